"""gather: copy cached tokens into contiguous rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.copied_rows import LayersContext, RowsBy, of_all_layers, place_params, stride_params
from kvgen.lowering.lowered import lower
from kvgen.lowering.row_runs import RunContext, check_raw, raw_params, raw_runs, row_params, rows_per_block, value_runs
from kvgen.ops.base import CopiedRowsOp
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param, Size
from kvgen.schema.kernel_set import KernelSet

THREADS = 256


@dataclass(frozen=True)
class GatherContext:
    """Everything ops/gather.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    runs: tuple[RunContext, ...]
    raw: bool
    by_slots: bool
    by_runs: bool
    layers: LayersContext | None
    threads: int
    rows: int


class Gather(CopiedRowsOp):
    """Copy tokens out of the cache, dequantized, into contiguous arrays.

    k_out and v_out are `[T, kv_heads, head_dim]`. Row t of request b, counted from `row_offsets[b]`, is token `starts[b] +
    t`; without `starts`, token t. Rows at or past `row_offsets[B]` are left as they are. With `rows="runs"` the rows of request b
    are `row_begins[b]` to `row_begins[b] + row_counts[b]`, and rows between these runs are left as they are: two launches,
    of two caches, fill one buffer (vLLM, dequantize_and_gather_k_cache). A row whose token has no valid
    page, or is not stored any more (in a ring, all but the last `window` before `length`), becomes NaN.

    `raw=False` is the default. `raw=True` copies what is stored, for scatter with raw to take back (offloading, moving a
    request): of quantized segments `k_codes_out` in bytes `[T, kv_heads, head_dim]`, 4-bit codes two a byte, and, where the
    cache computes scales, `k_scales_out` `[T, blocks of heads, blocks of dims]`, a zero point behind each scale; of others
    `k_out`. Latent rows have their RoPE part in `k_rope_out` where it is a segment of its own. V has the same. A row without
    a valid page then has codes 0xff, and NaN in scales and values.
    """

    kind: ClassVar[str] = "gather"
    ragged: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    BY_SLOTS: ClassVar[str] = (
        "Here slots name the tokens in place of requests: row t is the one in `slots[t]` = page * page_size + offset, whatever\n"
        "a table says. -1 leaves the row as it is; a slot past the pool makes it NaN, and is reported."
    )

    # What the base says of slots, and runs besides.
    rows: RowsBy | Literal["runs"] = "ragged"  # type: ignore[assignment]
    """How rows name their tokens: "ragged", request by request, by `row_offsets[B + 1]` and `starts[B]`; "runs", the same with
    gaps, by ascending `row_begins[B]`, `row_counts[B]` and `starts[B]`; "slots", one by one, by `slots[T]` = page *
    page_size + offset, without a page table.
    """

    def check(self, kernels: KernelSet) -> None:
        super().check(kernels)
        if self.raw:
            check_raw(self.name, kernels.kv)

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, lowered = kernels.kv, lower(kernels.kv)
        if self.raw:
            rows_of, runs = raw_params(lowered, "_out", "{}", access="out"), raw_runs(lowered, "_out")
        else:
            rows_of = row_params(lowered, "_out", "{} of the gathered tokens", access="out")
            runs = value_runs(lowered, "_out")
        if self.layers == "all":
            rows_of = of_all_layers(rows_of)
        names: dict[str, str] = {"begins": "first row of each request", "starts": "first token to take of each request"}
        place, starts = place_params(self.rows, self._index(cache), **names)
        params: tuple[Param, ...] = (
            *place,
            *rows_of,
            *starts,
            *stride_params(rows_of),
            Size("num_rows", "u32", "T"),
            *self._pool(cache),
            ERRORS,
        )
        rows = rows_per_block(lowered, THREADS)
        context = GatherContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            runs=runs,
            raw=self.raw,
            by_slots=self.rows == "slots",
            by_runs=self.rows == "runs",
            layers=self._layers(cache, rows_of),
            threads=THREADS,
            rows=rows,
        )
        whole = self.layers == "all"
        plan = KernelPlan(
            self.name,
            context.entry,
            "ops/gather.cu.j2",
            context,
            params,
            (ceil_div(var("T"), rows), const(1), var("all_layers") if whole else const(1)),
            THREADS,
            all_layers=whole,
            reads_tables=self.rows != "slots",
        )
        return (plan,)
