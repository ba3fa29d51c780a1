"""append: store the new tokens' K and V in the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from kvgen.dtypes import dtype
from kvgen.expr import ceil_div, const, var
from kvgen.ops.cache import ERRORS, entry_name, rows_per_block
from kvgen.ops.segments import SegmentContext, row_params, segments
from kvgen.plan import KernelPlan, Param
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.table import IndexName, PerKV

THREADS = 256


@dataclass(frozen=True)
class AppendContext:
    """Everything ops/append.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    segments: tuple[SegmentContext, ...]
    threads: int
    rows: int
    by_slot: bool
    lengths: str
    residual: int


class Append(Op):
    """Store k and v `[T, kv_heads, head_dim]` of the step's tokens.

    `rows="ragged"`: `row_offsets[B + 1]` says which rows are whose; row t of request b goes to position
    `length + t` ("before" lengths) or ends at `length` ("after"). Rows at or past `row_offsets[B]` are padding.
    `rows="slots"`: `slots[T]` names each row's place, `page * page_size + offset`; -1 skips the row.
    Quantized caches get codes, and scales where they are computed; with `residual`, K rows that no seal has
    quantized go to the tail: call seal first.
    """

    kind: ClassVar[str] = "append"
    rows: Literal["ragged", "slots"] = "ragged"
    index_dtype: IndexName | None = Field(default=None)

    def check(self, kernels: KernelSet) -> None:
        storage = kernels.cache.storage
        if self.rows == "slots" and isinstance(kernels.cache.page_table, PerKV):
            raise ValueError("rows: got 'slots' with table=PerKV(), where K and V lie in different pages; use 'ragged'")
        if self.rows == "slots" and (storage.own_table or storage.residual):
            which = (
                "own_table=True, whose scales lie in other pages" if storage.own_table else "residual, a tail a request"
            )
            raise ValueError(f"rows: got 'slots' with {which}; a slot names one place; use 'ragged'")

        for segment in storage.segments:
            quant, scales = segment.quant, segment.scales
            if quant is None or scales is None or not quant.computed or quant.residual:
                continue
            if segment.region.dtype.packed and scales.block[2] == 1:
                raise ValueError(
                    f"quant: got block.dim=1 with {segment.region.dtype.name} codes, two a byte, whose scales append "
                    "computes; a byte's codes are written together, so give block.dim an even number"
                )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.cache
        rows_of = row_params(cache, "", "new {} rows")
        params = list(rows_of)
        if self.rows == "slots":
            index = dtype(self.index_dtype or "i64")
            doc = "place of each row, or -1 to skip it"
            params.append(Param("slots", index, ("T",), untrusted=True, doc=doc, field="index_dtype"))
        else:
            index = dtype(self.index_dtype or cache.lengths_dtype)
            doc = "first row of each request"
            params.append(Param("row_offsets", index, ("B+1",), untrusted=True, doc=doc, field="index_dtype"))
        params += [Param(f"{r.name}_stride", dtype("i64"), value=f"{r.name}.stride") for r in rows_of]
        params.append(Param("num_rows", dtype("u32"), value="T"))
        params.append(ERRORS)
        rows = rows_per_block(cache, THREADS)
        context = AppendContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            segments=segments(cache),
            threads=THREADS,
            rows=rows,
            by_slot=self.rows == "slots",
            lengths=cache.lengths,
            residual=cache.storage.residual,
        )
        grid = (ceil_div(var("T"), rows), const(1), const(1))
        plan = KernelPlan(
            self.name, context.entry, "ops/append.cu.j2", context, tuple(params), grid, THREADS, writes_pool=True
        )
        return (plan,)
