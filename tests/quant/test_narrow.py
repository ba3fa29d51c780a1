"""Codes of 3 and 2 bits, packed and unpacked in vectors of every width, and the norms of what codes of a codebook stand for."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from kvgen.compile import compile_unit, default_cache
from kvgen.emulator import Library, build
from kvgen.reference import quant
from kvgen.schema.codebooks import lloyd_max
from tests.quant.inputs import around, every_half, patterns
from tests.quant.kernels import launched, memory, unit

# Elements of the vectors, from the fewest whose codes fill bytes to the most that a row of 16 bytes at a time has.
WIDTHS = {"u3": (8, 16, 32, 64, 128), "u2": (4, 8, 16, 64)}
DEVICE = {"u3": "u3", "u2": "u2x4"}
BITS = {"u3": 3, "u2": 2}
# Of unlike magnitudes, none of them a power of two, one of them 0.
BOOK = (-2.7, -1.3, -0.4, 0.0, 0.11, 0.9, 1.7, 3.9)

_HEAD = """\
#include "../device/quant/quantize.cuh"
#include "../device/quant/codebook.cuh"

__device__ __forceinline__ uint64_t thread() { return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; }
"""
_OF_WIDTH = """
extern "C" __global__ void pack_NAME_WIDTH(Raw<T, WIDTH>* out, const float* in) {
  float x[WIDTH];
#pragma unroll
  for (uint32_t i = 0; i < WIDTH; ++i) x[i] = in[thread() * WIDTH + i];
  pack<T>(out[thread()], x);
}
extern "C" __global__ void unpack_NAME_WIDTH(float* out, const Raw<T, WIDTH>* in) {
  float x[WIDTH];
  unpack<T>(x, in[thread()]);
#pragma unroll
  for (uint32_t i = 0; i < WIDTH; ++i) out[thread() * WIDTH + i] = x[i];
}
"""
_BOOK = """
__device__ const float kValues[] = {VALUES};
struct Book {
  static constexpr float kLargest = 3.9f, kSquareBase = 32.0f, kNormUnit = 0.001953125f;
  __device__ static __forceinline__ float value(uint32_t code) { return kValues[code]; }
  __device__ static __forceinline__ uint32_t code_of(float x) {
    constexpr float kMiddles[] = {MIDDLES};
    uint32_t code = 0;
#pragma unroll
    for (uint32_t i = 0; i < 7; ++i) code += x >= kMiddles[i];
    return code;
  }
};
extern "C" __global__ void codes(Raw<Coded<u3, Book>, 16>* out, float* values, uint32_t* squares, const float* in) {
  float x[16];
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) x[i] = in[thread() * 16 + i];
  pack<Coded<u3, Book>>(out[thread()], x);
  unpack<Coded<u3, Book>>(x, out[thread()]);
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) values[thread() * 16 + i] = x[i];
  squares[thread()] = squares_in_units<Book>(x);
}
extern "C" __global__ void corrected(float* out, const float* norms, const uint32_t* squares) {
  out[thread()] = corrected_norm<Book>(norms[thread()], squares[thread()]);
}
"""


@cache
def library() -> Library:
    parts = [_HEAD]
    for name, widths in WIDTHS.items():
        parts += [
            _OF_WIDTH.replace("NAME", name).replace("<T", f"<{DEVICE[name]}").replace("WIDTH", str(width))
            for width in widths
        ]
    book = np.array(BOOK, np.float32)
    values, middles = (", ".join(f"{float(x)!r}f" for x in numbers) for numbers in (book, (book[:-1] + book[1:]) / 2))
    text = "".join([*parts, _BOOK.replace("VALUES", values).replace("MIDDLES", middles)])
    ptx = compile_unit(unit(text, "corrected"), "sm_90a", "ptx", cache=default_cache()).data.decode()
    return build([ptx], mode="check")


CASES = [(name, width) for name, widths in WIDTHS.items() for width in widths]


@pytest.mark.parametrize(("name", "width"), CASES)
def test_pack(name: str, width: int) -> None:
    most = 2 ** BITS[name] - 1
    x = np.concatenate([around(np.arange(-2, most + 3) / 2), every_half()[:: 64 // width + 1], patterns(1 << 10)])
    x = np.resize(x, -(-len(x) // (128 * width)) * 128 * width).astype(np.float32)
    out = memory(len(x) * BITS[name] // 8, np.uint8)
    launched(library(), f"pack_{name}_{width}", [out], [memory(len(x), np.float32, x)], len(x) // width)
    np.testing.assert_array_equal(out, quant.pack_codes(quant.cast(x, name), BITS[name]))


@pytest.mark.parametrize(("name", "width"), CASES)
def test_unpack(name: str, width: int) -> None:
    """Every byte at every place of a vector, beside others."""
    count = width * BITS[name] // 8
    raw = np.stack([np.roll(np.arange(256, dtype=np.uint8), i * 37) for i in range(count)], axis=1).reshape(-1)
    out = memory(256 * width, np.float32)
    launched(library(), f"unpack_{name}_{width}", [out], [memory(len(raw), np.uint8, raw)], 256)
    np.testing.assert_array_equal(out, quant.unpack_codes(raw, BITS[name]))


def test_codes_of_a_book_and_their_squares() -> None:
    """Codes nearest to numbers, the upper one at a tie, 0 for NaN; values; squares to the unit, whatever their order."""
    book = np.array(BOOK, np.float32)
    x = np.concatenate(
        [around(np.concatenate([book, (book[:-1] + book[1:]) / np.float32(2)])), [np.nan, np.inf, -np.inf, -0.0]]
    )
    x = np.resize(x, 128 * 16).astype(np.float32)
    out, values, squares = memory(len(x) * 3 // 8, np.uint8), memory(len(x), np.float32), memory(128, np.uint32)
    launched(library(), "codes", [out, values, squares], [memory(len(x), np.float32, x)], 128)
    codes = quant.quantize(x[:, None], np.ones(len(x), np.float32), None, "i3", codebook=BOOK)[:, 0]
    np.testing.assert_array_equal(out, quant.pack_codes(codes, 3))
    np.testing.assert_array_equal(values, book[codes])
    unit_of = 2.0**-18  # 3.9 < 2^2: squares of 22 bits
    exact = book.astype(np.float64) ** 2
    np.testing.assert_array_equal(squares, np.rint(exact / unit_of)[codes].reshape(128, 16).sum(axis=1))
    norms = np.resize(np.array([1.0, 0.0, 3.7, 1e-7, 65504.0, np.inf, np.nan], np.float32), 128)
    corrected = memory(128, np.float32)
    none = squares.copy()
    none[::5] = 0
    launched(library(), "corrected", [corrected], [memory(128, np.float32, norms), memory(128, np.uint32, none)], 128)
    rows = np.where(none[:, None] == 0, 3, codes.reshape(128, 16))
    np.testing.assert_array_equal(corrected, quant.corrected(norms, rows, BOOK))


def test_a_corrected_norm_is_the_norm_over_that_of_the_values() -> None:
    """To a part in 2^22 of what f64 gives, for codes of rotated rows."""
    rng, book = np.random.default_rng(3), lloyd_max(4, 128)
    norms = rng.uniform(0.1, 100, 200).astype(np.float32)
    codes = quant.quantize(rng.standard_normal((200, 128)) / np.sqrt(128), np.ones(200), None, "i4", codebook=book)
    values = np.array(book, np.float32).astype(np.float64)[codes]
    np.testing.assert_allclose(
        quant.corrected(norms, codes, book), norms / np.linalg.norm(values, axis=1), rtol=2.0**-22
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_lie_from_the_lowest_bit_up(bits: int) -> None:
    """Code i takes bits i * bits and on of the bytes as one number."""
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 24)).astype(np.uint8)
    packed = quant.pack_codes(codes, bits)
    whole = [int.from_bytes(row.tobytes(), "little") for row in packed]
    assert whole == [sum(int(c) << i * bits for i, c in enumerate(row)) for row in codes]
    np.testing.assert_array_equal(quant.unpack_codes(packed, bits), codes)


@pytest.mark.parametrize("bits", [2, 4])
def test_strided_codes_are_a_rows_bytes_apart(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 24)).astype(np.uint8)
    packed, width = quant.pack_codes(codes, bits, strided=True), 24 * bits // 8
    for row, byte in zip(codes, packed, strict=True):
        assert [int(b) for b in byte] == [
            sum(int(row[i + width * n]) << bits * n for n in range(8 // bits)) for i in range(width)
        ]
    np.testing.assert_array_equal(quant.unpack_codes(packed, bits, strided=True), codes)


def test_signs_by_hand() -> None:
    """u = (0.6, 0.8, 0, 0) of the norm 5 is nearest to (0.5, 1, 0.5, 0.5): the larger of two at 0; what is left is
    (0.1, -0.2, -0.5, -0.5)."""
    book, row = (-1.0, -0.5, 0.5, 1.0), np.array([[3, 4, 0, 0]], np.float32)
    scale, left = quant.choose(row, "i3", "f32", "signs", True, codebook=book)
    assert left is not None
    assert scale == [5] and np.isclose(left, [np.sqrt((0.01 + 0.04 + 0.25 + 0.25) / 4)], rtol=1e-6).all()
    codes = quant.quantize(row, scale, left, "i3", "signs", codebook=book)
    assert codes.tolist() == [[2 + 4, 3, 2, 2]]
    values = quant.dequantize(codes, scale, left, "i3", "signs", codebook=book)[0]
    np.testing.assert_allclose(values, 5 * np.array([0.5 + left[0], 1 - left[0], *[0.5 - left[0]] * 2]), rtol=1e-6)


def test_signs_of_zeros_and_of_nan() -> None:
    """Zeros have the code of 0, whose value is as far from 0 as what is left, and read back as 0; NaN makes all of a row NaN."""
    book = lloyd_max(3, 64)
    rows = np.zeros((3, 64), np.float32)
    rows[1, 5], rows[2, 5] = np.nan, np.inf
    scale, left = quant.choose(rows, "i4", "f16", "signs", True, codebook=book)
    assert left is not None and scale[0] == 0 and left[0] == np.float16(book[4])
    norm = quant.norms(rows)
    codes = quant.quantize(rows, norm, left, "i4", "signs", codebook=book)
    assert (codes[0] == 4).all() and codes[1, 5] == 0
    values = quant.dequantize(codes, scale, left, "i4", "signs", codebook=book)
    assert (values[0] == 0).all() and np.isnan(values[1:]).all()
