"""The cache variant without pages: requests lie one after another."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from kvgen.schema.cache import Cache
from kvgen.schema.cache_fields import Layout
from kvgen.schema.layout_rules import check_room
from kvgen.schema.tables import Offsets


class Ragged(Cache):
    """No pages: requests lie one after another in contiguous tensors (varlen attention, cross attention, encoders).

    Request b has the rows `[kv_offsets[b], kv_offsets[b + 1])`. `kv_offsets` gives the lengths too, this step's tokens
    included; its element type is `lengths_dtype`.
    """

    layout: Layout = Field(
        default=Layout(k="token head dim", v="token head dim", layers="pointers"), validate_default=True
    )
    """Axes of the tensors; `token` counts the rows of all requests, and there is no `page`."""
    lengths: Literal["after"] = "after"
    """"after": `kv_offsets` counts this step's tokens."""
    total_tokens: int | None = Field(default=None, ge=1, le=2**31)
    """Rows that a tensor has room for; a tensor may show fewer. Needed where token lies inside head or dim, whose
    strides then depend on it. None: read from the tensors.
    """

    row_elements: int | None = Field(default=None, ge=1, le=2**24)
    """Elements from a token to the next one in the tensors, where these are views of wider rows: of packed q | k | v rows
    (q_heads + 2 * kv_heads) * head_dim. None: rows of K, and of V, lie side by side.
    """

    @property
    def token_step(self) -> int:
        return self.row_elements or 0

    @property
    def page_tokens(self) -> int | None:
        return None

    @property
    def page_table(self) -> Offsets:
        return Offsets(dtype=self.lengths_dtype)

    @property
    def ragged(self) -> bool:
        return True

    @property
    def token_extent(self) -> int | None:
        return self.total_tokens

    @model_validator(mode="after")
    def _room(self) -> Ragged:
        if self.total_tokens is not None:
            check_room(self.layout, self.total_tokens)
        return self

    def _check_quant(self) -> None:
        """Scales are a row's own, in rows of their own or the caller's: nothing of a page has a place."""
        for role, quant in self.quants.items():
            wrong = {
                "residual": quant is not None and quant.residual,
                "place": quant is not None and quant.place == "page" and quant.place,
                "own_table": quant is not None and quant.own_table,
                "order": quant is not None and quant.order == "swizzled" and quant.order,
            }
            for name, got in wrong.items():
                if got:
                    raise ValueError(
                        f"{self._quant_field(role)}: got {name}={got!r} for requests that begin at any row, without pages; "
                        "scales are a token's own, in tensors of as many rows, or the caller's; leave it out"
                    )
            if self.row_elements is not None and quant is not None:
                raise ValueError(
                    f"row_elements: got {self.row_elements} with {self._quant_field(role)}; rows that lie in wider ones are "
                    "elements of the cache's dtype; leave the quantization out"
                )
        super()._check_quant()
