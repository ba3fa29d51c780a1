"""RMS norm as operations apply it to Q, K, V and latent rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvgen.spec.base import Spec


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

    `weight_offset` is 1.0 where a checkpoint stores weights around 0 (Gemma). `weight_dtype` is w's: "same" as the
    tensor's, or "f32".
    """

    over: Literal["head", "row"] = "head"
    """What the mean runs over: each "head", or a token's whole "row" of heads. Weights: head_dim numbers, or heads *
    head_dim.
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

    @model_validator(mode="after")
    def _part_of_a_head(self) -> RmsNorm:
        if self.dim is not None and self.over == "row":
            raise ValueError(
                f"dim: got {self.dim} with over='row'; a part is the first elements of each head, and a row is normalised "
                "whole; use over='head', or leave dim out"
            )
        return self

    def weights(self, heads: int, head_dim: int) -> int:
        """How many numbers w has for rows of `heads` heads of `head_dim` elements."""
        return heads * head_dim if self.over == "row" else self.dim or head_dim
