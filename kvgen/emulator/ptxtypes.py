"""The scalar types of PTX and the C++ types that hold them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PtxType:
    """`kind` is one of u s b (integers), f (f32, f64), h (f16, bf16), p (packed pair of halves), pred."""

    name: str
    bits: int
    kind: str
    c: str

    @property
    def storage(self) -> str:
        """The unsigned C++ type of a register that holds it."""
        return storage_of(self.bits)

    @property
    def is_integer(self) -> bool:
        return self.kind in "usb"

    @property
    def bfloat(self) -> bool:
        return self.name.startswith("bf16")


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
        PtxType("f16x2", 32, "p", "u32"),
        PtxType("bf16x2", 32, "p", "u32"),
        PtxType("pred", 1, "pred", "bool"),
    ]
}
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def bit_type(bits: int) -> PtxType:
    return TYPES["pred"] if bits == 1 else TYPES[f"b{bits}"]
