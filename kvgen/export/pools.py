"""A cache in an exported header: the struct that kernels take, and how it follows from contiguous tensors and a page table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvgen.export.docs import described
from kvgen.export.members import Member, Struct, struct_of
from kvgen.export.words import comment, identifier
from kvgen.expr.nodes import Const, Expr, const, var
from kvgen.expr.to_cpp import cpp
from kvgen.layout.dtypes import DType, dtype
from kvgen.layout.storage import Base, PoolTensor
from kvgen.lowering.lowered import lower_pages
from kvgen.plan.params import Array, Field, Pool, Size
from kvgen.schema.any_cache import AnyCache


@dataclass(frozen=True)
class Extent:
    """A size that only the tensors or tables know."""

    name: str
    doc: tuple[str, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the cache's memory as a member of `Pools`: contiguous, at a multiple of `align` bytes."""

    name: str
    element: str
    doc: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A member of the cache's struct as layer_of() fills it: `value` in C++, elements behind `tensor` for an address.

    `table`: the member of `Tables` that it is.
    """

    member: str
    element: str
    tensor: str
    table: str
    value: str


@dataclass(frozen=True)
class Filling:
    """layer_of(): what it takes and how the struct follows. `layered`: the tensors hold all layers.

    `columns` and `scale_columns` name how many pages a request can have ("" for one, and for no table of scales), `tokens` a
    page's tokens; `endless`: a ring, in which requests may be of any length; `lengths`: requests have any.
    """

    tensors: tuple[Tensor, ...]
    extents: tuple[Extent, ...]
    tables: tuple[Member, ...]
    table_extents: tuple[Extent, ...]
    places: tuple[Place, ...]
    layered: bool
    columns: str
    scale_columns: str
    tokens: str
    endless: bool
    lengths: bool


@dataclass(frozen=True)
class PagesMember:
    """A page pointer as pages_of() finds it in the cache's struct; `stride` is "" where it leads to no pages."""

    pointer: str
    stride: str


@dataclass(frozen=True)
class CacheContext:
    """A cache's struct in a header; `prefix` begins the names of what it is made of ("" for the set's own).

    `fillings` has one entry where layer_of() can be written, none where the spec leaves gaps between a tensor's elements, which
    no contiguous tensor has.
    """

    name: str
    prefix: str
    title: tuple[str, ...]
    struct: Struct
    fillings: tuple[Filling, ...]
    pages: tuple[tuple[PagesMember, ...], ...]
    scale_pages: bool
    own_scale_table: bool
    page_tokens: int
    tokens_member: bool


def cache_context(
    name: str, cache: AnyCache, summary: str, pointers: Sequence[tuple[str, ...]], where: str
) -> CacheContext:
    """The context of a cache; `pointers` are the page pointers that operations on all layers have."""
    fields = lower_pages(cache).fields
    docs = [_doc(cache, f, fields) for f in fields]
    names = {f.name for f in fields}
    aligns = {f.name: _tensor_of(cache, f.name).align for f in fields if isinstance(f, Pool)}
    return CacheContext(
        name=name,
        prefix="" if name == "Cache" else name,
        title=comment(summary),
        struct=struct_of(fields, docs, where, aligns=aligns),
        fillings=_fillings(cache, fields, where),
        pages=tuple(tuple(_pages_member(p, names) for p in each) for each in pointers),
        scale_pages="num_scale_pages" in names,
        own_scale_table=any(b.table == "scales" for b in cache.storage.bases),
        page_tokens=cache.page_tokens or 0,
        tokens_member="page_tokens" in names,
    )


def _pages_member(pointer: str, names: set[str]) -> PagesMember:
    stride = f"{pointer}_page_stride"
    return PagesMember(pointer, stride if stride in names else "")


def _bases(cache: AnyCache, tensor: PoolTensor) -> tuple[Base, ...]:
    return tuple(b for b in cache.storage.bases if b.tensor == tensor.name)


def _tensor_of(cache: AnyCache, pointer: str) -> PoolTensor:
    """The tensor that a page pointer leads into."""
    tensors = {b.name: b.tensor for b in cache.storage.bases}
    return cache.storage.tensor(tensors.get(pointer, pointer))


def _doc(cache: AnyCache, field: Field, fields: Sequence[Field]) -> str:
    """What a member of the struct is."""
    if isinstance(field, Pool):
        tensor = _tensor_of(cache, field.name)
        first = "page 0 of this layer" if "page" in tensor.axes else "this layer's part"
        return f"{first} in {tensor.name}, at a multiple of {tensor.align} bytes."
    if isinstance(field, Array):
        return described(field, fields)
    named = {
        "pages": "pages of the pool: a page id at or past it is a fault.",
        "rows": "rows of the pools: a row at or past it is a fault.",
        "scale_pages": "pages of scales: an id at or past it is a fault.",
        "tokens": "tokens of a block.",
        "B": "B: requests.",
        "one": "1: a request has one block.",
        "max_seq_length": "the most new tokens of a request.",
        "max_cache_length": "the most tokens of a request, cached and new.",
        "k_tail_stride": "elements of k_tail from one request to the next.",
    }
    if field.value.endswith("_page_stride"):
        tensor = _tensor_of(cache, field.value.removesuffix("_page_stride"))
        step = "page" if "page" in tensor.axes else "row"
        return f"elements of {tensor.name} from one {step} to the next."
    return named.get(field.value) or described(field, fields)


def _size(axis: int | str) -> Expr:
    return const(axis) if isinstance(axis, int) else var(axis)


def contiguous(tensor: PoolTensor) -> dict[str, Expr] | None:
    """The strides of a contiguous tensor, by axis, with pages as far apart as they are aligned; None where the layout's own are
    others."""
    dense: Expr = const(1)
    found: dict[str, Expr] = {}
    for axis, size, fixed in reversed(list(zip(tensor.axes, tensor.shape, tensor.strides, strict=True))):
        if fixed is not None and size != 1 and const(fixed) != dense:
            return None
        if axis == "page" and tensor.page_align > 1:
            if not isinstance(dense, Const):
                return None
            dense = const(_aligned(tensor, dense.value))
        found[axis] = dense  # of an axis that is split, the outermost part's
        dense = dense * _size(size)
    return found


def _aligned(tensor: PoolTensor, elements: int) -> int:
    """So many elements, or more, that are as many bytes as pages are aligned to."""
    unit = tensor.page_align // math.gcd(tensor.page_align, dtype(tensor.dtypes[0]).bytes)
    return -(-elements // unit) * unit


def _fillings(cache: AnyCache, fields: Sequence[Field], where: str) -> tuple[Filling, ...]:
    """How layer_of() fills the struct; empty where it cannot."""
    tensors = sorted(cache.storage.tensors, key=lambda t: not t.holds_values)
    strides = {t.name: contiguous(t) for t in tensors}
    tables = tuple(f for f in fields if isinstance(f, Array))
    known = {str(n).partition("+")[0] for t in tables for n in t.shape if isinstance(n, str)}
    opened = [n for t in tensors for n in t.shape if isinstance(n, str) and n not in known]
    places = []
    for f in fields:
        if isinstance(f, Array):
            places.append(Place(f.name, "", "", f.name, ""))
            continue
        if isinstance(f, Pool):
            tensor = _tensor_of(cache, f.name)
            place = _address(cache, f, tensor, strides[tensor.name])
        else:
            place = _number(cache, f, tables, strides)
        if place is None:
            return ()
        places.append(place)
    held = "rows" if cache.ragged else "tokens"
    extents = tuple(dict.fromkeys(opened))
    return (
        Filling(
            tensors=tuple(_pool(cache, t) for t in tensors),
            extents=tuple(Extent(identifier(n, where, "size"), comment(_extent(n, tensors), 2)) for n in extents),
            tables=struct_of(tables, [described(t, tables) for t in tables], where).members,
            table_extents=tuple(
                Extent(identifier(n, where, "size"), comment(_extent(n, tables), 2)) for n in sorted(known | {"B"})
            ),
            places=tuple(places),
            layered=any("layer" in t.axes for t in tensors),
            columns=next((n for n in ("M", "I") if n in known), ""),
            scale_columns="MS" if "MS" in known else "",
            tokens=str(cache.page_tokens * cache.entry_tokens) if cache.page_tokens else held,
            endless=bool(lower_pages(cache).table.window),
            lengths=not cache.states,
        ),
    )


def _pool(cache: AnyCache, tensor: PoolTensor) -> Tensor:
    shape = ", ".join(str(n) for n in tensor.shape)
    doc = f"{' or '.join(tensor.dtypes)}[{shape}] ({tensor.text}), {_apart(tensor)}, at a multiple of {tensor.align} bytes"
    doc += "; only read." if tensor.given else "."
    return Tensor(tensor.name, _element(cache, tensor).c, comment(doc, 2))


def _apart(tensor: PoolTensor) -> str:
    """How far apart its elements lie."""
    strides, size = contiguous(tensor), dtype(tensor.dtypes[0]).bytes
    page = strides["page"] if strides is not None and tensor.page_align > 1 else None
    return f"contiguous but for pages, {page.value * size} bytes apart" if isinstance(page, Const) else "contiguous"


def _element(cache: AnyCache, tensor: PoolTensor) -> DType:
    """What the tensor is made of, as page pointers have it."""
    bases = _bases(cache, tensor)
    return bases[0].element if bases else dtype(tensor.dtypes[0])


def _address(cache: AnyCache, field: Pool, tensor: PoolTensor, strides: dict[str, Expr] | None) -> Place | None:
    """An address in a layer: so many elements behind the tensor's first."""
    whole = _element(cache, tensor)
    own = dtype(field.dtype)
    if strides is None or dtype(own.held_as).bytes != dtype(whole.held_as).bytes:
        return None
    kv = next((b.kv for b in _bases(cache, tensor) if b.name == field.name), 0)
    zero = const(0)
    place = strides.get("layer", zero) * var("layer") + strides.get("kv", zero) * kv
    return Place(field.name, own.c, tensor.name, "", cpp(place))


def _number(
    cache: AnyCache, field: Size, tables: Sequence[Array], strides: dict[str, dict[str, Expr] | None]
) -> Place | None:
    """A number of the struct."""
    c, value = dtype(field.dtype).c, field.value
    if value.endswith(("_page_stride", "k_tail_stride")):
        axes = strides[_tensor_of(cache, value.removesuffix("_page_stride").removesuffix("_stride")).name]
        if axes is None:
            return None
        axis = "request" if value == "k_tail_stride" else "page" if "page" in axes else "token"
        return Place(field.name, c, "", "", cpp(axes[axis]))
    if value.endswith(".stride"):
        table = next(t for t in tables if f"{t.name}.stride" == value)
        step: Expr = const(1)
        for n in table.shape[1:]:
            step = step * _size(n)
        return Place(field.name, c, "", "", cpp(step))
    return Place(field.name, c, "", "", "1" if value == "one" else value)


def _extent(name: str, arrays: Sequence[PoolTensor | Array]) -> str:
    named = {"B": "requests of the step", "pages": "pages", "layers": "layers", "scale_pages": "pages of scales"}
    having = [a.name for a in arrays if any(str(n).partition("+")[0] == name for n in a.shape)]
    where = f", as in the shape of {', '.join(having)}" if having else ""
    return f"{named.get(name, name)}{where}."
