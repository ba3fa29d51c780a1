"""slot_mapping and remap_indices: places in the pool of new tokens, and of tokens that sparse attention picked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import IndexName, PerKV

THREADS: Final = 256
WARPS: Final = 8
# Indices that a warp maps: all that most sparse attentions pick of a row are four warps' work.
COLUMNS: Final = 512


@dataclass(frozen=True)
class SlotMappingContext:
    """Everything ops/slot_mapping.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    threads: int
    element: str
    index: str
    before: bool


@dataclass(frozen=True)
class RemapIndicesContext:
    """Everything ops/remap_indices.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    warps: int
    columns: int
    index: str


def _check_one_place(kernels: KernelSet, kind: str) -> None:
    """Raise ValueError where one number cannot say where a token is."""
    storage = kernels.cache.storage
    if isinstance(kernels.cache.page_table, PerKV):
        raise ValueError(f"ops: got {kind} with table=PerKV(), where K and V lie in different pages; use another table")
    if storage.own_table or storage.residual:
        which = "own_table=True, whose scales lie in other pages" if storage.own_table else "residual, a tail a request"
        raise ValueError(f"ops: got {kind} with {which}; a slot names one place; use a cache without")


class SlotMapping(Op):
    """Find each new row's place, `page * page_size + offset`, for append's `rows="slots"`: `slots[T]`.

    `row_offsets[B + 1]` says which rows are whose, as append takes them. Rows of no request get -1, and so do rows that a
    later row of the step takes the place of (a ring), and bad ones, which are reported: contradicting offsets, a length that
    cannot be, a token past the page table, an id outside the pool, a slot that `slots_dtype` cannot hold.
    """

    kind: ClassVar[str] = "slot_mapping"
    index_dtype: IndexName | None = None
    slots_dtype: Literal["i32", "i64"] = "i64"

    def check(self, kernels: KernelSet) -> None:
        _check_one_place(kernels, self.kind)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        index, slots = dtype(self.index_dtype or cache.lengths_dtype), dtype(self.slots_dtype)
        doc = "first new row of each request"
        params = (
            Param("row_offsets", index, ("B+1",), untrusted=True, doc=doc, field="index_dtype"),
            Param("slots", slots, ("T",), access="out", doc="place of each row, or -1", field="slots_dtype"),
            Param("num_rows", dtype("u32"), value="T"),
            ERRORS,
        )
        context = SlotMappingContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            element=slots.c,
            index=index.c,
            before=cache.lengths == "before",
        )
        grid = (ceil_div(var("T"), THREADS), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/slot_mapping.cu.j2", context, params, grid, THREADS),)


class RemapIndices(Op):
    """Map tokens of requests to their rows in the pool, `page * page_size + t % page_size`: `out[T, J]`.

    `indices[T, J]` are tokens counted from the first one of the request whose row it is, and out may be the same array;
    `row_offsets[B + 1]` says which rows are whose. Negative ones pass through. -1: rows of no request; and, reported, rows
    with contradicting offsets, tokens past the page table, ids outside the pool, places past 2^31 - 1. Lengths are not
    consulted.
    Source: Modular MAX, paged_sparse_kv_index_remap.
    """

    kind: ClassVar[str] = "remap_indices"
    index_dtype: IndexName | None = None

    def check(self, kernels: KernelSet) -> None:
        _check_one_place(kernels, self.kind)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        index, i32, i64 = dtype(self.index_dtype or kernels.cache.lengths_dtype), dtype("i32"), dtype("i64")
        doc = "tokens of each row's request, or negative"
        params = (
            Param("indices", i32, ("T", "J"), strided=True, untrusted=True, doc=doc),
            Param("row_offsets", index, ("B+1",), untrusted=True, doc="first row of each request", field="index_dtype"),
            Param(
                "out",
                i32,
                ("T", "J"),
                access="out",
                strided=True,
                doc="their rows in the pool, or negative",
                in_place=("indices",),
            ),
            Param("indices_stride", i64, value="indices.stride"),
            Param("out_stride", i64, value="out.stride"),
            Param("num_rows", dtype("u32"), value="T"),
            Param("columns", dtype("u32"), value="J"),
            ERRORS,
        )
        context = RemapIndicesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            warps=WARPS,
            columns=COLUMNS,
            index=index.c,
        )
        grid = (ceil_div(var("T"), WARPS), ceil_div(var("J"), COLUMNS), const(1))
        return (KernelPlan(self.name, context.entry, "ops/remap_indices.cu.j2", context, params, grid, WARPS * 32),)
