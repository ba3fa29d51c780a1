"""Tensor maps: what a tensor copy must know of the tensor, under the rules of the driver's cuTensorMapEncodeTiled."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from kvgen.emulator.errors import EmulatorError

_MAGIC = 0x70616D2D6E65746B
_ELEMENTS = {  # bytes of each, in the order that the runtime numbers them
    "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "float16": 2, "float32": 4,
    "float64": 8, "bfloat16": 2,
}  # fmt: skip
_SPANS = {0: 0, 32: 1, 64: 2, 128: 3}


def _within(name: str, values: tuple[int, ...], low: int, high: int, unit: str = "") -> None:
    for i, v in enumerate(values):
        if not low <= v <= high:
            raise EmulatorError(f"{name}[{i}]: got {v}; it is {low} to {high}{unit}")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves.

    Dimension 0 is the innermost, whose elements lie next to each other. `strides` are the bytes between neighbours of
    dimensions 1 and up. `element_strides` takes every n-th element of a dimension of the box (1 and up). `swizzle` is the
    span in bytes, 0 for none. Raises EmulatorError for what the driver refuses, and for interleaved layouts and for element
    types that change on their way (tf32, packed 4 and 6 bits), which are not modelled.
    """

    element: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: Literal[0, 32, 64, 128] = 0
    interleave: Literal["none"] = "none"
    l2_promotion: Literal[0, 64, 128, 256] = 0
    oob_fill: Literal["zero", "nan"] = "zero"

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.dims))
        if self.element not in _ELEMENTS:
            raise EmulatorError(f"element: got {self.element!r}; it is one of {', '.join(_ELEMENTS)}")
        if not 1 <= self.rank <= 5:
            raise EmulatorError(f"dims: got {self.rank} dimensions; a tensor map has 1 to 5")
        for name, n in (("strides", self.rank - 1), ("box", self.rank), ("element_strides", self.rank)):
            if len(getattr(self, name)) != n:
                raise EmulatorError(f"{name}: got {len(getattr(self, name))} values; rank {self.rank} takes {n}")
        if self.interleave != "none":
            raise EmulatorError(f"interleave: got {self.interleave!r}; only 'none' is modelled")
        if self.l2_promotion not in (0, 64, 128, 256):
            raise EmulatorError(f"l2_promotion: got {self.l2_promotion}; it is 0, 64, 128 or 256 bytes")
        if self.oob_fill not in ("zero", "nan"):
            raise EmulatorError(f"oob_fill: got {self.oob_fill!r}; it is 'zero' or 'nan'")
        if self.oob_fill == "nan" and "float" not in self.element:
            raise EmulatorError(f"oob_fill: got 'nan'; {self.element} has no NaN")
        self._check_extents()
        self._check_inner()

    def _check_extents(self) -> None:
        if self.address <= 0 or self.address % 16:
            raise EmulatorError(f"address: got {self.address:#x}; it must be a multiple of 16")
        _within("dims", self.dims, 1, 2**32)
        _within("strides", self.strides, 0, 2**40 - 1, " bytes")
        for i, stride in enumerate(self.strides):
            if stride % 16:
                raise EmulatorError(f"strides[{i}]: got {stride} bytes; it must be a multiple of 16")
        _within("box", self.box, 1, 256)
        _within("element_strides", self.element_strides, 1, 8)

    def _check_inner(self) -> None:
        inner = self.box[0] * _ELEMENTS[self.element]
        if inner % 16:
            raise EmulatorError(f"box[0]: got {self.box[0]} x {self.element}, {inner} bytes; it takes a multiple of 16")
        if self.swizzle not in _SPANS:
            raise EmulatorError(f"swizzle: got {self.swizzle}; it is 0, 32, 64 or 128 bytes")
        if self.swizzle and inner > self.swizzle:
            raise EmulatorError(
                f"box[0]: got {self.box[0]} x {self.element}, {inner} bytes; a swizzle of {self.swizzle} bytes takes no more"
            )

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes that one load writes to shared memory and its mbarrier counts."""
        total = self.box[0] * _ELEMENTS[self.element]
        for n, step in zip(self.box[1:], self.element_strides[1:], strict=True):
            total *= -(-n // step)
        return total

    def encode(self) -> bytes:
        """The 128 bytes that a kernel takes as a CUtensorMap; in memory they need an alignment of 64."""

        def padded(values: tuple[int, ...], n: int, fill: int) -> tuple[int, ...]:
            return values + (fill,) * (n - len(values))

        return struct.pack(
            "<QQ4Q5I5H5B4B41x",
            _MAGIC,
            self.address,
            *padded(self.strides, 4, 0),
            *padded(tuple(d - 1 for d in self.dims), 5, 0),
            *padded(self.box, 5, 1),
            *padded(self.element_strides, 5, 1),
            list(_ELEMENTS).index(self.element),
            self.rank,
            _SPANS[self.swizzle],
            int(self.oob_fill == "nan"),
        )
