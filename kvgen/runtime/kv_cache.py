"""The cache object behind every generated `Cache`: pools and page tables as views, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import index
from typing import Any, ClassVar, Final, Self, SupportsIndex

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Pool, Size
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.empty_cache import empty_pools, empty_tables, sizes_of
from kvgen.runtime.layer_cache import LayerCache, SizesKey, StepLayers
from kvgen.runtime.module import Module
from kvgen.runtime.overlap import Footprint, Memory, spans_of
from kvgen.runtime.packing import Bytes, Layout, layout
from kvgen.runtime.params import check_array, kinds_of, size_of
from kvgen.runtime.pool_tensors import PoolLayers, Tensor, pool_layers
from kvgen.runtime.role_cache import RoleCache
from kvgen.runtime.strides import KVParams, Role, TensorLayout
from kvgen.runtime.wrong_call import explained

LONGEST: Final = 2**32 - 2  # a length that a kernel can count, and tell from a wrong one


class BaseCache:
    """What generated caches share; they give `MODULE`, `TENSORS`, `FIELDS` and `PAGE_TOKENS`.

    `FIELDS` is the struct that every kernel of the set takes first; `TABLES` are the arrays among them.
    """

    MODULE: ClassVar[Module]
    TENSORS: ClassVar[tuple[Tensor, ...]]
    FIELDS: ClassVar[tuple[Pool | Array | Size, ...]]
    PAGE_TOKENS: ClassVar[int | None]
    ROLES: ClassVar[tuple[Role, ...]]
    NAME: ClassVar[str]
    HEADS: ClassVar[int]
    PAGE_SIZE: ClassVar[int]
    WINDOW: ClassVar[int] = 0
    CacheType: ClassVar[type[RoleCache]] = RoleCache
    TABLES: ClassVar[tuple[Array, ...]]
    _LAYOUT: ClassVar[Layout]
    _POOLS: ClassVar[tuple[tuple[int, str], ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__init__", "step"):
            if name in vars(cls):
                setattr(cls, name, explained(vars(cls)[name], cls.__doc__))
        cls.TABLES = tuple(f for f in cls.FIELDS if isinstance(f, Array))
        cls._LAYOUT = layout(kinds_of(cls.FIELDS))
        cls._POOLS = tuple((i, f.name) for i, f in enumerate(cls.FIELDS) if isinstance(f, Pool))

    @classmethod
    def struct_kind(cls) -> Bytes:
        """Size and alignment of the struct that kernels take."""
        return cls._LAYOUT.kind

    def __init__(
        self,
        pools: Sequence[object],
        tables: Sequence[object],
        max_seq_length: int | None = None,
        max_cache_length: int | None = None,
    ) -> None:
        self._given = tuple(pools)
        self._pools = pool_layers(self.TENSORS, pools, self.PAGE_TOKENS)
        self.device = self._pools[0].views[0].device
        self._count = sum(len(found.addresses) for found in self._pools)
        named = {spec.name: given for spec, given in zip(self.TABLES, tables, strict=True)}
        self._take(named, {"max_seq_length": max_seq_length, "max_cache_length": max_cache_length})

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
        sizes = sizes_of(layers, requests, pages, tokens, pages_per_request)
        new = object.__new__(cls)
        pools, tables = empty_pools(cls.TENSORS, sizes, device), empty_tables(cls.TABLES, sizes, device)
        BaseCache.__init__(new, pools, tables)
        return new

    def with_tables(
        self, tables: Sequence[object], max_seq_length: int | None = None, max_cache_length: int | None = None
    ) -> Self:
        """The same pools under the tables of another step; what is None stays as it was given before."""
        new = object.__new__(type(self))
        new._given, new._pools, new.device, new._count = self._given, self._pools, self.device, self._count
        named = {
            name: before if given is None else given
            for (name, before), given in zip(self._given_tables.items(), tables, strict=True)
        }
        lengths = {"max_seq_length": max_seq_length, "max_cache_length": max_cache_length}
        new._take(named, {n: self._given_lengths[n] if given is None else given for n, given in lengths.items()})
        return new

    def _take(self, tables: dict[str, object], lengths: dict[str, int | None]) -> None:
        """Take a step's tables, check them, and say what every layer's struct has in common."""
        self._given_tables, self._given_lengths = tables, lengths
        self._roles: dict[tuple[int, int], RoleCache] = {}
        self._table_views: dict[str, ArrayView] = {}
        dims = self._tables()
        counts = tuple(
            (f.name, self._table_views[f.name], True) for f in self.TABLES if f.access != "in" and self.has_tables
        )
        read = {f.name: self._table_views[f.name] for f in self.TABLES if f.access == "in" and self.has_tables}
        self._table_spans = spans_of((name, found, False) for name, found in read.items())
        self._steps = tuple(self._step(found, dims, (*found.memory, *counts), read) for found in self._pools)
        self._layers: list[LayerCache | None] = [None] * self._count

    @property
    def has_tables(self) -> bool:
        """Whether the cache has page tables and lengths; operations that read none of them work without."""
        return bool(self._table_views)

    def _tables(self) -> Dims:
        """Check the tables; the sizes that they fix."""
        dims = Dims(origin="the tables")
        given = self._given_tables
        absent = [name for name, array in given.items() if array is None]
        if absent and len(absent) == len(given):
            return Dims({"B": 0, "B+1": 1, **{n: 0 for f in self.TABLES for n in (*_names(f), f"{f.name}.stride")}})
        if absent:
            others = ", ".join(n for n in given if n not in absent)
            raise ArgumentError(
                f"{absent[0]}: got None beside {others}; a cache has all of its tables or none; pass an array, or leave out "
                "all of them for operations that read none"
            )
        for spec in self.TABLES:
            found = view(given[spec.name], spec.name)
            check_array(spec, found, dims, self.device)
            self._table_views[spec.name] = found
            if found.strides:
                dims[f"{spec.name}.stride"] = found.strides[0]
        if "B" not in dims:
            raise ArgumentError(f"{self.MODULE.name}: no table gives the number of requests")
        dims["B+1"] = dims["B"] + 1
        return dims

    def _step(
        self, pool: PoolLayers, tables: Dims, memory: tuple[Memory, ...], read: dict[str, ArrayView]
    ) -> StepLayers:
        """What the layers of `pool` have in common in this step."""
        self._hold_requests(pool, tables)
        dims = Dims(pool.dims)
        dims.update(tables)
        dims.origin = pool.dims.origin | tables.origin
        found_by_values = any("scale_pages" in t.shape and not t.own_table for t in self.TENSORS)
        if found_by_values and dims["scale_pages"] < dims["pages"]:
            raise ArgumentError(
                f"{dims.origin['scale_pages']}: got {dims['scale_pages']} pages; scales lie in the pages of their values, of "
                f"which there are {dims['pages']}; pass a pool with as many"
            )
        self._longest(dims)
        held: dict[str, int] = {f.name: size_of(f, dims) for f in self.FIELDS if isinstance(f, Size)}
        held |= {f.name: self._table_views[f.name].pointer if self.has_tables else 0 for f in self.TABLES}
        footprint = Footprint.of((*spans_of(memory), *self._table_spans))
        values = [held.get(f.name, 0) for f in self.FIELDS]
        return StepLayers(dims, SizesKey(dims), values, read, memory, footprint)

    def _hold_requests(self, pool: PoolLayers, tables: Dims) -> None:
        """Raise ArgumentError where a tensor of the pool, as a tail, is for other requests than the tables."""
        for tensor, (name, found, _) in zip(self.TENSORS, pool.memory, strict=True):
            if self.has_tables and any(n in tables for n in tensor.shape):
                dims = Dims(tables)
                dims.origin = tables.origin | {}
                check(found, name, dtype=tensor.dtype, shape=tensor.shape, dims=dims, strides=tensor.strides)

    def _layer(self, number: int) -> LayerCache:
        """A layer, whose struct is packed when it is first asked for."""
        first, which = number, 0
        while first >= len(self._pools[which].addresses):
            first -= len(self._pools[which].addresses)
            which += 1
        pool, step = self._pools[which], self._steps[which]
        addresses, values = pool.addresses[first], step.values.copy()
        for place, name in self._POOLS:
            values[place] = addresses[name]
        return LayerCache(
            self.MODULE, number, self.device, step, self._LAYOUT.pack(values), addresses, pool.sizes, self._LAYOUT.kind
        )

    def __repr__(self) -> str:
        requests = f"{self._steps[0].dims['B']} requests" if self.has_tables else "no tables"
        return f"{self.MODULE.name}.{type(self).__name__}({self._count} layers, {requests}, {self.device!r})"

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
        """Tokens of a page; 0 where a block holds a request."""
        return self.PAGE_SIZE

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
        most = LONGEST if self.WINDOW else min(columns * dims["tokens"], LONGEST)
        for name, given in self._given_lengths.items():
            whole = hasattr(given, "__index__") and not isinstance(given, bool)
            if given is not None and not (whole and 0 <= index(given) <= LONGEST):
                raise ArgumentError(f"{name}: got {given!r}; it counts tokens; pass an int from 0 to {LONGEST}")
            dims[name] = most if given is None else index(given)

    @cached_property
    def footprint(self) -> Footprint:
        """Where the memory of all layers lies, for operations on the whole cache."""
        found = {name: (name, array, written) for layer in self for name, array, written in layer.memory}
        return Footprint.of((*spans_of(found.values()), *self._table_spans))

    def __len__(self) -> int:
        """The number of layers."""
        return self._count

    def __iter__(self) -> Iterator[LayerCache]:
        """The layers, first to last."""
        return (self[number] for number in range(self._count))

    def __getitem__(self, layer: SupportsIndex) -> LayerCache:
        """One layer, for the launchers; raises ArgumentError for anything but 0 to the last."""
        number = index(layer) if hasattr(layer, "__index__") else -1
        if not 0 <= number < self._count:
            raise ArgumentError(
                f"layer: got {layer!r}; the pool has {self._count} layers; pass one from 0 to {self._count - 1}"
            )
        found = self._layers[number]
        if found is None:
            found = self._layers[number] = self._layer(number)
        return found


def _names(table: Array) -> tuple[str, ...]:
    """The sizes that a table fixes."""
    return tuple(n for n in table.shape if isinstance(n, str))
