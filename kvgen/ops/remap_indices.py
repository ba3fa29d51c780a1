"""remap_indices: tokens that sparse attention picked, as rows of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows_rules import check_one_place
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import IndexName

WARPS: Final = 8


# Indices that a warp maps: all that most sparse attentions pick of a row are four warps' work.
COLUMNS: Final = 512


@dataclass(frozen=True)
class RemapIndicesContext:
    """Everything ops/remap_indices.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    warps: int
    columns: int
    index: str


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
        check_one_place(kernels, self.kind)

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
