"""indexer_scores: what a learned indexer makes of every key, from which a sparse attention picks the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from pydantic import Field

from kvgen.expr.nodes import ceil_div, const, var
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention.indexer import (
    BLOCKS,
    THREADS,
    TOKENS,
    IndexerShape,
    indexer_shape,
)
from kvgen.lowering.attention.split_kv import new_in_length, row_offsets
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.spec.tables import IndexName

TEMPLATE: Final = "ops/indexer_scores.cu.j2"


@dataclass(frozen=True)
class IndexerScoresContext:
    """Everything ops/indexer_scores.cu.j2 reads.

    `together` rows of q are one product of a warpgroup on sm_90a (0: warps multiply there too). `shared` are the bytes of the
    members of the template's struct. `blocks` a multiprocessor is what registers leave room for.
    """

    entry: str
    params: tuple[str, ...]
    threads: int
    tokens: int
    stages: int
    blocks: int
    heads: int
    rows: int
    rate: int
    together: int
    row_bytes: int
    scaled: bool
    packed: bool
    fill: bool
    new_in_length: bool
    shared: tuple[int, ...]


class IndexerScores(Op):
    """Score every key of a request for each of its query rows: the sum over heads of `weights[t, h] * relu(q[t, h] . k[j])`.

    q is `[T, q_heads, head_dim]` in the dtype of the cache's elements: bf16, f16, or codes e4m3 where keys are, whose scale a
    head is part of `weights` f32 `[T, q_heads]`. Where keys are e2m1 with an e8m0 scale for 32 dims (MXFP4), so is q: u8
    `[T, q_heads, head_dim / 2]`, the even dim in the low nibble, and `q_scales` i32 `[T, q_heads]`, exponents + 127 of four
    blocks, the first the lowest byte. `weights` have the model's factors too (head_dim ** -0.5 * q_heads ** -0.5); IndexerQuery
    makes all that.

    `logits` f32 `[T, N]` has room for the keys of the longest request; rows may lie any distance apart. The best entries of a
    row are for a library (torch.topk, a radix select) to find, and ties are the caller's.

    Request b has q's rows from b * rows on, or with `row_offsets[B + 1]` its own, any number of them: prompts as well as
    single tokens and drafts. Of n tokens, row i of r stands at token n - r + i and sees the keys up to there; in a cache with
    a `rate`, those whose last token is among them.

    Work is divided on the device, by what lengths are now, among as many blocks as fit the GPU: no workspace, no plan, and
    a CUDA graph may have `logits` for the longest request there can be.

    A key whose page is invalid scores NaN; a row whose request has bad offsets, or a length that is bad or above N, is NaN
    throughout. Sums are f32; on sm_90a products of e4m3 codes are added as its tensor cores do, to about 2^-13 of the largest.

    Source: DeepSeek V3.2 and V4, inference/model.py, Indexer; DeepGEMM, fp8_paged_mqa_logits and fp8_mqa_logits, which take
    one page size, one number of heads and a schedule made before.
    """

    kind: ClassVar[str] = "indexer_scores"
    at_rates: ClassVar[bool] = True
    rows: int = Field(default=1, ge=1, le=8)
    """Query rows that share one reading of their request's keys; without `row_offsets`, the rows of each request. Prompts are
    scored fastest with 128 / q_heads or more.
    """
    fill: bool = True
    """True: what a row does not see becomes -inf, to the end of its logits, and so do rows of no request; it costs 4 bytes an
    entry. False: all that is left as it was, for a selection that takes lengths.
    """
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    def check(self, kernels: KernelSet) -> None:
        """The cache has one head of rows that tensor cores can take."""
        self._shape(kernels)

    def split_plan(self, kernels: KernelSet) -> None:
        """It has no workspace."""

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, shape = kernels.kv, self._shape(kernels)
        element = cache.storage.roles["k"][0].region.dtype
        params = self._params(kernels, cache, element, packed=shape.packed)
        entry = entry_name(kernels, self.name)
        context = IndexerScoresContext(
            entry=entry,
            params=tuple(p.declaration for p in params),
            threads=THREADS,
            tokens=TOKENS,
            stages=shape.stages,
            blocks=BLOCKS,
            heads=kernels.q_heads,
            rows=self.rows,
            rate=cache.entry_tokens,
            together=shape.together,
            row_bytes=shape.row_bytes,
            scaled=shape.scaled,
            packed=shape.packed,
            fill=self.fill,
            new_in_length=new_in_length(kernels),
            shared=shape.members,
        )
        grid = (var("T") * ceil_div(var("N"), TOKENS), const(1), const(1))
        return (
            KernelPlan(
                self.name,
                entry,
                TEMPLATE,
                context,
                params,
                grid,
                THREADS,
                shared=shape.shared,
                blocks_by_arch=tuple((arch, shape.blocks_on(arch)) for arch in kernels.arch),
            ),
        )

    def _shape(self, kernels: KernelSet) -> IndexerShape:
        return indexer_shape(kernels, self.rows)

    def _params(self, kernels: KernelSet, cache: Cache, element: DType, *, packed: bool) -> tuple[Param, ...]:
        """What a call brings, in the order of the kernel's signature."""
        heads = kernels.q_heads
        scales = Array(
            "q_scales",
            "i32",
            ("T", heads),
            strided=True,
            doc="scales of q's codes, four exponents + 127 a word",
            fields=(None, "q_heads"),
        )
        return (
            Array(
                "q",
                "u8" if packed else element.name,
                ("T", heads, cache.head_dim // 2 if packed else cache.head_dim),
                align=16,
                strided=True,
                doc="query rows of the indexer, as K's elements are",
                field="quant.dtype" if cache.quants["k"] is not None else "dtype",
                fields=(None, "q_heads", "head_dim"),
            ),
            *((scales,) if packed else ()),
            Array(
                "weights",
                "f32",
                ("T", heads),
                align=4,
                strided=True,
                doc="of each head, with the scale of q's codes",
                fields=(None, "q_heads"),
            ),
            Array("logits", "f32", ("T", "N"), access="out", align=4, strided=True, doc="scores of a request's keys"),
            row_offsets(dtype(self.index_dtype or cache.lengths_dtype).name),
            Size("q_stride", "i64", "q.stride"),
            *((Size("q_scales_stride", "i64", "q_scales.stride"),) if packed else ()),
            Size("weights_stride", "i64", "weights.stride"),
            Size("logits_stride", "i64", "logits.stride"),
            Size("num_rows", "u32", "T"),
            Size("num_keys", "u32", "N"),
            ERRORS,
        )
