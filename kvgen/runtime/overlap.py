"""Overlaps: memory that a launch writes to is no other array's, unless the operation is declared to work in place on it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, Shape, extent, itemsize

if TYPE_CHECKING:
    from kvgen.plan.params import Array

Memory = tuple[str, ArrayView, bool]  # name, array, whether operations may write to it
Taken = tuple[int, int, "Array", ArrayView]  # an argument: its extent, what it has to be, where it lies

_MOST_WORK: Final = 100_000  # steps that the exact test may take; arrays of engines take fewer than a thousand


class Span(NamedTuple):
    """One array of a cache or of pages, and the addresses [low, high) that its elements lie in."""

    low: int
    high: int
    name: str
    array: ArrayView
    written: bool


class Footprint(NamedTuple):
    """The memory that a struct leads a kernel to, measured once: pools, page tables, lengths, scales.

    `written` are those of `spans` that operations may write to. `clash` says which two of them lie in each other, and is
    empty where no two do: it is an error in calls that write, since kernels that read may read anything twice.
    """

    spans: tuple[Span, ...]
    written: tuple[Span, ...]
    clash: str

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Footprint:
        """The footprint of these arrays."""
        found = tuple(spans)
        return cls(found, tuple([span for span in found if span[4]]), _clash(found))


def spans_of(memory: Iterable[Memory]) -> tuple[Span, ...]:
    """Where these arrays lie; those without elements lie nowhere."""
    found = []
    for name, array, written in memory:
        low, high = extent(array)
        if low < high:
            found.append(Span(low, high, name, array, written))
    return tuple(found)


def refuse_aliases(arrays: Sequence[Taken], own: Footprint, others: Sequence[Memory], writes: bool) -> None:
    """Raise ArgumentError where a launch would write to memory that another of its arrays lies in.

    `arrays` are the call's, `own` is the cache's memory, which is written only if the kernel `writes`, and `others` is
    what other arguments lead to: another cache, pages of another pool.
    """
    if writes and own.clash:
        raise ArgumentError(own.clash)
    spans, written = own.spans, own.written if writes else ()
    if others:
        more = spans_of(others)
        mine = spans if writes else tuple(span._replace(written=False) for span in spans)
        clash = _clash((*mine, *more))
        if clash:
            raise ArgumentError(clash)
        spans, written = (*mine, *more), (*written, *(span for span in more if span.written))
    for taken in arrays:
        low, high, spec, array = taken
        if spec.access == "in":
            for span in written:
                if low < span[1] and span[0] < high and overlap(array, span[3]):
                    raise _refused(spec.name, span[2], span[2], "")
            continue
        for span in spans:
            if low < span[1] and span[0] < high:
                _hold_in_place(spec, array, span[2], span[3], None)
        for other in arrays:
            if low < other[1] and other[0] < high and other is not taken:
                _hold_in_place(spec, array, other[2].name, other[3], other[2])


def overlap(a: ArrayView, b: ArrayView) -> bool:
    """Whether an element of `a` has a byte in common with one of `b`; elements between the other's do not."""
    return _meet(b.pointer - a.pointer, a.shape, a.strides, itemsize(a), b.shape, b.strides, itemsize(b))


@functools.lru_cache(maxsize=4096)  # views of one buffer lie alike at every step
def _meet(distance: int, shape: Shape, strides: Shape, size: int, others: Shape, steps: Shape, width: int) -> bool:
    import numpy as np

    origin = 1 << 60  # far from both ends of what NumPy counts in; nothing is read there
    first = np.asarray(_Somewhere(origin, shape, strides, size))
    second = np.asarray(_Somewhere(origin + distance, others, steps, width))
    try:
        return np.shares_memory(first, second, max_work=_MOST_WORK)  # type: ignore[arg-type]  # the stubs know its special values alone
    except (np.exceptions.TooHardError, OverflowError):
        return True  # their extents overlap, and nobody can tell


class _Somewhere:
    """Elements at an address, as NumPy takes them."""

    def __init__(self, pointer: int, shape: Shape, strides: Shape, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (pointer, True),
            "shape": shape,
            "strides": tuple(stride * size for stride in strides),
            "typestr": f"|V{size}",
        }


def _clash(spans: Sequence[Span]) -> str:
    """What is wrong with the first two that lie in each other and of which one may be written to; empty: nothing is."""
    before: list[Span] = []
    top = 0
    for span in sorted(spans, key=itemgetter(0)):
        if span[0] >= top:  # all of them end before it
            before, top = [span], span[1]
            continue
        before = [other for other in before if other[1] > span[0]]
        for other in before:
            if (span.written or other.written) and overlap(span.array, other.array):
                both = span.written and other.written
                return str(
                    _refused(span.name, other.name, "both" if both else (span if span.written else other).name, "")
                )
        before.append(span)
        top = max(top, span[1])
    return ""


def _hold_in_place(spec: Array, array: ArrayView, name: str, other: ArrayView, also: Array | None) -> None:
    """Raise ArgumentError where an array that is written overlaps another one, the call's `also` or one of the cache's."""
    declared = name in spec.in_place
    if declared and _same_places(spec, array, other, also):
        return
    if overlap(array, other):
        both = also is not None and also.access != "in"
        hint = f", or {name} itself: its address and its strides" if declared else ""
        raise _refused(spec.name, name, "both" if both else spec.name, hint)


def _same_places(spec: Array, array: ArrayView, other: ArrayView, also: Array | None) -> bool:
    """Whether every element of `array` is the one that the kernel has read for it: of `other`, of the first columns of its
    rows, or of one of the arrays that it holds along an axis of its own (states of attention)."""
    size = itemsize(array)
    if size != itemsize(other):
        return False
    shape, strides, distance = other.shape, other.strides, array.pointer - other.pointer
    if also is not None:
        for axis in range(len(also.shape)):
            if also.shape[:axis] + also.shape[axis + 1 :] == spec.shape:
                item, distance = divmod(distance, strides[axis] * size)
                if not 0 <= item < shape[axis]:
                    return False
                shape, strides = shape[:axis] + shape[axis + 1 :], strides[:axis] + strides[axis + 1 :]
                break
    # A row q | k | v has one axis where q has heads and dims.
    alike = len(shape) - (len(shape) < len(array.shape))
    if distance or shape[:alike] != array.shape[:alike]:
        return False
    return all(n == 1 or a == b for n, a, b in zip(shape[:alike], strides, array.strides, strict=False))


def _refused(name: str, other: str, written: str, hint: str) -> ArgumentError:
    return ArgumentError(
        f"{name}: got memory that {other} lies in too; the kernel writes to {written}, while the other may still be read or "
        f"written; pass an array of its own{hint}"
    )
