"""decode over several blocks a request: chunks are merged right, in one order, whoever finishes last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from kvgen import CSR, Continuous, KernelSet, Layout, Paged, Quant, Ring, ops, presets
from kvgen.reference import Decoded
from kvgen.reference.attention import RowPosition
from kvgen.reference.decode import VisibleKeys, attend
from kvgen.runtime import Fault, describe
from kvgen.runtime.workspace import Workspace
from tests.support import split_list
from tests.support.batches import PLAIN
from tests.support.decode_steps import Step, step
from tests.support.harness import on_machine, package
from tests.support.memory import Raw
from tests.support.scenes import Scene
from tests.support.split_list import columns_of
from tests.support.tolerance import hold

SCHEDULES: tuple[Any, ...] = ("ascending", "descending", 12345)
BALANCED, ALONE = ops.Decode(split="balanced"), ops.Decode(name="alone")


def _set(name: str, cache: Any, group: int, *found: Any) -> KernelSet:
    return KernelSet(name=f"split_{name}", q_heads=cache.kv_heads * group, cache=cache, ops=found or (BALANCED,))


SETS = {
    s.name.removeprefix("split_"): s
    for s in (
        _set(
            "tensor",
            Paged(dtype="bf16", kv_heads=1, head_dim=32, page_size=16),
            3,
            BALANCED,
            ops.Decode(name="fixed", split="invariant", chunk=64),
            ALONE,
        ),
        # Blocks of two kv heads, whose partial results lie side by side.
        _set(
            "heads",
            Paged(dtype="bf16", kv_heads=4, head_dim=32, page_size=16, quant=Quant(dtype="e4m3", scale_dtype="f32")),
            3,
            BALANCED,
            ops.Decode(name="fixed", split="invariant", chunk=64),
            ALONE,
        ),
        _set(
            "simt",
            Paged(dtype="f32", kv_heads=2, head_dim=4, page_size=16, table=CSR(), lengths="after"),
            3,
            ops.Decode(rows=3, split="balanced"),
            ops.Decode(name="fixed", rows=3, split="invariant", chunk=128),
            ops.Decode(name="alone", rows=3),
        ),
        _set(
            "seven",
            Paged(
                dtype="f16",
                kv_heads=1,
                head_dim=24,
                v_head_dim=40,
                page_size=5,
                layout=Layout(k="page layer token head dim", v="layer page head dim token"),
                lengths="after",
            ),
            3,
        ),
        # More columns than a block takes: several blocks, and counters, a kv head.
        _set("tiles", presets.flashinfer_hnd(dtype="bf16", kv_heads=1, head_dim=8, page_size=16), 150),
        _set("slots", presets.sglang(dtype="f32", kv_heads=1, head_dim=4), 2),
        _set("kv_apart", presets.tensorrt_llm(dtype="f16", kv_heads=1, head_dim=8, page_size=64), 2),
        _set("block", Continuous(dtype="f32", kv_heads=1, head_dim=4, max_tokens=5000), 1),
        _set("ring", Paged(dtype="bf16", kv_heads=1, head_dim=8, page_size=16, table=Ring(window=1000)), 2),
    )
}
LONG = (0, 1, 127, 128, 129, 1000, 5000)
MIDDLE = (65, 1000, 0, 700, 64, 1)
EDGES = (128, 257, 0, 129, 127, 256, 1)
CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
# Both kernels, and each way to divide columns; the others' caches are the campaign's.
_EDGED = tuple(SETS) if CAMPAIGN else ("tensor", "heads", "simt", "tiles", "ring")
_CUT = ("tensor", "simt", "tiles", "block", "ring") if CAMPAIGN else ("tensor", "block", "ring")
EVERY = {f"{n}-edges": (n, EDGES) for n in _EDGED} | {
    f"{n}-long": (n, LONG if n in ("block", "ring") else MIDDLE) for n in _CUT
}
MERGED = ("tensor", "heads", "simt")
# Chunks of a size, and none, of one kernel of each kind; blocks of two kv heads too in the campaign.
FIXED = MERGED if CAMPAIGN else ("tensor", "simt")
CASES = [(name, op) for name in MERGED for op in ("decode", "fixed") if op == "decode" or name in FIXED]
POSITIONS = (5, 413, 999)  # in the first chunk of a request, in the middle, in the last


def made(
    name: str, totals: Sequence[int], counts: Sequence[int] | None = None, *, op: str = "decode", **more: Any
) -> Step:
    """A step whose requests have rows behind offsets where `counts` says how many, else the operation's own."""
    batch = replace(PLAIN, totals=tuple(totals), new=(0,) * len(totals), **more)
    return step(SETS[name], batch, counts, op=op, offsets=counts is not None)


def planned(found: Step, max_rows: int | None = None, *, layer: int | None = None, **sizes: Any) -> Workspace:
    """A workspace with canaries around it, planned for a step."""
    launcher = getattr(package(found.scene.kernels), found.op.name)
    if found.op.split == "invariant":
        sizes = {"max_tokens": _cache(found).max_cache_length} | sizes
    workspace = split_list.guarded(launcher, max_rows or max(1, len(found.q)), **sizes)
    plan(found, workspace, layer=layer)
    return workspace


def plan(found: Step, workspace: Workspace, *, layer: int | None = None) -> None:
    """Plan a workspace for a step as its lengths are now."""
    launcher = getattr(package(found.scene.kernels), found.op.name)
    with on_machine(found.scene.batch):
        launcher.plan(
            _cache(found)[found.scene.layer if layer is None else layer],
            workspace,
            rows=len(found.q),
            row_offsets=found.row_offsets,
        )
    clean(found, workspace)


def clean(found: Step, workspace: Workspace) -> None:
    """The workspace is ready for the next layer."""
    split_list.hold_clean(workspace, columns_of(found.scene.kernels, found.op.name))


def _cache(found: Step) -> Any:
    return package(found.scene.kernels).Cache(**found.scene.arguments())


def checked(found: Step, workspace: Workspace) -> tuple[Raw, Raw, Decoded]:
    """Run a step and hold it to the oracle."""
    out, lse, wanted = found.check(workspace=workspace)
    clean(found, workspace)
    assert lse is not None
    return out, lse, wanted


def bits(arrays: Sequence[Raw], rows: slice = slice(None)) -> list[bytes]:
    """Bits of these rows of arrays."""
    return [np.ascontiguousarray(a[rows]).tobytes() for a in arrays]


def listed(found: Step, workspace: Workspace) -> split_list.ChunkList:
    """The chunks of a planned step."""
    return split_list.read(workspace, columns_of(found.scene.kernels, found.op.name))


@pytest.mark.parametrize(("name", "totals"), EVERY.values(), ids=EVERY)
def test_every_length_in_one_batch(name: str, totals: tuple[int, ...]) -> None:
    """One plan serves both layers."""
    found = made(name, totals, padding=2, fill="inf" if totals is EDGES else "nan")
    workspace = planned(found, layer=1)
    assert totals is EDGES or (listed(found, workspace).chunks["num_chunks"] > 1).any()
    for layer in (0, 1) if totals is EDGES else (found.scene.layer,):
        found.scene.layer = layer
        found.scene.fill(found.scene.batch.totals)
        checked(found, workspace)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_sixteen_runs_and_three_schedules(name: str, op: str) -> None:
    """Another block comes last every time, and the bits are the same."""
    seen = set()
    for schedule in SCHEDULES:
        found = made(name, (400, 4, 200, 129), op=op, schedule=schedule)
        workspace = planned(found)
        for _ in range((16 if op == "decode" else 4) if schedule == 12345 else 1):
            seen.add(tuple(bits(found.run(workspace=workspace))))
        clean(found, workspace)
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["tensor", *(["seven"] if CAMPAIGN else []), "slots"])
def test_a_workspace_is_planned_again(name: str) -> None:
    """For longer requests, for shorter ones, for fewer rows than it holds; a call for other rows is refused."""
    totals = (700, 4, 1500, 129)
    found = made(name, totals)
    lengths = found.scene.tables["lengths"]
    real = lengths.copy()
    lengths[...] = np.minimum(real, 3)
    workspace = planned(found, max_rows=9)
    checked(found, workspace)
    for most in (2**20, 400):
        lengths[...] = np.minimum(real, most)
        plan(found, workspace)
        checked(found, workspace)
    fewer = made(name, totals[:2])
    plan(fewer, workspace)
    checked(fewer, workspace)


@pytest.mark.parametrize("name", ["tiles", "slots", *(["kv_apart"] if CAMPAIGN else [])])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_bad_page_in_one_chunk(name: str, position: int) -> None:
    """That request is NaN, all of it; the others have the bits they have without it."""
    totals, victim = (1000, 1000, 300), 1
    clean_step = made(name, totals)
    right = clean_step.run(workspace=planned(clean_step))
    found = made(name, totals, schedule=SCHEDULES[POSITIONS.index(position)])
    tables, page = found.scene.tables, position // found.scene.tokens
    match name:
        case "tiles":
            tables["page_indices"][tables["page_indptr"][victim] + page] = -1
        case "slots":
            tables["req_to_token"][tables["request_ids"][victim], page] = found.scene.pages
        case "kv_apart":
            tables["page_table"][victim, 1, page] = 2**31 - 1
    out, lse, wanted = checked(found, planned(found))
    report = describe(wanted.errors)
    assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, victim)
    for row in (slice(0, 1), slice(2, 3)):
        assert bits((out, lse), row) == bits(right, row)


@pytest.mark.parametrize(("name", "op"), CASES)
def test_a_length_past_the_table(name: str, op: str) -> None:
    """NaN, and the others are as close as ever; what has its own chunks whatever the batch keeps its bits."""
    totals = (1000, 300, 700)
    right = (first := made(name, totals, op=op)).run(workspace=planned(first))
    found = made(name, totals, op=op)
    found.scene.tables["lengths"][1] = -1 if found.scene.tables["lengths"].dtype.kind == "i" else 2**31
    out, lse, wanted = checked(found, planned(found))
    report = describe(wanted.errors)
    assert report is not None and (report.code, report.request) == (Fault.LENGTH, 1)
    if op == "fixed":
        for row in (slice(0, found.op.rows), slice(2 * found.op.rows, None)):
            assert bits((out, lse), row) == bits(right, row)


def test_rows_of_some_requests() -> None:
    """With offsets: rows of nobody first and last, requests with one row, three and none."""
    found = made("simt", (300, 200, 0, 700, 90), (3, 0, 1, 2, 3), padding=2, leading=2)
    assert found.row_offsets is not None
    checked(found, planned(found, max_rows=20))
    found.row_offsets[-1] = len(found.q) + 1  # nobody knows whose the last rows are
    workspace = planned(found, max_rows=20)
    _, _, wanted = checked(found, workspace)
    report = describe(wanted.errors)
    assert report is not None and report.code is Fault.ROW_OFFSETS


@pytest.mark.parametrize("name", MERGED)
def test_no_requests(name: str) -> None:
    """An empty batch is planned, and padding rows are 0 and -inf."""
    found = made(name, (), padding=2)
    out, lse, _ = checked(found, planned(found))
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("name", FIXED)
def test_more_requests_than_multiprocessors(name: str) -> None:
    """One multiprocessor works on everything, chunk after chunk; hardly a request is shared."""
    found = made(name, (*range(1, 80, 2), 400), padding=1)
    workspace = planned(found, multiprocessors=1)
    assert workspace.sizes["num_sm_parts"] <= 2
    out, _, _ = checked(found, workspace)
    alone = replace(found, op=next(o for o in found.scene.kernels.ops if o.name == "alone")).run()  # type: ignore[arg-type]
    assert np.abs(out.astype(np.float64) - alone[0].astype(np.float64)).max() < 0.03


# Bits that depend on nothing else -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXED)
def test_bits_do_not_depend_on_the_batch(name: str) -> None:
    """split="invariant": a request has the same bits in any order, in a shorter batch, and beside others, on any number of
    multiprocessors."""
    totals = (500, 4, 300, 129, 377, 64)
    found = made(name, totals, op="fixed")
    tables, rows = found.scene.tables, found.op.rows
    whole = [a.reshape(len(totals), rows, -1) for a in found.run(workspace=planned(found))]
    lengths, table = tables["lengths"].copy(), _table(found)
    queries = found.q.copy()
    orders = [((5, 4, 3, 2, 1, 0), n) for n in (1, 3, 8)]
    orders += [((2, 0), 8), ((4,), 1), ((0, 0, 0, 1, 2, 3, 4, 5, 0, 4), 3)]
    for order, multiprocessors in orders:
        picked = list(order)
        found.scene.tables = tables | {"lengths": lengths[picked]} | table(picked)
        found.q = np.concatenate([queries[b * rows : (b + 1) * rows] for b in picked])
        workspace = planned(found, multiprocessors=multiprocessors)
        for array, right in zip(found.run(workspace=workspace), whole, strict=True):
            assert array.tobytes() == right[picked].tobytes(), (order, multiprocessors)


def _table(found: Step) -> Any:
    """A function from some of a step's requests to their page table."""
    tables = found.scene.tables
    if "page_table" in tables:
        matrix = tables["page_table"].copy()
        return lambda picked: {"page_table": np.ascontiguousarray(matrix[picked])}
    indices, starts = tables["page_indices"].copy(), tables["page_indptr"].copy()

    def pick(picked: Sequence[int]) -> dict[str, Raw]:
        runs = [indices[starts[b] : starts[b + 1]] for b in picked]
        return {
            "page_indices": np.concatenate(runs),
            "page_indptr": np.cumsum([0, *map(len, runs)]).astype(starts.dtype),
        }

    return pick


def test_split_none_has_that_property_too() -> None:
    """Without a workspace a block has the whole request."""
    found = made("tensor", (300, 40, 129), op="alone")
    right = found.run()
    found.scene.tables = {n: np.ascontiguousarray(a[::-1]) for n, a in found.scene.tables.items()}
    found.q = np.ascontiguousarray(found.q[::-1])
    for array, other in zip(found.run(), right, strict=True):
        assert array.tobytes() == np.ascontiguousarray(other[::-1]).tobytes()


# Many chunks -----------------------------------------------------------------------------------------------------------------


def large(name: str, op: str, totals: Sequence[int]) -> tuple[Step, Decoded]:
    """A step over so many tokens that pools are filled, and attended to, at once."""
    kernels = SETS[name]
    spec: Any = next(o for o in kernels.ops if o.name == op)
    batch = replace(PLAIN, totals=tuple(totals), new=(0,) * len(totals))
    before = kernels.cache.lengths == "before"
    scene = Scene(kernels, batch, [n - spec.rows * before for n in totals])
    pool = scene.arrays()["pool"]
    pool[...] = scene.rng.standard_normal(pool.shape).astype(pool.dtype)
    q = scene.values(spec.rows * len(totals), kernels.q_heads, kernels.cache.head_dim)
    outs, sums, seen = [], [], []
    for b, total in enumerate(totals):
        ids = np.array([page[0] for page in scene.entries[b]])
        k, v = (pool[ids, i, scene.layer].astype(np.float64).reshape(-1, *pool.shape[-2:]) for i in (0, 1))
        for i in range(spec.rows):
            n = total - spec.rows + i + 1
            out, lse = attend(q[b * spec.rows + i].astype(np.float64), k[:n], v[:n], scene.scale)
            outs.append(out)
            sums.append(lse)
            at = RowPosition(b, b * spec.rows, np.array([i]), spec.rows, total)
            seen.append(VisibleKeys(k[:n], v[:n], at, np.arange(n)))
    wanted = Decoded(np.stack(outs), np.stack(sums), 0, tuple(seen))
    return Step(scene, spec, (spec.rows,) * len(totals), q, None, {}, []), wanted


# Requests, one of which has more chunks than that; what is balanced has chunks of some 500 tokens at least. Behind a request of
# two chunks, a counter that is not as many apart from its own as chunks have blocks is that of another merge of the same request.
TOTALS = {("tensor", "decode"): (18_000, 3, 700), ("simt", "fixed"): (200, 4_500, 3, 700)}


@pytest.mark.parametrize(("name", "op"), TOTALS if CAMPAIGN else [("simt", "fixed")])
def test_more_chunks_than_one_merge_takes(name: str, op: str) -> None:
    """Chunks are merged in groups, then the groups; a bad page in one of them makes the request NaN, and leaves the workspace
    as it was."""
    totals = TOTALS[name, op]
    total, b = max(totals), totals.index(max(totals))
    found, wanted = large(name, op, totals)
    workspace = planned(found, multiprocessors=200)
    chunks = listed(found, workspace).chunks
    assert chunks["num_chunks"].max() > split_list.FAN_IN
    assert chunks["slot"][chunks["b"] == b][0] == (2 if b else 0)
    # The second group is complete before the first: whoever merges too early finds no results of an earlier run.
    found.scene.batch = replace(found.scene.batch, schedule="descending")
    right = found.run(workspace=workspace)
    hold(wanted, found.numerics, found.q, *right)
    clean(found, workspace)

    tables, rows = found.scene.tables, found.op.rows
    mine = slice(b * rows, (b + 1) * rows)
    entry: Any = tables["page_indices"] if "page_indices" in tables else tables["page_table"][b]
    first = tables["page_indptr"][b] if "page_indptr" in tables else 0
    for token in (0, total * 5 // 9, total - 10) if found.op.split == "invariant" else (total * 5 // 9,):
        entry[first + token // 16], good = found.scene.pages, entry[first + token // 16].copy()
        found.scene.batch = replace(found.scene.batch, schedule="descending" if token else 9)
        spoilt = found.run(workspace=workspace)
        assert np.isnan(spoilt[0][mine].astype(np.float32)).all() and np.isnan(spoilt[1][mine]).all()
        for others in (slice(0, mine.start), slice(mine.stop, None)):
            assert bits(spoilt, others) == bits(right, others)
        clean(found, workspace)
        entry[first + token // 16] = good
    assert bits(found.run(workspace=workspace)) == bits(right), "a faulty step leaves nothing behind"


@pytest.mark.parametrize("name", ["tensor", "simt"])  # whose pools `large` fills
def test_one_long_request_beside_many_short_ones(name: str) -> None:
    """All blocks work on the long one, though its last tile may stay with the chunk before; the others' results are right."""
    rows = SETS[name].ops[0].rows  # type: ignore[attr-defined]
    found, wanted = large(name, "decode", (rows,) * 20 + (9_011,) + (rows,) * 11)
    workspace = planned(found)
    assert listed(found, workspace).chunks["num_chunks"].max() >= max(2, workspace.sizes["num_sm_parts"] // 2 - 1)
    hold(wanted, found.numerics, found.q, *found.run(workspace=workspace))
