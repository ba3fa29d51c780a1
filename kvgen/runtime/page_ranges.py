"""Pages as ranges of memory, for those who move bytes by address: NIXL, Mooncake, LMCache, RDMA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, itemsize
from kvgen.runtime.page_pool import BasePages
from kvgen.runtime.pool_cache import PoolCache
from kvgen.runtime.pool_tensors import Tensor


class PageRange(NamedTuple):
    """`nbytes` neighbouring bytes from `address` on."""

    address: int
    nbytes: int


def page_ranges(
    pool: PoolCache | BasePages,
    pages: Sequence[SupportsIndex],
    *,
    heads: range | None = None,
    scale_pages: Sequence[SupportsIndex] | None = None,
) -> list[list[PageRange]]:
    """The memory of each page, in all layers: K, V and the scales that lie in pages of the same id.

    pages: ids that number the pool's pages. heads: the KV heads whose memory it is, by default all of them; ranks of another
    tensor-parallel size hold some. scale_pages: as many ids of pages of scales, where these have a table of their own. The
    ranges of a page come tensor by tensor, in a tensor by address; neighbours in it are one range. Two pools of one layout
    and as many layers have the same ranges in the same order, so that the i-th of a page goes to the i-th of another one; of
    pools that hold different heads, `paired_ranges` says what goes where.

    What a request has besides its pages (the newest tokens of KIVI) and scales of the caller's are no page's. Raises
    ArgumentError for an id that is no page, for caches without pages, and for heads that have no bytes of their own.
    """
    tensors = [t for t in pool.TENSORS if "page" in t.axes]
    if not tensors or pool.PAGE_TOKENS is None:
        raise ArgumentError(f"pool: got {type(pool).MODULE.name}, whose requests have no pages; pass a paged cache")
    _check_scale_pages(tensors, pages, scale_pages)
    cuts = {} if heads is None else _head_cuts(tensors, heads)
    places = [
        _place(tensor, layers.views[number], cuts.get(tensor.name))
        for number, tensor in enumerate(pool.TENSORS)
        if "page" in tensor.axes
        for layers in pool.pool_layers  # one tensor with all layers, or a tensor a layer, wherever it lies
    ]
    ids = [_checked("pages", pages, [place for place in places if not place.own_table])] * len(places)
    if scale_pages is not None:
        scales = _checked("scale_pages", scale_pages, [place for place in places if place.own_table])
        ids = [scales if place.own_table else values for place, values in zip(places, ids, strict=True)]
    found: list[list[PageRange]] = []
    for i in range(len(pages)):
        ranges: list[PageRange] = []
        for place, numbers in zip(places, ids, strict=True):
            begin = place.begin + numbers[i] * place.step
            ranges += [PageRange(begin + offset, nbytes) for offset, nbytes in place.spans]
        found.append(ranges)
    return found


class RangePair(NamedTuple):
    """`nbytes` bytes that a transport reads from `source` on and writes from `target` on."""

    source: int
    target: int
    nbytes: int


def paired_ranges(source: Sequence[PageRange], target: Sequence[PageRange]) -> list[RangePair]:
    """The ranges of one page and of the page that they go to, cut so that each piece is one range on both sides.

    Pieces that are neighbours on both sides are one, those of different tensors too: layers that lie beside each other.

    source, target: what `page_ranges` says of a page in two pools of one layout, as many layers and as many heads; where a pool
    holds other heads beside these, its ranges are shorter. Addresses may be those of another process or machine. Raises
    ArgumentError where one side has more bytes.
    """
    sizes = [sum(r.nbytes for r in side) for side in (source, target)]
    if sizes[0] != sizes[1]:
        raise ArgumentError(
            f"target: got {sizes[1]} bytes for {sizes[0]} of the source; a page goes to a page of one layout, with as many "
            "layers and heads; pass heads= to the page_ranges of the pool that has more"
        )
    found: list[RangePair] = []
    inputs, outputs = list(source)[::-1], list(target)[::-1]
    while inputs:
        (here, n), (there, room) = inputs.pop(), outputs.pop()
        size = min(n, room)
        last = found[-1] if found else RangePair(0, 0, 0)
        if (last.source + last.nbytes, last.target + last.nbytes) == (here, there):
            found[-1] = RangePair(last.source, last.target, last.nbytes + size)
        else:
            found.append(RangePair(here, there, size))
        if n > size:
            inputs.append(PageRange(here + size, n - size))
        if room > size:
            outputs.append(PageRange(there + size, room - size))
    return found


def _check_scale_pages(
    tensors: Sequence[Tensor], pages: Sequence[SupportsIndex], scale_pages: Sequence[SupportsIndex] | None
) -> None:
    """Raise ArgumentError where ids of pages of scales are missing, too many, or of no use."""
    own = any(t.own_table for t in tensors)
    if own != (scale_pages is not None) or (scale_pages is not None and len(scale_pages) != len(pages)):
        got = "none" if scale_pages is None else f"{len(scale_pages)} ids"
        rule = (
            f"scales have a table of their own; pass {len(pages)} ids"
            if own
            else "scales have the ids of their values; leave it out"
        )
        raise ArgumentError(f"scale_pages: got {got}; {rule}")


def _head_cuts(tensors: Sequence[Tensor], heads: range) -> dict[str, range]:
    """Each tensor's places along its head axis that belong to `heads`; scales of several heads have one place."""
    for t in tensors:
        if t.axes.count("head") != 1 or t.swizzled:
            found = "swizzled" if t.swizzled else f"'{' '.join(t.axes)}'"
            raise ArgumentError(
                f"heads: got {heads} of {t.name}, which is {found}; its heads have no ranges of their own; leave heads out, and "
                "let ops.Convert or ops.Gather and ops.Scatter move some of the heads"
            )
    counts = {t.name: t.shape[t.axes.index("head")] for t in tensors}
    most = max(n for n in counts.values() if isinstance(n, int))
    if not isinstance(heads, range) or heads.step != 1 or not 0 <= heads.start < heads.stop <= most:
        raise ArgumentError(f"heads: got {heads!r}; the cache has the KV heads 0 to {most - 1}; pass range(first, end)")
    cuts = {}
    for name, count in counts.items():
        assert isinstance(count, int)
        block = -(-most // count)
        if heads.start % block or (heads.stop % block and heads.stop != most):
            raise ArgumentError(
                f"heads: got {heads}; {name} has one scale for {block} heads; pass a range of whole multiples of {block}"
            )
        cuts[name] = range(heads.start // block, -(-heads.stop // block))
    return cuts


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the `count` pages of one tensor lie: page 0 begins at address `begin`, the others `step` bytes apart.

    `spans`: neighbouring bytes of a page, their addresses counted from the page's beginning.
    """

    name: str
    own_table: bool
    begin: int
    step: int
    count: int
    spans: Sequence[PageRange]


def _checked(name: str, ids: Sequence[SupportsIndex], places: Sequence[_Place]) -> list[int]:
    """The ids as numbers of pages that each of the places has."""
    fewest = min(places, key=lambda place: place.count)
    found = []
    for i, given in enumerate(ids):
        page = -1 if isinstance(given, bool) or not isinstance(given, SupportsIndex) else given.__index__()
        if not 0 <= page < fewest.count:
            raise ArgumentError(f"{name}[{i}]: got {given!r}; {fewest.name} has the pages 0 to {fewest.count - 1}")
        found.append(page)
    return found


def _place(tensor: Tensor, array: ArrayView, heads: range | None) -> _Place:
    """Where the pages of a tensor lie; of these places along its head axis."""
    at, size, counts = tensor.axes.index("page"), itemsize(array), list(array.shape)
    first = 0
    if heads is not None:
        head = tensor.axes.index("head")
        first, counts[head] = heads.start * array.strides[head], len(heads)
    axes = [(n, count) for i, (n, count) in enumerate(zip(array.strides, counts, strict=True)) if i != at and count > 1]
    first += sum(min(0, n) * (count - 1) for n, count in axes)
    axes = sorted((abs(n), count) for n, count in axes)
    run = 1
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    offsets = [first]
    for step, count in axes:
        offsets = [offset + i * step for i in range(count) for offset in offsets]
    spans = list(_joined([PageRange(offset * size, run * size) for offset in sorted(offsets)]))
    return _Place(tensor.name, tensor.own_table, array.pointer, array.strides[at] * size, array.shape[at], spans)


def _joined(ranges: Sequence[PageRange]) -> Iterator[PageRange]:
    """The same memory, neighbours in one."""
    begin, end = ranges[0].address, ranges[0].address
    for address, nbytes in ranges:
        if address != end:
            yield PageRange(begin, end - begin)
            begin = address
        end = address + nbytes
    yield PageRange(begin, end - begin)
