"""gather: copy cached tokens into contiguous rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import lower
from kvgen.lowering.row_runs import RunContext, check_raw, raw_params, raw_runs, row_params, rows_per_block, value_runs
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.tables import IndexName

THREADS = 256


@dataclass(frozen=True)
class GatherContext:
    """Everything ops/gather.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    runs: tuple[RunContext, ...]
    raw: bool
    threads: int
    rows: int


class Gather(Op):
    """Copy tokens out of the cache, dequantized, into contiguous arrays.

    k_out and v_out are `[T, kv_heads, head_dim]`. Row t of request b, counted from `row_offsets[b]`, is token `starts[b] +
    t`; without `starts`, token t. Rows at or past `row_offsets[B]` are left as they are. A row whose token has no valid
    page, or is not stored any more (in a ring, all but the last `window` before `length`), becomes NaN.

    `raw=False` is the default. `raw=True` copies what is stored, for scatter with raw to take back (offloading, moving a
    request): of quantized segments `k_codes_out` in bytes `[T, kv_heads, head_dim]`, 4-bit codes two a byte, and, where the
    cache computes scales, `k_scales_out` `[T, blocks of heads, blocks of dims]`, a zero point behind each scale; of others
    `k_out`. Latent rows have their RoPE part in `k_rope_out` where it is a segment of its own. V has the same. A row without
    a valid page then has codes 0xff, and NaN in scales and values.
    """

    kind: ClassVar[str] = "gather"
    ragged: ClassVar[bool] = True
    index_dtype: IndexName | None = None
    """Element type of `row_offsets` and `starts`. None: the cache's `lengths_dtype`."""
    raw: bool = False
    """True: codes and scales are copied as they are stored. False: values are dequantized."""

    def check(self, kernels: KernelSet) -> None:
        if self.raw:
            check_raw(self.name, kernels.cache)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, lowered = kernels.cache, lower(kernels.cache)
        index = dtype(self.index_dtype or cache.lengths_dtype)
        if self.raw:
            rows_of, runs = raw_params(lowered, "_out", "{}", access="out"), raw_runs(lowered, "_out")
        else:
            rows_of = row_params(lowered, "_out", "{} of the gathered tokens", access="out")
            runs = value_runs(lowered, "_out")
        doc = "first row of each request"
        params = [Array("row_offsets", index.name, ("B+1",), untrusted=True, doc=doc, field="index_dtype"), *rows_of]
        doc = "first token to take of each request"
        params.append(Array("starts", index.name, ("B",), optional=True, untrusted=True, doc=doc, field="index_dtype"))
        params += [Size(f"{r.name}_stride", "i64", f"{r.name}.stride") for r in rows_of]
        params += [Size("num_rows", "u32", "T"), ERRORS]
        rows = rows_per_block(lowered, THREADS)
        context = GatherContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            runs=runs,
            raw=self.raw,
            threads=THREADS,
            rows=rows,
        )
        grid = (ceil_div(var("T"), rows), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/gather.cu.j2", context, tuple(params), grid, THREADS),)
