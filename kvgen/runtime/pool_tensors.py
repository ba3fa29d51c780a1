"""Pool tensors: what a spec says of them, and where each layer's pages begin in those that a caller brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, itemsize, view
from kvgen.runtime.checks import Dims, check
from kvgen.runtime.overlap import Memory


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the pool as the spec lays it out.

    `bases` are the page pointers into it, in the order of its kv axis ("k", "v"); `shape` has names where only the pool
    knows the extent; `strides` are the compile-time ones in elements, None for page, kv and layer; `align` is the widest
    access in bytes; `field` and `fields` name the spec fields behind dtype and axes. `writes`: operations may write to it.
    `own_table`: a table of scales says which page, not the table of values. `swizzled`: the elements of a page lie in another
    order than the strides say. `page_align`: bytes of which the stride along page is a multiple.
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
    swizzled: bool = False
    field: str = "dtype"
    page_align: int = 1

    def page_stride(self, array: ArrayView) -> int:
        """The array's stride along page, in elements; where requests lie one after another, from row to row."""
        fixed = dict(zip(self.axes, self.strides, strict=True)).get("token")
        return self.stride(array, "page") if "page" in self.axes else fixed or 0

    def stride(self, array: ArrayView, axis: str) -> int:
        """The array's stride along `axis`, in elements; 0 where the tensor has no such axis."""
        return array.strides[self.axes.index(axis)] if axis in self.axes else 0

    def check_page_align(self, array: ArrayView, name: str) -> None:
        """Raise ArgumentError where pages lie no multiple of `page_align` bytes apart."""
        step = self.page_stride(array) * itemsize(array)
        if self.page_align == 1 or array.shape[self.axes.index("page")] < 2 or step % self.page_align == 0:
            return
        raise ArgumentError(
            f"{name}: got pages {step} bytes apart; the layout's page_align={self.page_align} takes multiples of that; pass a "
            f"view with a page stride of {-(-abs(step) // self.page_align) * self.page_align} bytes"
        )

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
class PoolLayers:
    """Layers whose pages lie in the same tensors: all layers of tensors with a layer axis, or one of `layers="pointers"`.

    `dims` are the sizes and strides that the tensors fix, `memory` the tensors themselves. `addresses` has a layer's page
    pointers, by name; `sizes` the bytes of their tensor's elements.
    """

    dims: Dims
    memory: tuple[Memory, ...]
    addresses: tuple[dict[str, int], ...]
    sizes: dict[str, int]

    @property
    def views(self) -> tuple[ArrayView, ...]:
        """The tensors."""
        return tuple(array for _, array, _ in self.memory)


def pool_layers(tensors: Sequence[Tensor], pools: Sequence[object], page_tokens: int | None) -> tuple[PoolLayers, ...]:
    """The layers of `pools`, one of them for each of `tensors`, first to last; raises ArgumentError where one does not fit.

    `page_tokens` is None where a block holds a request, whose tokens the tensor tells.
    """
    per_layer = not any("layer" in t.axes for t in tensors)
    found: list[list[tuple[str, ArrayView]]] = []
    for tensor, given in zip(tensors, pools, strict=True):
        if per_layer and (not issubclass(type(given), Sequence) or not given):
            raise ArgumentError(
                f"{tensor.name}: got {type(given).__name__}; the spec's layers='pointers' takes a list of tensors, one "
                "per layer"
            )
        items = cast(Sequence[object], given) if per_layer else (given,)
        names = [f"{tensor.name}[{i}]" if per_layer else tensor.name for i in range(len(items))]
        found.append([(name, view(item, name)) for name, item in zip(names, items, strict=True)])
    if len({len(each) for each in found}) > 1:
        counts = " and ".join(f"{len(f)} for {t.name}" for t, f in zip(tensors, found, strict=True))
        raise ArgumentError(f"{tensors[-1].name}: got {counts}; every tensor needs one entry a layer")
    device = found[0][0][1].device
    return tuple(_layers(tensors, views, per_layer, page_tokens, device) for views in zip(*found, strict=True))


def _layers(
    tensors: Sequence[Tensor],
    views: Sequence[tuple[str, ArrayView]],
    per_layer: bool,
    page_tokens: int | None,
    device: str,
) -> PoolLayers:
    """The layers that these tensors hold."""
    dims = Dims({"one": 1}, "the pool")
    for tensor, (name, found) in zip(tensors, views, strict=True):
        check(
            found,
            name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            dims=dims,
            strides=tensor.strides,
            align=tensor.align,
            device=device,
            field=tensor.field,
            fields=tensor.fields,
        )
        if tensor.writes:
            tensor.check_places(found, name)
        tensor.check_page_align(found, name)
        for pointer in tensor.bases:
            dims[f"{pointer}_page_stride"] = tensor.page_stride(found)
            dims[f"{pointer}_stride"] = tensor.stride(found, "request")
    if page_tokens is not None:
        dims["tokens"] = page_tokens
    if "rows" in dims:  # requests one after another: to the host, all tensors are one page
        dims |= {"pages": 1, "scale_pages": 1, "tokens": dims["rows"]}
    elif dims["tokens"] == 0:
        raise ArgumentError(
            f"{views[0][0]}: got blocks of 0 tokens; a block holds a request; pass a pool with at least 1"
        )
    addresses: list[dict[str, int]] = []
    for number in range(1 if per_layer else dims["layers"]):
        pointers = {}
        for tensor, (_, found) in zip(tensors, views, strict=True):
            for i, pointer in enumerate(tensor.bases):
                steps = number * tensor.stride(found, "layer") + i * tensor.stride(found, "kv")
                pointers[pointer] = found.pointer + steps * itemsize(found)
        addresses.append(pointers)
    memory = tuple((name, found, t.writes) for t, (name, found) in zip(tensors, views, strict=True))
    sizes = {p: itemsize(found) for t, (_, found) in zip(tensors, views, strict=True) for p in t.bases}
    return PoolLayers(dims, memory, tuple(addresses), sizes)
