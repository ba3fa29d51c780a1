"""indexer_scores: what a learned indexer makes of every key, from which a sparse attention picks the best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from kvgen.expr.nodes import ceil_div, const, maximum, var
from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.attention.choose import joined
from kvgen.lowering.attention.indexer import (
    BLOCKS,
    THREADS,
    TOKENS,
    IndexerShape,
    indexer_shape,
)
from kvgen.lowering.attention.split_kv import new_in_length, row_offsets
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.partners import check_partners
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import IndexName

TEMPLATE: Final = "ops/indexer_scores.cu.j2"
LISTS_TEMPLATE: Final = "ops/indexer_candidates.cu.j2"


@dataclass(frozen=True)
class IndexerScoresContext:
    """Everything ops/indexer_scores.cu.j2 reads.

    `together` rows of q are one product of a warpgroup on sm_90a (0: warps multiply there too). `shared` are the bytes of the
    members of the template's struct. `blocks` a multiprocessor is what registers leave room for. `block` keys share a maximum
    (0: none is asked for), that of the newest key +inf where `pin` says so.
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
    logits: bool
    block: int
    pin: bool
    new_in_length: bool
    shared: tuple[int, ...]


@dataclass(frozen=True)
class IndexerCandidatesContext:
    """Everything ops/indexer_candidates.cu.j2 reads: as above, of one row at a time; a number in a list is `block` keys, and
    requests have `rows` rows where the call brings no offsets."""

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
    block: int
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

    Two levels (DeepSeek V4.1): one layer chooses blocks of keys, of which alone later layers score the keys.

    - `block_max=8`: the call brings `block_max` f32 `[T, NB]` too, the largest score of each 8 keys that a row sees, from which
      a library's top-k makes the list; `pin_newest` has the block of the newest key in every list. `logits=False`: alone.
    - `candidates=8`: the call brings lists `candidates` i32 `[T, C]`, and logits f32 `[T, C, 8]`: for entry c of a row's list the
      scores of keys candidates[t, c] * 8 and on. Numbers may stand in any order; -1, any other number that is no block the
      row sees, and keys past those that it sees give -inf. Keys are gathered for each row, whatever others list.

    Work is divided on the device, by what lengths are now, among as many blocks as fit the GPU: no workspace, no plan, and
    a CUDA graph may have `logits` for the longest request there can be.

    A key whose page is invalid scores NaN, and so does its block; a row whose request has bad offsets, or a length that is bad
    or above N, is NaN throughout. Sums are f32; on sm_90a products of e4m3 codes are added as its tensor cores do, to about
    2^-13 of the largest.

    Source: DeepSeek V3.2 to V4.1, inference/model.py, Indexer; DeepGEMM, fp8_paged_mqa_logits, fp8_mqa_logits and
    fp8_fp4_paged_sparse_mqa_logits, which take one page size, one number of heads and a schedule made before.
    """

    kind: ClassVar[str] = "indexer_scores"
    scores_keys: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    rows: int = Field(default=1, ge=1, le=8)
    """Query rows that share one reading of their request's keys; without `row_offsets`, the rows of each request. Prompts are
    scored fastest with 128 / q_heads or more.
    """
    fill: bool = True
    """True: what a row does not see becomes -inf, to the end of its logits, and so do rows of no request; it costs 4 bytes an
    entry. False: all that is left as it was, for a selection that takes lengths.
    """
    block_max: Literal[2, 4, 8, 16] | None = None
    """Keys of a block whose largest score the call brings room for: `block_max` f32 `[T, NB]`. A row's keys then have to fit
    NB blocks as well as N logits. None: no maxima.
    """
    pin_newest: bool = False
    """True: of each row the block with the newest key that it sees is +inf in `block_max` (NaN where one of its scores is)."""
    logits: bool = True
    """False: `block_max` alone is written, an eighth (of blocks of 8) of the bytes."""
    candidates: Literal[1, 2, 4, 8, 16, 32, 64, 128] | None = None
    """Keys of a block, of which the call brings a list a row; then those alone are scored. None: all that a row sees."""
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`. None: the cache's `lengths_dtype`."""

    @model_validator(mode="after")
    def _whole(self) -> IndexerScores:
        if self.block_max is None and self.pin_newest:
            raise ValueError("pin_newest: got True without block_max, in which it would be; give block_max=8")
        if self.block_max is None and not self.logits:
            raise ValueError("logits: got False without block_max; then nothing would be written; give block_max=8")
        if self.candidates is not None and self.block_max is not None:
            raise ValueError(
                f"candidates: got {self.candidates} with block_max={self.block_max}; blocks are chosen among all keys; use an "
                "operation for each"
            )
        if self.candidates is not None and not self.fill:
            raise ValueError(
                f"fill: got False with candidates={self.candidates}; every column of a list is written, -inf where it names "
                "no key; leave it out"
            )
        return self

    def check(self, kernels: KernelSet) -> None:
        """The cache has one head of rows that tensor cores can take."""
        self._shape(kernels)
        if self.candidates is not None:
            makers = [op for op in kernels.ops if isinstance(op, IndexerScores) and op.block_max is not None]
            blocks = [(op, "block_max", op.block_max) for op in makers]
            check_partners(
                self, "candidates", self.candidates, blocks, "lists name the blocks whose largest scores were given"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        cache, shape = kernels.kv, self._shape(kernels)
        element = cache.storage.roles["k"][0].region.dtype
        params = self._params(kernels, cache, element, packed=shape.packed)
        entry = entry_name(kernels, self.name)
        common: dict[str, Any] = {
            "entry": entry,
            "params": tuple(p.declaration for p in params),
            "threads": THREADS,
            "tokens": TOKENS,
            "stages": shape.stages,
            "blocks": BLOCKS,
            "heads": kernels.q_heads,
            "rows": self.rows,
            "rate": cache.entry_tokens,
            "together": shape.together,
            "row_bytes": shape.row_bytes,
            "scaled": shape.scaled,
            "packed": shape.packed,
            "new_in_length": new_in_length(kernels),
            "shared": shape.members,
        }
        context = (
            IndexerCandidatesContext(**common, block=self.candidates)
            if self.candidates is not None
            else IndexerScoresContext(
                **common, fill=self.fill, logits=self.logits, block=self.block_max or 0, pin=self.pin_newest
            )
        )
        # Tiles of a row's keys, of its blocks, of its list.
        keys, blocks = ceil_div(var("N"), TOKENS), ceil_div(var("NB"), TOKENS // (self.block_max or 1))
        tiles = keys if self.block_max is None else maximum(keys, blocks) if self.logits else blocks
        tiles = tiles if self.candidates is None else ceil_div(var("C"), TOKENS // self.candidates)
        plan = KernelPlan(
            self.name,
            entry,
            TEMPLATE if self.candidates is None else LISTS_TEMPLATE,
            context,
            params,
            (var("T") * tiles, const(1), const(1)),
            THREADS,
            shared=shape.shared,
        )
        return (joined({arch: replace(plan, most_blocks=shape.blocks_on(arch)) for arch in kernels.arch}),)

    def _shape(self, kernels: KernelSet) -> IndexerShape:
        lists = self.candidates is not None
        return indexer_shape(kernels, 1 if lists else self.rows, lists=lists)

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
        found, sizes = self._scores()
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
            *found,
            row_offsets(dtype(self.index_dtype or cache.lengths_dtype).name),
            Size("q_stride", "i64", "q.stride"),
            *((Size("q_scales_stride", "i64", "q_scales.stride"),) if packed else ()),
            Size("weights_stride", "i64", "weights.stride"),
            *(Size(f"{array.name}_stride", "i64", f"{array.name}.stride") for array in found),
            Size("num_rows", "u32", "T"),
            *sizes,
            ERRORS,
        )

    def _scores(self) -> tuple[list[Array], list[Size]]:
        """The arrays of scores, behind that of lists; and their sizes."""
        if self.candidates is not None:
            listed = "blocks of keys, counted from the request's first key; -1: none"
            scores, fields = "scores of the keys of each listed block", (None, None, "candidates")
            return [
                Array("candidates", "i32", ("T", "C"), strided=True, untrusted=True, doc=listed),
                Array(
                    "logits",
                    "f32",
                    ("T", "C", self.candidates),
                    access="out",
                    align=4,
                    strided=True,
                    doc=scores,
                    fields=fields,
                ),
            ], [Size("num_candidates", "u32", "C")]
        logits = Array(
            "logits", "f32", ("T", "N"), access="out", align=4, strided=True, doc="scores of a request's keys"
        )
        maxima = Array(
            "block_max",
            "f32",
            ("T", "NB"),
            access="out",
            align=4,
            strided=True,
            doc=f"largest score of each {self.block_max} keys of a request",
        )
        found = [*([logits] if self.logits else []), *([maxima] if self.block_max is not None else [])]
        sizes = {"logits": Size("num_keys", "u32", "N"), "block_max": Size("num_blocks", "u32", "NB")}
        return found, [sizes[array.name] for array in found]
