"""Negative lengths, page ids, offsets and parents: the fault that is reported, and that nothing is read or written for them.

Index arrays are i32 by default, so that every one of them can hold a negative number. Other modules compare bad data with the
oracle; here the fault and the untouched memory are written down by hand, an operation at a time. The CPU machine refuses every
access outside the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen import KernelSet, Latent, Paged, ops
from kvgen.layout.dtypes import dtype
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.harness import package

Raw = NDArray[Any]
PAGE, PAGES, LOWEST = 4, 9, -(2**31)
OPS: Final = (
    ops.Append(),
    ops.Gather(),
    ops.Decode(),
    ops.Decode(name="split", split="balanced"),
    ops.Scatter(),
    ops.SlotMapping(),
    ops.RowOffsets(),
    ops.Advance(),
    ops.Advance(name="accept", counts="new_tokens"),
    ops.Reorder(),
    ops.ToCsr(),
)
SET: Final = KernelSet(
    name="negative", q_heads=2, cache=Paged(dtype="f32", kv_heads=1, head_dim=8, page_size=PAGE), ops=OPS
)
MLA: Final = KernelSet(
    name="negative_latent",
    q_heads=16,
    cache=Latent(dtype="bf16", latent_dim=64, rope_dim=16, page_size=PAGE),
    ops=(ops.MlaDecode(scale=0.1),),
)
# What becomes negative: request 1's length or its pages, or where request 2's rows begin.
BAD: Final = {
    **{f"length{value}": ("lengths", 1, value, Fault.LENGTH) for value in (-1, -2, LOWEST)},
    **{f"page{value}": ("page_table", 1, value, Fault.PAGE_ID) for value in (-1, -7, LOWEST)},
    **{f"offset{value}": ("row_offsets", 2, value, Fault.ROW_OFFSETS) for value in (-1, -3, LOWEST)},
}


@dataclass
class Step:
    """Three requests of 5, 6 and 3 tokens that get 1, 2 and 1 new ones, a page of 4 tokens each two of a pool of nine."""

    kernels: KernelSet = SET
    lengths: Raw = field(default_factory=lambda: np.array([5, 6, 3], np.int32))
    page_table: Raw = field(default_factory=lambda: np.array([[4, 2], [7, 1], [3, 5]], np.int32))
    row_offsets: Raw = field(default_factory=lambda: np.array([0, 1, 3, 4], np.int32))
    errors: Raw = field(default_factory=lambda: np.zeros(1, np.uint64))
    pool: Raw = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        tensor = package(self.kernels).Cache.TENSORS[0]
        shape = [{"pages": PAGES, "layers": 1}.get(n, n) for n in tensor.shape]
        self.pool = np.random.default_rng(1).standard_normal(shape).astype(dtype(tensor.dtype).numpy())

    def spoil(self, label: str) -> Fault:
        """Write the negative number; returns the fault to expect."""
        name, at, value, fault = BAD[label]
        getattr(self, name)[at] = value
        return fault

    def run(self, op: str, *, whole: bool = False, **arguments: Any) -> None:
        """The operation on the CPU machine."""
        made = package(self.kernels)
        cache = made.Cache(self.pool, lengths=self.lengths, page_table=self.page_table)
        with machine(mode="check"):
            getattr(made, op)(cache if whole else cache[0], **arguments, errors=self.errors)

    def says(self, fault: Fault, *requests: int) -> None:
        """The error word has this fault, of one of these requests."""
        report = describe(self.errors)
        assert report is not None and report.code is fault, f"{report}, not {fault.name}"
        assert not requests or report.request in requests


def rows(*shape: int, fill: float | None = None) -> Raw:
    if fill is not None:
        return np.full(shape, fill, np.float32)
    return np.random.default_rng(2).standard_normal(shape).astype(np.float32)


def last_is_good(label: str) -> bool:
    """Whether nothing is wrong with request 2: negative offsets are its own too."""
    return not label.startswith("offset")


# Without `starts`, gather and scatter take a request's first tokens and read no length.
UNCOUNTED: Final = [n for n in BAD if not n.startswith("length")]
# A decode step has a row a request, and no offsets.
ONE_ROW: Final = [n for n in BAD if not n.startswith("offset")]


@pytest.mark.parametrize(("op", "label"), [*(("append", n) for n in BAD), *(("scatter", n) for n in UNCOUNTED)])
def test_writes(op: str, label: str) -> None:
    """The victim's rows are stored nowhere; those of the others where they belong."""
    clean, step = Step(), Step()
    given = {"k": rows(4, 1, 8), "v": rows(4, 1, 8)}
    before = step.pool.copy()
    clean.run(op, **given, row_offsets=clean.row_offsets)
    fault = step.spoil(label)
    step.run(op, **given, row_offsets=step.row_offsets)
    assert describe(clean.errors) is None
    step.says(fault)
    good = [4, 2, 3, 5] if last_is_good(label) else [4, 2]
    for page in range(PAGES):
        wanted = clean.pool if page in good else before
        assert step.pool[page].tobytes() == wanted[page].tobytes(), f"page {page}"
    assert (clean.pool != before).any(axis=tuple(range(1, before.ndim))).sum() >= 3


@pytest.mark.parametrize("label", UNCOUNTED)
def test_gather(label: str) -> None:
    """Tokens 0 and 1 of every request: the victim's rows are NaN, or stay where the row's request is not known."""
    clean, step = Step(), Step()
    outs = [[rows(6, 1, 8, fill=5.0) for _ in "kv"] for _ in range(2)]
    for one, out in zip((clean, step), outs, strict=True):
        one.row_offsets = np.array([0, 2, 4, 6], np.int32)
        fault = one.spoil(label) if one is step else None
        one.run("gather", row_offsets=one.row_offsets, k_out=out[0], v_out=out[1])
    assert fault is not None
    step.says(fault)
    kept = [True, True, False, False, *[last_is_good(label)] * 2]
    for right, found in zip(*outs, strict=True):
        for row, good in enumerate(kept):
            if good:
                assert found[row].tobytes() == right[row].tobytes()
            else:
                assert np.isnan(found[row]).all() or (found[row] == 5.0).all()


@pytest.mark.parametrize("start", [-1, -2, LOWEST])
def test_gather_starts(start: int) -> None:
    """A negative first token: that request's rows are NaN."""
    step, outs = Step(), [rows(6, 1, 8, fill=5.0) for _ in "kv"]
    starts = np.array([0, start, 0], np.int32)
    step.run("gather", row_offsets=np.array([0, 2, 4, 6], np.int32), k_out=outs[0], v_out=outs[1], starts=starts)
    report = describe(step.errors)
    assert report is not None and report.request == 1 and report.code in (Fault.LENGTH, Fault.POSITION)
    for out in outs:
        assert np.isnan(out[2:4]).all() and np.isfinite(out[[0, 1, 4, 5]]).all() and not (out == 5.0).any()


@pytest.mark.parametrize("label", ONE_ROW)
@pytest.mark.parametrize("op", ["decode", "split"])
def test_attention(op: str, label: str) -> None:
    """The victim's row is NaN, the others' are finite, and of one block a request the same bits."""
    found = []
    for step in (clean := Step(), spoilt := Step()):
        fault = step.spoil(label) if step is spoilt else None
        q, out = rows(3, 2, 8), rows(3, 2, 8, fill=5.0)
        if op == "split":
            made = package(SET)
            layer = made.Cache(step.pool, lengths=step.lengths, page_table=step.page_table)[0]
            with machine(mode="check"):
                workspace = made.split.workspace(max_rows=3, max_tokens=2 * PAGE, multiprocessors=4)
                made.split.plan(layer, workspace, rows=3)
                made.split(layer, q, out, workspace=workspace, errors=step.errors)
        else:
            step.run(op, q=q, out=out)
        found.append(out)
    assert fault is not None and describe(clean.errors) is None
    spoilt.says(fault, 1)
    assert np.isnan(found[1][1]).all() and np.isfinite(found[1][[0, 2]]).all()
    if op == "decode":
        assert found[0][[0, 2]].tobytes() == found[1][[0, 2]].tobytes()


@pytest.mark.parametrize("label", ONE_ROW)
def test_mla_attention(label: str) -> None:
    found, fault = [], None
    for spoilt in (False, True):
        step = Step(kernels=MLA)
        if spoilt:
            fault = step.spoil(label)
        q, out = (rows(3, 16, n).astype(step.pool.dtype) for n in (80, 64))
        step.run("mla_decode", q=q, out=out)
        found.append(out.astype(np.float32))
    assert fault is not None
    step.says(fault, 1)
    assert np.isnan(found[1][1]).all() and np.isfinite(found[1][[0, 2]]).all()
    assert found[0][[0, 2]].tobytes() == found[1][[0, 2]].tobytes()


@pytest.mark.parametrize("label", BAD)
def test_slot_mapping(label: str) -> None:
    """The victim's rows have no slot."""
    step, slots = Step(), np.full(4, 77, np.int64)
    fault = step.spoil(label)
    step.run("slot_mapping", row_offsets=step.row_offsets, slots=slots)
    step.says(fault)
    right = [2 * PAGE + 1, -1, -1, 3 * PAGE + 3 if last_is_good(label) else -1]
    assert slots.tolist() == right


@pytest.mark.parametrize("value", [-1, -3, LOWEST])
@pytest.mark.parametrize("name", ["lengths", "row_offsets"])
def test_lengths_of_the_next_step(name: str, value: int) -> None:
    """row_offsets and advance count nothing for such a request; advance leaves what the length is."""
    for op in ("row_offsets", "advance"):
        step = Step()
        getattr(step, name)[1 if name == "lengths" else 2] = value
        given: dict[str, Raw] = {"out": np.full(4, 77, np.int32)}
        if op == "advance":
            given = {"new_lengths": np.full(3, 77, np.int32)}
        step.run(op, **given, row_offsets=step.row_offsets)
        step.says(Fault.LENGTH if name == "lengths" else Fault.ROW_OFFSETS, 1, 2)
        if op == "row_offsets":
            assert (np.diff(given["out"]) >= 0).all() and given["out"][0] == 0
        else:
            assert given["new_lengths"][0] == 6 and given["new_lengths"][1] == step.lengths[1]


@pytest.mark.parametrize("value", [-1, -3, LOWEST])
def test_accepted_tokens(value: int) -> None:
    """A negative number of accepted tokens leaves the request as long as it is."""
    step, lengths = Step(), np.full(3, 77, np.int32)
    step.run("accept", new_lengths=lengths, new_tokens=np.array([1, value, 1], np.int32))
    report = describe(step.errors)
    assert report is not None and report.request == 1
    assert lengths.tolist() == [6, 6, 4]


@pytest.mark.parametrize("value", [-2, -3, LOWEST])
def test_parents(value: int) -> None:
    """-1 ends a request and is no fault; another negative parent is one, and its row stays. Either way nothing is copied."""
    for parent in (value, -1):
        step, table = Step(), np.full((3, 2), 77, np.int32)
        before, lengths = step.pool.copy(), np.full(3, 77, np.int32)
        parents, fresh = np.array([0, parent, 2], np.int32), np.array([0, 6, 8], np.int32)
        step.run("reorder", whole=True, parents=parents, fresh=fresh, new_page_table=table, new_lengths=lengths)
        if parent == -1:
            assert describe(step.errors) is None
        else:
            step.says(Fault.TABLE, 1)
        assert lengths.tolist() == [5, 77, 3] and table.tolist() == [[4, 2], [77, 77], [3, 77]]
        assert step.pool.tobytes() == before.tobytes()


@pytest.mark.parametrize("value", [-1, -3, LOWEST])
def test_reorder_fresh_pages_and_lengths(value: int) -> None:
    """A negative free page gets no copy; a parent of negative length has no children."""
    for fresh, length, fault in ((value, 6, Fault.PAGE_ID), (6, value, Fault.LENGTH)):
        step, table = Step(), np.full((3, 2), 77, np.int32)
        step.lengths[1] = length
        before, parents = step.pool.copy(), np.array([1, 1, 2], np.int32)
        free = np.array([0, fresh, 8], np.int32)
        step.run("reorder", whole=True, parents=parents, fresh=free, new_page_table=table)
        step.says(fault)
        assert step.pool.tobytes() == before.tobytes()
        if fault is Fault.LENGTH:
            assert table.tolist() == [[77, 77], [77, 77], [3, 77]]


@pytest.mark.parametrize("label", BAD)
def test_to_csr(label: str) -> None:
    """A request of a negative length has an empty slice; a negative id becomes the entry past the pool."""
    step = Step()
    fault = step.spoil(label)
    indices, indptr, last = np.full(6, 77, np.int32), np.full(4, 77, np.int32), np.full(3, 77, np.int32)
    step.run("to_csr", page_indices=indices, page_indptr=indptr, last_page_len=last, row_offsets=step.row_offsets)
    step.says(fault)
    assert indptr[0] == 0 and (np.diff(indptr) >= 0).all() and indices[:2].tolist() == [4, 2]
    if label.startswith("length"):
        assert indptr.tolist() == [0, 2, 2, 3] and indices[:3].tolist() == [4, 2, 3] and last[1] == 0
    elif label.startswith("page"):
        assert indptr.tolist() == [0, 2, 4, 5] and indices[:5].tolist() == [4, 2, PAGES, PAGES, 3]
    assert (indices >= 0).all()


def test_every_index_array_is_signed() -> None:
    """By default; so that the numbers above mean what they say."""
    made: list[Callable[..., Any]] = [getattr(package(SET), o.name) for o in OPS]
    kinds = {a.dtype for op in made for a in op.KERNEL.arguments if a.name in {"row_offsets", "parents", "new_tokens"}}  # type: ignore[attr-defined]
    assert kinds == {"i32"} and {f.dtype for f in package(SET).Cache.TABLES} == {"i32"}
