"""Codes of 2 and 3 bits, and rows whose norm readers correct (kernels/narrow.cu)."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.float_families import float_words
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats, quant
from tests.golden_gpu.probe import Arrays, Probe, pattern

UNIT: Final = "narrow"
BOOK: Final = (-2.5, -1.25, -0.5, 0.0, 0.125, 0.75, 1.5, 3.0)
TOKENS, HEADS, DIMS, THREADS = 8, 2, 40, 256
# Type and elements of a vector.
CODES: Final = {
    "narrow_u2": ("u2", 4),
    "narrow_u2_words": ("u2", 16),
    "narrow_u3": ("u3", 8),
    "narrow_u3_halves": ("u3", 16),
    "narrow_u3_words": ("u3", 32),
}
# The same with a code a byte, as strided ones are in registers.
STRIDED: Final = {"narrow_strided_u4": ("u4", 4), "narrow_strided_u2": ("u2", 8)}
# Heads and dims that share a norm.
ROWS: Final = {"narrow_rows": (1, 40), "narrow_parts": (1, 8), "narrow_heads": (2, 40)}


def _codes_inputs(dtype: str, width: int) -> dict[str, Array]:
    count = THREADS * width
    x = np.resize(np.concatenate([np.arange(-2, 19) / 2, [np.nan, np.inf, -np.inf, 0.4999999]]), count).astype(
        np.float32
    )
    x[count // 2 :] = float_words("f32", count - count // 2, 140).view(np.float32)
    bits = int(dtype[1])
    return {"in": pattern(x), "codes": np.zeros(count * bits // 8, np.uint8), "out": np.zeros(count, np.uint32)}


def _codes(dtype: str, arrays: Arrays) -> dict[str, Wanted]:
    codes = quant.cast(arrays["in"].view(np.float32), dtype)
    return {"codes": exact(quant.pack_codes(codes, int(dtype[1]))), "out": floats(codes.astype(np.float32))}


def _strided_inputs(dtype: str, width: int) -> dict[str, Array]:
    found = _codes_inputs(dtype, width)
    return found | {"codes": np.zeros(found["out"].size, np.uint8)}


def _strided(dtype: str, arrays: Arrays) -> dict[str, Wanted]:
    codes = quant.cast(arrays["in"].view(np.float32), dtype)
    return {"codes": exact(codes), "out": floats(codes.astype(np.float32))}


def _signs_inputs(each: int) -> dict[str, Array]:
    rng, count = np.random.default_rng(145), THREADS * 8
    x = np.resize(np.concatenate([BOOK, rng.uniform(-4, 4, 200), [np.nan, np.inf, -np.inf]]), count).astype(np.float32)
    scales = rng.uniform(0, 2, (THREADS, 4)).astype(np.float32)
    scales[3], scales[4] = np.nan, 0
    outs = {"codes": np.zeros(count // each, np.uint8), "out": np.zeros(count, np.uint32)}
    return {"in": pattern(x), "scales": pattern(scales.reshape(-1)), **outs}


def _signs(each: int, arrays: Arrays) -> dict[str, Wanted]:
    x, scales = arrays["in"].view(np.float32).reshape(-1, 4), arrays["scales"].view(np.float32).reshape(-1, 2, 2)
    scale, left = (scales[:, i].reshape(-1) for i in (0, 1))
    ones = np.ones_like(scale)
    codes = quant.quantize(x, ones, left, "i4", "signs", codebook=BOOK)
    values = quant.dequantize(codes, scale, left, "i4", "signs", codebook=BOOK)
    stored = quant.pack_codes(codes, 4) if each == 2 else codes
    return {"codes": exact(stored.reshape(-1)), "out": floats(values.reshape(-1))}


def _strided_rows_inputs() -> dict[str, Array]:
    x = np.random.default_rng(144).integers(-2, 18, TOKENS * HEADS * DIMS).astype(np.float32)
    return {"in": pattern(x), "codes": np.zeros(x.size // 2, np.uint8), "out": np.zeros(x.size, np.uint32)}


def _strided_rows(arrays: Arrays) -> dict[str, Wanted]:
    codes = quant.cast(arrays["in"].view(np.float32), "u4").reshape(-1, DIMS)
    stored = quant.pack_codes(codes, 4, strided=True)
    return {"codes": exact(stored.reshape(-1)), "out": floats(codes.reshape(-1).astype(np.float32))}


def _apart_inputs(bits: int) -> dict[str, Array]:
    rows = np.random.default_rng(143).integers(0, 256, 8 * THREADS).astype(np.uint8)
    return {"in": rows, "codes": np.zeros(rows.size * 8 // bits, np.uint8), "bytes": np.zeros(rows.size, np.uint8)}


def _apart(bits: int, arrays: Arrays) -> dict[str, Wanted]:
    codes = quant.unpack_codes(arrays["in"].reshape(-1, 8), bits, strided=True)
    return {"codes": exact(codes.reshape(-1)), "bytes": exact(arrays["in"])}


def _bits_inputs() -> dict[str, Array]:
    words = np.random.default_rng(141).integers(0, 1 << 32, 3 * THREADS, np.uint32)
    outs = {"numbers": np.zeros(4 * THREADS, np.uint32), "words": np.zeros(3 * THREADS, np.uint32)}
    return {"in": words, **outs, "fields": np.zeros(8 * THREADS, np.uint32)}


def _bits(arrays: Arrays) -> dict[str, Wanted]:
    """Fields of the first number: the second four from bit 3 on, xored with 1 and less 1, as signed codes are moved."""
    raw = arrays["in"].view(np.uint8).reshape(-1, 12)
    numbers = (raw.reshape(-1, 4, 3).astype(np.uint32) << np.array([0, 8, 16], np.uint32)).sum(axis=2, dtype=np.uint32)
    first = numbers[:, 0, None]
    low, high = (first >> np.arange(0, 12, 3, np.uint32) & 7, first >> np.arange(3, 15, 3, np.uint32) & 7)
    fields = np.concatenate([low.astype(np.float32), (high ^ 1).astype(np.float32) - 1], axis=1)
    return {"numbers": exact(numbers.reshape(-1)), "words": exact(arrays["in"]), "fields": floats(fields.reshape(-1))}


def _rows_inputs(heads: int, dims: int) -> dict[str, Array]:
    rng = np.random.default_rng(142)
    codes = rng.integers(0, 8, (TOKENS, HEADS, DIMS)).astype(np.uint8)
    codes[1], codes[2, 0] = 3, 3  # zeros throughout
    norms = rng.uniform(0.1, 9, (TOKENS, HEADS // heads, DIMS // dims)).astype(np.float16)
    norms[3], norms[4, 0], norms[5, 0], norms[1, :, ::2] = 0, np.inf, np.nan, np.inf
    return {
        "codes": quant.pack_codes(codes, 3).reshape(-1),
        "norms": pattern(norms),
        "out": np.zeros((7, TOKENS, HEADS, DIMS), np.uint32),
    }


def _rows(heads: int, dims: int, arrays: Arrays) -> dict[str, Wanted]:
    """Values of blocks; of what their first norms are for as a row of 40 dims, for readers of such; and what codes stand for."""
    codes = quant.unpack_codes(arrays["codes"], 3).reshape(TOKENS, HEADS, DIMS)
    norms = arrays["norms"].view(np.float16).reshape(TOKENS, HEADS // heads, DIMS // dims)
    book = np.array(BOOK, np.float32)

    def spread(numbers: Array) -> Array:
        return numbers.repeat(heads, axis=1).repeat(dims, axis=2)

    blocks = codes.reshape(TOKENS, HEADS // heads, heads, DIMS // dims, dims).transpose(0, 1, 3, 2, 4)
    factor = quant.corrected(norms, blocks.reshape(*norms.shape, -1), BOOK)
    with np.errstate(invalid="ignore"):
        values = book[codes] * spread(factor)
        scaled = book[codes] * spread(np.broadcast_to(factor[..., :1], factor.shape))
    eights = codes.reshape(TOKENS, HEADS, DIMS // 8, 8)
    parts = quant.corrected(np.broadcast_to(spread(norms)[..., :1], eights.shape[:3]), eights, BOOK).repeat(8, axis=2)
    return {
        "out": floats(np.stack([values, values, scaled, book[codes], book[codes], scaled, parts]).astype(np.float32))
    }


def probes() -> list[Probe]:
    """All of this module."""
    found = [
        Probe(
            f"library_{kernel}",
            UNIT,
            kernel,
            partial(_codes_inputs, *of),
            partial(_codes, of[0]),
            128,
            (THREADS // 128, 1, 1),
        )
        for kernel, of in CODES.items()
    ]
    found += [
        Probe(f"library_{k}", UNIT, k, partial(_strided_inputs, *of), partial(_strided, of[0]), 128, (2, 1, 1))
        for k, of in STRIDED.items()
    ]
    found += [
        Probe(f"library_{k}", UNIT, k, partial(_apart_inputs, b), partial(_apart, b), 128, (2, 1, 1))
        for k, b in (("narrow_apart_u4", 4), ("narrow_apart_u2", 2))
    ]
    found += [
        Probe(f"library_{k}", UNIT, k, partial(_signs_inputs, n), partial(_signs, n), 128, (2, 1, 1))
        for k, n in (("narrow_signs", 2), ("narrow_signs_strided", 1))
    ]
    rows = (_strided_rows_inputs, _strided_rows, TOKENS * HEADS, (1, 1, 1))
    found.append(Probe("library_narrow_strided_rows", UNIT, "narrow_strided_rows", *rows))
    found.append(Probe("library_narrow_bits", UNIT, "narrow_bits", _bits_inputs, _bits, 128, (THREADS // 128, 1, 1)))
    for kernel, block in ROWS.items():
        found.append(
            Probe(
                f"library_{kernel}", UNIT, kernel, partial(_rows_inputs, *block), partial(_rows, *block), 128, (1, 1, 1)
            )
        )
    return found
