"""append: store the new tokens' K and V in the cache, in one launch with what a model does to them before."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from kvgen.lowering.model_facts import StoredRows, check_rows
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.new_rows_rules import check_new_rows, resolve_rope
from kvgen.lowering.row_kernel import row_kernel
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.model import Rope
from kvgen.schema.norm import LayerNorm, RmsNorm
from kvgen.schema.position_scale import PositionScale
from kvgen.schema.tables import IndexName

_ROWS: Final = {
    "ragged": "Row t of a request is its new token t; rows at or past `row_offsets[B]` are padding.",
    "padded": "Arrays are `[B, S, ...]`; the first `valid_lengths[b]` rows of request b are new, the others padding.",
    "slots": "A row goes to page slot // page_size, token slot % page_size; -1 skips it.",
}


class Append(Op):
    """Store the step's new K and V rows in the cache, with bias, norm, RoPE and quantization in the same launch.

    k and v are `[T, kv_heads, head_dim]`, T new rows of all requests; q, which some options change as well, is `[T, q_heads,
    q_dim]`. On the way to the cache a row passes, each where it is asked for: `bias`; the norms `q_norm`, `k_norm` (in latent
    rows, of the latent part; with over="row" of the whole row) and `v_norm`, each an RmsNorm or a LayerNorm; `rope` (with
    `norm_order="after"` it comes before the norms: Llama 4, Hunyuan); q's `position_scale`; the transform `hadamard`. These are
    computed in f32 and rounded once, to the cache's dtype or by its quantization; an RmsNorm with `multiply="after"` also casts
    before its weights.

    Choices, with the default first:

    - `rows` says where a row goes. "ragged": `row_offsets[B + 1]` says which rows are whose; row t of request b becomes
      token `length + t` where the spec's lengths are "before", and the last row token `length - 1` where they are "after".
      Rows at or past `row_offsets[B]` are padding. "padded": arrays are `[B, S, ...]`, and `valid_lengths[B]` counts the new
      rows of each request. "slots": `slots[T]` holds `page * page_size + offset` of every row, as vLLM computes it; -1 skips
      the row.
    - `inputs` says what arrays hold the rows. "separate": q, k and v. "qkv": one array of rows q | k | v, as a fused
      projection gives them. "parts": `k_latent` and `k_rope` of latent rows. "q": q alone, and nothing is stored, for a
      layer that reads another layer's K and V (Gemma 3n and 4, YOCO).
    - `q_out` says how q comes back. "same": in the cache's dtype. "e4m3": codes of q / `q_scale` (an optional f32), without
      scales. "none": not at all. A row whose position is unknown becomes NaN there. With `q_out_heads` zeros follow q's heads.
    - `rope` is a Rope, or "model" or "local" for those of the set's model. None: K is stored as it comes.
    - `angles`: "computed" from position * frequency, for positions below 2^24; or read from `cos_sin[P, dims]`, "halves"
      (all cos, all sin: vLLM) or "pairs" (cos, sin, cos, sin: Modular MAX's freqs_cis). Use a table where the model's angles
      follow no formula, as in LongRoPE.
    - `positions`: "lengths", the token's place in its request; or "given", by `positions[T]`. With `sections` (Qwen2-VL's
      M-RoPE) they are `[len(sections), T]`; `sections_order` says which row of positions rotates a pair.

    A quantized cache gets codes, and scales where they are computed. In a cache with `residual`, K rows that no group has
    yet go to the tail: call seal before append.
    """

    kind: ClassVar[str] = "append"
    ragged: ClassVar[bool] = True
    at_rates: ClassVar[bool] = True
    rows: Literal["ragged", "padded", "slots"] = "ragged"
    """How rows find their request: "ragged", by `row_offsets[B + 1]`; "padded", arrays are `[B, S, ...]` with
    `valid_lengths[B]`; "slots", by `slots[T]` = page * page_size + offset.
    """
    inputs: Literal["separate", "qkv", "parts", "q"] = "separate"
    """"separate": q, k and v. "qkv": one array of rows q | k | v. "parts": a latent row as `k_latent` and `k_rope`. "q": q
    alone; nothing is stored.
    """
    bias: bool = False
    """True: the call brings `q_bias`, `k_bias` and `v_bias`, or one `bias` with inputs="qkv"."""
    q_norm: RmsNorm | LayerNorm | None = None
    """Norm of q, weights `q_weight`. None: no norm."""
    k_norm: RmsNorm | LayerNorm | None = None
    """Norm of k, weights `k_weight`; in latent rows of the latent part, with over="row" of the whole row. None: no norm."""
    v_norm: RmsNorm | LayerNorm | None = None
    """Norm of v, weights `v_weight` (Gemma 4: RmsNorm(weight=False)). None: no norm."""
    norm_order: Literal["before", "after"] = "before"
    """Place of the norms of q and k: "before" RoPE or "after" it (Llama 4, Hunyuan)."""
    rope: Rope | Literal["model", "local"] | None = None
    """Rotation of q and k: a Rope, "model" or "local" for the set's model's. None: no rotation."""
    angles: Literal["computed", "pairs", "halves"] = "computed"
    """"computed": cosines and sines from positions. "pairs" and "halves": the call brings `cos_sin[P, dims]`, pair by
    pair (Modular MAX) or all cosines first (vLLM).
    """
    angles_dtype: Literal["f32", "same"] = "f32"
    """Element type of `cos_sin`: "f32", or "same" as the cache's `dtype`."""
    positions: Literal["lengths", "given"] = "lengths"
    """"lengths": a row's position is its place in its request. "given": the call brings `positions[T]`."""
    sections: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False, max_length=4)] = ()
    """Pairs of each section of M-RoPE; `positions` is then `[len(sections), T]`. (): one position a row."""
    sections_order: Literal["runs", "interleaved"] = "runs"
    """"runs": the first sections[0] pairs rotate by the first row of `positions`, the next sections[1] by the second, and so on
    (Qwen2-VL, GLM-4V). "interleaved", of three sections t, h, w: pair i rotates by h where i % 3 == 1 and i < 3 * h, by w where
    i % 3 == 2 and i < 3 * w, else by t (Qwen3-VL, Qwen3-Omni, Qwen3.5).
    """
    hadamard: Literal["qk", "qkv"] | None = None
    """Hadamard transform of each head, the last step before rows are rounded or quantized: x H / sqrt(dim), H the matrix of
    signs (-1)^popcount(i & j). "qk": of q and k, whose products stay what they are (DeepSeek's indexer). "qkv": of v too;
    attention's output is then transformed as well, and ops.AttentionOutput(hadamard=True) undoes it. None: no transform.
    """
    position_scale: PositionScale | None = None
    """Factor of q by its position, after its norm and RoPE (Llama 4, Ministral 3). None: none."""
    q_out: Literal["same", "e4m3", "none"] = "same"
    """Output of q: "same", `q_out` in the cache's dtype; "e4m3", codes of q / `q_scale`; "none", q is not taken.
    """
    q_dim: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Elements of a query head. None: `head_dim`."""
    q_out_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Heads of `q_out`, those behind q's own zeros, for attention kernels that take 64 or 128 (FlashMLA). None: `q_heads`."""
    index_dtype: IndexName | None = Field(default=None)
    """Element type of `row_offsets`, `valid_lengths`, `slots` and `positions`. None: the cache's `lengths_dtype`; i64
    for slots and for the positions beside them.
    """

    @property
    def takes_q(self) -> bool:
        """True: q is an input, and q_out an output."""
        changed = self.rope is not None or self.q_norm is not None or self.bias or self.position_scale is not None
        changed = changed or self.hadamard is not None
        return self.q_out != "none" and (changed or self.inputs == "qkv")

    def new_rows(self, kernels: KernelSet) -> NewRows:
        """The rows, with the model's RoPE looked up."""
        return NewRows(
            name=self.name,
            rows=self.rows,
            index_dtype=self.index_dtype,
            inputs=self.inputs,
            bias=self.bias,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            v_norm=self.v_norm,
            norm_order=self.norm_order,
            rope=resolve_rope(self.rope, kernels),
            local=self.rope == "local",
            angles=self.angles,
            angles_dtype=self.angles_dtype,
            positions=self.positions,
            sections=self.sections,
            sections_order=self.sections_order,
            position_scale=self.position_scale,
            hadamard=self.hadamard or "",
            takes_q=self.takes_q,
            q_out=self.q_out,
            q_dim=self.q_dim,
            q_out_heads=self.q_out_heads,
        )

    @property
    def description(self) -> str:
        """The steps of this append, of all that one could have."""
        norms = [f"norm of {r}" for r in "qkv" if getattr(self, f"{r}_norm") is not None]
        rope = ["RoPE"] if self.rope is not None else []
        done = [
            *(["bias"] if self.bias else []),
            *(norms + rope if self.norm_order == "before" else rope + norms),
            *(["factor of q by position"] if self.position_scale is not None else []),
            *([f"Hadamard transform of {', '.join(self.hadamard)}"] if self.hadamard is not None else []),
        ]
        if self.inputs == "q":
            first = f"Change the step's rows of q: {', '.join(done)}. Nothing is stored in the cache."
        else:
            first = "Store the step's new rows in the cache" + (f", after {', '.join(done)}." if done else ".")
        lines = [first, "", _ROWS[self.rows]]
        if done:
            each = (self.q_norm, self.k_norm, self.v_norm)
            casts = any(isinstance(norm, RmsNorm) and norm.weight and norm.multiply == "after" for norm in each)
            before = ", but for a norm's cast before its weights" if casts else ""
            lines += [f"All of it is done in f32 and rounded once{before}."]
        if self.takes_q:
            lines += ["q comes back as `q_out`; a row whose position is unknown is NaN there."]
        return "\n".join(lines)

    def check(self, kernels: KernelSet) -> None:
        check_new_rows(self.new_rows(kernels), kernels)
        norms = {"q_norm": self.q_norm} if self.q_out != "none" else {}
        norms |= {"k_norm": self.k_norm} if self.inputs != "q" else {}
        check_rows(StoredRows(self, norms, self.rope), kernels)
        self.plan(kernels)  # raises where a row is too large for a block

    def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
        new = self.new_rows(kernels)
        if new.q_alone:
            title = "writes the step's rows of q to q_out; the cache is only read"
            return (row_kernel(new, kernels, "ops/append_q.cu.j2", title),)
        return (row_kernel(new, kernels, "ops/append.cu.j2", "stores the step's new rows in the cache"),)
