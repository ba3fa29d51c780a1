"""The oracle against what others say: ml_dtypes' casts, and numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvgen.reference import quant
from tests.quant.inputs import around, every_bf16, every_half, patterns

ROOT = Path(__file__).resolve().parents[2]
NARROW = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
INF, NAN = np.inf, np.nan


@pytest.mark.parametrize("dtype", NARROW)
def test_values_are_those_of_ml_dtypes(dtype: str) -> None:
    codes = np.arange(16 if dtype == "e2m1" else 256, dtype=np.uint8)
    wanted = codes.view(NARROW[dtype]).astype(np.float64)
    found = quant.values(codes, dtype)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found)[found == 0], np.signbit(wanted)[wanted == 0])


@pytest.mark.parametrize("dtype", NARROW)
def test_casts_are_those_of_ml_dtypes_where_it_has_a_number(dtype: str) -> None:
    x = np.concatenate([every_half(), patterns(1 << 16)])
    x = x[np.abs(x) <= quant.LARGEST[dtype]]
    wanted = x.astype(NARROW[dtype]).view(np.uint8)
    if dtype == "e2m1":
        wanted = np.where(wanted == 8, 0, wanted)
    np.testing.assert_array_equal(quant.cast(x, dtype), wanted)


@pytest.mark.parametrize(
    ("dtype", "known"),
    [
        ("e4m3", [(448, 0x7E), (464, 0x7E), (480, 0x7E), (INF, 0x7E), (-INF, 0xFE), (NAN, 0x7F), (-0.0, 0x80), (0.0, 0),
                  (440, 0x7E), (432, 0x7E), (1, 0x38), (1.0625, 0x38), (1.07, 0x39), (1.1875, 0x3A), (2**-9, 1), (2**-10, 0),
                  (2**-10 * 1.01, 1), (-(2**-11), 0x80), (2**-6, 8), (2**-6 - 2**-9, 7), (2**-6 - 2**-10, 8)]),
        ("e5m2", [(57344, 0x7B), (61440, 0x7B), (65536, 0x7B), (INF, 0x7B), (-INF, 0xFB), (NAN, 0x7F), (-0.0, 0x80), (1, 0x3C),
                  (1.125, 0x3C), (1.375, 0x3E), (2**-16, 1), (2**-17, 0), (2**-17 * 1.01, 1), (2**-14, 4)]),
        ("e2m1", [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5, 6), (7, 7), (INF, 7), (-INF, 15), (NAN, 7),
                  (-0.0, 0), (-0.25, 0), (-0.2501, 9), (0.2501, 1), (0.7499, 1), (1.2501, 3), (1.7499, 3), (2.5001, 5),
                  (3.4999, 5), (5.0001, 7), (-6, 15)]),
        ("i8", [(127, 127), (127.5, 127), (1e9, 127), (-127, 129), (-128, 129), (-INF, 129), (INF, 127), (NAN, 0), (0.5, 0),
                (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, 254)]),
        ("u8", [(255, 255), (255.5, 255), (INF, 255), (-1, 0), (-INF, 0), (NAN, 0), (0.5, 0), (1.5, 2), (254.5, 254)]),
        ("i4", [(7, 7), (8, 7), (-7, 9), (-8, 9), (-INF, 9), (NAN, 0), (0.5, 0), (1.5, 2), (-1, 15)]),
        ("u4", [(15, 15), (16, 15), (INF, 15), (-1, 0), (NAN, 0), (14.5, 14), (13.5, 14)]),
    ],
)  # fmt: skip
def test_known_casts(dtype: str, known: list[tuple[float, int]]) -> None:
    x, codes = zip(*known, strict=True)
    assert quant.cast(np.array(x, np.float64), dtype).tolist() == list(codes)


def test_a_nan_loses_its_sign() -> None:
    negative = np.array([0xFFC00000], np.uint32).view(np.float32)
    assert [int(quant.cast(negative, d)[0]) for d in ("e4m3", "e5m2", "e2m1", "i8")] == [0x7F, 0x7F, 7, 0]


def test_ties_go_to_even_everywhere() -> None:
    for dtype in NARROW:
        codes = np.arange(7 if dtype == "e2m1" else 123, dtype=np.uint8)
        low, high = quant.values(codes, dtype), quant.values(codes + 1, dtype)
        found = quant.cast(around((low + high) / 2)[: 3 * len(codes)], dtype).reshape(3, -1)
        np.testing.assert_array_equal(found, [codes + codes % 2, codes, codes + 1])


@pytest.mark.parametrize(
    ("recipe", "dtype", "block", "scale"),
    [
        ("amax", "e4m3", [448, -1], 1.0),
        ("amax", "e4m3", [0, 0], 0.0),
        ("amax", "i8", [-254, 3], 2.0),
        ("amax", "e4m3", [1, NAN], NAN),
        ("amax", "e4m3", [1, -INF], INF),
        ("pow2", "e4m3", [448, 0], 1.0),
        ("pow2", "e4m3", [449, 0], 2.0),
        ("pow2", "e4m3", [1, 0], 2.0**-8),
        ("pow2", "e4m3", [0, 0], 2.0**-126),
        ("pow2", "e4m3", [NAN, 0], NAN),
        ("pow2", "e4m3", [INF, 0], INF),
        ("max", "e2m1", [6, 0], 1.0),
        ("max", "e2m1", [0, 0], 2.0**-9),
        ("max", "e2m1", [1e9, 0], 448.0),
        ("max", "e2m1", [INF, 0], 448.0),
        ("max", "e2m1", [NAN, 0], NAN),
        ("global", "e2m1", [24, 0], 2.0),
        ("global", "e2m1", [INF, 0], 448.0),
        ("global", "e2m1", [0, 0], 0.0),
    ],
)
def test_known_scales(recipe: str, dtype: str, block: list[float], scale: float) -> None:
    kind = "e4m3" if recipe in ("max", "global") else "f32"
    found, zero = quant.choose(np.array([block]), dtype, kind, recipe, global_scale=2.0)
    assert zero is None
    np.testing.assert_array_equal(found.astype(np.float64), [scale])


@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "recipe", "floors", "block", "scale"),
    [
        ("e4m3", "e8m0", "pow2", {}, [449, 0], 2.0),
        ("e5m2", "e8m0", "pow2", {}, [57344, 0], 1.0),
        ("e2m1", "e8m0", "pow2", {}, [3.4e38, 0], 2.0**126),
        ("e2m1", "e8m0", "pow2", {}, [0, 0], 2.0**-126),
        ("e4m3", "e8m0", "pow2", {}, [INF, 0], NAN),
        ("e4m3", "e8m0", "pow2", {}, [NAN, 0], NAN),
        ("e4m3", "e8m0", "pow2", {"amax_min": 1e-4}, [0, 0], 2.0**-22),  # DeepSeek's and vLLM's least
        ("e4m3", "e8m0", "pow2", {"scale_min": 1e-4}, [0, 0], 2.0**-13),  # FlashMLA's
        ("e4m3", "e8m0", "pow2", {"amax_min": 1e-4}, [448, NAN], NAN),
        ("e2m1", "e8m0", "pow2", {"amax_min": 6 * 2.0**-126}, [0, 0], 2.0**-126),
        ("e4m3", "f32", "amax", {"amax_min": 448.0}, [1, 2], 1.0),
        ("e4m3", "f32", "amax", {"scale_min": 0.5}, [1, 448], 1.0),
        ("e2m1", "e4m3", "amax", {}, [0, 0], 0.0),
        ("e2m1", "e4m3", "amax", {"scale_min": 2.0**-9}, [0, 0], 2.0**-9),
        ("e2m1", "e4m3", "amax", {"scale_min": 2.0**-9}, [1e9, 0], 448.0),
    ],
)
def test_known_scales_of_2026(
    dtype: str, scale_dtype: str, recipe: str, floors: dict[str, float], block: list[float], scale: float
) -> None:
    found, zero = quant.choose(np.array([block]), dtype, scale_dtype, recipe, **floors)
    assert zero is None
    np.testing.assert_array_equal(found.astype(np.float64), [scale])


def test_a_reciprocal_finds_the_powers_of_a_division() -> None:
    """Engines multiply by f32(1 / M): of every bf16 that is the same power of two."""
    x = np.abs(every_bf16())
    x = x[np.isfinite(x) & (x >= 6 * 2.0**-126)]
    for dtype in ("e4m3", "e2m1"):
        byte = ((x * (np.float32(1) / np.float32(quant.LARGEST[dtype]))).view(np.uint32) + 0x7FFFFF) >> 23
        np.testing.assert_array_equal(
            quant.choose(x[:, None], dtype, "e8m0", "pow2")[0].view(np.uint8), np.maximum(byte, 1)
        )


@pytest.mark.parametrize(
    ("block", "scale", "zero", "codes", "back"),
    [
        ([0, 255], 1, 0, [0, 255], [0, 255]),
        ([-510, 0], 2, 255, [0, 255], [-510, 0]),
        ([7, 7], 7, -1, [0, 0], [7, 7]),
        ([-7, -7], 7, 1, [0, 0], [-7, -7]),
        ([0, 0], 1, 0, [0, 0], [0, 0]),
        ([-1, NAN], NAN, NAN, [0, 0], [NAN, NAN]),
    ],
)
def test_known_asymmetric(block: list[float], scale: float, zero: float, codes: list[int], back: list[float]) -> None:
    x = np.array([block])
    s, z = quant.choose(x, "i8", "f32", zero=True)
    assert z is not None
    np.testing.assert_array_equal([s[0], z[0]], [scale, zero])
    found = quant.quantize(x, s, z, "i8")
    np.testing.assert_array_equal(found, [codes])
    np.testing.assert_array_equal(quant.dequantize(found, s, z, "i8"), [back])


def test_the_docs_have_the_scale_of_zeros() -> None:
    """docs/quantization.md says what a block of zeros stores, in the words of what is chosen for one."""

    def stored(recipe: str, zero: bool = False) -> str:
        nvfp4 = recipe in ("max", "global")
        scale, point = quant.choose(
            np.zeros((1, 16)), "e2m1" if nvfp4 else "i8", "e4m3" if nvfp4 else "f32", recipe, zero, 0.5
        )
        assert point is None if not zero else (point is not None and point[0] == 0)
        significand, exponent = np.frexp(float(scale[0]))
        assert significand in (0, 0.5)
        return "0" if not significand else "1" if exponent == 1 else f"2^{exponent - 1}"

    assert stored("amax") == stored("global")
    text = " ".join((ROOT / "docs" / "quantization.md").read_text(encoding="utf-8").split())
    assert (
        f'it stores {stored("amax")} with `"amax"` and `"global"`, {stored("pow2")} with `"pow2"`, {stored("max")} with '
        f'`"max"`, and {stored("amax", zero=True)} with a zero point, which is 0.'
    ) in text
    assert rf"s = \|c\|, {stored('amax', zero=True)} for zeros, z = -sign(c)" in text


def test_max_goes_through_e4m3() -> None:
    scale = np.array([1.125]).astype(ml_dtypes.float8_e4m3fn)
    codes = quant.cast(np.array([[3, 6, 0.5, -1.5]]), "e2m1")
    found = quant.dequantize(codes, scale, None, "e2m1", "max", "bf16")
    # Products 3.375, 6.75, 0.5625, -1.6875: ties but for the third, to even mantissas.
    np.testing.assert_array_equal(found.astype(np.float64), [[3.5, 7.0, 0.5625, -1.75]])
    most = np.array([448.0]).astype(ml_dtypes.float8_e4m3fn)
    assert float(quant.dequantize(codes, most, None, "e2m1", "max", "f32")[0, 1]) == 448.0


def test_nibbles() -> None:
    codes = np.arange(16, dtype=np.uint8).reshape(2, 8)
    packed = quant.pack_nibbles(codes)
    assert packed[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    np.testing.assert_array_equal(quant.unpack_nibbles(packed), codes)
