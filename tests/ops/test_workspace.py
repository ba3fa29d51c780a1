"""Workspaces: the uses of a plan that docs/attention.md lists, and what kernels make of a workspace that holds none.

Whatever lies in a workspace, a planned kernel ends, touches nothing outside its arrays, and every row of its output is right,
or the error word says that some are not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pytest

from kvgen import KernelSet
from kvgen.errors import ArgumentError
from kvgen.runtime import Fault, FaultReport, describe
from kvgen.runtime.cpu import machine
from kvgen.runtime.workspace import Workspace
from tests.ops import test_extend_sm90, test_mla_sm90_rows, test_split
from tests.support import extend_sets, extend_steps
from tests.support import latent_steps as latent
from tests.support.batches import PLAIN
from tests.support.decode_steps import step
from tests.support.harness import package, surroundings
from tests.support.latent_steps import Rows, latent_scene
from tests.support.memory import CANARY, GUARD, Raw, aligned, rows_array
from tests.support.scenes import Scene
from tests.support.split_list import HEADER, IDLE, KV_CHUNK, columns_of, guarded, read

# Of each kind of garbage, over all kernels.
COUNT: Final = int(os.environ.get("KVGEN_GARBAGE", "25"))
KERNELS: Final[dict[str, tuple[KernelSet, str]]] = {
    "tensor": (test_split.SETS["tensor"], "decode"),
    "tensor-invariant": (test_split.SETS["tensor"], "fixed"),
    "simt": (test_split.SETS["simt"], "decode"),
    "simt-invariant": (test_split.SETS["simt"], "fixed"),
    "tiles": (test_split.SETS["tiles"], "decode"),
    "mla": (latent.SPLIT["mla_balanced"], "mla_decode"),
    "mla-invariant": (latent.SPLIT["mla_invariant"], "mla_decode"),
    "wgmma": (test_mla_sm90_rows.SETS["wgmma_balanced"], "mla_decode"),
    "extend": (extend_sets.SETS["paged"], "extend"),
    "extend-invariant": (extend_sets.SETS["invariant"], "extend"),
    "extend-wgmma": (test_extend_sm90.SETS["llama"], "extend"),
}
# The shortest requests that are cut into pieces and merged, with one that has one piece and one that has none; where more tokens
# make a piece, and in `make campaign`, longer ones.
SHORT: Final = (130, 130, 0, 3)
MIDDLE: Final = (400, 65, 0, 129)
LONG: Final = (1100, 65, 0, 129)  # extend cuts what has more than 1,000 tokens, by warpgroups twice as many
LONGER: Final = (2200, 65, 0, 129)
EXTEND_ROWS: Final = 3  # of q, of each request
ROWS: Final = 20  # of q that workspaces are made for
# The two kernels of extend, and those of mla_decode, read a plan by the same functions: all of it for both is `make campaign`'s.
_TRIED: Final = [name for name in KERNELS if COUNT > 50 or not name.endswith("wgmma")]
ALL = pytest.mark.parametrize("name", _TRIED)
# One of each template; the two of decode.cu are both ways of splitting.
EACH = pytest.mark.parametrize(
    "name", [name for name in _TRIED if name not in ("simt-invariant", "tiles", "mla-invariant", "extend-invariant")]
)


def totals_of(name: str) -> tuple[int, int, int, int]:
    """The lengths of a kernel's step."""
    if name.startswith("extend"):
        return LONGER if name.endswith("wgmma") else LONG
    # The CPU machine takes longest for wgmma.
    return MIDDLE if name == "tensor" or (COUNT > 50 and name != "wgmma") else SHORT


@dataclass
class Result:
    """Results of a launch: out and lse as float64, the bytes of out, and the error word."""

    out: Raw
    lse: Raw
    raw: Raw
    report: FaultReport | None

    def is_nan(self, row: int) -> bool:
        """True if all of a row says that it has no result."""
        return bool(np.isnan(self.out[row]).all() and np.isnan(self.lse[row]).all())

    def untouched(self, row: int) -> bool:
        """True if a row of out is as it was before."""
        return bool((self.raw[row].view(np.uint8) == CANARY).all())


@dataclass
class Planned:
    """A step of one of KERNELS: lengths, pages and q."""

    name: str
    totals: Sequence[int] = ()  # by default those of totals_of
    seed: int = PLAIN.seed  # of page ids, values and q
    kernels: KernelSet = field(init=False)
    scene: Scene = field(init=False)
    q: Raw = field(init=False)

    def __post_init__(self) -> None:
        self.kernels, self.op = KERNELS[self.name]
        self.totals = self.totals or totals_of(self.name)
        batch = replace(PLAIN, totals=tuple(self.totals), new=(0,) * len(self.totals), seed=self.seed)
        self.rows = next(getattr(op, "rows", EXTEND_ROWS) for op in self.kernels.ops if op.name == self.op)
        if self.op == "mla_decode":
            of = [Rows(b, b * self.rows, (b + 1) * self.rows) for b in range(len(self.totals))]
            most = [max(n, self.rows) for n in self.totals] if self.kernels.cache.lengths == "before" else self.totals
            self.scene, self.q = latent_scene(self.kernels, replace(batch, totals=tuple(most)), of, len(of) * self.rows)
        elif self.op == "extend":
            prompts = extend_steps.step(self.kernels, batch, (self.rows,) * len(self.totals), offsets=False)
            self.scene, self.q = prompts.scene, prompts.q
        else:
            made = step(self.kernels, batch, op=self.op, offsets=False)
            self.scene, self.q = made.scene, made.q

    @property
    def launcher(self) -> Any:
        return getattr(package(self.kernels), self.op)

    def cache(self) -> Any:
        return package(self.kernels).Cache(**self.scene.arguments())

    def layer(self, layer: int | None = None) -> Any:
        return self.cache()[self.scene.layer if layer is None else layer]

    def sizes(self) -> dict[str, int]:
        """The sizes that a workspace of the step is made for."""
        return {"max_rows": ROWS, "max_tokens": 3000 if COUNT > 50 else 1000, "multiprocessors": 5}

    def workspace(self) -> Workspace:
        return guarded(self.launcher, **self.sizes())

    def plan(self, workspace: Workspace, *, layer: int | None = None) -> Workspace:
        with machine(mode="check"):
            self.launcher.plan(self.layer(layer), workspace, rows=len(self.q))
        return workspace

    def run(self, workspace: Workspace, q: Raw | None = None) -> Result:
        """One launch into canaries, which are whole around what it may write."""
        q = self.q if q is None else q
        kind = next(p for p in self.launcher.KERNEL.arguments if p.name == "out").dtype
        dim = getattr(self.kernels.cache, "latent_dim", None) or self.kernels.cache.v_dim
        out, around = rows_array(len(q), (q.shape[1], dim), kind, strided=True)
        lse, lse_around = rows_array(len(q), (q.shape[1],), "f32", strided=False)
        word = np.zeros(1, np.uint64)
        with machine(mode="check"):
            self.launcher(self.layer(), q, out, workspace, lse=lse, errors=word)
        for array, memory in ((out, around), (lse, lse_around)):
            assert (surroundings(array, memory) == CANARY).all(), "written beside the rows"
        memory = workspace.view.owner
        assert isinstance(memory, np.ndarray)
        assert (memory[:GUARD] == CANARY).all() and (memory[-GUARD:] == CANARY).all(), "written beside the workspace"
        return Result(out.astype(np.float64), lse.astype(np.float64), np.ascontiguousarray(out), describe(word))

    @property
    def lengths(self) -> Raw:
        """The array that the requests' lengths follow from: themselves, or the tokens of their last pages."""
        tables = self.scene.arguments()
        found = tables["lengths" if "lengths" in tables else "last_page_len"]
        assert isinstance(found, np.ndarray)
        return found

    def rows_of(self, b: int) -> range:
        return range(b * self.rows, (b + 1) * self.rows)


def inside(workspace: Workspace) -> Raw:
    """The bytes of a guarded workspace."""
    memory = workspace.view.owner
    assert isinstance(memory, np.ndarray)
    return memory[GUARD : GUARD + workspace.nbytes]


def header_in(workspace: Workspace) -> Any:
    """The header of a guarded workspace, in its place."""
    return inside(workspace)[: HEADER.itemsize].view(HEADER)


def entries_in(workspace: Workspace, found: Planned) -> Any:
    """The entries of a guarded workspace, in their place."""
    columns = columns_of(found.kernels, found.op)
    if found.op != "extend":
        return read(workspace, columns).chunks
    sizes = workspace.sizes  # behind them is what other planners have, which extend's has no use for
    before = (4 * (sizes["num_sm_parts"] + 1), sizes["max_rows"], 4 * sizes["max_slots"] * columns)
    at = HEADER.itemsize + sum(-(-size // 16) * 16 for size in before)
    count = int(header_in(workspace)["num_chunks"][0])
    return inside(workspace)[at : at + count * KV_CHUNK.itemsize].view(KV_CHUNK)


@functools.cache
def right_of(name: str) -> tuple[Planned, Result, bytes]:
    """A step, its result, and the workspace as its planner left it."""
    found = Planned(name)
    workspace = found.plan(found.workspace())
    before = inside(workspace).tobytes()
    return found, found.run(workspace), before


@ALL
def test_requests_are_cut_and_merged(name: str) -> None:
    """Later tests try merges of a request's pieces, and requests without any, as short as they are."""
    found, _, plan = right_of(name)
    workspace = found.workspace()
    inside(workspace)[...] = np.frombuffer(plan, np.uint8)
    pieces = entries_in(workspace, found)["num_chunks"]
    assert pieces.max() > 1 and pieces.min() <= 1


def close(found: Raw, right: Raw) -> bool:
    """True if a row is right, however its request was cut."""
    return bool(np.allclose(found, right, rtol=2**-6, atol=2**-6 * max(1.0, float(np.abs(right).max(initial=0.0)))))


# Uses of a plan: a test a row of the table in docs/attention.md -----------------------------------------------------------


@EACH
def test_one_plan_serves_every_layer(name: str) -> None:
    found, right, _ = right_of(name)
    other = (found.scene.layer + 1) % len(found.cache())
    result = found.run(found.plan(found.workspace(), layer=other))
    assert result.report is None and result.raw.tobytes() == right.raw.tobytes()


@EACH
def test_bound_once_and_replayed_with_new_plans(name: str) -> None:
    """As a graph replays them: lengths rise after the step's last layer, plan and decode run again, nothing is bound anew."""
    _, right, _ = right_of(name)
    fresh = Planned(name)
    workspace = fresh.workspace()
    lengths = fresh.lengths
    out, word = np.zeros(right.out.shape, right.raw.dtype), np.zeros(1, np.uint64)
    with machine(mode="check"):
        planning = fresh.launcher.bind_plan(fresh.layer(), workspace, rows=len(fresh.q))
        decoding = fresh.launcher.bind(fresh.layer(), fresh.q, out, workspace, errors=word)
        for _ in range(1 if name.endswith("wgmma") else 2):
            planning()
            decoding()
            assert describe(word) is None
            assert all(close(out[i].astype(np.float64), right.out[i]) for i in range(len(out)))
            fewer = min(30, int(lengths[0]) - 1)
            lengths[0] -= fewer
            planning()
            decoding()
            assert describe(word) is None and out[0].tobytes() != right.raw[0].tobytes()
            lengths[0] += fewer


@EACH
def test_lengths_that_changed_since_the_plan(name: str) -> None:
    """Neither the old lengths' output nor the new ones': NaN for the request, and for no other one."""
    _, right, _ = right_of(name)
    changed = Planned(name)
    workspace = changed.plan(changed.workspace())
    assert changed.run(workspace).report is None
    lengths = changed.lengths
    planned_for = int(lengths[0])
    for other in (planned_for - 1,) if name.endswith("wgmma") else (planned_for + 1, planned_for - 1, 0):
        lengths[0] = other
        result = changed.run(workspace)
        lengths[0] = planned_for
        assert result.report is not None and (result.report.code, result.report.request) == (Fault.STALE, 0)
        assert all(result.is_nan(i) for i in changed.rows_of(0))
        others = [i for b in range(1, len(changed.totals)) for i in changed.rows_of(b)]
        assert result.raw[others].tobytes() == right.raw[others].tobytes()
    assert changed.run(workspace).raw.tobytes() == right.raw.tobytes(), "the plan is as good as before"


@EACH
def test_pages_may_move_since_the_plan(name: str) -> None:
    """A plan knows lengths and rows alone: other page ids, another pool and another q are no other plan."""
    found, _, _ = right_of(name)
    moved = Planned(name, seed=found.seed + 1)
    assert moved.scene.entries != found.scene.entries
    right = moved.run(moved.plan(moved.workspace()))
    result = moved.run(found.plan(found.workspace()))
    assert result.report is None and result.raw.tobytes() == right.raw.tobytes()


@EACH
def test_a_plan_is_all_in_its_memory(name: str) -> None:
    """Planned through one Workspace and used through another one over the same array; the array is copied, as a graph's or a
    checkpoint's may be."""
    found, right, _ = right_of(name)
    memory = aligned(found.launcher.workspace_bytes(**found.sizes()))
    with machine(mode="check"):
        first = found.launcher.workspace(**found.sizes(), memory=memory)
        found.launcher.plan(found.layer(), first, rows=len(found.q))
    copied = found.workspace()
    inside(copied)[...] = memory
    assert found.run(copied).raw.tobytes() == right.raw.tobytes()


@EACH
@pytest.mark.parametrize("other", ("requests", "rows", "operation", "unplanned"))
def test_planned_for_another_call(name: str, other: str) -> None:
    """Another batch, fewer rows, another operation of the same sizes, none at all: every row is NaN."""
    found, _, plan = right_of(name)
    workspace, q = found.workspace(), found.q
    if other == "requests":
        more = Planned(name, (*found.totals[:-1], 40, 12))
        with machine(mode="check"):
            more.launcher.plan(more.layer(), workspace, rows=len(found.q))
    elif other == "rows":
        found.plan(workspace)
        q = q[: len(q) - 1]
    elif other == "operation":
        inside(workspace)[...] = np.frombuffer(plan, np.uint8)
        header_in(workspace)["digest_high"] ^= 1
    result = found.run(workspace, q)
    assert result.report is not None and result.report.code is Fault.PLAN
    assert all(result.is_nan(i) for i in range(len(q)))


@pytest.mark.parametrize("name", ["simt", "extend", "extend-wgmma"])
def test_a_header_that_differs_in_one_word(name: str) -> None:
    """Each word of the header that tells a call is compared, and a list longer than the workspace; of extend every word."""
    found, _, plan = right_of(name)
    workspace = found.workspace()
    for number in range(16 if name == "extend" else 9, 16 if found.op == "extend" else 0):
        for value in (1, 2**31):
            inside(workspace)[...] = np.frombuffer(plan, np.uint8)
            words = inside(workspace)[:64].view(np.uint32)
            words[number] ^= value
            result = found.run(workspace)
            assert result.report is not None and result.report.code is Fault.PLAN, number
            assert all(result.is_nan(i) for i in range(len(found.q))), number
    for word in (
        ()
        if found.op == "extend"
        else (
            "magic",
            "batch",
            "digest_low",
            "rows",
            "num_sm_parts",
            "max_rows",
            "max_chunks",
            "max_slots",
            "num_chunks",
        )
    ):
        inside(workspace)[...] = np.frombuffer(plan, np.uint8)
        header = header_in(workspace)
        header[word] = header["max_chunks"] + 1 if word == "num_chunks" else header[word] + 1
        result = found.run(workspace)
        assert result.report is not None and result.report.code is Fault.PLAN, word
        assert all(result.is_nan(i) for i in range(len(found.q))), word


@pytest.mark.parametrize("name", ["simt", "extend"])
def test_a_piece_that_differs_in_one_word(name: str) -> None:
    """Its request, rows, columns, slot, part and tokens are bounded, and its place in the list is its own: nothing outside is
    touched, and rows that lose it are no numbers."""
    found, right, plan = right_of(name)
    workspace = found.workspace()
    inside(workspace)[...] = np.frombuffer(plan, np.uint8)
    header, pieces = header_in(workspace)[0], entries_in(workspace, found)
    at = int(np.argmax(pieces["num_chunks"] > 1))
    piece, last = pieces[at].copy(), 2**32 - 1
    slots = int(header["max_slots"])
    assert piece["rows"] == found.rows > 1 and piece["fault"] == 0
    for word, values in {
        "b": (len(found.totals), last),
        "row": (len(found.q) - 1, len(found.q), last),
        "rows": (0, len(found.q) + 1 if found.op == "extend" else found.rows + 1, last),
        "unused": (found.rows * found.kernels.group, last) if found.op == "extend" else (),  # the first column
        "index": (int(piece["num_chunks"]), last),
        "num_chunks": (0, slots + 1, last),
        "slot": (slots - int(piece["num_chunks"]) + 1, slots, last),
        "begin": (int(piece["end"]) + 1, last),
        "end": (int(piece["tokens"]) + 1, last),
        "fault": (int(Fault.ROW_OFFSETS) + 1, last),
        "stamp": (int(piece["stamp"]) ^ 1, int(pieces["stamp"][at + 1])),
    }.items():
        for value in values:
            inside(workspace)[...] = np.frombuffer(plan, np.uint8)
            pieces[word][at] = value
            result = found.run(workspace)
            assert result.report is not None and result.report.code is Fault.PLAN, (word, value)
            for i in range(len(found.q)):
                assert result.is_nan(i) or result.untouched(i) or close(result.out[i], right.out[i]), (word, value)


@EACH
@pytest.mark.parametrize("value", [0, 1, 2, 2**32 - 1])
def test_counters_overwritten(name: str, value: int) -> None:
    """By zeros, by small numbers: nobody takes them for blocks that have finished. Requests of one chunk need no counter."""
    found, right, plan = right_of(name)
    workspace = found.workspace()
    inside(workspace)[...] = np.frombuffer(plan, np.uint8)
    words = inside(workspace)[: len(plan) // 4 * 4].view(np.uint32)
    words[words == IDLE] = value
    result = found.run(workspace)
    assert result.report is not None and result.report.code is Fault.PLAN
    for i in range(len(found.q)):
        assert result.is_nan(i) or close(result.out[i], right.out[i])
    assert any(result.is_nan(i) for i in range(len(found.q)))


# Garbage ------------------------------------------------------------------------------------------------------------------

Spoil = Callable[[Planned, Raw, bytes, np.random.Generator], bool]


def _random(found: Planned, memory: Raw, plan: bytes, rng: np.random.Generator) -> bool:
    memory[...] = rng.integers(0, 256, len(memory), np.uint8)
    return True


def _zero(found: Planned, memory: Raw, plan: bytes, rng: np.random.Generator) -> bool:
    memory[...] = 0
    return True


def _body(found: Planned, memory: Raw, plan: bytes, rng: np.random.Generator) -> bool:
    """A valid header, and behind it bytes, words as small as the plan's, or the plan's own words in another order."""
    words = memory[: len(memory) // 4 * 4].view(np.uint32)
    rest = words[HEADER.itemsize // 4 :]
    match int(rng.integers(3)):
        case 0:
            rest[...] = rng.integers(0, 2**32, len(rest), np.uint32)
        case 1:
            rest[...] = rng.integers(0, 6, len(rest), np.uint32)
        case 2:
            # Not the partial results: they are written before they are read.
            listed = rest[: max(64, len(rest) // 8)]
            listed[...] = rng.permutation(listed)
    return False


def _half(found: Planned, memory: Raw, plan: bytes, rng: np.random.Generator) -> bool:
    """Half of it, at the front, at the end or in the middle of the list, by bytes, zeros, or the plan of other lengths."""
    listed = min(len(memory), 64 + 48 * 40)
    begin, end = [
        (0, len(memory) // 2),
        (len(memory) // 2, len(memory)),
        (listed // 4, 3 * listed // 4),
        (0, listed // 2),
    ][int(rng.integers(4))]
    match int(rng.integers(3)):
        case 0:
            memory[begin:end] = rng.integers(0, 256, end - begin, np.uint8)
        case 1:
            memory[begin:end] = 0
        case 2:
            memory[begin:end] = np.frombuffer(_another(found.name, int(rng.integers(4))), np.uint8)[begin:end]
    return False


@functools.cache
def _another(name: str, which: int) -> bytes:
    """The plan of other lengths for the same operation, batch and rows."""
    a, b, _, c = totals_of(name)
    longest = a * 5 // 3
    totals = [(64, 65, 1, longest), (a, b, a, c), (c, a, b, 0), (longest,) * 4][which]
    other = Planned(name, totals)
    return inside(other.plan(other.workspace())).tobytes()


@functools.cache
def _foreign_plans(name: str) -> tuple[bytes, ...]:
    """Plans of every other kernel, and of this one for another batch."""
    others = [right_of(other)[2] for other in KERNELS if other != name]
    batches = [Planned(name, totals) for totals in (totals_of(name)[:3], (*totals_of(name), 7))]
    return (*others, *(inside(p.plan(p.workspace())).tobytes() for p in batches))


def _foreign(found: Planned, memory: Raw, plan: bytes, rng: np.random.Generator) -> bool:
    plans = _foreign_plans(found.name)
    other = np.frombuffer(plans[int(rng.integers(len(plans)))], np.uint8)[: len(memory)]
    memory[...] = rng.integers(0, 256, len(memory), np.uint8)
    memory[: len(other)] = other
    return True


def _lengths(found: Planned, memory: Raw, plan: bytes, rng: np.random.Generator) -> bool:
    memory[...] = np.frombuffer(_another(found.name, int(rng.integers(4))), np.uint8)
    return False


GARBAGE: Final[dict[str, Spoil]] = {
    "random": _random, "zero": _zero, "body": _body, "half": _half, "foreign": _foreign, "lengths": _lengths
}  # fmt: skip


def launches(name: str) -> int:
    """A kernel's part of COUNT: a 25th for wgmma, which the CPU machine takes longest for; the others share the rest."""
    few = max(COUNT // 25, 1)
    return few if name == "wgmma" else -(-(COUNT - few) // (len(KERNELS) - 1))


@ALL
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage(name: str, kind: str) -> None:
    """Nothing outside the arrays, an end, and no wrong row without a fault; a header that is not this call's: all rows NaN."""
    found, right, plan = right_of(name)
    workspace = found.workspace()
    memory = inside(workspace)
    rng = np.random.default_rng([list(KERNELS).index(name), list(GARBAGE).index(kind)])
    for _ in range(launches(name)):
        memory[...] = np.frombuffer(plan, np.uint8)
        no_header = GARBAGE[kind](found, memory, plan, rng)
        result = found.run(workspace)
        if no_header:
            assert result.report is not None and result.report.code is Fault.PLAN
            assert all(result.is_nan(i) for i in range(len(found.q)))
        for i in range(len(found.q)):
            if close(result.out[i], right.out[i]):
                continue
            assert result.report is not None, f"row {i} is wrong, and nothing says so"
            assert result.is_nan(i) or result.untouched(i), f"row {i} is a number that is wrong"
            # Tokens that a request has no more may have no page either; of several faults the first token's is kept.
            assert result.report.code in (Fault.PLAN, Fault.STALE, Fault.POSITION, Fault.PAGE_ID)
    found.plan(workspace)
    assert found.run(workspace).raw.tobytes() == right.raw.tobytes(), "a new plan mends it"


# A caller's memory ----------------------------------------------------------------------------------------------------------


def test_memory_of_the_callers() -> None:
    found, _, _ = right_of("tensor")
    nbytes = found.launcher.workspace_bytes(**found.sizes())
    memory = aligned(nbytes + 64)
    assert found.launcher.workspace(**found.sizes(), memory=memory).nbytes == nbytes
    frozen = memory[:nbytes]
    frozen.flags.writeable = False
    for given, message in (
        (
            memory[: nbytes - 1],
            f"memory: got {nbytes - 1} bytes; this workspace has {nbytes}; pass an array of workspace_byt",
        ),
        (memory[1:], "so it must be a multiple of 16; pass an array that begins at one"),
        (memory[::2], "memory: got stride 2 in dimension 0"),
        (frozen, "memory: got a read-only array; the kernel writes to it"),
        (np.zeros(nbytes, np.int8), "memory: got dtype i8; it must be u8"),
        (7, "memory: got int"),
    ):
        with pytest.raises(ArgumentError) as caught:
            found.launcher.workspace(**found.sizes(), memory=given)
        assert message in str(caught.value)


def test_the_header_is_as_described() -> None:
    """Kernels compare the header with what the planner was called with."""
    found, _, _ = right_of("tensor")
    workspace = found.plan(found.workspace())
    header = read(workspace, columns_of(found.kernels, found.op)).header
    assert header["magic"] == int.from_bytes(b"kpln", "little")
    assert (header["batch"], header["rows"]) == (len(found.totals), len(found.q))
    digests = {(int(h["digest_low"]), int(h["digest_high"])) for h in map(_header_of, KERNELS)}
    assert len(digests) == len(KERNELS), "every operation has plans of its own"


def _header_of(name: str) -> Any:
    return np.frombuffer(right_of(name)[2], HEADER, 1)[0]
