"""Pages of the records of 2026, byte for byte as their writers make them: stated here in NumPy, without kvgen's oracle.

The writers are FlashMLA's tests/quant.py, vLLM's fused_compress_quant_cache and FlashInfer's of DeepSeek V4; docs/quantization.md
says what becomes of NaN and infinity, which they leave open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from kvgen import Layout
from kvgen.errors import ArgumentError
from kvgen.export.pools import contiguous
from kvgen.expr.nodes import const
from kvgen.runtime.cpu import machine
from kvgen.verify.memory import HostMemory
from kvgen.verify.run import Verifier
from tests.ops.test_records import LATENT, SETS
from tests.support.harness import package
from tests.support.memory import CANARY, Raw, aligned

BF16: Final = np.dtype(ml_dtypes.bfloat16)


# Scales and codes of blocks [..., n] -----------------------------------------------------------------------------------


class Coded(NamedTuple):
    """Rows `[T, ...]`: the bytes of codes, those of scales, and the numbers that both stand for, in f32."""

    codes: Raw
    scales: Raw
    numbers: Raw


def exponents(quotient: Raw) -> Raw:
    """The byte of the power of two at or above each f32, on its bits; NaN's 255 for what is not finite."""
    up = (quotient.view(np.uint32) + np.uint32(0x7FFFFF)) >> 23
    return np.where(np.isfinite(quotient), np.maximum(up, 1), 255).astype(np.uint8)


def powers(byte: Raw) -> Raw:
    """2^(byte - 127); 255 is NaN."""
    return np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127)).astype(np.float32)


def fp8(quotient: Raw) -> tuple[Raw, Raw]:
    """(e4m3 bytes, their numbers), saturating; 0x7f for NaN."""
    codes = np.clip(quotient, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    byte = np.where(np.isnan(quotient), 0x7F, codes.view(np.uint8)).astype(np.uint8)
    return byte, byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def fp4(quotient: Raw) -> tuple[Raw, Raw]:
    """(bytes of two e2m1, the even one low; their numbers), saturating; NaN is 6, what rounds to zero +0."""
    wanted = np.where(np.isnan(quotient), 6, np.clip(quotient, -6, 6)).astype(np.float32)
    numbers = wanted.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    numbers = np.where(numbers == 0, np.float32(0), numbers)
    nibble = numbers.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(len(quotient), -1)
    return (nibble[:, 0::2] | nibble[:, 1::2] << 4).astype(np.uint8), numbers


def coded(blocks: Raw, scale: Raw, byte: Raw, cast: Callable[[Raw], tuple[Raw, Raw]]) -> Coded:
    """Blocks `[T, blocks, n]` under their scales, whose bytes are `byte`; all zero where a scale is."""
    with np.errstate(all="ignore"):
        codes, numbers = cast(np.where(scale[..., None] == 0, np.float32(0), blocks / scale[..., None]))
        return Coded(codes.reshape(len(blocks), -1), byte, (numbers * scale[..., None]).reshape(len(blocks), -1))


def mx(x: Raw, group: int, cast: Callable[[Raw], tuple[Raw, Raw]], amax_min: float, scale_min: float = 0.0) -> Coded:
    """Rows `[T, dims]` with e8m0 scales of so many dims."""
    blocks = x.reshape(len(x), -1, group)
    amax = np.maximum(np.abs(blocks).max(-1), np.float32(amax_min))
    byte = exponents(np.maximum(amax * (np.float32(1) / np.float32(448 if cast is fp8 else 6)), np.float32(scale_min)))
    return coded(blocks, powers(byte), byte, cast)


def nvfp4(x: Raw, scale_min: float = 0.0) -> Coded:
    """Rows `[T, dims]` in e2m1 with e4m3 scales of 16 dims."""
    blocks = x.reshape(len(x), -1, 16)
    wanted = np.clip(np.maximum(np.abs(blocks).max(-1) / np.float32(6), np.float32(scale_min)), 0, 448)
    byte, scale = fp8(wanted.astype(np.float32))
    return coded(blocks, scale, byte, fp4)


def padded(scales: Raw, width: int) -> Raw:
    """Zero bytes behind each row's."""
    return np.pad(scales, ((0, 0), (0, width - scales.shape[1])))


# Records ---------------------------------------------------------------------------------------------------------------


class Pages(NamedTuple):
    """Rows as a record has them: `[T, row]` bytes, `[T, footer]` bytes behind all rows of a page, and what reads back,
    `[T, 512]` bf16."""

    rows: Raw
    footers: Raw
    back: Raw


@dataclass(frozen=True)
class Record:
    """`row` bytes and `footer` bytes a token, pages at multiples of `align` bytes; `pages` makes them of bf16 rows `[T, 512]`."""

    row: int
    footer: int
    align: int
    pages: Callable[[Raw], Pages]

    def stride(self, tokens: int) -> int:
        """Bytes from a page to the next, as the writer has them."""
        size = (self.row + self.footer) * tokens
        return -(-size // self.align) * self.align


def plain(rows: Raw) -> Raw:
    """The bytes of the last 64 dims as they are."""
    return np.ascontiguousarray(rows[:, 448:]).view(np.uint8).reshape(len(rows), 128)


def mixed(rows: Raw, own: Coded) -> Raw:
    """What 448 coded dims and the RoPE part read back."""
    with np.errstate(over="ignore"):
        return np.concatenate([own.numbers.astype(BF16), rows[:, 448:]], 1)


def nothing(rows: Raw) -> Raw:
    """No footer."""
    return np.zeros((len(rows), 0), np.uint8)


def v4(rows: Raw) -> Pages:
    own = mx(rows[:, :448].astype(np.float32), 64, fp8, 1e-4)
    return Pages(np.concatenate([own.codes, plain(rows)], 1), padded(own.scales, 8), mixed(rows, own))


def v41_footer(rows: Raw) -> Pages:
    own = mx(rows.astype(np.float32), 32, fp8, 1e-4)
    return Pages(own.codes, own.scales, own.numbers.astype(BF16))


def v41_inline(rows: Raw) -> Pages:
    own = mx(rows.astype(np.float32), 32, fp8, 0.0, 1e-4)
    return Pages(np.concatenate([own.codes, own.scales], 1), nothing(rows), own.numbers.astype(BF16))


def v41_fp4_footer(rows: Raw) -> Pages:
    own = nvfp4(rows.astype(np.float32), 2.0**-9)
    return Pages(own.codes, own.scales, own.numbers.astype(BF16))


def v41_fp4_inline(rows: Raw) -> Pages:
    own = v41_fp4_footer(rows)
    return Pages(np.concatenate([own.rows, own.footers], 1), nothing(rows), own.back)


def v4_nvfp4(rows: Raw) -> Pages:
    own = nvfp4(rows[:, :448].astype(np.float32))
    return Pages(np.concatenate([own.codes, plain(rows)], 1), padded(own.scales, 32), mixed(rows, own))


def v4_mxfp4(rows: Raw) -> Pages:
    own = mx(rows[:, :448].astype(np.float32), 32, fp4, 0.0)
    return Pages(np.concatenate([own.codes, padded(own.scales, 16), plain(rows)], 1), nothing(rows), mixed(rows, own))


RECORDS: Final = {
    "v4": Record(576, 8, 576, v4),
    "v41_footer": Record(512, 16, 16, v41_footer),
    "v41_inline": Record(528, 0, 16, v41_inline),
    "v41_fp4_footer": Record(256, 32, 256, v41_fp4_footer),
    "v41_fp4_inline": Record(288, 0, 16, v41_fp4_inline),
    "v4_nvfp4": Record(352, 32, 16, v4_nvfp4),
    "v4_mxfp4": Record(368, 0, 16, v4_mxfp4),
}
COUNTS: Final = (9, 1, 4)


def new_rows() -> Raw:
    """Rows of every size: ordinary ones, zeros, those below floors and at the ends of scales, amax at powers of two, NaN and
    infinity, and every code of e4m3 and of e2m1 under a scale of 1.
    """
    rng, count = np.random.default_rng(31), sum(COUNTS)
    x = rng.standard_normal((count, 512)) * np.exp2(rng.integers(-6, 7, (count, 512 // 16)).repeat(16, 1))
    x[1] = 0
    x[2] *= 1e-6
    x[3] = np.exp2(rng.integers(-133, 128, 512))
    x[4, ::8] = 448 * np.exp2(rng.integers(-20, 10, 64).astype(np.float64))
    x[5, ::16] = 6 * np.exp2(rng.integers(-20, 10, 32).astype(np.float64))
    x[6, [0, 40, 300, 500]] = np.nan
    x[7, [17, 64, 320, 511]] = np.inf, -np.inf, np.inf, -np.inf
    x[8] = np.where(x[8] < 0, -0.0, 2e38)
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    x[9:11].reshape(-1, 16)[:, 1:] = np.resize(codes[np.isfinite(codes)], 64 * 15).reshape(64, 15)
    x[9:11].reshape(-1, 16)[:, 0] = 448
    x[11].reshape(-1, 16)[...] = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    return x.astype(BF16)


def pool_of(name: str, tokens: int, pages: int) -> tuple[Raw, Raw]:
    """(the tensor that the cache takes, its memory): pages as far apart as the writer has them, full of canaries."""
    record, (tensor,) = RECORDS[name], LATENT[name].storage.tensors
    stride = record.stride(tokens)
    memory = aligned(pages * stride)
    shape = [pages if n == "pages" else int(n) for n in tensor.shape]
    strides = [stride if step is None else step for step in tensor.strides]
    return np.ndarray(shape, np.uint8, memory.data, 0, strides), memory


def appended(name: str, rows: Raw) -> tuple[Raw, Raw, Raw]:
    """(memory by page, the page table, what gather reads back) after append of all rows to three requests."""
    module, table = package(SETS[name]), np.array([[4, 0, 6, 7, 8], [2, *[99] * 4], [5, 1, *[99] * 3]], np.int32)
    pool, memory = pool_of(name, LATENT[name].page_size, 10)
    offsets, out = np.cumsum([0, *COUNTS]).astype(np.int32), np.zeros((len(rows), 1, 512), BF16)
    cache = module.Cache([pool], lengths=np.zeros(3, np.int32), page_table=table)
    with machine(mode="check"):
        module.append(cache[0], rows[:, None], offsets)
        module.gather(cache[0], offsets, out)
    return memory.reshape(10, -1), table, out[:, 0]


@pytest.mark.parametrize("name", RECORDS)
def test_pages(name: str) -> None:
    """What append writes is the writer's page, bytes of padding included, and beside it nothing; gather reads back what the
    codes and scales stand for, the RoPE part bit for bit where it is stored as it is."""
    record, tokens, rows = RECORDS[name], LATENT[name].page_size, new_rows()
    memory, table, out = appended(name, rows)
    own, expected = record.pages(rows), np.full_like(memory, CANARY)
    row = iter(range(len(rows)))
    for b, count in enumerate(COUNTS):
        for t in range(count):
            page, slot, mine = expected[table[b, t // tokens]], t % tokens, next(row)
            page[slot * record.row : (slot + 1) * record.row] = own.rows[mine]
            begin = tokens * record.row + slot * record.footer
            page[begin : begin + record.footer] = own.footers[mine]
    np.testing.assert_array_equal(memory, expected)
    nan = np.isnan(own.back.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), nan)
    np.testing.assert_array_equal(out.view(np.uint16)[~nan], own.back.view(np.uint16)[~nan])
    if LATENT[name].plain_dims:
        assert out[:, 448:].tobytes() == rows[:, 448:].tobytes()


def test_what_rows_have() -> None:
    """Every code there is to write, the least scale and NaN's; e4m3's -NaN is none, nor is e2m1's -0."""
    rows = new_rows().astype(np.float32)
    wide, narrow, two = mx(rows, 32, fp8, 1e-4), mx(rows, 32, fp4, 0.0), nvfp4(rows)
    assert set(np.unique(wide.codes)) == set(range(255))
    for own in (narrow, two):
        assert set(np.unique(np.stack([own.codes & 15, own.codes >> 4]))) == set(range(16)) - {8}
    assert {127 - 22, 127, 255} <= set(np.unique(wide.scales)) and {1, 255} <= set(np.unique(narrow.scales))
    assert {0, 0x7E, 0x7F} <= set(np.unique(two.scales))


@pytest.mark.parametrize(
    ("name", "bits", "scales", "floor"), [("v41", 8, 16, 448 * 2.0**-14), ("v41_fp4", 4, 32, -1.0)]
)
def test_footers_and_scales_in_rows_differ_in_place_alone(name: str, bits: int, scales: int, floor: float) -> None:
    """V4.1's two forms; of fp8 rows, which have floors of two kinds, blocks above both."""
    rows = new_rows()
    (behind, table, _), (inside, _, _) = (appended(f"{name}_{place}", rows) for place in ("footer", "inline"))
    footer, row = (LATENT[f"{name}_{place}"].page_size for place in ("footer", "inline"))
    amax, codes = np.abs(rows.astype(np.float32)).reshape(len(rows), scales, -1).max(-1), 512 * bits // 8
    for t in range(COUNTS[0]):
        page, slot = behind[table[0, t // footer]], t % footer
        of_footer = page[codes * slot :][:codes], page[codes * footer + scales * slot :][:scales]
        whole = inside[table[0, t // row]][(codes + scales) * (t % row) :][: codes + scales]
        alike = ~(amax[t] <= floor)
        np.testing.assert_array_equal(whole[:codes].reshape(scales, -1)[alike], of_footer[0].reshape(scales, -1)[alike])
        np.testing.assert_array_equal(whole[codes:][alike], of_footer[1][alike])
        assert alike.any() or t in (1, 2)


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


def test_pools_that_no_access_can_load() -> None:
    """Rows and footers are read 16 bytes at a time: what lies elsewhere is refused before a launch."""
    tables = {"lengths": np.zeros(1, np.int32), "page_table": np.zeros((1, 1), np.int32)}
    memory, module = aligned(8192), package(SETS["v41_footer"])
    for offset, stride, said in (
        (0, 1064, "must be a multiple of 16 elements"),
        (8, 1072, "8 past a multiple of 16 bytes"),
    ):
        with pytest.raises(ArgumentError, match=said):
            module.Cache([np.ndarray((4, 1056), np.uint8, memory.data, offset, (stride, 1))], **tables)
    module.Cache([np.ndarray((4, 1056), np.uint8, memory.data, 0, (1072, 1))], **tables)


def test_verify_lays_out_aligned_pages() -> None:
    """`kvgen verify` brings pages that are as far apart, and finds what is written between them."""
    kernels = SETS["v4"]
    (append, *_) = kernels.ops
    result = Verifier(kernels, package(kernels), HostMemory(), quick=True).run(append)
    assert result.status == "ok" and [c.wrong for c in result.cases] == [()] * len(result.cases)


def test_exported_sources_know_how_far_apart_pages_lie() -> None:
    """layer_of() of an exported set steps over what aligns pages; where layers lie in a page, the caller fills in the step."""
    steps = {}
    for page_size in (3, 72):
        (tensor,) = LATENT["v4"].model_copy(update={"page_size": page_size}).storage.tensors
        steps[page_size] = contiguous(tensor)
    assert [str(found["page"]) for found in steps.values() if found] == [str(const(n)) for n in (2304, 73 * 576)]
    axis = Layout(kv="page layer token head dim", page_align=576)
    (tensor,) = LATENT["v4"].model_copy(update={"layout": axis}).storage.tensors
    assert contiguous(tensor) is None


@pytest.mark.parametrize("name", RECORDS)
def test_sizes(name: str) -> None:
    """The bytes of a token are the record's."""
    record, cache = RECORDS[name], LATENT[name]
    (tensor,) = cache.storage.tensors
    size = int(np.prod([n for n in tensor.shape if isinstance(n, int)]))
    unit = 1 if cache.layout.page_align else 16  # pages side by side begin at multiples of 16 bytes
    assert size == -(-(record.row + record.footer) * cache.page_size // unit) * unit
    assert cache.latent_part == cache.head_dim == 512
