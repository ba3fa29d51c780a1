"""pool_tokens: the step's tokens pooled into entries of the cache, several tokens an entry."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvgen.layout.dtypes import dtype
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.new_rows_rules import check_new_rows, resolve_rope
from kvgen.lowering.pooled_tokens import MOST_PAGES, VECTOR, PooledTokens, Roundings, pool_kernel
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.model import Rope
from kvgen.schema.norm import RmsNorm
from kvgen.schema.tables import IndexName


class PoolTokens(Op):
    """Pool the step's tokens into entries of the cache: a softmax over each entry's tokens, channel by channel.

    The cache's `rate` says how many tokens an entry stands for. A token brings kv and a gate's scores, `c * d` columns each, d
    being `head_dim`; `ape [rate, c * d]` adds to the scores by a token's place in its entry. Entry j has tokens j * rate to
    j * rate + rate - 1 (c = 1), with `overlap` those of entry j - 1 as well (c = 2): of them the first d columns count, of its
    own the last d; the tokens before entry 0 do not count. An entry is the sum of softmax(scores) * kv over those tokens. The
    last of its tokens emits it: it passes `norm`, RoPE at the position of its first token, the transform `hadamard` and
    quantization, and is stored as append stores rows, in the same launch. With rate 1 there are neither gate nor state:
    entries are the rows of kv.

    Tokens wait for the rest of their entry in a state of f32 rows, scores with `ape` in them. The kernel keeps the rows that a
    later step may read, also where it takes up to `drafts` tokens back; entries of tokens that are taken back are written
    again when their last token comes again. The state of a new request need not be cleared.

    `row_offsets[B + 1]` says which rows are whose; lengths count tokens. Computed in f32; `pooled_dtype` and
    `normed_dtype` say what is rounded on the way. Source: the compressors of DeepSeek V4 and V4.1.
    """

    kind: ClassVar[str] = "pool_tokens"
    at_rates: ClassVar[bool] = True
    overlap: bool = False
    """True: an entry's softmax is over the tokens of the entry before as well."""
    ape: bool = False
    """True: the call brings `ape [rate, columns]`, which is added to the scores by a token's place in its entry."""
    inputs: Literal["fused", "separate"] = "fused"
    """"fused": `x` has rows kv | gate. "separate": `x` has kv, `gate` the scores."""
    input_dtype: Literal["f32", "same"] = "f32"
    """Element type of `x` and `gate`: "f32", or "same" as the cache's `dtype`."""
    state: Literal["ring", "paged"] = "ring"
    """Where rows wait. "ring": `state_ids[B]` names a block of `state_tokens` rows a request, row p % state_tokens for token p
    (vLLM V4.1, SGLang). "paged": `state_table[B, C]` names the page of each run of `state_tokens` tokens (vLLM V4's sliding
    window).
    """
    state_tokens: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Rows of a ring, or of a state page. None: of a ring, the tokens of a softmax and `drafts`, rounded up to a power of two;
    of a page, `rate`.
    """
    state_buffers: Literal[1, 2] = 1
    """1: a row of `state` is kv | score. 2: `kv_state` and `score_state` (TensorRT-LLM)."""
    drafts: Annotated[int, Field(ge=0, le=1024)] = 0
    """Tokens of a step that a later one may take back."""
    norm: RmsNorm | None = None
    """Norm of the whole row, weights `k_weight`. None: no norm."""
    rope: Rope | Literal["model", "local"] | None = None
    """Rotation of an entry at the position of its first token: a Rope, "model" or "local" for the set's model's. None: none."""
    angles: Literal["computed", "pairs", "halves"] = "computed"
    """"computed": cosines and sines from positions. "pairs" and "halves": the call brings `cos_sin[P, dims]`, as in append."""
    angles_dtype: Literal["f32", "same"] = "f32"
    """Element type of `cos_sin`: "f32", or "same" as the cache's `dtype`."""
    hadamard: Literal["k"] | None = None
    """"k": Hadamard transform of an entry, the last step before it is rounded or quantized, as in append. None: no transform."""
    pooled_dtype: Literal["f32", "same"] = "f32"
    """Rounding of a pooled row before its norm: "f32", not at all (vLLM); "same" as the cache's `dtype` (DeepSeek's
    own).
    """
    normed_dtype: Literal["f32", "same", "same_unrotated"] = "f32"
    """Rounding of a pooled row before RoPE and quantization: "f32", not at all; "same" as the cache's `dtype` (DeepSeek's own);
    "same_unrotated", only where RoPE does not rotate it (vLLM V4).
    """
    rotated_dtype: Literal["f32", "same"] = "f32"
    """Rounding after RoPE, and again after `hadamard`: "f32", not at all; "same" as the cache's `dtype` (DeepSeek's
    own, where codes are chosen of what rotates). It takes normed_dtype="same".
    """
    latent_out: bool = False
    """True: `latent_out [T, d]` gets the entries as they are before RoPE, in the rows of the tokens that emit them; NaN where the
    entry is not known. Other rows are left alone. V4.1 makes its index keys of them.
    """
    index_dtype: IndexName | None = None
    """Element type of `row_offsets`, `state_ids` and `state_table`. None: the cache's `lengths_dtype`."""

    def new_rows(self, kernels: KernelSet) -> NewRows:
        """Whose rows these are and how entries rotate, with the model's RoPE looked up."""
        return NewRows(
            name=self.name,
            index_dtype=self.index_dtype,
            tiled=2 if self.pooled(kernels).pair else 1,
            rope=resolve_rope(self.rope, kernels),
            local=self.rope == "local",
            angles=self.angles,
            angles_dtype=self.angles_dtype,
            hadamard=self.hadamard or "",
        )

    def pooled(self, kernels: KernelSet) -> PooledTokens:
        """The entries, and their state."""
        rate = kernels.kv.entry_tokens
        span = rate * (1 + self.overlap)
        default = rate if self.state == "paged" else 1 << (span + self.drafts - 1).bit_length()
        return PooledTokens(
            rate=rate,
            dim=kernels.kv.head_dim,
            overlap=self.overlap,
            ape=self.ape,
            inputs=self.inputs,
            kind=kernels.kv.dtype if self.input_dtype == "same" else "f32",
            paged=self.state == "paged",
            state_tokens=self.state_tokens or default,
            buffers=self.state_buffers,
            drafts=self.drafts,
        )

    def check(self, kernels: KernelSet) -> None:
        _check_cache(kernels)
        self._check_fields(kernels.kv.entry_tokens)
        self._check_state(self.pooled(kernels))
        check_new_rows(self.new_rows(kernels), kernels)
        self.plan(kernels)

    def _check_fields(self, rate: int) -> None:
        if self.norm is not None and self.norm.dim is not None:
            raise ValueError(f"norm: got dim={self.norm.dim}; an entry's norm is over its whole row; leave dim out")
        if self.norm is not None and self.norm.given:
            raise ValueError(
                "norm: got mean_square='given'; an entry is pooled in this operation, and nobody has its mean square before; use "
                "mean_square='computed'"
            )
        if self.normed_dtype == "same_unrotated" and self.rope is None:
            raise ValueError("normed_dtype: got 'same_unrotated' without rope, so that no channel rotates; use 'same'")
        if self.rotated_dtype == "same" and self.normed_dtype != "same":
            raise ValueError(
                f"rotated_dtype: got 'same' with normed_dtype={self.normed_dtype!r}; what RoPE does not rotate would stay in "
                "f32; use normed_dtype='same', or leave it out"
            )
        if rate > 1:
            return
        fields = ("overlap", "ape", "inputs", "state", "state_tokens", "state_buffers", "drafts")
        for field in fields:
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(
                    f"{field}: got {getattr(self, field)!r} with rate=1; a token is then an entry, and has neither gate nor "
                    "state; leave it out, or give the cache a rate"
                )

    def _check_state(self, pooled: PooledTokens) -> None:
        least = pooled.span + pooled.drafts
        if not pooled.paged and pooled.state_tokens < least:
            raise ValueError(
                f"state_tokens: got {pooled.state_tokens} for a ring with entries of {pooled.span} tokens and "
                f"drafts={self.drafts}; rows that are still read would be overwritten; give {least} or more"
            )
        if pooled.pages > MOST_PAGES:
            raise ValueError(
                f"state_tokens: got {pooled.state_tokens} a page for entries of {pooled.span} tokens, which may lie in "
                f"{pooled.pages} pages; a warp finds {MOST_PAGES}; use larger pages"
            )

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        new, pooled, kind = self.new_rows(kernels), self.pooled(kernels), dtype(kernels.kv.dtype).c
        dims = pooled.dim - (new.rotary_dim(kernels.kv) if self.normed_dtype == "same_unrotated" else 0)
        roundings = Roundings(
            "" if self.pooled_dtype == "f32" else kind,
            "" if self.normed_dtype == "f32" else kind,
            "" if self.rotated_dtype == "f32" else kind,
            dims,
        )
        return (pool_kernel(new, pooled, self.norm, roundings, latent_out=self.latent_out, kernels=kernels),)


def _check_cache(kernels: KernelSet) -> None:
    cache = kernels.kv
    if cache.stores != "k" or cache.kv_heads != 1:
        raise ValueError(
            f"ops: got pool_tokens for a cache of {cache.kv_heads} KV heads that stores {' and '.join(cache.roles)}; an entry "
            "is one row of K; use Latent, or kv_heads=1 and stores='k'"
        )
    if cache.head_dim % VECTOR:
        raise ValueError(
            f"head_dim: got {cache.head_dim} with pool_tokens, whose threads have {VECTOR} channels each; use a multiple"
        )
    if cache.page_table.drops_tokens:
        raise ValueError(
            f"ops: got pool_tokens with table={type(cache.page_table).__name__}(), which drops the oldest tokens; entries stay; "
            "use another table"
        )
    if cache.storage.residual:
        raise ValueError(
            f"ops: got pool_tokens with residual={cache.storage.residual}, whose seal takes rows of tokens; use a cache without"
        )
