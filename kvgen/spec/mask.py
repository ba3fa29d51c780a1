"""Masks: which tokens of its request a query row sees."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from kvgen.spec.base import Spec

Tree = Literal["packed", "mask"]
Extent = Annotated[int, Field(le=2**31 - 1)]
# Rows of a request that the bits of a packed tree tell apart.
TREE_ROWS: Final = 32


class Mask(Spec):
    """Which tokens a row sees: those that all conditions given here admit. Without any, `causal=False`: all of its request.

    A row stands at a position of its request, as the token that it brings does: row i of r rows of a request of n tokens
    at n - r + i. `causal`: tokens up to its position. `window=w`: token > position - w, thus w tokens, its own included;
    with `causal=False` tokens after the position stay visible. `chunk=c`: token // c == position // c; with `causal` that
    is Llama 4's chunked attention.

    `padding`: of request b the first `valid_tokens[b]` tokens only, or all where it has fewer; an argument of the index
    dtype. Positions stay what they are, and so do lengths. A negative number is a fault of the request's length.

    `tree` is for rows that are not one after another, as drafts of speculative decoding. "packed": the argument
    `tree_mask`, u32 `[T]`, says in bit j of row t that the row sees the token of its request's j-th row (itself included:
    nothing is implied); tokens before the request's rows are visible. "mask": the argument `mask`, u8 `[T, K]`, whose rows
    may be strided, says which tokens row t sees: token k where k < K and mask[t, k] is not 0; `causal` is then False
    unless it is given. What else is given holds besides. Window, chunk and positions count tokens as they are stored, not
    the depth in a tree.
    """

    causal: bool = True
    window: Extent | None = None
    chunk: Extent | None = None
    padding: bool = False
    tree: Tree | None = None

    def model_post_init(self, context: Any) -> None:
        """The mask states by itself what is visible: causal only where that is asked for."""
        if self.tree == "mask" and "causal" not in self.model_fields_set:
            object.__setattr__(self, "causal", False)

    @model_validator(mode="after")
    def _consistent(self) -> Mask:
        for name, value in (("window", self.window), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise ValueError(
                    f"{name}: got {value}; a row sees at least its own token, so the least {name} is 1; None is no {name}"
                )
        if self.tree == "packed" and not self.causal:
            raise ValueError(
                "tree: got 'packed' with causal=False; its bits stand in for the causal order of a request's new tokens; "
                "use causal=True, or tree='mask', which says everything"
            )
        return self

    @property
    def later(self) -> bool:
        """Whether a row may see tokens after its position."""
        return not self.causal or self.tree == "packed"
