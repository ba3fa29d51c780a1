"""remap_indices: tokens that sparse attention picked, as rows of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows_rules import check_one_place
from kvgen.lowering.partners import check_partners
from kvgen.ops.indexer_scores import IndexerScores
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Size
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

WARPS: Final = 8


# Indices that a warp maps: all that most sparse attentions pick of a row are four warps' work.
COLUMNS: Final = 512


@dataclass(frozen=True)
class RemapIndicesContext:
    """Everything ops/remap_indices.cu.j2 reads; an entry of the cache is `rate` tokens, lengths count the rows (`after`), and a
    number in `candidates` is `block` tokens (0: there are no such lists)."""

    entry: str
    params: tuple[str, ...]
    warps: int
    columns: int
    counts: bool
    unseen: bool
    rate: int
    after: bool
    block: int


class RemapIndices(Op):
    """Turn token numbers of requests into rows of the pool, `page * page_size + t % page_size`: `out[T, J]`.

    `indices[T, J]` count tokens from the first one of the request that has the row by `row_offsets[B + 1]`; out may be the
    same array. Negative ones pass through. Rows of no request become -1; so do, reported, rows with contradicting offsets,
    tokens past the page table, ids outside the pool and places past 2^31 - 1. Where an entry of the cache stands for several
    tokens, indices count entries. Source: Modular MAX, paged_sparse_kv_index_remap.

    - `counts=True`: `counts[T]` i32 is the end of each row's last valid index, which of a list that ends in -1 is the number of
      valid ones (vLLM's top-k lengths); 0 for rows of no request, -1 where something of the row was reported, so that MlaDecode
      gives NaN. A list that its caller has ended elsewhere ends there in `indices` by -1.
    - `candidates=8`: indices count the columns of lists of blocks, `candidates[T, C]`, as the logits of
      IndexerScores(candidates=8) do: j is token candidates[t, j // 8] * 8 + j % 8. A negative number there names no token;
      columns past a list count as tokens past the page table.
    - `unseen="drop"`: indices of tokens after the row's position, entries j >= (p + 1) // rate, become -1 (top-k over scores of
      -inf may pick them). Positions follow from lengths, which are not read otherwise.
    """

    kind: ClassVar[str] = "remap_indices"
    at_rates: ClassVar[bool] = True
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""
    counts: bool = False
    """True: the call brings `counts[T]`, i32, where each row's list ends."""
    unseen: Literal["keep", "drop"] = "keep"
    """"keep": indices are mapped wherever their tokens stand. "drop": those after the row's position become -1."""

    candidates: Literal[1, 2, 4, 8, 16, 32, 64, 128] | None = None
    """Tokens of a block of the lists whose columns `indices` count. None: they count tokens."""

    def check(self, kernels: KernelSet) -> None:
        check_one_place(kernels, self.kind)
        if self.candidates is not None:
            scores = [op for op in kernels.ops if isinstance(op, IndexerScores) and op.candidates is not None]
            listed = [(op, "candidates", op.candidates) for op in scores]
            check_partners(self, "candidates", self.candidates, listed, "indices count columns of lists of blocks")

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        index = dtype(self.index_dtype or kernels.kv.lengths_dtype)
        doc = "tokens of each row's request, or negative"
        if self.candidates is not None:
            doc = "columns of each row's list, or negative"
        listed = Array(
            "candidates", "i32", ("T", "C"), strided=True, untrusted=True, doc="blocks of tokens, or negative"
        )
        params = (
            Array("indices", "i32", ("T", "J"), strided=True, untrusted=True, doc=doc),
            *((listed,) if self.candidates is not None else ()),
            Array(
                "row_offsets",
                index.name,
                ("B+1",),
                untrusted=True,
                doc="first row of each request",
                field="index_dtype",
            ),
            Array(
                "out",
                "i32",
                ("T", "J"),
                access="out",
                strided=True,
                doc="their rows in the pool, or negative",
                in_place=("indices",),
            ),
            *(
                (Array("counts", "i32", ("T",), access="out", doc="where each list ends, or -1"),)
                if self.counts
                else ()
            ),
            Size("indices_stride", "i64", "indices.stride"),
            *((Size("candidates_stride", "i64", "candidates.stride"),) if self.candidates is not None else ()),
            Size("out_stride", "i64", "out.stride"),
            Size("num_rows", "u32", "T"),
            Size("columns", "u32", "J"),
            *((Size("num_candidates", "u32", "C"),) if self.candidates is not None else ()),
            ERRORS,
        )
        context = RemapIndicesContext(
            entry=entry_name(kernels, self.name),
            params=tuple(p.declaration for p in params),
            warps=WARPS,
            columns=COLUMNS,
            counts=self.counts,
            unseen=self.unseen == "drop",
            rate=kernels.kv.entry_tokens,
            after=kernels.kv.lengths != "before",
            block=self.candidates or 0,
        )
        grid = (ceil_div(var("T"), WARPS), const(1) if self.counts else ceil_div(var("J"), COLUMNS), const(1))
        return (KernelPlan(self.name, context.entry, "ops/remap_indices.cu.j2", context, params, grid, WARPS * 32),)
