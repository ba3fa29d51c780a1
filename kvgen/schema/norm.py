"""Norms as operations apply them to Q, K, V and latent rows: RMS norm and LayerNorm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvgen.schema.base import Spec


class RmsNorm(Spec):
    """Root mean square norm (arXiv 1910.07467): y = x * r * (w + weight_offset), r = 1 / sqrt(mean(x^2) + eps).

    `over` says what the mean runs over: each "head" (Qwen 3, Gemma 3; the weight w has one number an element of a head) or
    a token's whole "row" of heads (OLMo 2, MiniMax; heads * head_dim numbers). `dim`, with "head", normalises only a
    head's first `dim` elements, over themselves; w has `dim` numbers and the rest passes (the 512 latent elements of
    DeepSeek's rows of 576; MAX's gamma shorter than a head). None: all of them.

    r and x * r are computed in f32. `multiply` says where the tensor's dtype comes in: "after" casts x * r to it and
    multiplies then (transformers' LlamaRMSNorm, `self.weight * hidden_states.to(input_dtype)`, as in Qwen 3 and
    DeepSeek), "before" multiplies in f32 and casts the product (Gemma3RMSNorm; MAX's `multiply_before_cast`). In f32
    both are the same.

    `mean_square` says whose mean that is: "computed", of the row that the call brings; or "given", for the row of a GPU that has
    a part of the heads under tensor parallelism. The call then brings the mean over all GPUs' heads, `[T]` f32
    (`q_mean_square`, `k_mean_square`, `v_mean_square`): each GPU's own mean of x^2, summed over the GPUs and divided by their
    number, as vLLM's MiniMax-M2 all-reduces it. Weights are those of the GPU's heads.

    `weight_offset` is 1.0 where a checkpoint stores weights around 0 (Gemma). `weight_dtype` is w's: "same" as the
    tensor's, or "f32". `weight=False` is a norm without weights, y = x * r in f32 (Llama 4's L2 norm of q and k, Gemma 4's
    norm of v): the call then brings none, and what belongs to weights is left out.
    """

    over: Literal["head", "row"] = "head"
    """What the mean runs over: each "head", or a token's whole "row" of heads. Weights: head_dim numbers, or heads *
    head_dim.
    """
    mean_square: Literal["computed", "given"] = "computed"
    """Mean of x^2 of a whole row: "computed" from the row; "given", brought by the call as f32, one number a row, where other
    GPUs have the row's other heads. "given" takes over="row".
    """
    eps: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1e-6
    """Number added to the mean square before the root."""
    weight_offset: Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)] = 0.0
    """Number added to every weight: 1.0 where a checkpoint stores weights around 0 (Gemma)."""
    multiply: Literal["after", "before"] = "after"
    """"after": x * r is cast to the tensor's dtype, then multiplied by the weights (Llama, Qwen, DeepSeek). "before":
    multiplied in f32, then cast (Gemma 3).
    """
    dim: Annotated[int, Field(ge=2, le=2**20)] | None = None
    """Elements of a head that are normalised, the first ones, over themselves; the weights have as many. None: all."""
    weight_dtype: Literal["same", "f32"] = "same"
    """Element type of the weights: "same" as the tensor's, or "f32"."""
    weight: bool = True
    """True: the call brings weights. False: the norm has none (Llama 4's q and k, Gemma 4's v)."""

    @model_validator(mode="after")
    def _part_of_a_head(self) -> RmsNorm:
        if self.dim is not None and self.over == "row":
            raise ValueError(
                f"dim: got {self.dim} with over='row'; a part is the first elements of each head, and a row is normalised "
                "whole; use over='head', or leave dim out"
            )
        return self

    @model_validator(mode="after")
    def _given_of_a_row(self) -> RmsNorm:
        if self.mean_square == "given" and self.over != "row":
            raise ValueError(
                f"mean_square: got 'given' with over={self.over!r}; each GPU has whole heads and computes their means itself; "
                "use over='row', or mean_square='computed'"
            )
        return self

    @model_validator(mode="after")
    def _no_weights(self) -> RmsNorm:
        if self.weight:
            return self
        for field, default in (("weight_offset", 0.0), ("multiply", "after"), ("weight_dtype", "same")):
            if getattr(self, field) != default:
                raise ValueError(
                    f"{field}: got {getattr(self, field)!r} with weight=False; it is about the weights, of which there are none; "
                    "use weight=True, or leave it out"
                )
        return self

    @property
    def whole_row(self) -> bool:
        """Whether the mean runs over all heads of a row."""
        return self.over == "row"

    @property
    def given(self) -> bool:
        """True where the call brings the mean square."""
        return self.mean_square == "given"

    def weights(self, heads: int, head_dim: int) -> int:
        """How many numbers w has for rows of `heads` heads of `head_dim` elements."""
        return heads * head_dim if self.over == "row" else self.dim or head_dim


class LayerNorm(Spec):
    """Layer norm of each head (arXiv 1607.06450): y = (x - mean(x)) * r * w + b, r = 1 / sqrt(mean((x - mean(x))^2) + eps).

    Everything is done in f32 and the result is rounded once (torch.nn.LayerNorm; transformers' CohereLayerNorm). With
    `per_head` every head has weights of its own, `[heads, head_dim]` (Cohere's `use_qk_norm`, StableLM's `qk_layernorm`);
    else all heads share `[head_dim]` (Phi, Persimmon; the indexer keys of DeepSeek V3.2). `bias` is b, of w's shape: Phi and
    Persimmon have one, Cohere and StableLM have none.
    """

    eps: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1e-5
    """Number added to the variance before the root."""
    bias: bool = False
    """True: the call brings a bias of the weights' shape, `q_norm_bias`, `k_norm_bias` or `v_norm_bias`."""
    per_head: bool = False
    """True: weights of each head, `[heads, head_dim]`. False: all heads share `[head_dim]`."""
    weight_dtype: Literal["same", "f32"] = "same"
    """Element type of weights and bias: "same" as the tensor's, or "f32"."""

    @property
    def whole_row(self) -> bool:
        """Whether the mean runs over all heads of a row: never."""
        return False

    @property
    def given(self) -> bool:
        """False: no call brings the mean square of a layer norm."""
        return False

    @property
    def dim(self) -> None:
        """Elements of a head that are normalised: None, all of them."""
        return None


Norm = RmsNorm | LayerNorm
