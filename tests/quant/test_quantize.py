"""Scales, codes and values of the device library against the oracle: every recipe, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from kvgen.reference import quant
from tests.quant.inputs import SCALES as HARD_SCALES
from tests.quant.inputs import around, every_bf16, hard_quotients, patterns
from tests.quant.kernels import LANES, SCALES, SIGNED, TARGETS, TYPES, WIDTH, launch, memory

targets = pytest.mark.parametrize("arch", TARGETS)
UNSIGNED = ("u8", "u4")
SPEC_DTYPE = {"u8": "i8", "u4": "i4"}
ZEROS = np.array([0, 128, -3.5, 1e6, np.nan, np.inf, 0.49999997], np.float32)


def packed(codes: np.ndarray, dtype: str) -> np.ndarray:
    """Rows of codes as memory has them."""
    return (quant.pack_nibbles(codes) if TYPES[dtype][1] == 2 else codes).reshape(-1)


def same_floats(found: np.ndarray, wanted: np.ndarray) -> None:
    """Equal, the sign of zero included; NaN where NaN."""
    np.testing.assert_array_equal(found, wanted)
    zero = wanted == 0
    np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(wanted[zero]))


def on_device(arch: str, dtype: str, x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
    """Rows of WIDTH values quantized with an f32 scale (and zero) a row: the packed bytes."""
    out = memory(x.size // TYPES[dtype][1], np.uint8)
    ins = [memory(x.size, np.float32, x.reshape(-1)), memory(len(scale), np.float32, scale)]
    ins += [] if zero is None else [memory(len(zero), np.float32, zero)]
    launch(arch, f"quantize_{dtype}", [out], ins, len(x))
    return out


def values_on_device(arch: str, dtype: str, raw: np.ndarray, scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
    out = memory(len(scale) * WIDTH, np.float32)
    ins = [memory(raw.size, np.uint8, raw), memory(len(scale), np.float32, scale)]
    ins += [] if zero is None else [memory(len(zero), np.float32, zero)]
    launch(arch, f"dequantize_{dtype}", [out], ins, len(scale))
    return out.reshape(-1, WIDTH)


# Each type without instructions of its own, and on an architecture that has them.
CONVERTED = [(d, "sm_80") for d in TYPES] + [("e4m3", "sm_90a"), ("e5m2", "sm_90a"), ("e2m1", "sm_100f")]


@pytest.mark.parametrize(("dtype", "arch"), CONVERTED)
def test_every_bf16_by_hard_scales(dtype: str, arch: str) -> None:
    rows = every_bf16().reshape(-1, WIDTH)
    rng = np.random.default_rng(5)
    x = np.concatenate([rows] * len(HARD_SCALES))
    mixed = rng.permutation(every_bf16()).reshape(-1, WIDTH)  # rows of which one element is ordinary and one is not
    ordinary = rng.standard_normal((len(rows), WIDTH)).astype(np.float32)
    x = np.concatenate([x, mixed, ordinary])
    scale = np.repeat(np.concatenate([HARD_SCALES, np.float32([0.013, 0.0071])]), len(rows))
    zero = np.resize(ZEROS, len(scale)) if dtype in UNSIGNED else None
    codes = quant.quantize(x, scale, zero, SPEC_DTYPE.get(dtype, dtype))
    raw = on_device(arch, dtype, x, scale, zero)
    np.testing.assert_array_equal(raw, packed(codes, dtype))
    found = values_on_device(arch, dtype, raw, scale, zero)
    same_floats(found, quant.dequantize(codes, scale, zero, SPEC_DTYPE.get(dtype, dtype)))


def quotients_on_device(arch: str, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    out = memory(x.size, np.float32)
    ins = [memory(x.size, np.float32, x.reshape(-1)), memory(len(scale), np.float32, scale)]
    launch(arch, "quotients", [out], ins, len(x))
    return out.reshape(x.shape)


@targets
def test_quotients(arch: str) -> None:
    """The shared reciprocal gives what a division does wherever a code could tell."""
    rng = np.random.default_rng(17)
    bits = patterns().view(np.uint32)[: 1 << 15]
    scale = ((bits & 0x007FFFFF) | rng.integers(127 - 50, 127 + 50, 1 << 15).astype(np.uint32) << 23).view(np.float32)
    scale[::4] = (scale[::4].view(np.uint32) & 0xFFFF0000).view(np.float32)
    scale = np.concatenate([scale, np.resize(HARD_SCALES, 1 << 12)])
    with np.errstate(all="ignore"):
        x = (np.exp2(rng.uniform(-27, 20, (len(scale), WIDTH))) * scale.astype(np.float64)[:, None]).astype(np.float32)
        x *= rng.choice([-1, 1], x.shape)
        x[-4096:] = np.resize(patterns(), (4096, WIDTH))
        x[:, 5] = -0.0
        wanted = np.where(scale[:, None] == 0, np.float32(0), x / scale[:, None])
    found = quotients_on_device(arch, x, scale)
    tiny = (np.abs(wanted) < 2.0**-28) & (x != 0) & (scale[:, None] != 0)
    same_floats(found[~tiny], wanted[~tiny])
    assert (np.abs(found[tiny]) <= 2.0**-28).all() and (np.signbit(found[tiny]) == np.signbit(wanted[tiny])).all()


@targets
def test_hard_quotients(arch: str) -> None:
    scale, x = hard_quotients()
    same_floats(quotients_on_device(arch, x, scale), x / scale[:, None])


def amaxes() -> np.ndarray:
    """Every magnitude of bf16, NaN and infinity included, random ones, and what makes scales near powers of two."""
    powers = np.exp2(np.arange(-20, 20))
    return np.concatenate(
        [
            np.abs(every_bf16()),
            np.abs(patterns(1 << 14)),
            *(np.abs(around(m * powers)) for m in (448, 57344, 6, 127, 7)),
        ]
    )


def scales_on_device(arch: str, dtype: str, x: np.ndarray) -> dict[str, np.ndarray]:
    kinds = {**SCALES, "pow2": np.float32}
    outs = {name: memory(len(x), kind) for name, kind in kinds.items()}
    launch(arch, f"scales_{dtype}", list(outs.values()), [memory(len(x), np.float32, x)], len(x))
    return outs


def same_numbers(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    same_floats(found.astype(np.float32), wanted.astype(np.float32))


@targets
@pytest.mark.parametrize("dtype", SIGNED)
def test_scales(dtype: str, arch: str) -> None:
    x = amaxes()
    found = scales_on_device(arch, dtype, x)
    for name in SCALES:
        same_numbers(found[name], quant.choose(x[:, None], dtype, name)[0])
    same_numbers(found["pow2"], quant.choose(x[:, None], dtype, "f32", "pow2")[0])


@targets
@pytest.mark.parametrize("level", [1.0, 0.0123, 0.0, 3e38, 1e-42, float("nan")])
def test_nvfp4_scales(level: float, arch: str) -> None:
    x = amaxes()
    most, two_level = memory(len(x), float8_e4m3fn), memory(len(x), float8_e4m3fn)
    divisor = memory(len(x), np.float32)
    launch(arch, "nvfp4_scales", [most, two_level, divisor], [memory(len(x), np.float32, x), level], len(x))
    same_numbers(most, quant.choose(x[:, None], "e2m1", "e4m3", "max")[0])
    wanted = quant.choose(x[:, None], "e2m1", "e4m3", "global", global_scale=level)[0]
    same_numbers(two_level, wanted)
    with np.errstate(all="ignore"):
        same_floats(divisor, wanted.astype(np.float32) * np.float32(level))


@targets
def test_nvfp4_values(arch: str) -> None:
    """Every pair of codes by every scale."""
    raw = np.resize(np.arange(256, dtype=np.uint8), (256, 256 * 4)).reshape(256 * 256, 4)
    codes = quant.unpack_nibbles(raw)
    scale = np.repeat(np.arange(256, dtype=np.uint8), 256).view(float8_e4m3fn)
    most, two_level = memory(codes.size, np.float32), memory(codes.size, np.float32)
    ins = [memory(raw.size, np.uint8, raw.reshape(-1)), memory(len(scale), float8_e4m3fn, scale), 0.0371]
    launch(arch, "nvfp4_values", [most, two_level], ins, len(scale))
    same_floats(most.reshape(codes.shape), quant.dequantize(codes, scale, None, "e2m1", "max"))
    wanted = quant.dequantize(codes, scale, None, "e2m1", "global", global_scale=0.0371)
    same_floats(two_level.reshape(codes.shape), wanted)


@targets
@pytest.mark.parametrize("dtype", UNSIGNED)
def test_asymmetric_scales(dtype: str, arch: str) -> None:
    some = patterns()[: 1 << 16]
    ends = np.sort(np.stack([every_bf16(), some]), axis=0)
    ends[:, ::3] = ends[0, ::3]  # one value
    narrow = np.stack([patterns()[-(1 << 15) :]] * 2)
    narrow[1] = np.nextafter(narrow[1], np.float32(np.inf))
    ends = np.concatenate([ends, narrow], axis=1)
    outs = {name: memory(2 * ends.shape[1], SCALES[name]) for name in ("f32", "f16", "bf16")}
    low, high = (memory(ends.shape[1], np.float32, end) for end in ends)
    launch(arch, f"scales_{dtype}", list(outs.values()), [low, high], len(low))
    for name, out in outs.items():
        scale, zero = quant.choose(ends.T, SPEC_DTYPE[dtype], name, zero=True)
        assert zero is not None
        same_numbers(out[0::2], scale)
        same_numbers(out[1::2], zero)


SPECIAL = [
    [0.0] * 8, [-0.0] * 8, [1.0, np.nan, *[2.0] * 6], [np.inf, 1, *[0.0] * 6], [-np.inf, *[1.0] * 7], [np.nan] * 8,
    [5.5] * 8, [-5.5] * 8, [1e-40] * 8, [-1e-40, 1e-45, *[0.0] * 6], [3e38, -3e38, *[1.0] * 6], [-0.0, 0.0] * 4,
    [448.0, 464, 480, 1, 0.5, 2**-9, 2**-10, -448], [1000.0, *[1000.5] * 7], [1e-9] * 8, [-1e-9] * 8, [1e6] * 8, [-1e6] * 8,
    [np.inf] * 8, [-np.inf] * 8, [np.inf, -np.inf] * 4, [-1.0, *[np.nan] * 7],
]  # fmt: skip


def check_blocks(arch: str, x: np.ndarray) -> None:
    """Rows through every recipe from end to end, each a block: what one kernel gives is what the next gets."""
    extremes = [memory(len(x), np.float32) for _ in range(3)]
    launch(arch, "extremes", list(extremes), [memory(x.size, np.float32, x.reshape(-1))], len(x))
    amax, low, high = extremes
    same_floats(amax, np.abs(x).max(axis=1))
    np.testing.assert_array_equal(low, x.min(axis=1))
    np.testing.assert_array_equal(high, x.max(axis=1))
    for dtype in SIGNED:
        for name, found in scales_on_device(arch, dtype, amax).items():
            recipe, kind = ("pow2", "f32") if name == "pow2" else ("amax", name)
            scale = quant.choose(x, dtype, kind, recipe)[0]
            same_numbers(found, scale)
            single = found.astype(np.float32)
            raw = on_device(arch, dtype, x, single, None)
            codes = quant.quantize(x, scale, None, dtype, recipe)
            np.testing.assert_array_equal(raw, packed(codes, dtype))
            same_floats(
                values_on_device(arch, dtype, raw, single, None), quant.dequantize(codes, scale, None, dtype, recipe)
            )
    for dtype, spec in SPEC_DTYPE.items():
        outs = {name: memory(2 * len(x), SCALES[name]) for name in ("f32", "f16", "bf16")}
        launch(arch, f"scales_{dtype}", list(outs.values()), [low, high], len(x))
        for name, out in outs.items():
            scale, zero = quant.choose(x, spec, name, zero=True)
            assert zero is not None
            same_numbers(out[0::2], scale)
            same_numbers(out[1::2], zero)
            s, z = out.astype(np.float32).reshape(-1, 2).T
            raw = on_device(arch, dtype, x, s, z)
            codes = quant.quantize(x, scale, zero, spec)
            np.testing.assert_array_equal(raw, packed(codes, dtype))
            same_floats(values_on_device(arch, dtype, raw, s, z), quant.dequantize(codes, scale, zero, spec))
    check_nvfp4(arch, x, amax, 0.37)


def check_nvfp4(arch: str, x: np.ndarray, amax: np.ndarray, level: float) -> None:
    most, two_level = memory(len(x), float8_e4m3fn), memory(len(x), float8_e4m3fn)
    divisor = memory(len(x), np.float32)
    launch(arch, "nvfp4_scales", [most, two_level, divisor], [amax, level], len(x))
    for recipe, scale, single in (("max", most, most.astype(np.float32)), ("global", two_level, divisor)):
        wanted = quant.choose(x, "e2m1", "e4m3", recipe, global_scale=level)[0]
        same_numbers(scale, wanted)
        codes = quant.quantize(x, wanted, None, "e2m1", recipe, level)
        raw = on_device(arch, "e2m1", x, single, None)
        np.testing.assert_array_equal(raw, packed(codes, "e2m1"))
        outs = [memory(x.size, np.float32) for _ in range(2)]
        launch(arch, "nvfp4_values", list(outs), [raw, scale, level], len(x))
        found = outs[recipe == "global"].reshape(x.shape)
        same_floats(found, quant.dequantize(codes, wanted, None, "e2m1", recipe, "f32", level))


@targets
def test_special_blocks(arch: str) -> None:
    check_blocks(arch, np.array(SPECIAL, np.float32))


@targets
def test_drawn_blocks(arch: str) -> None:
    """Rows of one kind of number or of all: of every f16, of every f32, of small ones, and of what has rules of its own."""
    rng, shape = np.random.default_rng(29), (2048, WIDTH)
    kinds = np.stack(
        [
            rng.integers(0, 1 << 16, shape, np.uint16).view(np.float16).astype(np.float32),
            rng.integers(0, 1 << 32, shape, np.uint32).view(np.float32),
            rng.uniform(-8, 8, shape).astype(np.float16).astype(np.float32),
            rng.choice(np.float32([0.0, -0.0, 1e-40, 448.0, 3e38, np.inf, np.nan]), shape),
        ]
    )
    one, each = rng.integers(0, len(kinds), (2048, 1)), rng.integers(0, len(kinds), shape)
    which = np.where(rng.random((2048, 1)) < 0.5, one, each)
    check_blocks(arch, np.take_along_axis(kinds, which[None], axis=0)[0])


@targets
@pytest.mark.parametrize(("lanes", "active"), [(n, m) for n in LANES for m in (32, 16, 8) if n <= m])
def test_reductions(lanes: int, active: int, arch: str) -> None:
    """Groups of lanes, also in a warp of which only the first lanes take part."""
    rng = np.random.default_rng(lanes)
    x = rng.standard_normal(32).astype(np.float32)
    x[[3, 9]] = np.inf, np.nan
    low, high = memory(32, np.float32), memory(32, np.float32)
    launch(arch, "reductions", [low, high], [memory(32, np.float32, x), lanes, active], 32)
    groups = x[:active].reshape(-1, lanes)
    np.testing.assert_array_equal(low[:active], np.repeat(groups.min(axis=1), lanes))
    np.testing.assert_array_equal(high[:active], np.repeat(groups.max(axis=1), lanes))
    assert not low[active:].any() and not high[active:].any()
