"""The cache object behind every generated `Cache` of tokens: pools and page tables, and Modular MAX's names for them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import ClassVar, Final, Self, SupportsIndex

from kvgen.errors import ArgumentError
from kvgen.runtime.checks import Dims
from kvgen.runtime.empty_cache import sizes_of
from kvgen.runtime.pool_cache import PoolCache
from kvgen.runtime.role_cache import RoleCache
from kvgen.runtime.strides import KVParams, Role, TensorLayout

LONGEST: Final = 2**32 - 2  # a length that a kernel can count, and tell from a wrong one


class BaseCache(PoolCache):
    """What generated caches of tokens share; they give `ROLES`, `NAME`, `HEADS` and `PAGE_SIZE` besides, and `RATE` where an
    entry stands for several tokens."""

    ROLES: ClassVar[tuple[Role, ...]]
    NAME: ClassVar[str]
    HEADS: ClassVar[int]
    PAGE_SIZE: ClassVar[int]
    RATE: ClassVar[int] = 1
    WINDOW: ClassVar[int] = 0
    CacheType: ClassVar[type[RoleCache]] = RoleCache
    LONGEST = ("max_seq_length", "max_cache_length")

    def __init__(
        self,
        pools: Sequence[object],
        tables: Sequence[object],
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> None:
        super().__init__(pools, tables, max_seq_length, max_cache_length)

    @classmethod
    def empty(
        cls,
        *,
        layers: int,
        requests: int,
        pages: int | None = None,
        tokens: int | None = None,
        pages_per_request: int | None = None,
        device: str = "cpu",
    ) -> Self:
        """A cache of zeros on `device` ("cpu", "cuda:0") for so many requests, none of which has a token yet.

        pages: of the pool; of a continuous cache its blocks. tokens: where the spec leaves them open, those of a block, and of a
        ragged cache all. pages_per_request: columns of the page table, by default an even share. Page ids are -1: whoever hands
        out pages writes them into `lookup_table`; a kernel that meets -1 reports PAGE_ID. The arrays are NumPy's on the CPU, and
        on a GPU torch's if torch is imported, else kvgen's own with the CUDA array interface; `blocks`, `cache_lengths` and
        `lookup_table` have them.

        Raises ArgumentError for what is no count, DeviceError where the memory cannot be had.
        """
        return cls._empty(sizes_of(layers, requests, pages, tokens, pages_per_request), device)

    def _take(self, tables: dict[str, object], lengths: dict[str, int | None]) -> None:
        self._roles: dict[tuple[int, int], RoleCache] = {}
        super()._take(tables, lengths)

    # --- Modular MAX's collection: the same cache under its names ---------------------------------------------------------

    @property
    def name_str(self) -> str:
        """ "paged", "continuous_batching" or "ragged"."""
        return self.NAME

    @property
    def kv_params(self) -> KVParams:
        """Heads, head size, and whether only K is stored."""
        return KVParams(self.HEADS, self.ROLES[0].dim, len(self.ROLES) == 1)

    @property
    def dtype(self) -> str:
        """The element type of K as stored."""
        return self.ROLES[0].values.dtype

    @property
    def scale_dtype(self) -> str | None:
        """The type of K's scales; None without."""
        return self.ROLES[0].scale_dtype

    @property
    def quantization_granularity(self) -> int:
        """Dims of K that share a scale; 1 without."""
        return self.ROLES[0].granularity

    @property
    def head_dim_granularity(self) -> int:
        """Scales that a head's quantized dims of K have."""
        return self.ROLES[0].scales_a_head

    @property
    def page_size(self) -> int:
        """Tokens of a page, entries at a rate; 0 where a block holds a request."""
        return self.PAGE_SIZE

    @property
    def rate(self) -> int:
        """Tokens that an entry stands for."""
        return self.RATE

    @property
    def blocks(self) -> tuple[object, ...]:
        """The pools of values as they were given: a tensor, or a list of one a layer, each."""
        return tuple(g for t, g in zip(self.TENSORS, self._given, strict=True) if t.name.endswith("pool"))

    @property
    def scales(self) -> tuple[object, ...]:
        """The pools of scales as they were given; empty without."""
        return tuple(g for t, g in zip(self.TENSORS, self._given, strict=True) if t.name.endswith("scales"))

    @classmethod
    def blocks_layout(cls) -> tuple[TensorLayout, ...]:
        """The tensors of values as the spec fixes them."""
        return cls._layouts("pool")

    @classmethod
    def blocks_shape(cls) -> tuple[tuple[int, ...], ...]:
        """Their shapes: (-1, 2, -1, page size, heads, dims) in the default layout."""
        return tuple(found.shape for found in cls.blocks_layout())

    @classmethod
    def scales_layout(cls) -> tuple[TensorLayout, ...]:
        """The tensors of scales as the spec fixes them; empty without."""
        return cls._layouts("scales")

    @classmethod
    def scales_shape(cls) -> tuple[tuple[int, ...], ...]:
        """Their shapes."""
        return tuple(found.shape for found in cls.scales_layout())

    @classmethod
    def _layouts(cls, kind: str) -> tuple[TensorLayout, ...]:
        return tuple(
            TensorLayout(
                t.axes,
                tuple(n if isinstance(n, int) else -1 for n in t.shape),
                tuple(-1 if n is None else n for n in t.strides),
            )
            for t in cls.TENSORS
            if t.name.endswith(kind)
        )

    @property
    def cache_lengths(self) -> object | None:
        """The lengths as they were given; None where the page table has them."""
        return self._given_tables.get("lengths")

    @property
    def lookup_table(self) -> object:
        """The page table as it was given."""
        return next(given for name, given in self._given_tables.items() if name != "lengths")

    @property
    def scales_lookup_table(self) -> object | None:
        """The page table of the scales as it was given; None where scales are found through the values'."""
        return self._given_tables.get("scales_page_table")

    @property
    def max_seq_length(self) -> int:
        """The most new tokens of a request."""
        return self._steps[0].dims["max_seq_length"]

    @property
    def max_cache_length(self) -> int:
        """The most tokens of a request, cached and new."""
        return self._steps[0].dims["max_cache_length"]

    @property
    def empty_cache(self) -> bool:
        """Whether no request has a token."""
        return self.max_cache_length == 0

    def cache_length(self, request: int) -> int:
        """Tokens of one request as the lengths have them; reads the device's memory and so waits for it."""
        lengths = self.cache_lengths
        if lengths is None:
            raise ArgumentError("cache_length: the lengths of this cache lie in its page table; read them there")
        count = self._table_views["lengths"].shape[0]
        if not 0 <= index(request) < count:
            raise ArgumentError(f"request: got {request}; the batch has {count}; pass one from 0 to {count - 1}")
        return int(lengths[request])  # type: ignore[index]

    def get_key_cache(self, layer: SupportsIndex) -> RoleCache:
        """K of one layer: shapes, rows, tensor maps."""
        return self._role(layer, 0)

    def get_value_cache(self, layer: SupportsIndex) -> RoleCache:
        """V of one layer; raises ArgumentError for a cache that stores K only."""
        if len(self.ROLES) == 1:
            raise ArgumentError(
                f"get_value_cache: {self.MODULE.name} stores K only; where rows are latent, V is their first dims: use "
                "get_key_cache()"
            )
        return self._role(layer, 1)

    def _role(self, layer: SupportsIndex, which: int) -> RoleCache:
        found = self[layer]
        key = (found.layer, which)
        if key not in self._roles:
            tensors = {base: t.name for t in self.TENSORS for base in t.bases}
            self._roles[key] = RoleCache(found, self.ROLES[which], self.kv_params, self.PAGE_SIZE, tensors)
        return self._roles[key]

    def _longest(self, dims: Dims) -> None:
        """The bounds that attention kernels ask for; by default what the page table can hold."""
        columns = min(dims.get("M", dims.get("I", 1)), dims.get("MS", LONGEST))
        most = LONGEST if self.WINDOW else min(columns * dims["tokens"] * self.RATE, LONGEST)
        for name, given in self._given_lengths.items():
            whole = hasattr(given, "__index__") and not isinstance(given, bool)
            if given is not None and not (whole and 0 <= index(given) <= LONGEST):
                raise ArgumentError(f"{name}: got {given!r}; it counts tokens; pass an int from 0 to {LONGEST}")
            dims[name] = most if given is None else index(given)
