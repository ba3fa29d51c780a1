"""scatter: store contiguous rows as cached tokens, the inverse of gather."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.copied_rows import LayersContext, of_all_layers, place_params, stride_params
from kvgen.lowering.lowered import LoweredCache, lower
from kvgen.lowering.row_runs import (
    RunContext,
    check_raw,
    check_writes,
    raw_params,
    raw_runs,
    row_params,
    rows_per_block,
    value_runs,
)
from kvgen.lowering.row_tiling import MOST_ROWS, Blocks, WriteContext, divide, values_by_token, write
from kvgen.ops.base import CopiedRowsOp
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param, Size
from kvgen.schema.kernel_set import KernelSet

THREADS = 256


@dataclass(frozen=True)
class RowContext:
    """The caller's rows of a role: `row` elements a head of C type `value`, in accesses of `width`.

    `tile`: they wait in shared memory, whose rows are so many elements apart, because neighbouring tokens are written
    together; 0: they are read as they are written.
    """

    role: str
    value: str
    row: int
    width: int
    tile: int


@dataclass(frozen=True)
class ScatterContext:
    """Everything ops/scatter.cu.j2 reads: `runs` of what is stored vector by vector, else `writes` of values that are
    quantized or wait in shared memory; a block takes `heads` of the kv heads, all of them but where rows wait."""

    entry: str
    params: tuple[str, ...]
    inputs: tuple[RowContext, ...]
    heads: int
    writes: tuple[WriteContext, ...]
    runs: tuple[RunContext, ...]
    raw: bool
    by_slots: bool
    layers: LayersContext | None
    threads: int
    rows: int


class Scatter(CopiedRowsOp):
    """Store rows as tokens that are named by their number, quantized as append does: the inverse of gather.

    k and v are `[T, kv_heads, head_dim]`. Row t of request b, counted from `row_offsets[b]`, becomes token `starts[b] + t`;
    without `starts`, token t. Rows of no request are skipped; rows without a valid page are skipped and reported. In a ring,
    `lengths` says which tokens it holds: older ones are not written, newer ones are reported.

    `raw=True` takes what gather with raw gives, under the same names without `_out`, and stores it as it is. A cache with
    residual is refused, because its keys are quantized in groups of tokens: give those rows to seal and append.
    """

    kind: ClassVar[str] = "scatter"
    at_rates: ClassVar[bool] = True
    BY_SLOTS: ClassVar[str] = (
        "Here slots name the tokens in place of requests: row t becomes the one in `slots[t]` = page * page_size + offset,\n"
        "whatever a table says. -1 skips the row; a slot past the pool is reported."
    )

    def check(self, kernels: KernelSet) -> None:
        super().check(kernels)
        if self.raw:
            check_raw(self.name, kernels.kv)
        else:
            check_writes(self.name, kernels.kv)
        self.plan(kernels)  # raises where a row is too large for a block

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, lowered = kernels.kv, lower(kernels.kv)
        plain = not _tiled(lowered) and not any(s.computed for s in lowered.segments)
        runs = raw_runs(lowered, "") if self.raw else value_runs(lowered, "") if plain else ()
        rows_of = raw_params(lowered, "", "{}") if self.raw else row_params(lowered, "", "{} of the tokens")
        if self.layers == "all":
            rows_of = of_all_layers(rows_of)
        names: dict[str, str] = {
            "begins": "first row of each request",
            "starts": "token that each request's first row becomes",
        }
        place, starts = place_params(self.rows, self._index(cache), **names)
        params: tuple[Param, ...] = (
            *rows_of,
            *place,
            *starts,
            *stride_params(rows_of),
            Size("num_rows", "u32", "T"),
            *self._pool(cache, writes=True),
            ERRORS,
        )
        blocks = (
            _raw_blocks(lowered, runs)
            if self.raw
            else divide(lowered, THREADS, tiles=dict.fromkeys(_tiled(lowered), dtype(cache.dtype).bytes))
        )
        context = ScatterContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            inputs=() if runs else _inputs(lowered, blocks),
            heads=blocks.heads,
            writes=() if runs else _writes(lowered, blocks),
            runs=runs,
            raw=self.raw,
            by_slots=self.rows == "slots",
            layers=self._layers(cache, rows_of),
            threads=THREADS,
            rows=blocks.rows,
        )
        whole = self.layers == "all"
        plan = KernelPlan(
            self.name,
            context.entry,
            "ops/scatter.cu.j2",
            context,
            params,
            (ceil_div(var("T"), blocks.rows), const(blocks.split), var("all_layers") if whole else const(1)),
            THREADS,
            writes_pool=True,
            all_layers=whole,
            reads_tables=self.rows == "ragged",
        )
        return (plan,)


def _raw_blocks(lowered: LoweredCache, runs: tuple[RunContext, ...]) -> Blocks:
    rows = rows_per_block(lowered, THREADS)
    return Blocks(max(rows, MOST_ROWS) if any(r.across for r in runs) else rows, lowered.spec.kv_heads, 1)


def _tiled(lowered: LoweredCache) -> set[str]:
    """The roles whose rows wait in shared memory."""
    return {s.role for s in lowered.segments if values_by_token(lowered, s)}


def _inputs(lowered: LoweredCache, blocks: Blocks) -> tuple[RowContext, ...]:
    found = []
    for p in row_params(lowered, "", ""):
        assert isinstance(p.shape[-1], int)
        row = p.shape[-1]
        width = next(w for w in (8, 4, 2, 1) if row % w == 0 and w * dtype(p.dtype).bytes <= min(p.align, 16))
        pad = 16 // dtype(p.dtype).bytes  # so that rows begin in other banks
        tile = -(-blocks.heads * row // pad) * pad + pad if p.name in _tiled(lowered) else 0
        found.append(RowContext(p.name, dtype(p.dtype).c, row, width, tile))
    return tuple(found)


def _writes(lowered: LoweredCache, blocks: Blocks) -> tuple[WriteContext, ...]:
    """Every segment's write, from rows of the caller's type, which no step through f32 may change."""
    found = []
    for s in lowered.segments:
        waits = s.role in _tiled(lowered)
        rows = f"{s.role}_{'tile' if waits else 'in'}"
        found.append(write(lowered, s, blocks, THREADS, tiled=waits, given=s.value, rows=rows))
    return tuple(found)
