"""rows_add: rows added to K and V of the step's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.row_adds import THREADS, AdderContext, adders, check_addable
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Scalar, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName


@dataclass(frozen=True)
class RowsAddContext:
    """Everything ops/rows_add.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    value: str
    adders: tuple[AdderContext, ...]
    threads: int
    rows: int
    search_lanes: int
    parts: int
    after: bool


class RowsAdd(Op):
    """Add rows to K and V of the step's tokens, in the cache.

    a is `[T, kv_heads * (head_dim + v_head_dim)]`: K's half and V's half of a token. `row_offsets[A + 1]` may be a slice of
    the batch's: row t is token t + row_offsets[0] of the batch, and request i of the slice is request i + `batch_offset` of
    the cache. Rows at or past the slice's last offset are padding. Call it after the append of the same step. Sums are f32,
    rounded once. Quantized values are dequantized, added to and quantized again, with a new scale where scales are computed.
    Source: Modular MAX, kv_cache.ragged.paged.radd.
    """

    kind: ClassVar[str] = "rows_add"
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        check_addable(self.kind, kernels.kv)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        value, new = dtype(cache.dtype), NewRows(self.name, index_dtype=self.index_dtype)
        found = adders(lower(cache), side_by_side=True)
        v_dim = "v_head_dim" if cache.v_dim != cache.head_dim else "head_dim"
        offsets = "first token of each of A requests, in the batch"
        params = (
            Array(
                "a",
                value.name,
                ("T", cache.kv_heads * (cache.head_dim + cache.v_dim)),
                align=found.align * value.bytes,
                strided=True,
                doc="what is added: K's half of a row, V's half",
                field="dtype",
                fields=(None, f"kv_heads * (head_dim + {v_dim})"),
            ),
            replace(new.places_param(cache), shape=("A+1",), doc=offsets),
            Scalar("batch_offset", "u32", doc="the cache's request that is the first of the A"),
            Size("a_stride", "i64", "a.stride"),
            Size("num_rows", "u32", "T"),
            Size("requests", "u32", "A"),
            ERRORS,
        )
        context = RowsAddContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            value=value.c,
            adders=found.roles,
            threads=THREADS,
            rows=found.rows,
            search_lanes=new.search_lanes(found.rows, THREADS),
            parts=found.parts,
            after=new.after(cache),
        )
        grid = (ceil_div(var("T"), found.rows) * found.parts, const(2), const(1))
        plan = KernelPlan(
            self.name, context.entry, "ops/rows_add.cu.j2", context, params, grid, THREADS, writes_pool=True
        )
        return (plan,)
