"""The base of cache objects of every kind: pools and tables as views, checked once; a struct a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from operator import index
from typing import Any, ClassVar, Self, SupportsIndex

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Pool, Size
from kvgen.runtime.arrays import ArrayView, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.empty_cache import empty_pools, empty_tables
from kvgen.runtime.layer_cache import LayerCache, SizesKey, StepLayers
from kvgen.runtime.module import Module
from kvgen.runtime.overlap import Footprint, Memory, spans_of
from kvgen.runtime.packing import Bytes, Layout, layout
from kvgen.runtime.params import check_array, kinds_of, size_of
from kvgen.runtime.pool_tensors import PoolLayers, Tensor, pool_layers
from kvgen.runtime.wrong_call import explained


class PoolCache:
    """The base of generated caches, of tokens and of states, which give `MODULE`, `TENSORS`, `FIELDS` and `PAGE_TOKENS`.

    `FIELDS` is the struct that every kernel of the set takes first; `TABLES` are the arrays among them. `LONGEST` names the
    bounds of lengths that a step has besides. `CALLED` of a class with this data is the class derived from it that has a typed
    signature, of which callers make caches; None where there is none.
    """

    MODULE: ClassVar[Module]
    TENSORS: ClassVar[tuple[Tensor, ...]]
    FIELDS: ClassVar[tuple[Pool | Array | Size, ...]]
    PAGE_TOKENS: ClassVar[int | None]
    LONGEST: ClassVar[tuple[str, ...]] = ()
    TABLES: ClassVar[tuple[Array, ...]]
    CALLED: ClassVar[type[PoolCache] | None] = None
    _LAYOUT: ClassVar[Layout]
    _POOLS: ClassVar[tuple[tuple[int, str], ...]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("__init__", "step"):
            if name in vars(cls) and hasattr(cls, "FIELDS"):
                setattr(cls, name, explained(vars(cls)[name], cls.__doc__))
        if "FIELDS" not in vars(cls):
            table = cls.__bases__[0]
            if issubclass(table, PoolCache) and "FIELDS" in vars(table):
                table.CALLED = cls
            return
        cls.TABLES = tuple(f for f in cls.FIELDS if isinstance(f, Array))
        cls._LAYOUT = layout(kinds_of(cls.FIELDS))
        cls._POOLS = tuple((i, f.name) for i, f in enumerate(cls.FIELDS) if isinstance(f, Pool))

    @classmethod
    def struct_kind(cls) -> Bytes:
        """Size and alignment of the struct that kernels take."""
        return cls._LAYOUT.kind

    def __init__(self, pools: Sequence[object], tables: Sequence[object], *longest: int | None) -> None:
        self._given = tuple(pools)
        self._pools = pool_layers(self.TENSORS, pools, self.PAGE_TOKENS)
        self.device = self._pools[0].views[0].device
        self._count = sum(len(found.addresses) for found in self._pools)
        named = {spec.name: given for spec, given in zip(self.TABLES, tables, strict=True)}
        self._take(named, dict(zip_longest(self.LONGEST, longest)))

    @classmethod
    def _empty(cls, sizes: Mapping[str, int], device: str) -> Self:
        """A cache of zeros of these sizes, whose tables name no page."""
        new = object.__new__(cls)
        pools, tables = empty_pools(cls.TENSORS, sizes, device), empty_tables(cls.TABLES, sizes, device)
        PoolCache.__init__(new, pools, tables)
        return new

    def with_tables(self, tables: Sequence[object], *longest: int | None) -> Self:
        """A cache of these pools under the tables of another step; a table that is None stays as it was given before."""
        new = object.__new__(type(self))
        new._given, new._pools, new.device, new._count = self._given, self._pools, self.device, self._count
        named = {
            name: before if given is None else given
            for (name, before), given in zip(self._given_tables.items(), tables, strict=True)
        }
        lengths = dict(zip_longest(self.LONGEST, longest))
        new._take(named, {n: self._given_lengths[n] if given is None else given for n, given in lengths.items()})
        return new

    def _take(self, tables: dict[str, object], lengths: dict[str, int | None]) -> None:
        """Take a step's tables, check them, and say what every layer's struct has in common."""
        self._given_tables, self._given_lengths = tables, lengths
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
    def pool_layers(self) -> tuple[PoolLayers, ...]:
        """The tensors that hold the layers."""
        return self._pools

    @property
    def has_tables(self) -> bool:
        """True where the cache has page tables and lengths; operations that read none of them work without."""
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
        """The data that the layers of `pool` share in this step."""
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
        self._hold_page_ids(dims)
        held |= {f.name: self._table_views[f.name].pointer if self.has_tables else 0 for f in self.TABLES}
        footprint = Footprint.of((*spans_of(memory), *self._table_spans))
        values = [held.get(f.name, 0) for f in self.FIELDS]
        return StepLayers(dims, SizesKey(dims), values, read, memory, footprint)

    def _hold_page_ids(self, dims: Dims) -> None:
        """Raise ArgumentError where page ids of the pool would be negative numbers of a table of i32."""
        if self.has_tables and any(t.dtype == "i32" for t in self.TABLES):
            for name in ("pages", "scale_pages"):
                if dims.get(name, 0) > 2**31:
                    raise ArgumentError(
                        f"{dims.origin[name]}: got {dims[name]} pages; ids in tables of i32 are below 2^31; pass a smaller pool, "
                        "or build the set with tables of u32 or i64"
                    )

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

    def _longest(self, dims: Dims) -> None:
        """Add the bounds of lengths to a step's sizes; none here."""

    def __repr__(self) -> str:
        requests = f"{self._steps[0].dims['B']} requests" if self.has_tables else "no tables"
        return f"{self.MODULE.name}.{type(self).__name__}({self._count} layers, {requests}, {self.device!r})"

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
