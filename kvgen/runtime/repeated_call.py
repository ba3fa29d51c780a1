"""A call whose arguments were checked, kept so that the next one like it needs no more than its addresses looked at.

A call is like another where the sizes of the step and every argument but for its address are the same: class, element type,
shape, strides. What the check of those found, grid and sizes included, then holds for both; addresses are aligned, on the
right device and apart from each other, or the call is checked anew in full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Scalar, Size
from kvgen.runtime import cuda
from kvgen.runtime.arrays import ITEMSIZE, ArrayView, extent, view
from kvgen.runtime.gpu import launch_on
from kvgen.runtime.like_array import LikeArray, like_array
from kvgen.runtime.packing import PackedArgs, ParamKind, Value
from kvgen.runtime.params import Param
from kvgen.runtime.pool_map import layer_writer

if TYPE_CHECKING:
    from kvgen.runtime.call_check import Checked
    from kvgen.runtime.layer_cache import LayerCache, SizesKey
    from kvgen.runtime.overlap import Footprint

MOST: Final = 4  # calls that a kernel keeps: prefill and decode, with and without LSE


class ArrayArgument(NamedTuple):
    """An array of a checked call: the `number`-th argument, whose address is the `place`-th value of the kernel.

    `like` gives the address of an array like this one. Its elements lie from `before` bytes before the address to `behind`
    bytes past it; the address is a multiple of `align`.
    """

    number: int
    place: int
    like: LikeArray
    align: int
    before: int
    behind: int
    written: bool
    spec: Array
    view: ArrayView

    def address(self, array: Any) -> int:
        """The address of `array`, looked at in full: it may take this one's place, or ArgumentError says what differs."""
        found, bound, name = view(array, self.spec.name), self.view, self.spec.name
        for what, got, want in (
            ("dtype", found.dtype, bound.dtype),
            ("shape", found.shape, bound.shape),
            ("strides", _strides(found), _strides(bound)),
            ("device", found.device, bound.device),
        ):
            if got != want:
                raise ArgumentError(
                    f"{name}: got {what} {got}; the launch was bound for {want}; pass an array like the one that bind() took, "
                    "or bind again"
                )
        if self.written and found.readonly:
            raise ArgumentError(f"{name}: got a read-only array; the kernel writes to it; pass a writable one")
        if 0 not in found.shape and (not found.pointer or found.pointer % self.align):
            raise ArgumentError(
                f"{name}: got address {found.pointer:#x}; it must be a multiple of {self.align} bytes and not null; pass an "
                "array that begins there"
            )
        return found.pointer


class Launch:
    """Packed arguments, and what launches with them: `go(stream handle)`."""

    __slots__ = ("_addresses", "_places", "_struct", "_words", "_write", "go")

    def __init__(
        self, args: PackedArgs, go: Callable[[int], None], places: Sequence[int], write: Callable[[LayerCache], None]
    ) -> None:
        self.go = go
        self._words, self._write = args.words, write
        self._places = [args.word_of(place) for place in places]
        self._addresses: list[int] = []
        self._struct = b""

    def fill(self, cache: LayerCache, addresses: list[int]) -> None:
        """Take these: the layer, and an address for each of the places."""
        if cache.struct is not self._struct:
            self._write(cache)
            self._struct = cache.struct
        if addresses != self._addresses:
            words = self._words
            for place, address in zip(self._places, addresses, strict=True):
                words[place] = address
            self._addresses = addresses


@dataclass(slots=True, eq=False)
class RepeatedCall:
    """Findings of the check of a call.

    It holds under one `driver`, for a cache on `device` whose step has the sizes of `key`. `same` are the arguments that are
    no arrays, with their places; `values` the kernel's values, 0 where addresses go;
    `tied` the distance of arrays that overlap and may, by their places in `arrays`. `free` are launches that nobody uses;
    `disjoint` is where arrays lay that were found apart from each other and from a cache's memory.
    """

    key: SizesKey
    driver: object
    device: str
    planned_rows: int | None
    writes: bool
    arrays: tuple[ArrayArgument, ...]
    same: tuple[tuple[int, object], ...]
    values: list[Value]
    tied: dict[tuple[int, int], int]
    kinds: tuple[ParamKind, ...]
    params: tuple[Param, ...]
    make: Callable[[PackedArgs], Callable[[int], None]]
    free: list[Launch]
    likes: tuple[tuple[int, LikeArray], ...]
    disjoint: tuple[Footprint, list[int]] | None = None

    def addresses(self, cache: LayerCache, arguments: Sequence[object], planned_rows: int | None) -> list[int] | None:
        """The addresses of the arrays of a call that is like this one; None for another."""
        step = cache.step
        if step.key is not self.key:
            if step.key != self.key:
                return None
            self.key = step.key  # the other layers of the step have the same object
        if cache.device != self.device or planned_rows != self.planned_rows or cuda.driver() is not self.driver:
            return None
        for index, value in self.same:
            other = arguments[index]
            if other is not value and (type(other) is not type(value) or other != value):
                return None
        found = []
        for index, like in self.likes:
            address = like(arguments[index])
            if not address:
                return None
            found.append(address)
        known = self.disjoint
        if known is None or step.footprint is not known[0] or found != known[1]:
            if not self._disjoint(found, step.footprint):
                return None
            self.disjoint = (step.footprint, found)
        return found

    def _disjoint(self, addresses: list[int], own: Footprint) -> bool:
        """True: nothing that is written lies in another array, as far as extents tell."""
        if self.writes and own.clash:
            return False
        written = own.written if self.writes else ()
        extents = [(at - e.before, at + e.behind) for e, at in zip(self.arrays, addresses, strict=True)]
        for i, (entry, (low, high)) in enumerate(zip(self.arrays, extents, strict=True)):
            for span in own.spans if entry.written else written:
                if low < span[1] and span[0] < high:
                    return False
            if entry.written:
                for j, (start, end) in enumerate(extents):
                    if low < end and start < high and i != j and self.tied.get((i, j)) != addresses[i] - addresses[j]:
                        return False
        return True

    def launch(self, cache: LayerCache, addresses: list[int], stream: int) -> None:
        """Launch with these addresses. Any number of threads may call it at once: each takes a launch of its own."""
        try:
            launch = self.free.pop()
        except IndexError:
            args = PackedArgs(self.kinds, [cache.struct, *self.values[1:]])
            places = [entry.place for entry in self.arrays]
            launch = Launch(args, self.make(args), places, layer_writer(self.params, args))
        launch.fill(cache, addresses)
        launch.go(stream)
        self.free.append(launch)


def array_arguments(checked: Checked, arguments: Sequence[object]) -> tuple[ArrayArgument, ...]:
    """The arrays of a checked call; nothing of them is kept alive."""
    found = []
    for place, spec in enumerate(checked.kernel.params, start=1):
        taken = checked.views.get(spec.name)
        if isinstance(spec, Array) and taken is not None:
            index = checked.kernel.places[spec.name]
            array = arguments[index]
            align, (low, high) = max(spec.align, ITEMSIZE[taken.dtype]), extent(taken)
            reach = (taken.pointer - low, high - taken.pointer)
            written = spec.access != "in"
            like = like_array(array, taken, align, written=written)
            found.append(ArrayArgument(index, place, like, align, *reach, written, spec, taken._replace(owner=None)))
    return tuple(found)


def repeated_call(checked: Checked, arguments: Sequence[object], planned_rows: int | None) -> list[RepeatedCall]:
    """A call on a GPU as the next one like it is compared with; none for a call with structs of other memory: pages of other
    pools, other caches, tensor maps."""
    kernel, cache = checked.kernel, checked.cache
    if kernel.all_layers or not all(isinstance(p, (Array, Size, Scalar)) for p in kernel.params):
        return []
    arrays = array_arguments(checked, arguments)
    taken = {entry.number for entry in arrays}
    left_out = {
        kernel.places[p.name]
        for p in kernel.arguments
        if isinstance(p, Array) and p.rows and p.name not in checked.views
    }
    same = tuple((i, a) for i, a in enumerate(arguments) if i not in taken and i not in left_out)
    extents = [extent(entry.view) for entry in arrays]
    tied = {
        (i, j): arrays[i].view.pointer - arrays[j].view.pointer
        for i, (low, high) in enumerate(extents)
        for j, (start, end) in enumerate(extents)
        if i != j and low < end and start < high
    }
    values = list(checked.values)
    values[0] = b""
    for entry in arrays:
        values[entry.place] = 0

    def make(args: PackedArgs) -> Callable[[int], None]:
        return launch_on(kernel, device, args, grid)

    device, grid = cache.device, checked.grid
    kinds = (cache.kind, *kernel.kinds)
    return [
        RepeatedCall(
            cache.step.key,
            cuda.driver(),
            device,
            planned_rows,
            kernel.writes,
            arrays,
            same,
            values,
            tied,
            kinds,
            kernel.params,
            make,
            [],
            tuple((entry.number, entry.like) for entry in arrays),
        )
    ]


def _strides(array: ArrayView) -> tuple[int, ...]:
    """Strides, 0 for axes of one element, where they mean nothing."""
    return tuple(step if size > 1 else 0 for size, step in zip(array.shape, array.strides, strict=True))
