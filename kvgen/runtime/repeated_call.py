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
from kvgen.runtime.arrays import ITEMSIZE, ArrayView, RawReader, extent, raw_reader, view
from kvgen.runtime.gpu import launch_on
from kvgen.runtime.packing import PackedArgs, ParamKind, Value

if TYPE_CHECKING:
    from kvgen.runtime.call_check import Checked
    from kvgen.runtime.layer_cache import LayerCache, SizesKey
    from kvgen.runtime.overlap import Footprint

MOST: Final = 4  # calls that a kernel keeps: prefill and decode, with and without LSE


class ArrayArgument(NamedTuple):
    """An array of a checked call: the `number`-th argument, whose address is the `place`-th value of the kernel.

    `layout` is what `read` says of the array besides its address. Its elements lie from `before` bytes before the address to
    `behind` bytes past it; the address is a multiple of `align`.
    """

    number: int
    place: int
    kind: type
    read: RawReader
    layout: object
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


class Launch(NamedTuple):
    """Packed arguments and what launches with them."""

    args: PackedArgs
    go: Callable[[object], None]


@dataclass(slots=True)
class RepeatedCall:
    """What the check of a call found.

    It holds under one `driver`, for a cache on `device` whose step has the sizes of `key`. `same` are the arguments that are
    no arrays, with their places; `values` the kernel's values, 0 where addresses go;
    `tied` the distance of arrays that overlap and may, by their places in `arrays`. `free` are launches that nobody uses.
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
    make: Callable[[PackedArgs], Callable[[object], None]]
    free: list[Launch]

    def addresses(self, cache: LayerCache, arguments: Sequence[object], planned_rows: int | None) -> list[int] | None:
        """The addresses of the arrays of a call that is like this one; None for another."""
        if cache.step.key != self.key or cache.device != self.device or planned_rows != self.planned_rows:
            return None
        if cuda.driver() is not self.driver:
            return None
        for index, value in self.same:
            other = arguments[index]
            if other is not value and (type(other) is not type(value) or other != value):
                return None
        found = []
        for entry in self.arrays:
            array = arguments[entry[0]]
            if type(array) is not entry[2]:
                return None
            try:
                address, layout = entry[3](array)
            except Exception:  # a stranger's code: the check in full says what is wrong with it
                return None
            if layout != entry[4] or not address or address % entry[5]:
                return None
            found.append(address)
        return found if self._apart(found, cache.step.footprint) else None

    def _apart(self, addresses: list[int], own: Footprint) -> bool:
        """Whether nothing that is written lies in another array, as far as extents tell."""
        if self.writes and own.clash:
            return False
        written = own.written if self.writes else ()
        for i, entry in enumerate(self.arrays):
            low, high = addresses[i] - entry[6], addresses[i] + entry[7]
            for span in own.spans if entry[8] else written:
                if low < span[1] and span[0] < high:
                    return False
            if entry[8]:
                for j, other in enumerate(self.arrays):
                    if (
                        low < addresses[j] + other[7]
                        and addresses[j] - other[6] < high
                        and i != j
                        and self.tied.get((i, j)) != addresses[i] - addresses[j]
                    ):
                        return False
        return True

    def launch(self, cache: LayerCache, addresses: Sequence[int], stream: object) -> None:
        """Launch with these addresses. Any number of threads may call it at once: each takes a launch of its own."""
        values = self.values.copy()
        values[0] = cache.struct
        for entry, address in zip(self.arrays, addresses, strict=True):
            values[entry[1]] = address
        try:
            launch = self.free.pop()
            launch.args.refill(values)
        except IndexError:
            args = PackedArgs(self.kinds, values)
            launch = Launch(args, self.make(args))
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
            read, (low, high) = raw_reader(array), extent(taken)
            align = max(spec.align, ITEMSIZE[taken.dtype])
            reach = (taken.pointer - low, high - taken.pointer)
            layout, written = read(array)[1], spec.access != "in"
            found.append(
                ArrayArgument(
                    index, place, type(array), read, layout, align, *reach, written, spec, taken._replace(owner=None)
                )
            )
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

    def make(args: PackedArgs) -> Callable[[object], None]:
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
            make,
            [],
        )
    ]


def _strides(array: ArrayView) -> tuple[int, ...]:
    """Strides, 0 for axes of one element, where they mean nothing."""
    return tuple(step if size > 1 else 0 for size, step in zip(array.shape, array.strides, strict=True))
