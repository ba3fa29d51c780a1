"""Masks: which tokens of its request a query row sees."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvgen.schema.base import Spec, zero_is_none

Tree = Literal["packed", "mask"]
Extent = Annotated[int, Field(le=2**31 - 1)]
# Rows of a request that the bits of a packed tree tell apart.
TREE_ROWS: Final = 32


class Mask(Spec):
    """Which tokens of its request a query row sees: those that all conditions given here admit.

    Row i of r rows of a request of n tokens stands at position n - r + i. Positions, windows and chunks count tokens as
    they are stored, not the depth in a tree. With tree="mask" or `block`, `causal` is False unless it is
    given.
    """

    causal: bool = True
    """True: a row sees no token after its position. False: it sees those too."""
    window: Annotated[Extent | None, BeforeValidator(zero_is_none)] = None
    """Tokens that a row sees, the token at its position included: token > position - window. With causal=False, tokens
    after the position stay visible, all or `ahead` of them. None or 0: no window.
    """
    ahead: Extent | None = None
    """Tokens after its position that a row sees, with causal=False: token <= position + ahead. FlashAttention's
    window_size=(left, right) is window=left + 1, ahead=right. Rows before the first token, of requests with more rows
    than tokens, then see nothing. None: all of them.
    """
    chunk: Annotated[Extent | None, BeforeValidator(zero_is_none)] = None
    """Tokens of a chunk: a row sees those with token // chunk == position // chunk (with `causal`, Llama 4's chunked
    attention). None or 0: no chunks.
    """
    block: Annotated[Extent | None, BeforeValidator(zero_is_none)] = None
    """Tokens of a block: a row sees those with token // block <= position // block, the rest of its own block included
    (block diffusion: LLaDA 2, DiffusionGemma). It stands in for `causal`, which is False with it. None or 0: no blocks.
    """
    padding: bool = False
    """True: the call brings `valid_tokens[B]`, of the operation's index dtype, and of request b only the first
    valid_tokens[b] tokens are seen. Positions and lengths stay what they are. A negative number is a LENGTH fault.
    """
    tree: Tree | None = None
    """For rows that do not follow one another, as drafts of speculative decoding. "packed": the call brings
    `tree_mask[T]`, u32; bit j of tree_mask[t] says that row t sees its request's j-th row, itself included, and tokens
    before the request's rows are visible. "mask": the call brings `mask[T, K]`, u8, whose rows may be strided; row t sees
    token k if k < K and mask[t, k] is not 0. None: no tree.
    """

    def model_post_init(self, context: Any) -> None:
        """The mask states by itself what is visible: causal only where that is asked for."""
        if (self.tree == "mask" or self.block) and "causal" not in self.model_fields_set:
            object.__setattr__(self, "causal", False)

    @model_validator(mode="after")
    def _consistent(self) -> Mask:
        for name, value in (("window", self.window), ("chunk", self.chunk), ("block", self.block)):
            if value is not None and value < 1:
                raise ValueError(
                    f"{name}: got {value}; a row sees at least its own token, so the least {name} is 1; None or 0 is no {name}"
                )
        if self.ahead is not None and (self.ahead < 1 or self.causal):
            raise ValueError(
                f"ahead: got {self.ahead} with causal={self.causal}; it is how many tokens after its position a row sees, "
                "1 or more, with causal=False; a row that sees none has causal=True"
            )
        if self.block is not None:
            self._check_block()
        if self.tree == "packed" and not self.causal:
            raise ValueError(
                "tree: got 'packed' with causal=False; its bits stand in for the causal order of a request's new tokens; "
                "use causal=True, or tree='mask', which says everything"
            )
        return self

    def _check_block(self) -> None:
        """Blocks say by themselves which tokens after its position a row sees."""
        beside = {"causal": self.causal or None, "ahead": self.ahead, "chunk": self.chunk, "tree": self.tree}
        for name, value in beside.items():
            if value is not None:
                raise ValueError(
                    f"{name}: got {value!r} with block={self.block}, which says which tokens after its position a row sees; "
                    "leave one of them out"
                )

    @property
    def later(self) -> bool:
        """Whether a row may see tokens after its position."""
        return not self.causal or self.tree == "packed"
