"""Pages as ranges of memory, for those who move bytes by address: NIXL, Mooncake, LMCache, RDMA."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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
    pool: PoolCache | BasePages, pages: Sequence[SupportsIndex], *, scale_pages: Sequence[SupportsIndex] | None = None
) -> list[list[PageRange]]:
    """The memory of each page, in all layers: K, V and the scales that lie in pages of the same id.

    pages: ids that number the pool's pages. scale_pages: as many ids of pages of scales, where these have a table of their own.
    The ranges of a page come tensor by tensor, in a tensor by address; neighbours in it are one range. Two pools of one layout
    and as many layers have the same ranges in the same order, so that the i-th of a page goes to the i-th of another one.

    What a request has besides its pages (the newest tokens of KIVI) and scales of the caller's are no page's. Raises
    ArgumentError for an id that is no page, and for caches without pages.
    """
    tensors = [t for t in pool.TENSORS if "page" in t.axes]
    if not tensors or pool.PAGE_TOKENS is None:
        raise ArgumentError(f"pool: got {type(pool).MODULE.name}, whose requests have no pages; pass a paged cache")
    own = any(t.own_table for t in tensors)
    if own != (scale_pages is not None) or (scale_pages is not None and len(scale_pages) != len(pages)):
        got = "none" if scale_pages is None else f"{len(scale_pages)} ids"
        rule = (
            f"scales have a table of their own; pass {len(pages)} ids"
            if own
            else "scales have the ids of their values; leave it out"
        )
        raise ArgumentError(f"scale_pages: got {got}; {rule}")
    found: list[list[PageRange]] = []
    for i, page in enumerate(pages):
        ranges: list[PageRange] = []
        for number, tensor in enumerate(pool.TENSORS):
            if "page" not in tensor.axes:
                continue
            name, id_ = (
                ("scale_pages", scale_pages[i]) if tensor.own_table and scale_pages is not None else ("pages", page)
            )
            for layers in pool.pool_layers:  # one tensor with all layers, or a tensor a layer, wherever it lies
                ranges += _joined(sorted(_ranges(tensor, layers.views[number], id_, f"{name}[{i}]")))
        found.append(ranges)
    return found


def _ranges(tensor: Tensor, array: ArrayView, page: SupportsIndex, name: str) -> Iterator[PageRange]:
    """The neighbouring bytes of a page of one tensor."""
    at = tensor.axes.index("page")
    if isinstance(page, bool) or not isinstance(page, SupportsIndex) or not 0 <= page.__index__() < array.shape[at]:
        raise ArgumentError(f"{name}: got {page!r}; {tensor.name} has the pages 0 to {array.shape[at] - 1}")
    size = itemsize(array)
    begin = array.pointer + page.__index__() * array.strides[at] * size
    axes = [
        (n, count) for i, (n, count) in enumerate(zip(array.strides, array.shape, strict=True)) if i != at and count > 1
    ]
    begin += sum(min(0, n) * (count - 1) for n, count in axes) * size
    axes = sorted((abs(n), count) for n, count in axes)
    run = 1
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    for places in itertools.product(*(range(count) for _, count in axes)):
        offset = sum(i * step for i, (step, _) in zip(places, axes, strict=True))
        yield PageRange(begin + offset * size, run * size)


def _joined(ranges: Sequence[PageRange]) -> Iterator[PageRange]:
    """The same memory, neighbours in one."""
    begin, end = 0, 0
    for address, nbytes in ranges:
        if address != end:
            if end > begin:
                yield PageRange(begin, end - begin)
            begin = address
        end = address + nbytes
    if end > begin:
        yield PageRange(begin, end - begin)
