"""Whole pages as bytes: the runs that a page consists of, and how kernels that move pages are given them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

from pydantic import Field

from kvgen.expr.nodes import Expr, ceil_div, const, var
from kvgen.layout.axes import OUTER
from kvgen.layout.dtypes import dtype
from kvgen.layout.storage import Base, PoolTensor
from kvgen.plan.params import PagePool
from kvgen.schema.any_cache import AnyCache

# As in device/cache/pages.cuh.
THREADS: Final = 256
TILE: Final = 4 * THREADS  # pieces of 16 bytes
MOST_UNITS: Final = 64  # pages that share a tile

# -1 means "no page": of u32 entries it is the largest number.
PairIndex = Literal["i32", "i64"]
# Layers that the struct of a pool has room for; kernel parameters are at most 4 KB before CUDA 12.1, 32 KB since.
MaxLayers = Annotated[int, Field(ge=1, le=512)]
_POOL_BYTES: Final = 15_000
# Kernels that operations of this kind launch before their own: what they do, and whether a call asks for them.
STEPS: Final = {
    "check": (
        "Report pairs that write to a page which another one reads or writes (OVERLAP), in a launch of its own.",
        True,
    ),
    "plan": ("Plan the moves on the device: see the operation.", False),
}


@dataclass(frozen=True)
class PageRun:
    """The neighbouring bytes of a page behind one page pointer: `nbytes` of them, or so many a token where only the pool
    knows how many it has (`open`). `id` says which of a place's ids finds them; `behind`: V's pointer, this many bytes on,
    goes through the same run. Where other pages or layers lie in between, `strip` bytes are neighbours, and the next ones
    lie `step` bytes on."""

    pointer: str
    tensor: str
    nbytes: int
    align: int
    id: int
    open: bool
    behind: tuple[str, int] | None = None
    strip: int = 0
    step: int = 0


@dataclass(frozen=True)
class RunContext:
    """A run of a page as its struct spells it out; `number`: of the page pointer in the pool's struct."""

    name: str
    pointer: str
    number: int
    id: int
    nbytes: int
    align: int
    open: bool
    strip: int
    step: int


@dataclass(frozen=True)
class PagesContext:
    """A pool's struct and the runs of its pages."""

    pointers: int
    layers: int
    runs: tuple[RunContext, ...]
    units: int


def page_runs(cache: AnyCache, *, ids: Literal["pool", "table"] = "pool") -> tuple[PageRun, ...]:
    """The runs of a page.

    `ids="pool"`: a page is all that its id names, scales in pages of the same id included; those that have a table of
    their own have ids of their own (1). `ids="table"`: what an entry of the table names; K and V then have ids 0 and 1
    where the table has two.
    """
    storage, found = cache.storage, dict[tuple[str, int, int], PageRun]()
    per_kv = ids == "table" and cache.page_table.separate_kv
    for base in storage.bases:
        tensor = storage.tensor(base.tensor)
        kv = base.kv if "kv" in tensor.axes else 0
        which = 1 if base.table == "scales" or (per_kv and base.name.startswith("v")) else 0
        run = _run(cache, tensor, base, which)
        inside = _kv_bytes(tensor, base)
        if inside and kv:
            first = found[tensor.name, 0, which]
            found[tensor.name, 0, which] = replace(first, behind=(base.name, inside))
        else:
            found.setdefault((tensor.name, kv, which), run)
    return tuple(found.values())


def _inner(tensor: PoolTensor) -> int:
    """Where the axes inside a page begin."""
    return next(i for i, name in enumerate(tensor.axes) if name not in OUTER)


def _last_outer(tensor: PoolTensor) -> int:
    """Where the axes begin whose elements are all one page's and one layer's."""
    return 1 + max(i for i, name in enumerate(tensor.axes) if name in ("page", "layer"))


def _kv_bytes(tensor: PoolTensor, base: Base) -> int:
    """How far V lies behind K where they alternate inside a page; 0 where they do not."""
    if "kv" not in tensor.axes or tensor.axes.index("kv") < max(_inner(tensor), _last_outer(tensor)):
        return 0
    return math.prod(int(n) for n in tensor.shape[tensor.axes.index("kv") + 1 :]) * _item(base)


def _item(base: Base) -> int:
    """Bytes of an element as the tensor has it."""
    return dtype(base.element.held_as).bytes


def _run(cache: AnyCache, tensor: PoolTensor, base: Base, which: int) -> PageRun:
    inner, last = _inner(tensor), _last_outer(tensor)
    strip_axes = [i for i in range(inner, last) if tensor.axes[i] not in OUTER]
    shape = [n for i, n in enumerate(tensor.shape) if i in strip_axes or i >= max(inner, last)]
    nbytes = math.prod(n for n in shape if isinstance(n, int)) * _item(base)
    run = PageRun(base.name, tensor.name, nbytes, min(tensor.align, 16), which, "tokens" in shape)
    if not strip_axes:
        return run
    strip = math.prod(int(n) for n in tensor.shape[last:]) * _item(base)
    if strip % 16 or strip_axes != list(range(inner, inner + len(strip_axes))):
        raise ValueError(
            f"layout: got {tensor.text!r}, where a page is strips of {strip} bytes between those of other pages or layers; "
            "operations that move pages take strips of whole 16 bytes, apart by one distance; move page and layer to the left"
        )
    return replace(run, strip=strip, step=int(tensor.strides[strip_axes[-1]] or 0) * _item(base))


def page_pointers(cache: AnyCache) -> tuple[str, ...]:
    """The page pointers that the runs of a page begin at, in the order of the cache's struct."""
    found = {r.pointer for r in (*page_runs(cache), *page_runs(cache, ids="table"))}
    return tuple(b.name for b in cache.storage.bases if b.name in found)


def check_layers(pointers: int, layers: int) -> None:
    """Raise ValueError where so many pointers of so many layers are too large for a kernel parameter."""
    size = 8 * pointers * (layers + 1) + 16
    if size > _POOL_BYTES:
        most = (_POOL_BYTES - 16) // (8 * pointers) - 1
        raise ValueError(
            f"max_layers: got {layers}, which makes a kernel parameter of {size} bytes with {pointers} page pointers a "
            f"layer; use at most {most}"
        )


def pool_param(
    cache: AnyCache, name: str, layers: int, *, given: bool = False, writes: bool = False, doc: str = ""
) -> PagePool:
    """The struct of a pool's pages; raises ValueError where it would be too large for a kernel parameter."""
    storage, pointers = cache.storage, page_pointers(cache)
    check_layers(len(pointers), layers)
    runs = {r.pointer: r for r in page_runs(cache)}
    return PagePool(
        name,
        pointers,
        layers,
        together=tuple((p, *r.behind) for p, r in runs.items() if r.behind and storage.base(p)),
        argument=given,
        writes=writes,
        doc=doc,
    )


def pages_context(pool: PagePool, runs: tuple[PageRun, ...], *, share: bool = True) -> PagesContext:
    """The runs, counting pointers as the struct does; `share`: small pages share a tile."""
    return PagesContext(
        pointers=len(pool.pointers),
        layers=pool.layers,
        runs=tuple(
            RunContext(
                name=f"{r.pointer.title().replace('_', '')}Run",
                pointer=r.pointer,
                number=pool.pointers.index(r.pointer),
                id=r.id,
                nbytes=r.nbytes,
                align=r.align,
                open=r.open,
                strip=r.strip,
                step=r.step,
            )
            for r in runs
        ),
        units=units(runs) if share else 1,
    )


def with_id(runs: tuple[PageRun, ...], which: int) -> tuple[PageRun, ...]:
    """The runs that have this id, as runs that have one id."""
    return tuple(replace(r, id=0) for r in runs if r.id == which)


def units(runs: tuple[PageRun, ...]) -> int:
    """Pages that share a tile."""
    if any(r.open for r in runs):
        return 1
    return max(1, min(MOST_UNITS, TILE // sum(-(-r.nbytes // 16) for r in runs)))


def chunks(runs: tuple[PageRun, ...]) -> Expr:
    """Tiles of a page in one layer."""
    pieces: Expr = const(0)
    for r in runs:
        pieces = pieces + (ceil_div(var("tokens") * r.nbytes, 16) if r.open else const(-(-r.nbytes // 16)))
    return ceil_div(pieces, TILE)


def tiles(runs: tuple[PageRun, ...], pairs: Expr) -> Expr:
    """Tiles of so many pages in one layer."""
    many = units(runs)
    return ceil_div(pairs, many) if many > 1 else pairs * chunks(runs)
