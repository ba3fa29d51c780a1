"""decode over several blocks a request: the parts are merged right, in one order, whatever the plan was made for."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvgen import CSR, Continuous, KernelSet, Layout, Paged, Ring, ops, presets
from kvgen.emit import render_all, write_file
from kvgen.reference import Decoded, decode
from kvgen.runtime import Fault, clear, describe
from kvgen.runtime.workspace import Workspace
from kvgen.spec.loader import LoadedSet
from tests.ops.batches import PLAIN, Batch
from tests.ops.harness import hold_to, offsets_of, on_machine, queries, raise_edges, surroundings
from tests.ops.memory import GUARD, Raw, aligned, rows_array
from tests.ops.scenes import Scene

PACKAGE = "kvgen_split_tests"
SCHEDULES: tuple[Any, ...] = ("ascending", "descending", 12345)
CHUNK = 128  # tokens below which a request is not split


def _set(name: str, cache: Any, group: int, splits: int) -> KernelSet:
    decodes = (ops.Decode(splits=splits), ops.Decode(name="alone"))
    return KernelSet(name=name, q_heads=cache.kv_heads * group, cache=cache, ops=decodes)


SETS = {
    s.name: s
    for s in (
        _set("two", Paged(dtype="bf16", kv_heads=2, head_dim=16, page_size=16), 4, 2),
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
            7,
        ),
        _set("sixteen", Paged(dtype="f32", kv_heads=2, head_dim=3, page_size=16, table=CSR(), lengths="after"), 1, 16),
        # More query heads than a block takes: two counters a kv head.
        _set("tiles", presets.flashinfer_hnd(dtype="bf16", kv_heads=1, head_dim=8, page_size=16), 11, 32),
        _set("slots", presets.sglang(dtype="f32", kv_heads=1, head_dim=4), 2, 32),
        _set("kv_apart", presets.tensorrt_llm(dtype="f16", kv_heads=1, head_dim=8, page_size=64), 2, 16),
        _set("block", Continuous(dtype="f32", kv_heads=1, head_dim=4, max_tokens=5000), 1, 7),
        _set("ring", Paged(dtype="bf16", kv_heads=1, head_dim=8, page_size=16, table=Ring(window=1000)), 2, 16),
    )
}
# With 5000 tokens chunks are long and the short requests have one; without, 129 tokens have a second chunk of one.
LONG = (0, 1, 127, 128, 129, 1000, 5000)
EDGES = (128, 257, 0, 129, 127, 256, 1)


@cache
def package(name: str) -> ModuleType:
    """The generated package of a set, all of them written once."""
    _root()
    return importlib.import_module(f"{PACKAGE}.{name}")


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix=PACKAGE)
    for file in render_all([LoadedSet(s, "tests/ops/test_split.py", "") for s in SETS.values()]).values():
        write_file(Path(folder.name) / PACKAGE, file)
    sys.path.insert(0, folder.name)
    return folder


@dataclass
class Guarded:
    """A workspace with canaries around it, full of garbage."""

    workspace: Workspace
    memory: Raw
    counters: int  # bytes of them

    @property
    def inside(self) -> Raw:
        return self.memory[GUARD:-GUARD]

    def check(self) -> None:
        """Nothing was written around it, and the counters are as the plan left them."""
        assert (self.memory[:GUARD] == 0xEE).all() and (self.memory[-GUARD:] == 0xEE).all()
        assert not self.inside[16 : 16 + self.counters].any()

    @property
    def chunk(self) -> int:
        return int(self.inside[:4].view(np.uint32)[0])

    def parts(self, max_rows: int) -> Raw:
        """Bytes `[max_rows, bytes a row]` of the partial results."""
        return self.inside[16 + self.counters :].reshape(max_rows, -1)


class Step:
    """A batch in a cache of two layers, all tokens stored, and a query row a request."""

    def __init__(self, name: str, totals: Sequence[int], *, padding: int = 0, **changes: Any) -> None:
        self.name, self.kernels = name, SETS[name]
        before = self.kernels.cache.lengths == "before"
        self.totals = [max(n, 1) if before else n for n in totals]
        batch: Batch = replace(PLAIN, totals=tuple(self.totals), new=(0,) * len(totals), padding=padding, **changes)
        self.scene = Scene(self.kernels, batch, self.lengths(self.totals))
        self.q = queries(self.scene, len(totals) + padding)
        for self.scene.layer in (1, 0):
            self.scene.fill(self.totals)
            raise_edges(self.scene, self.q, self.totals)
        self.generated = package(name)
        self.cache = self.generated.Cache(**self.scene.arguments())

    def lengths(self, totals: Sequence[int]) -> list[int]:
        """What the lengths tensor says of requests with so many tokens."""
        return [n - (self.kernels.cache.lengths == "before") for n in totals]

    def set_lengths(self, totals: Sequence[int]) -> None:
        self.scene.tables["lengths"][...] = self.lengths(totals)

    def workspace(self, max_rows: int) -> Guarded:
        found = self.generated.decode.workspace(max_rows)
        memory = aligned(found.nbytes + 2 * GUARD)
        found.view = found.view._replace(pointer=memory.ctypes.data + GUARD, owner=memory)
        tiles = -(-self.kernels.group // 8)
        return Guarded(found, memory, 4 * max_rows * self.kernels.cache.kv_heads * tiles)

    def plan(self, max_rows: int | None = None) -> Guarded:
        """A workspace planned for the lengths as they are now."""
        found = self.workspace(max_rows or len(self.q))
        with on_machine(self.scene.batch):
            self.generated.decode.plan(self.cache[0], found.workspace)
        found.check()
        return found

    def run(self, guarded: Guarded, layer: int = 0, row_offsets: Raw | None = None) -> tuple[Raw, Raw, Decoded]:
        """Decode one layer and hold it to the oracle; returns out, lse and the oracle's."""
        self.scene.layer = layer
        shape = (len(self.q), self.kernels.q_heads)
        out, around = rows_array(shape[0], (shape[1], self.kernels.cache.v_dim), self.kernels.cache.dtype, strided=True)
        lse, word = np.zeros(shape, np.float32), np.zeros(1, np.uint64)
        clear(word)
        with on_machine(self.scene.batch):
            self.generated.decode(
                self.cache[layer], self.q, out, guarded.workspace, lse=lse, row_offsets=row_offsets, errors=word
            )
        wanted = decode(self.scene.view, self.scene.rows(), self.q, row_offsets=row_offsets)
        hold_to(wanted, self.scene, self.q, out, lse)
        assert int(word[0]) == wanted.errors, f"{describe(word)}, not {describe(wanted.errors)}"
        assert (surroundings(out, around) == 0xEE).all(), "written beside the rows"
        guarded.check()
        return out, lse, wanted


@pytest.mark.parametrize("totals", [LONG, EDGES], ids=["long", "edges"])
@pytest.mark.parametrize("name", SETS)
def test_every_length_in_one_batch(name: str, totals: tuple[int, ...]) -> None:
    """One plan serves both layers."""
    arch: Any = "sm_80" if totals is EDGES else "sm_90a"
    step = Step(name, totals, arch=arch, padding=2, fill="inf" if totals is EDGES else "nan")
    guarded = step.plan()
    window = step.kernels.cache.page_table.window if name == "ring" else max(totals)
    splits = step.kernels.ops[0].splits  # type: ignore[attr-defined]
    assert guarded.chunk == max(CHUNK, -(-min(max(totals), window) // splits))
    for layer in (0, 1) if totals is EDGES else (1,):
        step.run(guarded, layer)


@pytest.mark.parametrize("name", ["two", "tiles", "block"])
def test_schedules_agree(name: str) -> None:
    """Three orders of blocks and threads, so three last blocks, and the same bits."""
    results = []
    for schedule in SCHEDULES:
        step = Step(name, (1000, 1, 300), schedule=schedule)
        out, lse, _ = step.run(step.plan())
        results.append((np.ascontiguousarray(out).tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["two", "seven", "slots"])
def test_plans_for_other_lengths(name: str) -> None:
    """A plan that is out of date still gives right results; a new one in the same workspace too."""
    step = Step(name, (700, 0, 1500, 129))
    real = step.totals
    step.set_lengths([min(n, 1) for n in real])
    guarded = step.plan()
    assert guarded.chunk == CHUNK
    step.set_lengths(real)  # every request grew
    step.run(guarded)
    with on_machine(step.scene.batch):
        step.generated.decode.plan(step.cache[1], guarded.workspace)
    assert guarded.chunk == max(CHUNK, -(-1500 // step.kernels.ops[0].splits))  # type: ignore[attr-defined]
    step.run(guarded, 1)
    step.set_lengths([min(n, 400) for n in real])  # and shrank
    step.run(guarded)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("split", [0, 3, 7])
@pytest.mark.parametrize("name", ["tiles", "slots", "kv_apart"])
def test_a_bad_page_in_one_part(name: str, split: int, schedule: Any) -> None:
    """That request is NaN, all of it; the others have the bits they have without it."""
    totals, victim = (1000, 1000, 300), 1
    clean = Step(name, totals, schedule=schedule)
    bits = [part.copy() for part in clean.run(clean.plan())[:2]]
    step = Step(name, totals, schedule=schedule)
    position = min(split * CHUNK + 5, 999)
    page = position // step.scene.tokens
    tables = step.scene.tables
    match name:
        case "tiles":
            tables["page_indices"][tables["page_indptr"][victim] + page] = -1
        case "slots":
            tables["req_to_token"][tables["request_ids"][victim], page] = step.scene.pages
        case "kv_apart":
            tables["page_table"][victim, 1, page] = 2**31 - 1
    out, lse, wanted = step.run(step.plan())
    report = describe(wanted.errors)
    assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, victim)
    assert np.isnan(out[victim].astype(np.float32)).all() and np.isnan(lse[victim]).all()
    for row in (0, 2):
        assert out[row].tobytes() == bits[0][row].tobytes() and lse[row].tobytes() == bits[1][row].tobytes()


def test_a_request_past_its_table_leaves_the_others_chunks_alone() -> None:
    """A length that no table holds is NaN, and does not make everybody's chunks as long as itself."""
    step = Step("two", (1000, 300))
    step.scene.tables["lengths"][1] = 2**31
    guarded = step.plan()
    assert guarded.chunk == 500
    out, _, wanted = step.run(guarded)
    assert np.isnan(out[1].astype(np.float32)).all() and np.isfinite(out[0].astype(np.float32)).all()
    report = describe(wanted.errors)
    assert report is not None and report.code is Fault.LENGTH


@pytest.mark.parametrize("name", ["two", "tiles"])
def test_fewer_rows_than_the_workspace_holds(name: str) -> None:
    """Rows of the workspace that the batch has not stay untouched; requests in one part leave theirs alone too."""
    step = Step(name, (300, 40, 400))
    guarded = step.plan(max_rows=7)
    step.run(guarded)
    parts = guarded.parts(7)
    written = [(row != 0xEE).any() for row in parts]
    assert written == [True, False, True, False, False, False, False]


def test_rows_of_some_requests() -> None:
    """With row offsets, requests without a row are left out, and padding follows."""
    step = Step("sixteen", (300, 200, 0, 700), padding=1)
    step.q = step.q[:4]
    guarded = step.plan()
    step.run(guarded, row_offsets=offsets_of((1, 0, 1, 1), step.kernels.cache.lengths_dtype))


def test_one_block_gives_what_splits_give() -> None:
    """Requests in one part have the same bits as with splits=1; longer ones are as close as the bound allows."""
    step = Step("two", (100, CHUNK, 17))
    out, lse, _ = step.run(step.plan())
    alone, alone_lse = np.zeros_like(step.q), np.zeros_like(lse)
    with on_machine(step.scene.batch):
        step.generated.alone(step.cache[0], step.q, alone, lse=alone_lse)
    assert np.ascontiguousarray(out).tobytes() == alone.tobytes() and lse.tobytes() == alone_lse.tobytes()


def test_no_requests() -> None:
    """An empty batch is planned, and padding rows are 0 and -inf."""
    step = Step("sixteen", (), padding=2)
    guarded = step.plan()
    assert guarded.chunk == CHUNK
    out, lse, _ = step.run(guarded)
    assert not out.any() and np.isneginf(lse).all()
