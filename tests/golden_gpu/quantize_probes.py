"""Quantization (kernels/quantize.cu): extremes, scales, quotients, and special blocks through every recipe."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import numpy as np

from tests.golden_gpu.compare import Wanted
from tests.golden_gpu.memory_probes import exact
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.oracle import floats, in_memory, quant
from tests.golden_gpu.probe import Arrays, Probe, pattern
from tests.quant.inputs import SCALES, around, every_bf16, hard_quotients, patterns

GLOBAL: Final = 0.0371
SINGLE: Final = struct.pack("<f", GLOBAL)
NAN, INF = float("nan"), float("inf")
SPECIAL: Final = [
    [0.0] * 8, [-0.0] * 8, [1.0, NAN, *[2.0] * 6], [INF, 1, *[0.0] * 6], [-INF, *[1.0] * 7], [NAN] * 8,
    [5.5] * 8, [-5.5] * 8, [1e-40] * 8, [-1e-40, 1e-45, *[0.0] * 6], [3e38, -3e38, *[1.0] * 6], [-0.0, 0.0] * 4,
    [448.0, 464, 480, 1, 0.5, 2**-9, 2**-10, -448], [1000.0, *[1000.5] * 7], [1e-9] * 8, [-1e-9] * 8, [1e6] * 8, [-1e6] * 8,
    [INF] * 8, [-INF] * 8, [INF, -INF] * 4, [-1.0, *[NAN] * 7], [65504.0, -65520, *[1.0] * 6],
    [6.0, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25],
    [127.0, 126.5, 0.5, 1.5, 2.5, -126.5, -0.5, -1.5], [2.0**-126, *[2.0**-127] * 7],
]  # fmt: skip


@cache
def blocks() -> Array:
    """512 blocks of 8: special ones, neighbouring and shuffled bf16, random f32, ordinary ones near each other."""
    rng = np.random.default_rng(95)
    rows = [np.array(SPECIAL, np.float32)]
    rows += [every_bf16().reshape(-1, 8)[::64], rng.permutation(every_bf16()).reshape(-1, 8)[:128]]
    rows += [patterns(1 << 11)[-1024:].reshape(-1, 8), rng.standard_normal((128, 8)).astype(np.float32)]
    return np.concatenate(rows)[:512]


# Numbers ------------------------------------------------------------------------------------------------------------


def _divide_inputs() -> dict[str, Array]:
    """Quotients next to the middle of two f32, every kind of scale, signed zeros; none below 2^-28, whose last bit is free."""
    scale, x = (a[::16] for a in hard_quotients())
    other = np.repeat(SCALES, 64)
    scale = np.concatenate([scale, other])
    x = np.concatenate([x, np.resize(blocks(), (len(other), 8))])
    with np.errstate(all="ignore"):
        quotient = np.abs(x / scale[:, None])
    x = np.where((quotient < 2.0**-28) & (scale[:, None] != 0), np.copysign(np.float32(0), x), x).astype(np.float32)
    return {"in": pattern(x), "scale": pattern(scale), "out": np.zeros(x.shape, np.uint32)}


def _divide(arrays: Arrays) -> dict[str, Wanted]:
    x, scale = arrays["in"].view(np.float32), arrays["scale"].view(np.float32)[:, None]
    with np.errstate(all="ignore"):
        return {"out": floats(np.where(scale == 0, np.float32(0), x / scale))}


def _extremes_inputs() -> dict[str, Array]:
    return {"in": pattern(blocks()), **{n: np.zeros(512, np.uint32) for n in ("amax", "lo", "hi")}}


def _extremes(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["in"].view(np.float32)
    return {
        "amax": floats(np.abs(x).max(axis=1)),
        "lo": floats(x.min(axis=1), any_zero=True),
        "hi": floats(x.max(axis=1), any_zero=True),
    }


GROUPS: Final = ((1, 32), (2, 32), (4, 20), (8, 8), (16, 16), (32, 32))


def _reduce_inputs() -> dict[str, Array]:
    x = np.random.default_rng(96).standard_normal((6, 32)).astype(np.float32)
    x[1:3, [3, 9]] = INF, NAN
    x[3, 5], x[4, 0], x[5, 31] = -INF, NAN, NAN
    x[0, [1, 2]] = NAN, -0.0
    return {"in": pattern(x), **{n: np.full((6, 32), 0x12345678, np.uint32) for n in ("lo", "hi")}}


def _reduce(arrays: Arrays) -> dict[str, Wanted]:
    x, found = arrays["in"].view(np.float32), dict[str, Wanted]()
    for name in ("lo", "hi"):
        out = arrays[name].view(np.float32).copy()
        for row, (lanes, active) in enumerate(GROUPS):
            groups = x[row, :active].reshape(-1, lanes)
            out[row, :active] = np.repeat(groups.min(axis=1) if name == "lo" else groups.max(axis=1), lanes)
        found[name] = floats(out)
    return found


SIGNED: Final = ("e4m3", "e5m2", "e2m1", "i8", "i4")
KINDS: Final = {
    "f32": ("f32", np.uint32),
    "half": ("f16", np.uint16),
    "brain": ("bf16", np.uint16),
    "small": ("e4m3", np.uint8),
}


@cache
def amaxes() -> Array:
    """Magnitudes of bf16, what makes scales near powers of two, subnormal, infinite, NaN."""
    powers = np.exp2(np.arange(-20, 20))
    near = [np.abs(around(m * powers))[::2] for m in (448, 57344, 6, 127, 7)]
    special = np.array([0, 1e-45, 1e-40, 2.0**-126, 3.4e38, INF, NAN], np.float32)
    x = np.concatenate([np.abs(every_bf16())[:32768:16], *near, special])
    return np.resize(x, -(-len(x) // 128) * 128).astype(np.float32)


def _scales_inputs() -> dict[str, Array]:
    x = amaxes()
    outs: dict[str, Array] = {n: np.zeros((5, len(x)), kind) for n, (_, kind) in KINDS.items()}
    last = {"most": np.uint8, "two_level": np.uint8, "divisor": np.uint32}
    return {
        "amax": pattern(x),
        **outs,
        "power": np.zeros((5, len(x)), np.uint32),
        **{n: np.zeros(len(x), k) for n, k in last.items()},
    }


def _scales(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["amax"].view(np.float32)[:, None]

    def each(kind: str, recipe: str = "amax") -> Array:
        return np.stack([quant.choose(x, dtype, kind, recipe)[0] for dtype in SIGNED])

    found = {name: floats(each(kind), kind) for name, (kind, _) in KINDS.items()}
    found["power"] = floats(each("f32", "pow2"))
    two_level = quant.choose(x, "e2m1", "e4m3", "global", global_scale=GLOBAL)[0]
    with np.errstate(all="ignore"):
        divisor = two_level.astype(np.float32) * np.float32(GLOBAL)
    most = quant.choose(x, "e2m1", "e4m3", "max")[0]
    return found | {"most": floats(most, "e4m3"), "two_level": floats(two_level, "e4m3"), "divisor": floats(divisor)}


def _powers_inputs() -> dict[str, Array]:
    x = amaxes()
    kinds = {"exponent": np.uint8, "back": np.uint32, "raised": np.uint32, "floored": np.uint8}
    return {"amax": pattern(x), **{n: np.zeros(len(x), k) for n, k in kinds.items()}}


def _powers(arrays: Arrays) -> dict[str, Wanted]:
    x = arrays["amax"].view(np.float32)[:, None]
    power = quant.choose(x, "e4m3", "e8m0", "pow2")[0]
    floored = quant.choose(x, "e4m3", "e8m0", "pow2", scale_min=1e-4)[0]
    return {
        "exponent": exact(power.view(np.uint8)),
        "back": floats(power.astype(np.float32)),
        "raised": floats(quant.choose(x, "e2m1", "f32", amax_min=1e-4)[0]),
        "floored": exact(floored.view(np.uint8)),
    }


def _exponents_inputs() -> dict[str, Array]:
    return {"bytes": np.arange(256, dtype=np.uint8), "out": np.zeros(256, np.uint32)}


def _exponents(arrays: Arrays) -> dict[str, Wanted]:
    """2^(byte - 127); 255 is NaN."""
    with np.errstate(over="ignore"):
        numbers = np.exp2(arrays["bytes"].astype(np.float64) - 127)
    return {"out": floats(np.where(arrays["bytes"] == 255, np.nan, numbers).astype(np.float32))}


# Recipes ------------------------------------------------------------------------------------------------------------

# Kernel -> the spec's dtype, scale dtype, recipe, zero point.
RECIPES: Final[dict[str, tuple[str, str, str, bool]]] = {
    "recipe_e4m3_f32": ("e4m3", "f32", "amax", False),
    "recipe_e5m2_f16": ("e5m2", "f16", "amax", False),
    "recipe_e2m1_e4m3": ("e2m1", "e4m3", "amax", False),
    "recipe_i8_bf16": ("i8", "bf16", "amax", False),
    "recipe_i4_f16": ("i4", "f16", "amax", False),
    "recipe_e4m3_pow2": ("e4m3", "f32", "pow2", False),
    "recipe_u8_f32": ("i8", "f32", "amax", True),
    "recipe_u8_f16": ("i8", "f16", "amax", True),
    "recipe_u4_bf16": ("i4", "bf16", "amax", True),
    "recipe_u4_least": ("i4", "f16", "min", True),
    "recipe_nvfp4_max": ("e2m1", "e4m3", "max", False),
    "recipe_nvfp4_global": ("e2m1", "e4m3", "global", False),
}
BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2, "e4m3": 1}


def _recipe_inputs(kernel: str) -> dict[str, Array]:
    dtype, kind, _, zero = RECIPES[kernel]
    x = blocks()
    return {
        "in": pattern(x),
        "scale": np.zeros((len(x), 1 + zero), f"u{BYTES[kind]}"),
        "codes": np.zeros(x.size // (2 if dtype in ("e2m1", "i4") else 1), np.uint8),
        "out": np.zeros(x.shape, np.uint32),
    }


def _recipe(kernel: str, arrays: Arrays) -> dict[str, Wanted]:
    dtype, kind, recipe, with_zero = RECIPES[kernel]
    x, level = arrays["in"].view(np.float32), GLOBAL if recipe == "global" else None
    scale, zero = quant.choose(x, dtype, kind, recipe, with_zero, level)
    codes = quant.quantize(x, scale, zero, dtype, recipe, level)
    values = quant.dequantize(codes, scale, zero, dtype, recipe, "f32", level)
    both = scale[:, None] if zero is None else np.stack([scale, zero], axis=1)
    return {"scale": floats(both, kind), "codes": exact(in_memory(codes, dtype)), "out": floats(values)}


BOOK: Final = (-2.5, -2, -1.5, -1.25, -1, -0.5, -0.25, -0.125, 0, 0.125, 0.5, 0.75, 1, 1.5, 2, 3)


def _book_inputs() -> dict[str, Array]:
    x = blocks()
    halves = {n: np.zeros(len(x) // 2, np.uint16) for n in ("norms", "units")}
    codes = {"codes": np.zeros(len(x), np.uint32), "rounded": np.zeros(4 * len(x), np.uint8)}
    codes["thirds"] = np.zeros(len(x), np.uint32)
    return {"in": pattern(x), **halves, **codes, "out": np.zeros(x.shape, np.uint32)}


def _book(arrays: Arrays) -> dict[str, Wanted]:
    """Norms of blocks of 16, codes of x / norm, codes of x / norm in f16; blocks of 8 under their largest magnitude."""
    x = arrays["in"].view(np.float32).reshape(-1, 16)
    unit, norm = (quant.choose(x, "i4", "f16", recipe, codebook=BOOK)[0] for recipe in ("unit", "norm"))
    codes, rounded = (
        quant.pack_nibbles(quant.quantize(x, s, None, "i4", codebook=BOOK)).reshape(-1) for s in (quant.norms(x), norm)
    )
    thirds = np.stack([quant.norms(x) / np.float32(3), np.zeros(len(x), np.float32)], axis=1)
    eights = x.reshape(-1, 8)
    scale = quant.choose(eights, "i4", "f32", codebook=BOOK)[0]
    some = quant.quantize(eights, scale, None, "i4", codebook=BOOK)
    return {
        "norms": floats(norm, "f16"),
        "units": floats(unit, "f16"),
        "codes": exact(codes.view(np.uint32)),
        "rounded": exact(rounded),
        "thirds": floats(thirds.reshape(-1)),
        "out": floats(quant.dequantize(some, scale, None, "i4", codebook=BOOK)),
    }


def _words_inputs() -> dict[str, Array]:
    words = np.random.default_rng(98).integers(0, 2**32, 512, dtype=np.uint32)
    return {"words": words, "out": np.zeros((512, 8), np.uint32)}


def _words(arrays: Arrays) -> dict[str, Wanted]:
    codes = arrays["words"][:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    return {"words": exact(arrays["words"]), "out": floats(np.array(BOOK, np.float32)[codes])}


def _values_inputs() -> dict[str, Array]:
    outs = {n: np.zeros((256, 512), np.uint32) for n in ("most", "two_level")}
    return {"bytes": np.arange(256, dtype=np.uint8), **outs}


def _values(arrays: Arrays) -> dict[str, Wanted]:
    codes = np.broadcast_to(quant.unpack_nibbles(arrays["bytes"]), (256, 512))
    scale = np.arange(256, dtype=np.uint8).view(quant.float8_e4m3fn)
    return {
        "most": floats(quant.dequantize(codes, scale, None, "e2m1", "max")),
        "two_level": floats(quant.dequantize(codes, scale, None, "e2m1", "global", global_scale=GLOBAL)),
    }


def probes() -> list[Probe]:
    """All of this module."""

    def probe(
        name: str,
        inputs: Callable[[], Any],
        wanted: Callable[[Any], Any],
        threads: int,
        tail: list[bytes],
        block: int = 128,
    ) -> Probe:
        kernel = name.removeprefix("library_")
        return Probe(name, "quantize", kernel, inputs, wanted, block, (threads // block, 1, 1), tail=tail)

    found = [
        probe("library_quantize_divide", _divide_inputs, _divide, len(_divide_inputs()["scale"]), [], 64),
        probe("library_quantize_extremes", _extremes_inputs, _extremes, 512, []),
        probe("library_quantize_reduce", _reduce_inputs, _reduce, 192, [], 32),
        probe("library_quantize_scales", _scales_inputs, _scales, len(amaxes()), []),
        probe("library_quantize_powers", _powers_inputs, _powers, len(amaxes()), []),
        probe("library_quantize_exponents", _exponents_inputs, _exponents, 256, []),
        probe("library_recipe_book", _book_inputs, _book, 512, []),
        probe("library_recipe_book_words", _words_inputs, _words, 512, []),
        probe("library_recipe_nvfp4_values", _values_inputs, _values, 64 * 256, [SINGLE], 64),
    ]
    for kernel in RECIPES:
        tail = [SINGLE] if kernel == "recipe_nvfp4_global" else []
        found.append(probe(f"library_{kernel}", partial(_recipe_inputs, kernel), partial(_recipe, kernel), 512, tail))
    return found
