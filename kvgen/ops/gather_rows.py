"""gather_rows: copy the cached tokens that each query row names into contiguous rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.row_runs import RunContext, row_params, value_runs
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

THREADS: Final = 256
_MOST_ROWS: Final = 32


@dataclass(frozen=True)
class GatherRowsContext:
    """Everything ops/gather_rows.cu.j2 reads; `sizes` are the elements of a row of each of `outs`, the
    constants `row_names`."""

    entry: str
    params: tuple[str, ...]
    runs: tuple[RunContext, ...]
    outs: tuple[str, ...]
    row_names: tuple[str, ...]
    sizes: tuple[int, ...]
    threads: int
    rows: int


class GatherRows(Op):
    """Copy chosen tokens of each query row out of the cache, dequantized: row (r, j) becomes token `slots[r, j]`.

    k_out is `[T, J, kv_heads, head_dim]`. The token is one of the request that has query row r by `row_offsets[B + 1]`. A
    negative slot leaves zeros and is no fault. A token without a valid page, or one that a ring holds no more, becomes NaN.
    Query rows of no request are left as they are. `roles="k"` copies K, "kv" also V, to v_out. Source: Modular MAX,
    kv_cache_gather_rows_ragged.
    """

    kind: ClassVar[str] = "gather_rows"
    ragged: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    roles: Literal["k", "kv"] = "k"
    """"k": K to `k_out`. "kv": V to `v_out` as well."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""
    slots_dtype: Literal["i32", "i64"] = "i32"  # negative: a hole
    """Element type of `slots[T, J]`, signed: a negative slot is a hole."""

    def check(self, kernels: KernelSet) -> None:
        if self.roles == "kv" and kernels.kv.stores == "k":
            raise ValueError("roles: got 'kv' for a cache that stores K only; use 'k'")

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        index, slot = dtype(self.index_dtype or cache.lengths_dtype), dtype(self.slots_dtype)
        doc = "first query row of each request"
        arrays = [Array("row_offsets", index.name, ("B+1",), untrusted=True, doc=doc, field="index_dtype")]
        doc = "tokens that each query row asks for, negative: none"
        arrays.append(Array("slots", slot.name, ("T", "J"), strided=True, untrusted=True, doc=doc, field="slots_dtype"))
        sizes: dict[str, int] = {}
        for p in row_params(lower(cache), "_out", "{} of the tokens", access="out"):
            if p.name[0] in self.roles:
                _, heads, dims = p.shape
                assert isinstance(heads, int) and isinstance(dims, int)
                sizes[p.name] = heads * dims
                arrays.append(
                    Array(
                        p.name,
                        p.dtype,
                        ("T", "J", heads, dims),
                        access="out",
                        align=p.align,
                        strided=True,
                        doc=p.doc,
                        field="dtype",
                        fields=(None, None, "kv_heads", p.fields[2]),
                    )
                )
        strides = [Size(f"{p.name}_stride", "i64", f"{p.name}.stride") for p in arrays if p.strided]
        params: tuple[Param, ...] = (
            *arrays,
            *strides,
            Size("num_rows", "u32", "T"),
            Size("num_slots", "u32", "J"),
            ERRORS,
        )
        runs = value_runs(lower(cache), "_out", tuple(self.roles))
        rows = max(1, min(_MOST_ROWS, 4 * THREADS // sum(r.vectors for r in runs)))
        context = GatherRowsContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            runs=runs,
            outs=tuple(sizes),
            row_names=tuple(f"k{name[0].upper()}Row" for name in sizes),
            sizes=tuple(sizes.values()),
            threads=THREADS,
            rows=rows,
        )
        grid = (ceil_div(var("T") * var("J"), rows), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/gather_rows.cu.j2", context, params, grid, THREADS),)
