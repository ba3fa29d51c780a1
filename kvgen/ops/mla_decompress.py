"""mla_decompress: the latent rows of one chunk of a prefill, side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.lowered import LoweredCache, lower
from kvgen.lowering.new_rows import counts_before
from kvgen.lowering.row_runs import RunContext, rows_per_block, value_runs
from kvgen.ops.base import ChunkOp
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.kernel_set import KernelSet

THREADS: Final = 256


@dataclass(frozen=True)
class MlaDecompressContext:
    """Everything ops/mla_decompress.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    runs: tuple[RunContext, ...]
    threads: int
    rows: int
    alignment: int
    before: bool
    index: str


class MlaDecompress(ChunkOp):
    """Copy the latent rows of one chunk of mla_plan out of the cache, dequantized, into one contiguous array.

    k_latent is `[T, latent_dim]`, or with `rope=True` `[T, latent_dim + rope_dim]`. `buffer_row_offsets[B + 1]` and
    `cache_offsets[B]` are row c of mla_plan's arrays, for chunk c: row g of request b becomes its key `g -
    buffer_row_offsets[b] + cache_offsets[b]`. `alignment` and `row_offsets` must be those that the plan had.

    Rows that pad a request's keys to `alignment` become 0, whatever the page holds there. Rows past the chunk's last one are
    left as they are. A key that has no valid page, or that the request does not have, becomes NaN and is reported.

    k_latent times the up projection is the next step: a matrix product, for a library. Source: Modular MAX,
    mla.decompress.k.cache.ragged.paged.
    """

    kind: ClassVar[str] = "mla_decompress"
    rope: bool = False
    """True: `k_latent` rows have the RoPE part behind the latent part. False: the latent part alone."""

    def check(self, kernels: KernelSet) -> None:
        super().check(kernels)
        if kernels.kv.rope_part and kernels.kv.latent_part == kernels.kv.head_dim:
            raise ValueError(
                "ops: got mla_decompress with values='row'; it gives the latent part, which projections turn into K and V, but "
                "here V is the whole row; use ops.Gather()"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, lowered = kernels.kv, lower(kernels.kv)
        value, index = dtype(cache.dtype), self._index(cache)
        runs = value_runs(lowered, "_latent") if self.rope else (_latent_run(lowered),)
        doc, field = "latent rows of the chunk's keys", "head_dim" if self.rope else "latent_dim"
        align, kind = max(r.width for r in runs) * value.bytes, "index_dtype"
        params = (
            Array(
                "k_latent",
                value.name,
                ("T", cache.head_dim if self.rope else cache.latent_part),
                access="out",
                align=align,
                strided=True,
                doc=doc,
                field="dtype",
                fields=(None, field),
            ),
            Array(
                "buffer_row_offsets", index.name, ("B+1",), untrusted=True, doc="first row of each request", field=kind
            ),
            Array("cache_offsets", index.name, ("B",), untrusted=True, doc="the key of each request there", field=kind),
            *self._step_offsets(cache),
            Size("k_latent_stride", "i64", "k_latent.stride"),
            Size("num_rows", "u32", "T"),
            ERRORS,
        )
        rows = rows_per_block(lowered, THREADS)
        context = MlaDecompressContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            runs=runs,
            threads=THREADS,
            rows=rows,
            alignment=self._alignment(cache),
            before=counts_before(cache),
            index=index.c,
        )
        grid = (ceil_div(var("T"), rows), const(1), const(1))
        return (KernelPlan(self.name, context.entry, "ops/mla_decompress.cu.j2", context, params, grid, THREADS),)


def _latent_run(cache: LoweredCache) -> RunContext:
    """A row's latent part, which may be all of its segment or its first dims."""
    run, segment = value_runs(cache, "_latent")[0], cache.segments[0]
    if segment.size == cache.spec.latent_part:
        return replace(run, head_dims=segment.size)
    width = run.width
    while cache.spec.latent_part % width:
        width //= 2
    view = f"RoleValues<{segment.struct}Role, {segment.value}, 0, {cache.spec.latent_part}>"
    latent = cache.spec.latent_part
    return replace(run, title="K, latent part", stored=view, width=width, vectors=latent // width, head_dims=latent)
