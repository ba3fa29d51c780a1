"""What every kind of cache has, whether its pages hold tokens or states: pages, and a table that finds a request's."""

from __future__ import annotations

from typing import Literal

from kvgen.layout.storage import Storage
from kvgen.schema.base import Spec
from kvgen.schema.quant import Quant
from kvgen.schema.tables import IndexName, Offsets, States, Table


class AnyCache(Spec):
    """What operations that move pages know of a cache; those that know tokens and heads ask for a `Cache`."""

    @property
    def page_tokens(self) -> int | None:
        """Tokens a page holds; None where only the pool knows. A state counts as 1."""
        raise NotImplementedError

    @property
    def entry_tokens(self) -> int:
        """Tokens that an entry of the cache stands for, the rate: 1 but in caches of compressed tokens."""
        return 1

    @property
    def page_table(self) -> Table | Offsets | States:
        """The form of the page table."""
        raise NotImplementedError

    @property
    def storage(self) -> Storage:
        """The tensors, page pointers and segments; operations read the cache through nothing else."""
        raise NotImplementedError

    @property
    def layers(self) -> Literal["axis", "pointers"]:
        """Whether tensors have a layer axis, or every layer has tensors of its own."""
        raise NotImplementedError

    @property
    def index_type(self) -> IndexName:
        """Element type of the index arrays of operations that state no type of their own."""
        raise NotImplementedError

    @property
    def ragged(self) -> bool:
        """Whether requests lie one after another, without pages."""
        return False

    @property
    def states(self) -> bool:
        """Whether pages are states: records of bytes, without tokens and heads."""
        return False

    @property
    def quants(self) -> dict[str, Quant | None]:
        """How each role is quantized; None: stored in `dtype`. Empty where there are no roles."""
        return {}

    @property
    def given_scales(self) -> bool:
        """True where a call brings scales of K or V, or the one above all blocks."""
        quants = [quant for quant in self.quants.values() if quant is not None and quant.scale_dtype is not None]
        return any(quant.scale == "given" or quant.recipe == "global" for quant in quants)
