"""mla_plan: which keys a prefill over latent rows projects together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pydantic import Field

from kvgen.expr.nodes import ceil_div, const, maximum, minimum, var
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows import counts_before
from kvgen.ops.base import ChunkOp
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.kernel_set import KernelSet

THREADS: Final = 512
_MOST_BLOCKS: Final = 1024  # of chunks; further ones are taken in turns


@dataclass(frozen=True)
class MlaPlanContext:
    """Everything ops/mla_plan.cu.j2 reads."""

    entry: str
    params: tuple[str, ...]
    threads: int
    buffer_token_size: int
    alignment: int
    index: str
    before: bool


class MlaPlan(ChunkOp):
    """Divide all keys of a batch, cached and new, among buffers of `buffer_token_size` rows, for a prefill over latent rows.

    The requests' keys are laid out one request after another, each request's padded to a multiple of `alignment` tokens.
    Chunk c is rows `[c, c + 1) * buffer_token_size` of that. C, the number of chunks, is the size of the arrays that the call
    brings:

    - `buffer_row_offsets[C, B + 1]`: request b has rows `[c, b]` to `[c, b + 1]` of chunk c's buffer.
    - `cache_offsets[C, B]`: the first of those rows is this key of the request.
    - `buffer_lengths[C]`, i32: rows in use. -1: the chunk lies behind the last key. An empty batch has 0 rows in use.

    New keys are counted by `row_offsets[B + 1]` where the spec's lengths are "before"; where they are "after", by the lengths.
    A request whose length, offsets and page table contradict each other is reported and has no keys. Keys that do not fit
    into C chunks are left out, and the first of them is reported. Source: Modular MAX, mla.prefill.ragged.paged.plan, whose
    older form is alignment=1; that one had an empty chunk behind a last one that is just full.
    """

    kind: ClassVar[str] = "mla_plan"
    buffer_token_size: int = Field(ge=1, le=2**31 - 1)
    """Rows of the buffer that a chunk of keys fits in."""

    def check(self, kernels: KernelSet) -> None:
        super().check(kernels)
        alignment = self._alignment(kernels.kv)
        if self.buffer_token_size % alignment:
            named = "" if self.alignment is not None else ", the page size"
            raise ValueError(
                f"buffer_token_size: got {self.buffer_token_size} with an alignment of {alignment}{named}; a buffer holds whole "
                "ones; use a multiple, or alignment=1"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache = kernels.kv
        index = self._index(cache)
        out: dict[str, Any] = {"access": "out", "strided": True, "field": "index_dtype"}
        params = (
            Array(
                "buffer_row_offsets",
                index.name,
                ("C", "B+1"),
                doc="first row of each request in each chunk's buffer",
                **out,
            ),
            Array("cache_offsets", index.name, ("C", "B"), doc="the key of each request that is there", **out),
            Array("buffer_lengths", "i32", ("C",), access="out", doc="rows of each chunk, -1: none"),
            *self._step_offsets(cache),
            Size("buffer_row_offsets_stride", "i64", "buffer_row_offsets.stride"),
            Size("cache_offsets_stride", "i64", "cache_offsets.stride"),
            Size("num_chunks", "u32", "C"),
            ERRORS,
        )
        context = MlaPlanContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            buffer_token_size=self.buffer_token_size,
            alignment=self._alignment(cache),
            index=index.c,
            before=counts_before(cache),
        )
        # Without chunks there is bad data to report still.
        grid = (ceil_div(var("B") + 1, THREADS), minimum(maximum(var("C"), 1), _MOST_BLOCKS), const(1))
        return (KernelPlan(self.name, context.entry, "ops/mla_plan.cu.j2", context, params, grid, THREADS),)
