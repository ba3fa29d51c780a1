"""Element types to and from f32 (kernels/elements.cu): by the hardware's conversions, and by the bit tricks that stand for
them where there are none (kernels/elements_tricks.cu). One expectation for both.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from tests.golden_gpu.compare import Rule, Wanted
from tests.golden_gpu.float_families import float_words
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import PACKED, TYPES, floats, in_memory, numbers_of, quant
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.quant.inputs import around, every_bf16, patterns


@cache
def casts() -> Array:
    """Every bf16; each code, each middle of two codes, and what lies next to those; other f32."""
    parts = [every_bf16(), patterns(1 << 11)]
    for dtype in TYPES:
        codes = quant.values(np.arange(16 if dtype in PACKED else 256), dtype)
        codes = np.unique(codes[np.isfinite(codes)])
        parts += [around(codes), around((codes[1:] + codes[:-1]) / 2)]
    x = np.concatenate(parts)
    return np.resize(x, -(-len(x) // 1024) * 1024).astype(np.float32)


def _pack_inputs() -> dict[str, Array]:
    x = casts()
    outs = {f"to_{t}": np.zeros(len(x) // (2 if t in PACKED else 1), np.uint8) for t in TYPES}
    return {"in": x.view(np.uint32), **outs, **{f"to_{t}": np.zeros(len(x), np.uint16) for t in ("bf16", "f16")}}


def _pack(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"].view(np.float32)
    found = {f"to_{t}": exact(in_memory(quant.cast(x, t), t)) for t in TYPES}
    with np.errstate(all="ignore"):
        found["to_bf16"] = floats(x.astype(ml_dtypes.bfloat16), "bf16")
        found["to_f16"] = floats(x.astype(np.float16), "f16")
    return found


def _unpack_inputs() -> dict[str, Array]:
    """Every byte at every place of a vector."""
    raw = np.stack([np.roll(np.arange(256, dtype=np.uint8), i * 37) for i in range(8)], axis=1).reshape(-1)
    return {"in": raw, **{f"of_{t}": np.zeros(len(raw) * (2 if t in PACKED else 1), np.uint32) for t in TYPES}}


def _unpack(arrays: Arrays) -> dict[str, Wanted]:
    return {f"of_{t}": floats(numbers_of(arrays["in"], t)) for t in TYPES}


def _widen_inputs() -> dict[str, Array]:
    every = np.arange(1 << 16, dtype=np.uint16)
    return {"in": every, **{f"of_{t}": np.zeros(1 << 16, np.uint32) for t in ("bf16", "f16")}}


def _widen(arrays: Arrays) -> dict[str, Wanted]:
    with np.errstate(invalid="ignore"):
        return {
            "of_bf16": floats(arrays["in"].view(ml_dtypes.bfloat16).astype(np.float32)),
            "of_f16": floats(arrays["in"].view(np.float16).astype(np.float32)),
        }


# What they are made of ----------------------------------------------------------------------------------------------


def _bytes_inputs() -> dict[str, Array]:
    a, b = float_words("f32", 512, 90), float_words("f32", 512, 91)
    c = np.random.default_rng(92).integers(0, 1 << 32, 512, np.uint32)
    b[::7] = a[::7]
    return {"a": a, "b": b, "c": c, "out": np.zeros((12, 512), np.uint32)}


def _permuted(low: int, high: int, selector: int) -> int:
    """prmt.b32: a byte for each nibble, or eight copies of its sign."""
    both, out = high << 32 | low, 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> 8 * (nibble & 7) & 255
        out |= (byte if nibble < 8 else 255 * (byte >> 7)) << 8 * i
    return out


def _bytes(arrays: Arrays) -> dict[str, Wanted]:
    x, y, z = (arrays[n].astype(np.uint32) for n in "abc")
    w = x * np.uint32(2654435761) + z
    four = np.stack([x, y, z, w], axis=1).copy()
    planes = four.view(np.uint8).reshape(-1, 4, 4)
    together = [np.ascontiguousarray(planes[:, :, i]).view(np.uint32)[:, 0] for i in range(4)]
    permuted = [_permuted(*(int(v) for v in row)) for row in zip(x, y, z, strict=True)]
    a, b = x.view(np.float32), y.view(np.float32)
    with np.errstate(invalid="ignore"):
        nan = np.isnan(a) | np.isnan(b)
        # PTX orders zeros: -0 is below +0.
        low = np.where((a < b) | ((a == b) & np.signbit(a)), a, b)
        high = np.where((a < b) | ((a == b) & np.signbit(a)), b, a)
        low, high = (np.where(nan, np.float32(np.nan), v).astype(np.float32) for v in (low, high))
        halves = x.copy().view(np.float16).astype(np.float32).reshape(-1, 2)
    rows = [np.asarray(row, np.uint32) for row in (permuted, (y & x) | (z & ~x), *together, *together[:2])]
    rows += [pattern(v.astype(np.float32)) for v in (low, high, halves[:, 0], halves[:, 1])]
    bits, nan_rule = Rule("b32"), Rule("f32", any_nan=True)
    return {"out": Wanted(np.stack(rows), (bits,) * 8 + (nan_rule,) * 4)}


def _codes_inputs() -> dict[str, Array]:
    x = np.concatenate([casts()[(1 << 16) :: 3], every_bf16()[::61]])
    x = np.resize(x, -(-len(x) // 128) * 128)
    return {"in": pattern(x), "out": np.zeros((17, len(x)), np.uint32)}


def _word(codes: list[Array], bits: int) -> Array:
    out = np.zeros(len(codes[0]), np.uint32)
    for i, code in enumerate(codes):
        out |= code.astype(np.uint32) << np.uint32(bits * i)
    return out


def _codes(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"].view(np.float32)
    nan = np.isnan(x)
    rows: list[Array] = []
    for dtype in ("e4m3", "e5m2", "e2m1"):
        magnitude = quant.cast(np.abs(np.where(nan, np.float32(0), x)), dtype).astype(np.uint32)
        rows.append(np.where(nan, np.uint32(7 if dtype == "e2m1" else 0xFE), magnitude))
    with np.errstate(all="ignore"):
        for most in (127, 7):
            rows.append(np.where(nan, 0xFFFF, np.rint(np.clip(x, -most, most)) + most + 1).astype(np.uint32))
        for most in (255, 15):
            rows.append(np.where(nan, 0, np.rint(np.clip(x, 0, most))).astype(np.uint32) | np.uint32(0x4B000000))
        small = quant.cast(x, "e4m3")
        rows += [
            small.astype(np.uint32),
            pattern(quant.values(small, "e4m3").astype(np.float32)),
            pattern(x * np.float32(2.0**-9)),
        ]
    signs = {4: (1, -1, 1, -1), 8: (1, 1, -1, -1, 1, 1, -1, -1)}
    for dtype in ("e4m3", "e5m2", "e2m1", "i8", "u8", "i4", "u4"):
        count = 8 if dtype in PACKED else 4
        rows.append(
            _word([quant.cast(np.copysign(x, s * np.copysign(1, x)), dtype) for s in signs[count]], 32 // count)
        )
    bits, nan_rule = Rule("b32"), Rule("f32", any_nan=True)
    return {"out": Wanted(np.stack(rows).astype(np.uint32), (bits,) * 8 + (nan_rule,) * 2 + (bits,) * 7)}


def _words_inputs() -> dict[str, Array]:
    words = np.random.default_rng(93).integers(0, 1 << 32, 256, np.uint32)
    words[:64] = np.arange(256, dtype=np.uint8).view(np.uint32)
    return {"in": words, "out": np.zeros((256, 64), np.uint32)}


def _words(arrays: Arrays) -> dict[str, Wanted]:
    raw = arrays["in"].view(np.uint8)
    columns = [numbers_of(raw, t).reshape(256, -1) for t in ("e4m3", "e5m2", "e2m1", "i8", "u8", "i4", "u4")]
    signed, nibbles = raw.reshape(256, 4).astype(np.float32) - 128, quant.unpack_nibbles(raw).reshape(256, 8)
    columns += [signed, (nibbles ^ 8).astype(np.float32) - 8]
    columns.append(np.where([False, True, False, True], (nibbles[:, :4] ^ 8).astype(np.float32) - 8, nibbles[:, :4]))
    largest = np.array([448, 57344, 6, 127, 255, 7, 15, 0], np.float32)
    out = np.concatenate([*columns, np.tile(largest, (256, 1))], axis=1).astype(np.float32)
    return {"out": floats(out)}


def _signs_inputs() -> dict[str, Array]:
    x = np.resize(casts()[:: (1 << 16) // 509], 1024)
    rng = np.random.default_rng(94)
    codes = np.where(rng.random(1024) < 0.1, 0xFE, rng.integers(0, 0x7F, 1024)).astype(np.uint8)
    return {"codes": codes.view(np.uint32), "in": pattern(x), "out": np.zeros(256, np.uint32)}


def _signs(arrays: Arrays) -> dict[str, Wanted]:
    codes, x = arrays["codes"].view(np.uint8), arrays["in"].view(np.float32)
    signed = np.where(codes == 0xFE, 0x7F, codes | np.signbit(x) * np.uint8(128)).astype(np.uint8)
    return {"out": exact(signed.view(np.uint32))}


def probes() -> list[Probe]:
    """All of this module."""
    found = []
    codes = len(_codes_inputs()["in"])
    for unit, suffix in (("elements", ""), ("elements_tricks", "_tricks")):
        for name, inputs, wanted, block, blocks in (
            ("pack", _pack_inputs, _pack, 128, len(casts()) // 1024),
            ("unpack", _unpack_inputs, _unpack, 128, 2),
            ("widen", _widen_inputs, _widen, 128, 128),
            ("bytes", _bytes_inputs, _bytes, 128, 4),
            ("codes", _codes_inputs, _codes, 128, codes // 128),
            ("words", _words_inputs, _words, 64, 4),
        ):
            grid = (blocks, 1, 1)
            found.append(Probe(f"library_{name}{suffix}", unit, f"elements_{name}", inputs, wanted, block, grid))
    signs = Probe("library_signs", "elements_tricks", "elements_signs", _signs_inputs, _signs, 128, (2, 1, 1))
    return [*found, signs]
