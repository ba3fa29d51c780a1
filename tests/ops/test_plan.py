"""The planner's list of chunks: every token of every request once, cut as its rules ask for."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Mask, Paged, ops
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.split_kv import LEAST_TILES
from kvgen.reference import TableView
from kvgen.runtime.cpu import machine
from kvgen.runtime.workspace import Workspace
from tests.support import split_list
from tests.support.harness import package
from tests.support.memory import GUARD, Raw
from tests.support.sets import archs_of
from tests.support.split_list import OVERHEAD, Span, columns_of

COLUMNS = 313  # pages of a request's table: 5008 tokens
SHORT = Mask(window=700, padding=True)
SETS = {
    s.name: s
    for s in (
        KernelSet(
            name="chunks_after",
            q_heads=2,
            cache=Paged(dtype="f32", kv_heads=2, head_dim=4, page_size=16, lengths="after", lengths_dtype="i32"),
            ops=(ops.Decode(rows=8, split="balanced"), ops.Decode(name="fixed", rows=8, split="invariant", chunk=192)),
        ),
        KernelSet(
            name="chunks_before",
            q_heads=4,
            cache=Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=16, lengths_dtype="i64"),
            ops=(
                ops.Decode(rows=2, split="balanced", mask=SHORT),
                ops.Decode(name="fixed", rows=2, split="invariant", chunk=64, mask=SHORT, index_dtype="u32"),
            ),
        ),
    )
}
CASES = [(name, op) for name in SETS for op in ("decode", "fixed")]
CAMPAIGN = "KVGEN_FAMILY" in os.environ


HEADS = KernelSet(
    name="chunks_heads",
    q_heads=16,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=64, page_size=16, lengths="after"),
    ops=(ops.Decode(split="balanced"),),
)


class Step:
    """A batch of which a planner sees lengths, offsets, and how long the table is."""

    def __init__(
        self,
        name: str,
        op: str,
        lengths: list[int],
        offsets: list[int] | None,
        valid: list[int],
        pages: int = COLUMNS,
    ) -> None:
        self.kernels = {**SETS, HEADS.name: HEADS}[name]
        cache = self.kernels.cache
        self.op: Any = next(o for o in self.kernels.ops if o.name == op)
        index = dtype(self.op.index_dtype or cache.lengths_dtype).numpy()
        kind = dtype(cache.lengths_dtype).numpy()
        tables = {
            "lengths": np.array(lengths, np.int64).astype(kind),
            "page_table": np.zeros((len(lengths), pages), np.int32),
        }
        self.offsets = None if offsets is None else np.array(offsets, np.int64).astype(index)
        self.given: dict[str, Raw] = {}
        if self.op.mask.padding:
            self.given["valid_tokens"] = np.array(valid[: len(lengths)], np.int64).astype(index)
        pool = np.zeros((1, 2, 1, 16, cache.kv_heads, cache.head_dim), dtype(cache.dtype).numpy())
        self.layer = package(self.kernels).Cache(pool, **tables)[0]
        self.launcher = getattr(package(self.kernels), op)
        self.view = TableView(cache, tables, 1, 16)
        self.columns = columns_of(self.kernels, op)

    def workspace(self, max_rows: int, multiprocessors: int) -> Workspace:
        longest = COLUMNS * 16 if self.op.split == "invariant" else None
        return split_list.guarded(self.launcher, max_rows, max_tokens=longest, multiprocessors=multiprocessors)

    def plan(self, workspace: Workspace, rows: int, schedule: Any = "ascending") -> None:
        with machine(mode="check", schedule=schedule):
            self.launcher.plan(self.layer, workspace, rows=rows, row_offsets=self.offsets, **self.given)
        split_list.hold_clean(workspace, self.columns)

    def requests(self, rows: int) -> tuple[list[Span], list[int]]:
        return split_list.spans(self.view, self.op.rows, rows, self.offsets, self.op.mask, self.given)

    @property
    def tile(self) -> int:
        """Tokens that the planner counts in."""
        context: Any = self.op.plan(self.kernels)[1].on(archs_of(self.kernels)[-1]).context
        return int(context.tile)

    def hold(self, workspace: Workspace, rows: int) -> list[list[Span]]:
        """The list in the workspace is the one that the rules ask for, by SM parts."""
        requests, kinds = self.requests(rows)
        sm_parts, tile = workspace.sizes["num_sm_parts"], self.tile
        found = split_list.read(workspace, self.columns)
        if self.op.split == "balanced":
            wanted = split_list.balanced(requests, sm_parts, tile)
        else:
            assert self.op.chunk % tile == 0
            wanted = split_list.invariant(requests, sm_parts, tile, self.op.chunk)
        split_list.hold_list(found, wanted, kinds, workspace.sizes["max_slots"])
        split_list.hold_whole(requests, [s for sm_part in wanted for s in sm_part])
        return wanted


LENGTHS = st.one_of(st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 700, 5000)), st.integers(0, 5000))
HOSTILE = st.one_of(LENGTHS, st.sampled_from((-1, 5008, 5009, 2**31 - 1, -(2**31))))


@st.composite
def drawn(draw: st.DrawFn, hostile: bool) -> tuple[list[int], list[int] | None, list[int], int]:
    """Lengths, row offsets, valid tokens and rows of a step of up to twelve requests; rows are 8 to a request at most."""
    lengths = draw(st.lists(HOSTILE if hostile else LENGTHS, max_size=12))
    counts = [draw(st.integers(0, 8)) for _ in lengths]
    if draw(st.booleans()):
        counts = [min(n, 2) for n in counts]
    offsets = [int(x) for x in np.cumsum([draw(st.integers(0, 2)), *counts])]
    rows = offsets[-1] + draw(st.integers(0, 3))
    if hostile and draw(st.booleans()):
        offsets[draw(st.integers(0, len(lengths)))] = draw(st.sampled_from((-1, 0, 1, rows + 1, 2**31 - 1)))
    valid = [draw(HOSTILE if hostile else LENGTHS) for _ in lengths]
    return lengths, draw(st.sampled_from((offsets, offsets, None))), valid, rows


@pytest.mark.parametrize(("name", "op"), CASES)
@settings(max_examples=15 if CAMPAIGN else 8)
@given(data=st.data())
def test_lists(name: str, op: str, data: Any) -> None:
    """Any batch, with bad lengths and offsets too, whatever the number of multiprocessors."""
    lengths, offsets, valid, rows = data.draw(drawn(data.draw(st.booleans())))
    step = Step(name, op, lengths, offsets, valid)
    max_rows = max(1, rows) + data.draw(st.integers(0, 5))
    workspace = step.workspace(max_rows, data.draw(st.sampled_from((1, 2, 7, 132))))
    step.plan(workspace, rows, data.draw(st.sampled_from(("ascending", "descending", 5))))
    step.hold(workspace, rows)


@pytest.mark.parametrize("name", SETS)
def test_sm_parts_of_equal_size(name: str) -> None:
    """No SM part has more than its share of tiles but what was too little for a chunk, only the last may have less than a chunk's
    overhead below it; one has two chunks of requests that others have too, at most."""
    rng = np.random.default_rng(3)
    lengths = [int(n) for n in rng.integers(0, 700, 60)] + [4900]
    step = Step(name, "decode", lengths, None, lengths)
    rows = len(lengths) * step.op.rows
    for multiprocessors in (1, 3, 16, 132):
        workspace = step.workspace(rows, multiprocessors)
        step.plan(workspace, rows)
        sm_parts = step.hold(workspace, rows)
        used = [own for own in sm_parts if own]
        costs = [sum(len(s.tiles(step.tile)) for s in own) for own in used]
        begun = [sum(s.index == 0 for s in own) for own in used]
        moved = OVERHEAD - 1  # tiles that stay with the chunk before
        share = max(costs) - moved
        for cost, new in zip(costs[:-1], begun, strict=False):
            assert share - OVERHEAD * (new + 1) - moved <= cost <= share + moved
        assert all(sum(s.num_chunks > 1 for s in own) <= 2 for own in sm_parts)
        assert len(used) == min(len(sm_parts), len(used)) and len(sm_parts) == workspace.sizes["num_sm_parts"]


LONG = 140_000
AROUND = sorted({2**n + d for n in range(5, 18) for d in (-1, 0, 1)} | {12_800, 100_000, 128_000, LONG})


@pytest.mark.parametrize("others", [(), (500,), (40, 3000, 1)], ids=lambda others: f"beside_{len(others)}")
@pytest.mark.parametrize("multiprocessors", [108, 132, 142])
def test_one_merge_whatever_the_length(multiprocessors: int, others: tuple[int, ...]) -> None:
    """A request has no more chunks than one merge takes, none of fewer tiles than its fixed cost behind others, and shares are no
    larger than that asks for."""
    drawn_lengths = np.random.default_rng(multiprocessors).integers(1, LONG, 40 if CAMPAIGN else 4)
    for length in (*AROUND, *drawn_lengths.tolist()):
        step = Step(HEADS.name, "decode", [*others, length], None, [], LONG // 16)
        workspace = step.workspace(8, multiprocessors)
        step.plan(workspace, 1 + len(others))
        costs = []
        for own in step.hold(workspace, 1 + len(others)):
            tiles = [len(s.tiles(step.tile)) for s in own]
            costs.append(sum(tiles) + OVERHEAD * sum(s.index == 0 for s in own))
            for s, count in zip(own, tiles, strict=True):
                assert s.num_chunks <= split_list.FAN_IN
                assert s.index == 0 or s.index < s.num_chunks - 1 or count >= OVERHEAD, (length, s)
        total, longest = sum(costs), -(-max(length, *others, 0) // step.tile)
        fair = max(OVERHEAD + LEAST_TILES, -(-total // len(costs)), -(-(longest + OVERHEAD) // (split_list.FAN_IN - 1)))
        assert max(costs) < fair + 2 * OVERHEAD, length


@pytest.mark.parametrize("op", ["decode", "fixed"])
def test_more_rows_than_threads(op: str) -> None:
    """1300 requests, planned in several rounds; some of them are nobody's, and one is long."""
    lengths = [3] * 1300
    lengths[700] = 5000
    offsets = [min(b, 1250) for b in range(1301)]
    step = Step("chunks_after", op, lengths, offsets, lengths)
    workspace = step.workspace(1400, 132)
    step.plan(workspace, 1300)
    sm_parts = step.hold(workspace, 1300)
    assert sum(map(len, sm_parts)) > 1250


@pytest.mark.parametrize("op", ["decode", "fixed"])
def test_no_rows_of_a_request(op: str) -> None:
    """Nothing but padding: no SM part has anything to do."""
    step = Step("chunks_before", op, [], [0], [])
    workspace = step.workspace(4, 3)
    step.plan(workspace, 4)
    assert not any(step.hold(workspace, 4))


def test_a_table_longer_than_the_workspace_is_for() -> None:
    """Its length is a fault of that request alone: chunks of the others are where they are without it."""
    kernels = SETS["chunks_after"]
    pool = np.zeros((1, 2, 1, 16, 2, 4), np.float32)
    lengths = np.array([700, 5000, 300], np.int32)
    tables = {"lengths": lengths, "page_table": np.zeros((3, COLUMNS), np.int32)}
    fixed = package(kernels).fixed
    layer = package(kernels).Cache(pool, **tables, max_cache_length=768)[0]
    workspace = split_list.guarded(fixed, 24, max_tokens=768, multiprocessors=4)
    with machine(mode="check"):
        fixed.plan(layer, workspace, rows=24)
    found = split_list.read(workspace, columns_of(kernels, "fixed"))
    counts = [int((found.chunks["b"] == b).sum()) for b in range(3)]
    assert counts == [-(-700 // 192), 1, -(-300 // 192)]
    assert [int(f) for f in found.chunks["fault"][found.chunks["b"] == 1]] == [3]
    assert not found.chunks["fault"][found.chunks["b"] != 1].any()


@pytest.mark.parametrize("name", SETS)
def test_workspace_bytes(name: str) -> None:
    """Balanced: partial results of two chunks an SM part, whatever the batch. Invariant: by the longest request."""
    kernels, generated = SETS[name], package(SETS[name])
    cache, balanced, fixed = kernels.cache, generated.decode, generated.fixed
    for multiprocessors in (1, 8, 132):
        found: dict[int, Workspace] = {
            n: split_list.guarded(balanced, n, multiprocessors=multiprocessors) for n in (1, 64, 512)
        }
        plan = balanced.split_plan()
        grid = found[1].sizes["num_sm_parts"] * plan.columns
        assert grid <= max(plan.columns, multiprocessors * plan.blocks_per_sm)
        # A partial result: at most 8 columns more than there are, a maximum and a sum each.
        rows_of_one: int = kernels.ops[0].rows  # type: ignore[attr-defined]
        columns = (kernels.group * rows_of_one // (plan.columns // cache.kv_heads) + 8) * (cache.v_dim + 2)
        for rows, workspace in found.items():
            assert workspace.nbytes == balanced.workspace_bytes(rows, multiprocessors=multiprocessors)
            assert workspace.nbytes == len(workspace.view.owner) - 2 * GUARD  # type: ignore[arg-type]
            most = 2 * grid * (4 * columns + 16) + 64 * (rows + grid + 8) + 4 * 2 * grid
            assert workspace.nbytes <= most
    if max_seen := fixed.split_plan().max_seen:
        few, many = (fixed.workspace_bytes(64, max_tokens=n) for n in (max_seen, 2**31))
        assert few == many, "a window has as many chunks, however long requests are"
        return
    sizes = [fixed.workspace_bytes(64, max_tokens=n, multiprocessors=m) for n in (1024, 8192) for m in (1, 132)]
    assert sizes[1] - sizes[0] == sizes[3] - sizes[2] < 4096, "multiprocessors hardly matter"
    assert 6 < sizes[2] / sizes[0] < 8
