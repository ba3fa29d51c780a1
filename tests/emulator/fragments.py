"""Where the elements of mma's matrices are, as the PTX ISA states it; element formats to bits and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Place = Callable[[int, int, int], tuple[int, int]]  # groupID, threadID_in_group, element of the lane: row, column

FLOATS: dict[str, Any] = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32, "f64": np.float64,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "e4m3": 8, "e5m2": 8,
        "s32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}  # fmt: skip


def upper(low: bool, g: int) -> int:
    return g if low else g + 8


# "Matrix fragments for mma.m16n8k16", and so on: one entry for each shape and element size.
A: dict[tuple[str, int], Place] = {
    ("m8n8k4", 64): lambda g, t, i: (g, t),
    ("m16n8k4", 64): lambda g, t, i: (upper(i == 0, g), t),
    ("m16n8k8", 64): lambda g, t, i: (upper(i in (0, 2), g), t if i < 2 else t + 4),
    ("m16n8k16", 64): lambda g, t, i: (upper(i % 2 == 0, g), i * 2 + t if i % 2 == 0 else i * 2 - 2 + t),
    ("m16n8k4", 32): lambda g, t, i: (upper(i == 0, g), t),
    ("m16n8k8", 32): lambda g, t, i: (upper(i in (0, 2), g), t if i < 2 else t + 4),
    ("m16n8k8", 16): lambda g, t, i: (upper(i < 2, g), t * 2 + (i & 1)),
    ("m16n8k16", 16): lambda g, t, i: (upper(i < 2 or 4 <= i < 6, g), t * 2 + (i & 1) + (0 if i < 4 else 8)),
    ("m8n8k16", 8): lambda g, t, i: (g, t * 4 + i),
    ("m16n8k16", 8): lambda g, t, i: (upper(i < 4, g), t * 4 + (i & 3)),
    ("m16n8k32", 8): lambda g, t, i: (upper(i < 4 or 8 <= i < 12, g), t * 4 + (i & 3) + (0 if i < 8 else 16)),
    ("m8n8k32", 4): lambda g, t, i: (g, t * 8 + i),
    ("m16n8k32", 4): lambda g, t, i: (upper(i < 8, g), t * 8 + (i & 7)),
    ("m16n8k64", 4): lambda g, t, i: (upper(i < 8 or 16 <= i < 24, g), t * 8 + (i & 7) + (0 if i < 16 else 32)),
    ("m8n8k128", 1): lambda g, t, i: (g, t * 32 + i),
    ("m16n8k128", 1): lambda g, t, i: (upper(i < 32, g), t * 32 + (i & 31)),
    ("m16n8k256", 1): lambda g, t, i: (upper(i < 32 or 64 <= i < 96, g), t * 32 + (i & 31) + (0 if i < 64 else 128)),
}
B: dict[tuple[int, int], Place] = {  # k, element size
    (4, 64): lambda g, t, i: (t, g),
    (8, 64): lambda g, t, i: (t if i == 0 else t + 4, g),
    (16, 64): lambda g, t, i: (i * 4 + t, g),
    (4, 32): lambda g, t, i: (t, g),
    (8, 32): lambda g, t, i: (t if i == 0 else t + 4, g),
    (8, 16): lambda g, t, i: (t * 2 + i, g),
    (16, 16): lambda g, t, i: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
    (16, 8): lambda g, t, i: (t * 4 + i, g),
    (32, 8): lambda g, t, i: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
    (32, 4): lambda g, t, i: (t * 8 + i, g),
    (64, 4): lambda g, t, i: (t * 8 + (i & 7) + (0 if i < 8 else 32), g),
    (128, 1): lambda g, t, i: (t * 32 + i, g),
    (256, 1): lambda g, t, i: (t * 32 + (i & 31) + (0 if i < 32 else 128), g),
}


def c_place(g: int, t: int, i: int) -> tuple[int, int]:
    return g if i < 2 else g + 8, t * 2 + (i & 1)


def raw(values: Array, kind: str) -> Array:
    """Bit patterns, as u64."""
    if kind in FLOATS:
        whole = np.ascontiguousarray(values.astype(FLOATS[kind]))
        return whole.view(f"u{whole.dtype.itemsize}").astype(np.uint64)
    return values.astype(np.int64).astype(np.uint64) & np.uint64((1 << BITS[kind]) - 1)


def packed(matrix: Array, place: Place, kind: str) -> Array:
    """Each lane's elements in order, low bits first: [32, words] of u32."""
    bits = raw(matrix, kind)
    count = matrix.size // 32
    lanes = [[bits[place(lane // 4, lane % 4, i)] for i in range(count)] for lane in range(32)]
    return to_words(np.array(lanes, np.uint64), BITS[kind])


def to_words(elements: Array, bits: int) -> Array:
    if bits >= 32:
        return np.ascontiguousarray(elements.astype(f"<u{bits // 8}")).view(np.uint32)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    groups = elements.reshape(len(elements), -1, per_word)
    return (groups << shifts).sum(-1).astype(np.uint32)


def unpacked(words: Array, place: Place, kind: str, shape: tuple[int, int]) -> Array:
    """The matrix that the lanes' registers [32, words] hold, as numbers of its format."""
    elements = np.ascontiguousarray(words).view(np.int32 if kind == "s32" else FLOATS[kind])
    out = np.zeros(shape, elements.dtype)
    for lane in range(32):
        for i in range(elements.shape[1]):
            out[place(lane // 4, lane % 4, i)] = elements[lane, i]
    return out


def numbers(rng: np.random.Generator, kind: str, shape: tuple[int, int], spread: str) -> Array:
    """Random operands as float64 that the format holds exactly; "exact" ones have sums that any order gets right."""
    if kind == "b1":
        return rng.integers(0, 2, shape).astype(np.float64)
    if kind not in FLOATS:
        low, high = (-(1 << BITS[kind] - 1), 1 << BITS[kind] - 1) if kind[0] == "s" else (0, 1 << BITS[kind])
        return rng.choice([low, high - 1, 0, 1, *rng.integers(low, high, 4)], shape).astype(np.float64)
    if spread == "exact":
        return rng.integers(-6, 7, shape).astype(np.float64)
    if spread == "corners":
        corners = [0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, 6e-8, 2.0**-9, 2.0**-16, 240.0]
        values = rng.choice(corners, shape, p=[0.3, 0.1, 0.2, 0.2, 0.02, 0.01, 0.01, 0.04, 0.04, 0.04, 0.04])
    else:
        values = rng.standard_normal(shape)
    held = values.astype(FLOATS[kind])
    if kind == "tf32":
        held = (held.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return held.astype(np.float64)
