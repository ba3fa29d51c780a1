"""The scalar types of PTX and the C types that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PtxType:
    """A type as instructions name it. `c` is its C type, `storage` the unsigned C type of a register that
    holds it.

    `kind` is one of u s b (integers), f (f32, f64), h (f16, bf16), m (formats of 19 bits and less that only cvt knows),
    pred; and of packed pairs: p (halves), q (16-bit integers), w (f32), n (formats of 8 bits and less).
    """

    name: str
    bits: int
    kind: str
    c: str
    storage: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage", storage_of(self.bits))

    @property
    def is_integer(self) -> bool:
        return self.kind in "usb"

    @property
    def bfloat(self) -> bool:
        return self.name.startswith("bf16")

    @property
    def lane(self) -> PtxType:
        """The type of one half of a packed pair."""
        return TYPES[self.name.removesuffix("x2")]

    @property
    def suffix(self) -> str:
        """The end of the names of helpers that take the type's C type."""
        return {"float": "f32", "double": "f64"}.get(self.c, self.c)

    def from_bits(self, expression: str) -> str:
        """C that makes a value of the type of its bits."""
        if self.kind == "f":
            return f"{self.name}_of(({self.storage})({expression}))"
        return f"(({self.c})({expression}))"

    def to_bits(self, expression: str) -> str:
        """C of the bits, as an unsigned number, of a value of the type."""
        if self.kind == "f":
            return f"bits_{self.name}({expression})"
        return f"(({self.storage})({expression}))"

    def each_lane(self, values: Sequence[str], scalar: Callable[[Sequence[str]], str]) -> str:
        """C of a packed operation: `scalar` gives one lane's expression from that lane of every value."""
        lane, half = self.lane, self.bits // 2

        def part(value: str, shift: int) -> str:
            return lane.from_bits(f"({lane.storage})({value} >> {shift})")

        low, high = (lane.to_bits(f"({lane.c})({scalar([part(v, shift) for v in values])})") for shift in (0, half))
        return f"(({self.c}){high} << {half} | {low})"


def storage_of(bits: int) -> str:
    return "bool" if bits == 1 else f"u{max(bits, 8)}"


def _integers() -> list[PtxType]:
    out = []
    for bits in (8, 16, 32, 64):
        out += [PtxType(f"{k}{bits}", bits, k, f"{'s' if k == 's' else 'u'}{bits}") for k in "usb"]
    return out


TYPES: dict[str, PtxType] = {
    t.name: t
    for t in [
        *_integers(),
        PtxType("b128", 128, "b", "u128"),
        PtxType("f32", 32, "f", "float"),
        PtxType("f64", 64, "f", "double"),
        PtxType("f16", 16, "h", "u16"),
        PtxType("bf16", 16, "h", "u16"),
        PtxType("tf32", 32, "m", "u32"),
        PtxType("f16x2", 32, "p", "u32"),
        PtxType("bf16x2", 32, "p", "u32"),
        PtxType("u16x2", 32, "q", "u32"),
        PtxType("s16x2", 32, "q", "u32"),
        PtxType("f32x2", 64, "w", "u64"),
        *(PtxType(f"{name}x2", 16, "n", "u16") for name in ("e4m3", "e5m2", "e2m3", "e3m2", "ue8m0")),
        PtxType("e2m1x2", 8, "n", "u8"),
        PtxType("pred", 1, "pred", "bool"),
    ]
}
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def bit_type(bits: int) -> PtxType:
    return TYPES["pred"] if bits == 1 else TYPES[f"b{bits}"]
