"""The cache object behind every generated `Cache`: pools and page tables as views, checked once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, SupportsIndex

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, Dims, check, itemsize, view
from kvgen.runtime.module import Module
from kvgen.runtime.packing import Bytes, Layout, layout
from kvgen.runtime.params import Array, Pool, Scalar, kinds_of


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the pool as the spec lays it out.

    `roles` are the roles it holds ("k", "v"); `shape` has names where only the pool knows the extent; `strides` are the
    compile-time ones in elements, None for page, kv and layer; `align` is the widest access in bytes; `fields` names the
    spec fields behind the axes.
    """

    name: str
    dtype: str
    roles: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int | str, ...]
    strides: tuple[int | None, ...]
    align: int
    fields: tuple[str | None, ...] = ()

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


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer of a cache, ready for launchers.

    `struct` are the bytes of the kernels' first parameter and `kind` their size and alignment; `tables` and `memory` are
    the arrays that the addresses in it belong to.
    """

    module: Module
    layer: int
    device: str
    dims: Dims
    struct: bytes
    kind: Bytes
    tables: dict[str, ArrayView]
    memory: tuple[tuple[str, ArrayView], ...]


class BaseCache:
    """What generated caches share; they give `MODULE`, `TENSORS`, `FIELDS` and `PAGE_TOKENS`.

    `FIELDS` is the struct that every kernel of the set takes first; `TABLES` are the arrays among them.
    """

    MODULE: ClassVar[Module]
    TENSORS: ClassVar[tuple[Tensor, ...]]
    FIELDS: ClassVar[tuple[Pool | Array | Scalar, ...]]
    PAGE_TOKENS: ClassVar[int | None]
    TABLES: ClassVar[tuple[Array, ...]]
    _LAYOUT: ClassVar[Layout]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.TABLES = tuple(f for f in cls.FIELDS if isinstance(f, Array))
        cls._LAYOUT = layout(kinds_of(cls.FIELDS))

    def __init__(self, pools: Sequence[object], tables: Sequence[object]) -> None:
        per_layer = not any("layer" in t.axes for t in self.TENSORS)
        layers: list[list[ArrayView]] = []
        for tensor, given in zip(self.TENSORS, pools, strict=True):
            if per_layer:
                if not isinstance(given, Sequence) or not given:
                    raise ArgumentError(
                        f"{tensor.name}: got {type(given).__name__}; the spec's layers='pointers' takes a list of tensors, "
                        "one per layer"
                    )
                layers.append([view(item, f"{tensor.name}[{i}]") for i, item in enumerate(given)])
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
            spec.check(found, dims, self.device)
            self._table_views[spec.name] = found
            if found.strides:
                dims[f"{spec.name}.stride"] = found.strides[0]
        if "B" not in dims:
            raise ArgumentError(f"{self.MODULE.name}: no table gives the number of requests")
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
                field="dtype",
                fields=tensor.fields,
            )
            tensor.check_places(found, name)
            stride = tensor.stride(found, "page")
            for role in tensor.roles:
                dims[f"{role}_page_stride"] = stride
        if self.PAGE_TOKENS is not None:
            dims["tokens"] = self.PAGE_TOKENS
        if dims["tokens"] == 0:
            raise ArgumentError(
                f"{names[0]}: got blocks of 0 tokens; a block holds a request; pass a pool with at least 1"
            )
        memory = tuple(zip(names, views, strict=True))
        numbers = {f.name: f.number(dims) for f in self.FIELDS if isinstance(f, Scalar)}
        numbers |= {name: table.pointer for name, table in self._table_views.items()}
        layers = []
        for number in [only] if only is not None else range(dims["layers"]):
            pools = {}
            for tensor, found in zip(self.TENSORS, views, strict=True):
                for i, role in enumerate(tensor.roles):
                    steps = (0 if only is not None else number) * tensor.stride(found, "layer") + i * tensor.stride(
                        found, "kv"
                    )
                    pools[role] = found.pointer + steps * itemsize(found)
            held = numbers | pools
            packed = self._LAYOUT.pack([held[f.name] for f in self.FIELDS])
            kind = self._LAYOUT.kind
            layers.append(LayerCache(self.MODULE, number, self.device, dims, packed, kind, self._table_views, memory))
        return layers

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
