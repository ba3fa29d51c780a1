"""Element types: one table of names, widths and spellings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvgen.errors import SpecError

if TYPE_CHECKING:
    import numpy

DTypeName = Literal[
    "f32", "f16", "bf16", "e4m3", "e5m2", "e8m0", "e2m1", "u2", "u3", "i4", "u4", "i8", "u8", "i32", "u32", "i64", "u64"
]  # fmt: skip
FloatName = Literal["f32", "f16", "bf16"]


@dataclass(frozen=True)
class DType:
    """One element type.

    `bits` is the storage width (below 8 for packed types), `c` the name in the generated CUDA of what memory is made of
    (device/quant/elements.cuh; a byte for packed types), `numpy_name` its name in NumPy or ml_dtypes, or that of the bytes
    which hold it.
    """

    name: DTypeName
    bits: int
    c: str
    numpy_name: str

    @property
    def packed(self) -> bool:
        """True if elements are parts of bytes, one after another from the lowest bits up; arrays then hold u8."""
        return self.bits < 8

    @property
    def together(self) -> int:
        """The fewest elements that fill whole bytes: 2 of 4 bits, 4 of 2 bits, 8 of 3 bits."""
        return 8 // math.gcd(8, self.bits)

    @property
    def packing(self) -> str:
        """How packed elements lie in bytes, in words."""
        return {4: "two a byte", 3: "eight in three bytes", 2: "four a byte"}[self.bits]

    @property
    def place(self) -> int:
        """Bits of what offsets and strides count: of an element, or one where elements (of 3 bits) begin and end within bytes."""
        return 1 if self.bits % 8 and 8 % self.bits else self.bits

    def size_of(self, count: int) -> int:
        """Bytes of so many elements, whole ones."""
        return count * self.bits // 8

    @property
    def held_as(self) -> str:
        """The name of the dtype an array of such elements has."""
        return "u8" if self.packed else self.name

    @property
    def bytes(self) -> int:
        """Storage bytes of one element; packed types have none of their own."""
        if self.bits % 8:
            raise SpecError(f"dtype {self.name}: {self.bits}-bit elements have no size in bytes of their own")
        return self.bits // 8

    def numpy(self) -> numpy.dtype[Any]:
        """The NumPy dtype; those that NumPy lacks come from ml_dtypes."""
        import numpy as np

        if hasattr(np, self.numpy_name):
            plain: numpy.dtype[Any] = np.dtype(self.numpy_name)
            return plain
        import ml_dtypes

        narrow: numpy.dtype[Any] = np.dtype(getattr(ml_dtypes, self.numpy_name))
        return narrow


DTYPES: Final[dict[str, DType]] = {
    d.name: d
    for d in (
        DType("f32", 32, "float", "float32"),
        DType("f16", 16, "f16", "float16"),
        DType("bf16", 16, "bf16", "bfloat16"),
        DType("e4m3", 8, "e4m3", "float8_e4m3fn"),
        DType("e5m2", 8, "e5m2", "float8_e5m2"),
        DType("e8m0", 8, "e8m0", "float8_e8m0fnu"),
        DType("e2m1", 4, "e2m1x2", "float4_e2m1fn"),
        DType("u2", 2, "u2x4", "uint8"),
        DType("u3", 3, "u3", "uint8"),
        DType("i4", 4, "i4x2", "int4"),
        DType("u4", 4, "u4x2", "uint4"),
        DType("i8", 8, "int8_t", "int8"),
        DType("u8", 8, "uint8_t", "uint8"),
        DType("i32", 32, "int32_t", "int32"),
        DType("u32", 32, "uint32_t", "uint32"),
        DType("i64", 64, "int64_t", "int64"),
        DType("u64", 64, "uint64_t", "uint64"),
    )
}


def dtype(name: str) -> DType:
    """The element type called `name`; raises SpecError with the valid names."""
    found = DTYPES.get(name)
    if found is None:
        raise SpecError(f"dtype: got {name!r}; it must be one of {', '.join(DTYPES)}")
    return found
