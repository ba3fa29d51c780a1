"""The cache variant without tokens: a record of bytes a request, as Mamba, gated delta net and short convolutions keep."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

from pydantic import Field

from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import Base, PoolTensor, Storage
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.tables import IndexName, States

POOL = "state_pool"


class State(AnyCache):
    """States: `bytes` bytes a request in each layer, of which kernels know nothing but their number.

    What hybrid models keep beside KV: the states of Mamba, gated delta net and short convolution layers. A page is one
    state; every layer has a pool `[pages, bytes]` of u8, whose page stride is read from the tensor. So a state may be part
    of a larger page of an engine's, as large as a page of KV. Request b has state `state_ids[b]`; -1: it has none.

    Alignment: states begin at multiples of the largest power of two that divides `bytes`, at most 16; the pool's address
    and its page stride are checked. Copies move 16 bytes at a time wherever a state begins at a multiple of 16, so other
    sizes are slower only where the page stride is no multiple of 16.
    """

    bytes: int = Field(ge=1, le=2**30)
    """Bytes of a request's state in one layer, padding between states not included."""
    table_dtype: IndexName = "i32"
    """Element type of `state_ids[B]`, the state of each request."""

    @property
    def align(self) -> int:
        """Bytes that every state's address is a multiple of."""
        return math.gcd(self.bytes, 16)

    @property
    def page_tokens(self) -> int:
        return 1

    @property
    def page_table(self) -> States:
        return States(dtype=self.table_dtype)

    @property
    def layers(self) -> Literal["pointers"]:
        return "pointers"

    @property
    def index_type(self) -> IndexName:
        return self.table_dtype

    @property
    def states(self) -> bool:
        return True

    @cached_property
    def storage(self) -> Storage:
        """One tensor a layer, without roles: nothing in it is K or V."""
        pool = PoolTensor(
            POOL,
            ("u8",),
            ("page", "byte"),
            ("pages", self.bytes),
            (None, 1),
            self.align,
            "page byte",
            (None, "bytes"),
        )
        return Storage((pool,), (Base("state", POOL, dtype("u8")),), {})
