"""The cache object behind every generated `Cache`: pools and page tables as views, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, ClassVar, Final, SupportsIndex, cast

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Pool, Size
from kvgen.runtime.arrays import ArrayView, itemsize, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.module import Module
from kvgen.runtime.overlap import Footprint, spans_of
from kvgen.runtime.packing import Bytes, Layout, layout
from kvgen.runtime.params import check_array, kinds_of, size_of
from kvgen.runtime.role_cache import RoleCache
from kvgen.runtime.strides import KVParams, Role, TensorLayout

LONGEST: Final = 2**32 - 2  # a length that a kernel can count, and tell from a wrong one


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the pool as the spec lays it out.

    `bases` are the page pointers into it, in the order of its kv axis ("k", "v"); `shape` has names where only the pool
    knows the extent; `strides` are the compile-time ones in elements, None for page, kv and layer; `align` is the widest
    access in bytes; `field` and `fields` name the spec fields behind dtype and axes. `writes`: operations may write to it.
    `own_table`: a table of scales says which page, not the table of values.
    """

    name: str
    dtype: str | tuple[str, ...]
    bases: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int | str, ...]
    strides: tuple[int | None, ...]
    align: int
    fields: tuple[str | None, ...] = ()
    writes: bool = True
    own_table: bool = False
    field: str = "dtype"

    def page_stride(self, array: ArrayView) -> int:
        """The array's stride along page, in elements; where requests lie one after another, from row to row."""
        fixed = dict(zip(self.axes, self.strides, strict=True)).get("token")
        return self.stride(array, "page") if "page" in self.axes else fixed or 0

    def stride(self, array: ArrayView, axis: str) -> int:
        """The array's stride along `axis`, in elements; 0 where the tensor has no such axis."""
        return array.strides[self.axes.index(axis)] if axis in self.axes else 0

    def check_places(self, array: ArrayView, name: str) -> None:
        """Raise ArgumentError where a stride of page, kv or layer makes two elements share a place.

        The axes must nest in some order: a step along one passes over all that the axes with smaller steps reach. That
        allows padding, interleaving and any order of the axes.
        """
        if 0 in array.shape:
            return
        # Compile-time strides first among equals: they are right, so the other one is to blame.
        axes = [i for i, n in enumerate(array.shape) if n > 1]
        axes.sort(key=lambda i: (abs(array.strides[i]), self.strides[i] is None))
        reach, blamed = 1, None
        for i in axes:
            blamed = i if self.strides[i] is None else blamed
            step = abs(array.strides[i])
            if step < reach and blamed is not None:
                raise ArgumentError(
                    f"{name}: got stride {array.strides[blamed]} along {self.axes[blamed]} (shape {array.shape}, strides "
                    f"{array.strides}, in elements); two elements would share a place; pass a view whose "
                    f"{self.axes[blamed]} steps lie apart"
                )
            reach += (array.shape[i] - 1) * step


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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.TABLES = tuple(f for f in cls.FIELDS if isinstance(f, Array))
        cls._LAYOUT = layout(kinds_of(cls.FIELDS))

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
        self._given, self._roles = tuple(pools), dict[tuple[int, int], RoleCache]()
        self._given_tables = {spec.name: given for spec, given in zip(self.TABLES, tables, strict=True)}
        self._given_lengths = {"max_seq_length": max_seq_length, "max_cache_length": max_cache_length}
        per_layer = not any("layer" in t.axes for t in self.TENSORS)
        layers: list[list[ArrayView]] = []
        for tensor, given in zip(self.TENSORS, pools, strict=True):
            if per_layer:
                if not issubclass(type(given), Sequence) or not given:
                    raise ArgumentError(
                        f"{tensor.name}: got {type(given).__name__}; the spec's layers='pointers' takes a list of tensors, "
                        "one per layer"
                    )
                layers.append(
                    [view(item, f"{tensor.name}[{i}]") for i, item in enumerate(cast(Sequence[object], given))]
                )
            else:
                layers.append([view(given, tensor.name)])
        if len({len(found) for found in layers}) > 1:
            counts = " and ".join(f"{len(f)} for {t.name}" for t, f in zip(self.TENSORS, layers, strict=True))
            raise ArgumentError(f"{self.TENSORS[-1].name}: got {counts}; every tensor needs one entry a layer")
        self.device = layers[0][0].device
        base = self._tables(tables)
        self._layers: list[LayerCache] = []
        for number in range(len(layers[0])):
            views = [found[number] for found in layers]
            names = [f"{t.name}[{number}]" if per_layer else t.name for t in self.TENSORS]
            self._layers += self._split(views, names, base, number if per_layer else None)

    def _tables(self, tables: Sequence[object]) -> Dims:
        dims = Dims({"one": 1}, "the cache")
        self._table_views: dict[str, ArrayView] = {}
        for spec, given in zip(self.TABLES, tables, strict=True):
            found = view(given, spec.name)
            check_array(spec, found, dims, self.device)
            self._table_views[spec.name] = found
            if found.strides:
                dims[f"{spec.name}.stride"] = found.strides[0]
        if "B" not in dims:
            raise ArgumentError(f"{self.MODULE.name}: no table gives the number of requests")
        self._table_spans = spans_of(
            (f.name, self._table_views[f.name], False) for f in self.TABLES if f.access == "in"
        )
        dims["B+1"] = dims["B"] + 1
        return dims

    def _split(self, views: list[ArrayView], names: list[str], base: Dims, only: int | None) -> list[LayerCache]:
        """The layers that these tensors hold: all of a tensor with a layer axis, or the one they belong to."""
        dims = Dims(base)
        dims.origin.update(base.origin)
        for tensor, found, name in zip(self.TENSORS, views, names, strict=True):
            check(
                found,
                name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                dims=dims,
                strides=tensor.strides,
                align=tensor.align,
                device=self.device,
                field=tensor.field,
                fields=tensor.fields,
            )
            if tensor.writes:
                tensor.check_places(found, name)
            for pointer in tensor.bases:
                dims[f"{pointer}_page_stride"] = tensor.page_stride(found)
                dims[f"{pointer}_stride"] = tensor.stride(found, "request")
        if self.PAGE_TOKENS is not None:
            dims["tokens"] = self.PAGE_TOKENS
        if "rows" in dims:  # requests one after another: to the host, all tensors are one page
            dims |= {"pages": 1, "scale_pages": 1, "tokens": dims["rows"]}
        elif dims["tokens"] == 0:
            raise ArgumentError(
                f"{names[0]}: got blocks of 0 tokens; a block holds a request; pass a pool with at least 1"
            )
        found_by_values = any("scale_pages" in t.shape and not t.own_table for t in self.TENSORS)
        if found_by_values and dims["scale_pages"] < dims["pages"]:
            raise ArgumentError(
                f"{dims.origin['scale_pages']}: got {dims['scale_pages']} pages; scales lie in the pages of their values, of "
                f"which there are {dims['pages']}; pass a pool with as many"
            )
        self._longest(dims)
        memory = tuple((n, v, t.writes) for t, n, v in zip(self.TENSORS, names, views, strict=True))
        counts = {f.name: self._table_views[f.name] for f in self.TABLES if f.access != "in"}
        memory += tuple((name, found, True) for name, found in counts.items())
        numbers = {f.name: size_of(f, dims) for f in self.FIELDS if isinstance(f, Size)}
        numbers |= {name: table.pointer for name, table in self._table_views.items()}
        sizes = {p: itemsize(v) for t, v in zip(self.TENSORS, views, strict=True) for p in t.bases}
        footprint = Footprint.of((*spans_of(memory), *self._table_spans))
        layers = []
        for number in [only] if only is not None else range(dims["layers"]):
            pools = {}
            for tensor, found in zip(self.TENSORS, views, strict=True):
                for i, pointer in enumerate(tensor.bases):
                    steps = (0 if only is not None else number) * tensor.stride(found, "layer") + i * tensor.stride(
                        found, "kv"
                    )
                    pools[pointer] = found.pointer + steps * itemsize(found)
            held = numbers | pools
            packed = self._LAYOUT.pack([held[f.name] for f in self.FIELDS])
            kind = self._LAYOUT.kind
            tables = {n: t for n, t in self._table_views.items() if n not in counts}
            layers.append(
                LayerCache(
                    self.MODULE, number, self.device, dims, packed, kind, tables, memory, footprint, pools, sizes
                )
            )
        return layers

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
        return self._layers[0].dims["max_seq_length"] if self._layers else 0

    @property
    def max_cache_length(self) -> int:
        """The most tokens of a request, cached and new."""
        return self._layers[0].dims["max_cache_length"] if self._layers else 0

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
        return len(self._layers)

    def __iter__(self) -> Iterator[LayerCache]:
        """The layers, first to last."""
        return iter(self._layers)

    def __getitem__(self, layer: SupportsIndex) -> LayerCache:
        """One layer, for the launchers; raises ArgumentError for anything but 0 to the last."""
        count = len(self._layers)
        number = index(layer) if hasattr(layer, "__index__") else -1
        if not 0 <= number < count:
            raise ArgumentError(f"layer: got {layer!r}; the pool has {count} layers; pass one from 0 to {count - 1}")
        return self._layers[number]
