"""Pages of the records of 2026, byte for byte as their writers make them: stated here in NumPy, without kvgen's oracle.

The writers are FlashMLA's tests/quant.py, vLLM's fused_compress_quant_cache and FlashInfer's of DeepSeek V4; docs/quantization.md
says what becomes of NaN and infinity, which they leave open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime.cpu import machine
from tests.ops.test_records import LATENT, SETS
from tests.support.harness import package
from tests.support.memory import CANARY, Raw, aligned

BF16: Final = np.dtype(ml_dtypes.bfloat16)


# Scales and codes of blocks [..., n] -----------------------------------------------------------------------------------


def exponents(quotient: Raw) -> Raw:
    """The byte of the power of two at or above each f32, on its bits; NaN's 255 for what is not finite."""
    up = (quotient.view(np.uint32) + np.uint32(0x7FFFFF)) >> 23
    return np.where(np.isfinite(quotient), np.maximum(up, 1), 255).astype(np.uint8)


def fp8(x: Raw, scale: Raw) -> Raw:
    """e4m3 bytes of x / scale, saturating; 0x7f for NaN."""
    with np.errstate(all="ignore"):
        codes = np.clip(x / scale[..., None], -448, 448).astype(np.float32)
    return np.where(np.isnan(codes), 0x7F, codes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).astype(np.uint8)


def fp4(x: Raw, scale: Raw) -> Raw:
    """Bytes of two e2m1 of x / scale, saturating, the even one low; NaN is 6, what rounds to zero +0, and so is all under 0."""
    with np.errstate(all="ignore"):
        codes = np.where(scale[..., None] == 0, 0, x / scale[..., None]).astype(np.float32)
    codes = np.where(np.isnan(codes), 6, np.clip(codes, -6, 6)).astype(np.float32)
    nibble = codes.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    nibble = np.where(nibble == 0, 0, nibble).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(x), -1)
    return (nibble[:, 0::2] | nibble[:, 1::2] << 4).astype(np.uint8)


def powers(byte: Raw) -> Raw:
    """2^(byte - 127); 255 is NaN."""
    return np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127)).astype(np.float32)


def mx(x: Raw, group: int, largest: int, amax_min: float, scale_min: float = 0.0) -> tuple[Raw, Raw]:
    """(codes, e8m0 bytes) of rows `[T, dims]`."""
    blocks = x.reshape(len(x), -1, group)
    amax = np.maximum(np.abs(blocks).max(-1), np.float32(amax_min))
    byte = exponents(np.maximum(amax * (np.float32(1) / np.float32(largest)), np.float32(scale_min)))
    return (fp8 if largest == 448 else fp4)(blocks, powers(byte)).reshape(len(x), -1), byte


def nvfp4(x: Raw, scale_min: float = 0.0) -> tuple[Raw, Raw]:
    """(codes, e4m3 bytes) of rows `[T, dims]`, 16 dims a scale."""
    blocks = x.reshape(len(x), -1, 16)
    amax = np.abs(blocks).max(-1)
    wanted = np.clip(np.maximum(amax / np.float32(6), np.float32(scale_min)), 0, 448).astype(np.float32)
    byte = np.where(np.isnan(wanted), 0x7F, wanted.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).astype(np.uint8)
    return fp4(blocks, byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)), byte


def padded(scales: Raw, width: int) -> Raw:
    """Zero bytes behind each row's."""
    return np.pad(scales, ((0, 0), (0, width - scales.shape[1])))


# Records ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Rows of `row` bytes, and `footer` bytes a token behind all rows of a page; pages of `stride(P)` bytes.

    `parts(rows)` are both, `[T, row]` and `[T, footer]`, of bf16 rows `[T, 512]`.
    """

    row: int
    footer: int
    align: int
    parts: Callable[[Raw], tuple[Raw, Raw]]

    def stride(self, tokens: int) -> int:
        """Bytes from a page to the next, as the writer has them."""
        size = (self.row + self.footer) * tokens
        return -(-size // self.align) * self.align


def rope(rows: Raw) -> Raw:
    """The last 64 dims as they are."""
    return np.ascontiguousarray(rows[:, 448:]).view(np.uint8).reshape(len(rows), 128)


def v4(rows: Raw) -> tuple[Raw, Raw]:
    codes, scales = mx(rows[:, :448].astype(np.float32), 64, 448, 1e-4)
    return np.concatenate([codes, rope(rows)], 1), padded(scales, 8)


def v41_footer(rows: Raw) -> tuple[Raw, Raw]:
    return mx(rows.astype(np.float32), 32, 448, 1e-4)


def v41_inline(rows: Raw) -> tuple[Raw, Raw]:
    return np.concatenate(mx(rows.astype(np.float32), 32, 448, 0.0, 1e-4), 1), np.zeros((len(rows), 0), np.uint8)


def v4_nvfp4(rows: Raw) -> tuple[Raw, Raw]:
    codes, scales = nvfp4(rows[:, :448].astype(np.float32))
    return np.concatenate([codes, rope(rows)], 1), padded(scales, 32)


def v4_mxfp4(rows: Raw) -> tuple[Raw, Raw]:
    codes, scales = mx(rows[:, :448].astype(np.float32), 32, 6, 0.0)
    return np.concatenate([codes, padded(scales, 16), rope(rows)], 1), np.zeros((len(rows), 0), np.uint8)


RECORDS: Final = {
    "v4": Record(576, 8, 576, v4),
    "v41_footer": Record(512, 16, 16, v41_footer),
    "v41_inline": Record(528, 0, 16, v41_inline),
    "v4_nvfp4": Record(352, 32, 16, v4_nvfp4),
    "v4_mxfp4": Record(368, 0, 16, v4_mxfp4),
}


def new_rows(count: int) -> Raw:
    """Rows of every size: ordinary ones, zeros, those below floors and at the ends of scales, amax at powers of two, NaN,
    infinity.
    """
    rng = np.random.default_rng(31)
    x = rng.standard_normal((count, 512)) * np.exp2(rng.integers(-6, 7, (count, 512 // 16)).repeat(16, 1))
    x[1] = 0
    x[2] *= 1e-6
    x[3] = np.exp2(rng.integers(-133, 128, 512))
    x[4, ::8] = 448 * np.exp2(rng.integers(-20, 10, 64).astype(np.float64))
    x[5, ::16] = 6 * np.exp2(rng.integers(-20, 10, 32).astype(np.float64))
    x[6, [0, 40, 300, 500]] = np.nan
    x[7, [17, 64, 320, 511]] = np.inf, -np.inf, np.inf, -np.inf
    x[8] = np.where(x[8] < 0, -0.0, 2e38)
    return x.astype(BF16)


def pool_of(name: str, tokens: int, pages: int) -> tuple[Raw, Raw]:
    """(the tensor that the cache takes, its memory): pages as far apart as the writer has them, full of canaries."""
    record, (tensor,) = RECORDS[name], LATENT[name].storage.tensors
    stride = record.stride(tokens)
    memory = aligned(pages * stride)
    shape = [pages if n == "pages" else int(n) for n in tensor.shape]
    strides = [stride if step is None else step for step in tensor.strides]
    return np.ndarray(shape, np.uint8, memory.data, 0, strides), memory


@pytest.mark.parametrize("name", RECORDS)
def test_pages(name: str) -> None:
    """What append writes is the writer's page, bytes of padding included, and beside it nothing; gather reads it back."""
    record, tokens, counts = RECORDS[name], LATENT[name].page_size, (7, 1, 4)
    module, table = package(SETS[name]), np.array([[4, 0, 6, 7], [2, 99, 99, 99], [5, 1, 99, 99]], np.int32)
    pool, memory = pool_of(name, tokens, 8)
    rows, offsets = new_rows(12), np.cumsum([0, *counts]).astype(np.int32)
    cache = module.Cache([pool], lengths=np.zeros(3, np.int32), page_table=table)
    out = np.zeros((12, 1, 512), BF16)
    with machine(mode="check"):
        module.append(cache[0], rows[:, None], offsets)
        module.gather(cache[0], offsets, out)

    expected = np.full_like(memory, CANARY).reshape(8, -1)
    for b, count in enumerate(counts):
        row, footer = record.parts(rows[offsets[b] : offsets[b] + count])
        for t in range(count):
            page, slot = expected[table[b, t // tokens]], t % tokens
            page[slot * record.row : (slot + 1) * record.row] = row[t]
            begin = tokens * record.row + slot * record.footer
            page[begin : begin + record.footer] = footer[t]
    np.testing.assert_array_equal(memory.reshape(8, -1), expected)
    held_back(name, rows, out[:, 0])


def held_back(name: str, rows: Raw, out: Raw) -> None:
    """Values come back within half a step of their block; the RoPE part bit for bit where it is stored as it is."""
    if LATENT[name].plain_dims:
        assert out[:, 448:].tobytes() == rows[:, 448:].tobytes()
    x, y = rows.astype(np.float64), out.astype(np.float64)
    quant = LATENT[name].quant
    assert quant is not None and quant.block.dim is not None
    dims = 512 - LATENT[name].plain_dims
    blocks, found = (a[:, :dims].reshape(12, -1, quant.block.dim) for a in (x, y))
    finite = np.isfinite(blocks).all(-1)
    amax = np.abs(blocks).max(-1, keepdims=True)
    step = 2.0**-3 if quant.dtype == "e4m3" else 2.0**-1.5  # of the largest, with a scale of the next power of two
    least = 2.0**-10 if quant.dtype == "e2m1" and quant.scale_dtype == "e4m3" else 1e-4
    saturates = quant.scale_dtype == "e4m3"
    fits = finite & ((amax[..., 0] <= 448 * 6) | (not saturates))
    assert (np.abs(found - blocks)[fits] <= (step * amax + 2 * least)[fits]).all()
    if not saturates:  # a fault stays visible in all of its block
        assert np.isnan(found[~finite]).all()


def test_pages_that_are_not_aligned() -> None:
    """Pages a multiple of 576 bytes apart; Cache.empty makes such, and others are refused by what they are."""
    module = package(SETS["v4"])
    pool, _ = pool_of("v4", 3, 4)
    made = module.Cache.empty(layers=1, requests=2, pages=4)
    assert made[0].dims["bytes_page_stride"] == 3 * 576 + 576
    tables = {"lengths": np.zeros(1, np.int32), "page_table": np.zeros((1, 1), np.int32)}
    loose = np.zeros((4, 1760), np.uint8)[:, : pool.shape[1]]
    with pytest.raises(
        ArgumentError, match=r"pool\[0\]: got pages 1760 bytes apart; the layout's page_align=576 takes"
    ) as said:
        module.Cache([loose], **tables)
    assert "pass a view with a page stride of 2304 bytes" in str(said.value)
    module.Cache([loose[:1]], **tables)  # one page is as far as any from the next


@pytest.mark.parametrize("name", RECORDS)
def test_sizes(name: str) -> None:
    """The bytes of a token are the record's."""
    record, cache = RECORDS[name], LATENT[name]
    (tensor,) = cache.storage.tensors
    size = int(np.prod([n for n in tensor.shape if isinstance(n, int)]))
    assert size == -(-(record.row + record.footer) * cache.page_size // 16) * 16
    assert cache.latent_part == cache.head_dim == 512
