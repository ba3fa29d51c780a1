"""One tensor map, under the rules of the driver's cuTensorMapEncodeTiled."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from kvgen.errors import ArgumentError

Element = Literal["u8", "u16", "u32", "i32", "u64", "i64", "f16", "f32", "bf16"]
Swizzle = Literal[0, 32, 64, 128]
Promotion = Literal[0, 64, 128, 256]
Fill = Literal["zero", "nan"]

ELEMENT_BYTES: Final[dict[Element, int]] = {
    "u8": 1, "u16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8, "f16": 2, "f32": 4, "bf16": 2,
}  # fmt: skip
_AS_BYTES: Final = ("e4m3", "e5m2", "e8m0", "i8")  # a copy moves bytes, whatever number they stand for
# Coordinates are int32. A box may start up to 255 before the last element, so that none of its own leaves that range.
REACH: Final = 2**31 - 256


def element(dtype: str) -> Element:
    """The tensor map's type for elements of a kvgen dtype."""
    if dtype in _AS_BYTES:
        return "u8"
    for name in ELEMENT_BYTES:
        if name == dtype:
            return name
    if dtype in ("e2m1", "i4"):
        raise ArgumentError(
            f"dtype: got {dtype!r}, whose elements share bytes; a tensor map counts bytes; pass 'u8', half of dim and half "
            "of every stride"
        )
    names = ", ".join((*ELEMENT_BYTES, *_AS_BYTES))
    raise ArgumentError(f"dtype: got {dtype!r}; a tensor map holds {names}")


def chunk_elements(dtype: str, swizzle: Swizzle) -> int:
    """`gran`: the columns of one chunk of a tile, a swizzle span (16 bytes without a swizzle)."""
    return (swizzle or 16) // ELEMENT_BYTES[element(dtype)]


def padded_depth(dim: int, gran: int) -> int:
    """`dim` rounded up to whole chunks."""
    return -(-dim // gran) * gran


def refuse(name: str, got: object, rule: str) -> ArgumentError:
    return ArgumentError(f"{name}: got {got}; {rule}")


@dataclass(frozen=True, slots=True)
class TensorMapPlan:
    """A tensor in global memory, the box that one copy moves, and how a kernel asks for a tile of it.

    `strides` are the bytes between neighbours of dimensions 1 and up. `coordinates` names what a copy is given. A tile is
    `boxes` copies and `tile_bytes` bytes of shared memory, which its mbarrier counts whether clipped or not; `issue_rows`
    of its rows come with each copy, in chunks of `gran` columns. Raises ArgumentError for what the hardware cannot do.
    """

    form: str
    dtype: Element
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    coordinates: tuple[str, ...]
    swizzle: Swizzle
    gran: int
    issue_rows: int
    boxes: int
    l2_promotion: Promotion = 0
    oob_fill: Fill = "zero"
    element_strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.dims))
        if self.dtype not in ELEMENT_BYTES:
            raise refuse("dtype", repr(self.dtype), f"it is one of {', '.join(ELEMENT_BYTES)}")
        if not 1 <= self.rank <= 5:
            raise refuse("dims", f"{self.rank} dimensions", "a tensor map has 1 to 5")
        for name, n in (("strides", self.rank - 1), ("box", self.rank), ("element_strides", self.rank)):
            if len(getattr(self, name)) != n:
                raise refuse(name, f"{len(getattr(self, name))} values", f"rank {self.rank} takes {n}")
        if self.swizzle not in (0, 32, 64, 128):
            raise refuse("swizzle", self.swizzle, "it is 32, 64 or 128 bytes, or 0 for none")
        if self.l2_promotion not in (0, 64, 128, 256):
            raise refuse("l2_promotion", self.l2_promotion, "it is 64, 128 or 256 bytes, or 0 for none")
        if self.oob_fill not in ("zero", "nan"):
            raise refuse("oob_fill", repr(self.oob_fill), "it is 'zero' or 'nan'")
        if self.oob_fill == "nan" and self.dtype not in ("f16", "bf16", "f32"):
            raise refuse("oob_fill", "'nan'", f"{self.dtype} has no NaN; pass 'zero'")
        self._check_memory()
        self._check_box()

    def _check_memory(self) -> None:
        if self.address <= 0 or self.address % 16:
            raise refuse("address", f"{self.address:#x}", "it must be a multiple of 16")
        for i, extent in enumerate(self.dims):
            if not 1 <= extent <= 2**32:
                raise refuse(f"dims[{i}]", f"{extent} ({self.coordinates[i]})", "a dimension has 1 to 2^32 elements")
        for i, stride in enumerate(self.strides):
            what = f"{stride} bytes (between neighbours of {self.coordinates[i + 1]})"
            if stride % 16:
                raise refuse(f"strides[{i}]", what, "a stride is a multiple of 16 bytes; pad to it")
            if not 0 <= stride < 2**40:
                raise refuse(f"strides[{i}]", what, "a stride is less than 2^40 bytes and not negative")

    def _check_box(self) -> None:
        for i, extent in enumerate(self.box):
            if not 1 <= extent <= 256:
                raise refuse(
                    f"box[{i}]", f"{extent} ({self.coordinates[i]})", "a box has 1 to 256 elements a dimension"
                )
        for i, step in enumerate(self.element_strides):
            if not 1 <= step <= 8:
                raise refuse(f"element_strides[{i}]", step, "it is 1 to 8")
        inner = self.box[0] * self.size
        if inner % 16:
            raise refuse("box[0]", f"{self.box[0]} x {self.dtype}, {inner} bytes", "it is a multiple of 16 bytes")
        if self.swizzle and inner > self.swizzle:
            raise refuse(
                "box[0]", f"{self.box[0]} x {self.dtype}, {inner} bytes", f"it fits the swizzle of {self.swizzle} bytes"
            )
        if self.boxes > 1 and self.box_bytes % 128:
            raise refuse(
                "box", f"{self.boxes} boxes of {self.box_bytes} bytes a tile",
                "each starts at a multiple of 128 bytes of shared memory; take more rows or a wider swizzle",
            )  # fmt: skip

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def box_bytes(self) -> int:
        """What one copy writes to shared memory (gather4: four rows)."""
        counts = (-(-n // step) for n, step in zip(self.box[1:], self.element_strides[1:], strict=True))
        return self.box[0] * self.size * prod(counts) * (4 if self.form == "gather4" else 1)

    @property
    def tile_bytes(self) -> int:
        return self.boxes * self.box_bytes

    @property
    def smem_alignment(self) -> int:
        """Where a tile may start, so that its swizzle is a function of the place in the tile alone."""
        return 8 * self.swizzle or 128
