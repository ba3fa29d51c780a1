"""Values as C lays them out: the cache's struct, and kernel arguments as the driver and the CPU machine read them."""

from __future__ import annotations

import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kvgen.errors import ArgumentError


class Bytes(NamedTuple):
    """A parameter that is `size` bytes already packed: a struct, a tensor map."""

    size: int
    align: int

    def __str__(self) -> str:
        return f"{self.size} bytes"


TENSOR_MAP: Final = Bytes(128, 64)
ParamKind = Literal["ptr", "u32", "i32", "u64", "i64", "f32"] | Bytes
Value = int | float | bytes

_FORMATS: Final[dict[str, tuple[str, int]]] = {  # struct code and bytes
    "ptr": ("Q", 8), "u32": ("I", 4), "i32": ("i", 4), "u64": ("Q", 8), "i64": ("q", 8), "f32": ("f", 4),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layout:
    """A C struct of these kinds: each aligned, the whole padded to the strictest alignment."""

    values: struct.Struct
    offsets: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]  # which values are bytes, and how many
    align: int

    @property
    def kind(self) -> Bytes:
        """The struct as a parameter."""
        return Bytes(self.values.size, self.align)

    def pack(self, values: Sequence[Value]) -> bytes:
        """The struct's bytes. Every value must fit its kind."""
        return self.values.pack(*values)


@functools.lru_cache(maxsize=256)
def layout(kinds: tuple[ParamKind, ...]) -> Layout:
    """The layout of a struct whose fields have these kinds."""
    text, size, most, offsets, blocks = "<", 0, 1, [], []
    for index, kind in enumerate(kinds):
        code, nbytes, align = _shape(kind)
        text += f"{-size % align}x{code}"
        size += -size % align
        offsets.append(size)
        size += nbytes
        most = max(most, align)
        if isinstance(kind, Bytes):
            blocks.append((index, nbytes))
    return Layout(struct.Struct(f"{text}{-size % most}x"), tuple(offsets), tuple(blocks), most)


def _shape(kind: ParamKind) -> tuple[str, int, int]:
    """Struct code, bytes and alignment."""
    if isinstance(kind, Bytes):
        return f"{kind.size}s", kind.size, kind.align
    code, nbytes = _FORMATS[kind]
    return code, nbytes, nbytes


class PackedArgs:
    """Kernel arguments in the form the driver reads: stable storage and an array of the parameters' addresses.

    `address` is that array's address. `update` rewrites the values in place, so that prepared launches see them. Values
    are ints, floats for "f32", and bytes of the right size for Bytes. Raises ArgumentError for a value its kind cannot
    hold.
    """

    __slots__ = ("_origin", "_plan", "_storage", "address", "kinds")

    def __init__(self, kinds: Sequence[ParamKind], values: Sequence[Value]) -> None:
        self.kinds = tuple(kinds)
        self._plan = plan = layout(self.kinds)
        count = len(self.kinds)
        self._storage = array("Q", bytes(8 * count + -(-(plan.align + plan.values.size) // 8) * 8))
        self.address = self._storage.buffer_info()[0]
        first = self.address + 8 * count
        first += -first % plan.align
        self._origin = first - self.address
        struct.pack_into(f"<{count}Q", self._storage, 0, *[first + offset for offset in plan.offsets])
        self.update(values)

    def update(self, values: Sequence[Value]) -> None:
        """Rewrite all values."""
        if len(values) != len(self.kinds):
            raise ArgumentError(f"parameters: got {len(values)} values; the kernel takes {len(self.kinds)}; pass each")
        for index, size in self._plan.blocks:
            _check_size(index, size, values[index])
        try:
            self._plan.values.pack_into(self._storage, self._origin, *values)
        except (struct.error, OverflowError):
            for index, value in enumerate(values):
                self.set(index, value)  # finds which one
            raise

    @property
    def words(self) -> array[int]:
        """The storage, 8 bytes each: writing `words[word_of(index)]` rewrites one pointer."""
        return self._storage

    def word_of(self, index: int) -> int:
        """Which of `words` a pointer is."""
        return (self._origin + self._plan.offsets[index]) // 8

    def struct_writer(self) -> Callable[[bytes], None]:
        """A function that rewrites the first value, the bytes of a struct; they must be of its size."""
        kind = _shape(self.kinds[0])[0]
        return functools.partial(
            struct.Struct(f"<{kind}").pack_into, self._storage, self._origin + self._plan.offsets[0]
        )

    def set(self, index: int, value: Value) -> None:
        """Rewrite one value."""
        kind = self.kinds[index]
        if isinstance(kind, Bytes):
            _check_size(index, kind.size, value)
        try:
            struct.pack_into(f"<{_shape(kind)[0]}", self._storage, self._origin + self._plan.offsets[index], value)
        except (struct.error, OverflowError) as error:
            raise ArgumentError(
                f"parameter {index}: got {value!r}; it must fit {kind}; {error}; pass a smaller batch or array"
            ) from None

    def bytes_list(self) -> list[bytes]:
        """The raw little-endian bytes of each parameter, as the CPU machine takes them."""
        raw, offsets = self._storage.tobytes()[self._origin :], self._plan.offsets
        return [raw[start : start + _shape(kind)[1]] for kind, start in zip(self.kinds, offsets, strict=True)]


def _check_size(index: int, size: int, value: Value) -> None:
    # struct pads and cuts without a word.
    if not isinstance(value, bytes) or len(value) != size:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else repr(value)
        raise ArgumentError(f"parameter {index}: got {got}; it must be bytes, {size} of them; pass the packed struct")
