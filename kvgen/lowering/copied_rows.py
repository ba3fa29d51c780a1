"""How operations that copy whole tokens name the caller's rows: by request or by slot, of one layer or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvgen.layout.dtypes import DType, dtype
from kvgen.lowering.lowered import LoweredCache
from kvgen.lowering.page_runs import check_layers
from kvgen.plan.params import Array, PagePool, Param, Pool, Size
from kvgen.schema.cache import Cache

RowsBy = Literal["ragged", "slots"]
Layers = Literal["one", "all"]


@dataclass(frozen=True)
class LayerPointer:
    """A pointer of the cache's struct that every layer has for itself: number `number` of the pool's, to elements of `type`."""

    name: str
    type: str
    number: int


@dataclass(frozen=True)
class LayersContext:
    """The cache of a layer, for kernels that go over all layers: its own pointers, of which a launch brings room for
    `most` layers, and the `arrays` of rows, which have the layers outermost. `scale_pages`: scales have a count of pages."""

    pointers: tuple[LayerPointer, ...]
    most: int
    arrays: tuple[str, ...]
    scale_pages: bool


def check_slots(op: str, cache: Cache) -> None:
    """Raise ValueError where a slot does not name one place of a token."""
    if cache.page_table.separate_kv:
        raise ValueError(
            f"rows: got 'slots' for {op} with table=PerKV(), where K and V lie in different pages; use 'ragged'"
        )
    if cache.ragged:
        raise ValueError(
            f"rows: got 'slots' for {op} with a Ragged cache, whose tokens are found by request; use 'ragged'"
        )
    if cache.storage.own_table or cache.storage.residual:
        which = (
            "own_table=True, whose scales lie in other pages"
            if cache.storage.own_table
            else "residual, a tail a request"
        )
        raise ValueError(f"rows: got 'slots' for {op} with {which}; a slot names one place; use 'ragged'")


def place_params(
    rows: RowsBy | Literal["runs"], index: DType, *, begins: str, starts: str
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The arrays that say which token each row is, in front of the rows: `slots`, `row_offsets`, or begins and counts of runs;
    and `starts`, behind them."""
    if rows == "slots":
        doc = "place of each row's token, or -1 to skip it"
        slots = Array("slots", index.name, ("T",), untrusted=True, doc=doc, field="index_dtype", c_name="row_slots")
        return (slots,), ()
    found = [Array("row_offsets", index.name, ("B+1",), untrusted=True, doc=begins, field="index_dtype")]
    if rows == "runs":
        found = [
            Array("row_begins", index.name, ("B",), untrusted=True, doc=f"{begins}, ascending", field="index_dtype"),
            Array("row_counts", index.name, ("B",), untrusted=True, doc="rows of each request", field="index_dtype"),
        ]
    first = Array("starts", index.name, ("B",), optional=True, untrusted=True, doc=starts, field="index_dtype")
    return tuple(found), (first,)


def of_all_layers(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The same rows of every layer, `[layers, T, ...]`."""
    return tuple(
        replace(p, shape=("all_layers", *p.shape), strided=2, fields=(None, *p.fields) if p.fields else ())
        for p in arrays
    )


def stride_params(arrays: Sequence[Array]) -> tuple[Size, ...]:
    """From one row to the next; where arrays have all layers also from one layer to the next."""
    found = [
        Size(f"{p.name}_stride", "i64", f"{p.name}.{'row_stride' if p.strided == 2 else 'stride'}") for p in arrays
    ]
    found += [Size(f"{p.name}_layer_stride", "i64", f"{p.name}.stride") for p in arrays if p.strided == 2]
    return tuple(found)


def layer_pool(cache: LoweredCache, most: int, *, writes: bool) -> PagePool:
    """Where every layer's memory begins; raises ValueError where the layers are too many for a kernel parameter."""
    pointers = tuple(f.name for f in cache.fields if isinstance(f, Pool))
    check_layers(len(pointers), most)
    return PagePool("layers", pointers, most, writes=writes, doc="")


def layers_context(cache: LoweredCache, pool: PagePool, arrays: Sequence[Param]) -> LayersContext:
    """What a template prints for it."""
    fields = {f.name: f for f in cache.fields}
    pointers = []
    for number, name in enumerate(pool.pointers):
        field = fields[name]
        assert isinstance(field, Pool)
        pointers.append(LayerPointer(name, dtype(field.dtype).c, number))
    return LayersContext(tuple(pointers), pool.layers, tuple(p.name for p in arrays), "num_scale_pages" in fields)
