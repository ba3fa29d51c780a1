"""Packed codes, latent rows of two parts, tails of newest tokens, and pages that descend: each against NumPy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from kvgen import Block, KernelSet, Latent, Paged, Quant, ops
from kvgen.compile import UnitError, compile_unit
from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import dtype
from kvgen.schema.cache import Cache
from kvgen.schema.tables import Indirect
from tests.accessor.places import build, session
from tests.surface.harness import BF16, MAX, PAGE, filled, unit
from tests.surface.marks import proves
from tests.surface.test_refusals import KEYS, kernel

NONE, NO_ROW = 2**64 - 1, 0x7FFFFF00
PACKED: Final = Paged(**MAX, quant=Quant(dtype="i4", scale_dtype="f16", block=Block(dim=16)))
STRIDED: Final = Paged(**MAX, quant=Quant(dtype="i4", scale_dtype="f16", zero=True, packing="strided"))
SCALED: Final = Paged(**MAX, quant=Quant(dtype="e4m3", scale_dtype="f32"))
SLOTS: Final = Paged(**(MAX | {"page_size": 1}), table=Indirect(), quant=Quant(dtype="e4m3", scale_dtype="f32"))
TWO: Final = Latent(
    dtype="bf16",
    page_size=PAGE,
    latent_dim=64,
    rope_dim=16,
    layout={"k": "page layer token dim", "rope": "layer page token dim"},
)
MIXED: Final = Latent(
    dtype="bf16", page_size=PAGE, latent_dim=64, rope_dim=16, quant=Quant(dtype="e4m3", scale_dtype="f32")
)
TAIL: Final = Paged(
    **MAX,
    k_quant=Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(token=8, dim=1), residual=8),
    v_quant=Quant(dtype="i4", scale_dtype="f16", zero=True),
)


def package(name: str, cache: Cache, body: str) -> Any:
    """A set with one kernel: a thread, `out` for numbers and `x` for values."""
    text = f"""#include "cache.cuh"
extern "C" __global__ void one(const __grid_constant__ Cache cache, uint64_t* out, float* x) {{
  pdl_wait();
  const KeyCache keys = get_key_cache(cache);
{body}
}}
"""
    params = [ops.Array("out", "u64", ("N",), "inout"), ops.Array("x", "f32", ("M2",), "inout")]
    op = ops.Custom(name="one", text=text, params=params, grid=1, threads=1, writes=True)
    return build(KernelSet(name=name, q_heads=cache.kv_heads, cache=cache, ops=[op]))


def ask(found: Any, arrays: dict[str, Any], tables: dict[str, Any]) -> tuple[list[int], list[float], Any]:
    """What the kernel says, and the cache object."""
    out, x = np.zeros(16, np.uint64), np.zeros(16, np.float32)
    with session("cpu", found, arrays, tables) as run:
        run.launch("one", 0, out=out, x=x)
        return [int(n) for n in out], [float(n) for n in x], run.cache


def dense(ids: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    return {"lengths": np.array(lengths, np.int32), "page_table": np.array(ids, np.int32)}


# ---------------------------------------------------------------- two codes a byte
def packed() -> Any:
    body = "  out[0] = keys.col_idx(1);\n  out[1] = KeyCache::head_dim_granularity;\n  out[2] = keys.num_kv_rows();"
    arrays = {"pool": filled((4, 2, 1, PAGE, 2, 32), np.uint8), "scales": filled((4, 2, 1, PAGE, 2, 4), np.float16)}
    return ask(package("packed", PACKED, body), arrays, dense([[0, 1]], [9])), arrays


@proves("KVCacheT", "col_idx")
@proves("PagedKVCacheCollection", "head_dim_granularity", "kv_cache_dynamic_shape", "kv_cache_dynamic_strides")
def test_packed_codes_on_the_device_and_the_host() -> None:
    """Columns count elements of the row, bytes; scales a head and shapes count dims; strides bytes."""
    (numbers, _, cache), _ = packed()
    keys = cache.get_key_cache(0)
    assert numbers[:3] == [32, 4, keys.num_kv_rows]
    assert cache.head_dim_granularity == 4 and cache.quantization_granularity == 16
    assert keys.shape == (4, PAGE, 2, 64) and keys.strides == (2 * PAGE * 64, 64, 32, 1)
    assert keys.scales_shape == (4, PAGE, 2, 4)


@proves("KVCacheT", "create_tma_tile")
@proves("ContinuousBatchingKVCache", "create_ragged_tma_tile")
def test_tiles_of_packed_codes_are_asked_for_in_dims() -> None:
    (_, _, cache), arrays = packed()
    keys = cache.get_key_cache(0)
    tile, ragged = keys.create_tma_tile(PAGE, 64, swizzle=32).plan, keys.create_ragged_tma_tile(8, 64, swizzle=32).plan
    assert (tile.dtype, tile.dims, tile.box, tile.tile_bytes) == (
        "u8",
        (32, 2, keys.num_kv_rows),
        (32, 1, PAGE),
        PAGE * 32,
    )
    assert tile.address == arrays["pool"].ctypes.data and tile.strides == (32, 64)
    assert ragged.box[0] == 32 and ragged.tile_bytes == 8 * 32
    assert keys.create_tma_tile(PAGE, 64, swizzle=0, fold=True).plan.tile_bytes == PAGE * 32
    assert keys.create_gather4_tma_tile(32, swizzle=32).plan.dims == (64, keys.num_kv_rows), "columns are bytes"
    for depth in (63, 1, 48):
        with pytest.raises(
            ArgumentError, match=f"depth: got {depth}; two dims share a byte, .* chunks of 64 dims; 64 is"
        ):
            keys.create_tma_tile(PAGE, depth, swizzle=32)
    with pytest.raises(ArgumentError, match="depth: got 31; two dims share a byte"):
        keys.create_ragged_tma_tile(8, 31, swizzle=0)


@pytest.mark.parametrize("call", ["load_quantized<1>(0, 0, 0, 0)", "store<1>(0, 0, 0, 0, Raw<KeyCache::dtype, 2>{})"])
def test_half_a_byte_is_refused(call: str) -> None:
    with pytest.raises(UnitError) as error:
        compile_unit(unit(PACKED, kernel(PACKED, f"{KEYS}.{call};")), "sm_90a", "ptx", cache=None)
    assert call[
        : call.index("<")
    ] + ": codes fill whole bytes; 4-bit ones by 2, 2-bit ones by 4, 3-bit ones by 8" in str(error.value)


def test_codes_of_a_byte_that_are_no_neighbours() -> None:
    """Dims i and i + 32 share byte i: loads take one of them, tiles are of whole rows, no call stores half a byte."""
    body = """
  float numbers[4];
  for (uint32_t i = 0; i < 2; ++i) {
    unpack<KeyCache::dtype>(numbers, keys.load_quantized<4>(0, 1, 9, 8 + 32 * i));
    for (uint32_t j = 0; j < 4; ++j) x[4 * i + j] = numbers[j];
    const auto values = keys.load<4, float>(0, 1, 9, 8 + 32 * i);
    for (uint32_t j = 0; j < 4; ++j) x[8 + 4 * i + j] = values.e[j];
  }
  out[0] = (uint64_t)keys.block_paged_ptr<1>(0, 9, 1, 40);
"""
    arrays = {"pool": filled((4, 2, 1, PAGE, 2, 32), np.uint8), "scales": filled((4, 2, 1, PAGE, 2, 2), np.float16)}
    codes = arrays["pool"][0, 0, 0, 9, 1, 8:12]
    scale, zero = arrays["scales"][0, 0, 0, 9, 1] = np.array([0.5, 3], np.float16)
    numbers, values, cache = ask(package("strided", STRIDED, body), arrays, dense([[0, 1]], [9]))
    assert values[:8] == [*(codes % 16), *(codes // 16)]
    assert values[8:] == [(v - zero) * scale for v in values[:8]]
    assert numbers[0] == codes.ctypes.data
    keys = cache.get_key_cache(0)
    assert keys.create_tma_tile(PAGE, 64, swizzle=32).plan.tile_bytes == PAGE * 32
    refusal = "depth: got 32; dims that share a byte are 32 apart, and a tile has them all; 64 is"
    with pytest.raises(ArgumentError, match=refusal):
        keys.create_tma_tile(PAGE, 32, swizzle=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("store<2>(0, 0, 0, 0, Raw<KeyCache::dtype, 2>{})", "store: the codes of a byte are of dims apart"),
        ("load<64, float>(0, 0, 0, 0)", "a load is of one of each, at most as many as a row has bytes"),
    ],
)
def test_more_than_a_run_of_strided_codes_is_refused(call: str, message: str) -> None:
    with pytest.raises(UnitError) as error:
        compile_unit(unit(STRIDED, kernel(STRIDED, f"{KEYS}.{call};")), "sm_90a", "ptx", cache=None)
    assert message in str(error.value)


# ---------------------------------------------------------------- the RoPE part
_ROPE = """
  const auto row = keys.load<4, float>(0, 0, 17, 64);
  for (uint32_t i = 0; i < 4; ++i) x[i] = row.e[i];
  out[0] = (uint64_t)keys.block_paged_ptr<1>(0, 17, 0, 66);
  out[1] = (uint64_t)keys.block_paged_ptr<1>(keys.page(0, 17), 0, 1, 66);
  out[2] = (uint64_t)keys.scales_block_paged_ptr(0, 17, 0, 64);
  out[3] = (uint64_t)keys.block_paged_ptr<1>(0, 17, 0, 62);
  const auto codes = keys.load_quantized<4>(0, 0, 17, 68);
  float numbers[4];
  unpack<KeyCache::dtype>(numbers, codes);
  for (uint32_t i = 0; i < 4; ++i) x[4 + i] = numbers[i];
  x[8] = to_f32(keys.load_scale<1>(0, 0, 17, 64).e[0]);
  x[9] = to_f32(keys.load_zero(0, 0, 17, 64));
  Raw<KeyCache::dtype, 4> ones;
  const float four[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  pack<KeyCache::dtype>(ones, four);
  keys.store<4>(0, 0, 17, 72, ones);
  Vec<KeyCache::scale_dtype, 1> scale = {};
  keys.store_scale<1>(0, 0, 17, 64, scale);
"""


@proves("KVCacheT", "store", "block_paged_ptr")
def test_the_rope_part_of_one_type_is_reached_by_every_name() -> None:
    arrays = {"k_pool": filled((3, 1, PAGE, 64), BF16), "rope_pool": filled((1, 3, PAGE, 16), BF16, 1)}
    before = {n: a.copy() for n, a in arrays.items()}
    numbers, x, _ = ask(package("rope_two", TWO, _ROPE), arrays, dense([[2, 1]], [20]))
    rope = arrays["rope_pool"]
    assert x[:4] == before["rope_pool"][0, 1, 1, :4].astype(np.float32).tolist()
    at = rope[0, 1, 1, 2:].ctypes.data
    assert numbers[:4] == [at, at, 0, arrays["k_pool"][1, 0, 1, 62:].ctypes.data]
    before["rope_pool"][0, 1, 1, 8:12] = [1, 2, 3, 4]
    assert all(arrays[n].tobytes() == before[n].tobytes() for n in arrays)


def test_a_rope_part_of_another_type_has_neither_codes_nor_scales() -> None:
    """0, null, dropped: what lies behind the latent part's codes and scales is the next token's."""
    found = package("rope_mixed", MIXED, _ROPE)
    shapes = {t.name: (t.dtype, t.shape) for t in found.Cache.TENSORS}
    arrays = {
        name: filled(
            tuple(n if isinstance(n, int) else {"pages": 3, "scale_pages": 3}.get(n, 1) for n in shape), np.uint8
        )
        if name.endswith("pool")
        else filled(
            tuple(n if isinstance(n, int) else {"pages": 3, "scale_pages": 3}.get(n, 1) for n in shape), np.float32
        )
        for name, (_, shape) in shapes.items()
    }
    before = {n: a.copy() for n, a in arrays.items()}
    numbers, x, _ = ask(found, arrays, dense([[2, 1]], [20]))
    assert numbers[:3] == [0, 0, 0] and numbers[3] != 0
    assert any(x[:4]) and not any(x[4:10])
    assert all(arrays[n].tobytes() == before[n].tobytes() for n in arrays)


# ---------------------------------------------------------------- newest tokens
@proves("KVCacheT", "store", "block_paged_ptr")
@proves("ContinuousBatchingKVCache", "load_quantized", "load_scale", "scales_block_paged_ptr")
def test_tail_tokens_have_no_codes() -> None:
    """Of 20 tokens 16 are quantized: 15 has codes, 16 waits in the tail."""
    body = """
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t t = 15 + i;
    out[i * 4] = keys.sealed(keys.page(0, t), t % 16);
    out[i * 4 + 1] = keys.block_paged_ptr<1>(0, t, 0) != nullptr;
    out[i * 4 + 2] = keys.scales_block_paged_ptr(0, t, 0) != nullptr;
    out[i * 4 + 3] = keys.load_quantized<2>(0, 0, t, 0).e[0].bits;
    x[i * 4] = to_f32(keys.load_scale<1>(0, 0, t, 0).e[0]);
    x[i * 4 + 1] = to_f32(keys.load_zero(0, 0, t, 0));
    x[i * 4 + 2] = keys.load<1, float>(0, 0, t, 0).e[0];
    keys.store<2>(0, 0, t, 2, Raw<KeyCache::dtype, 2>{});
  }
  out[8] = get_value_cache(cache).block_paged_ptr<1>(0, 16, 0) != nullptr;
  out[9] = get_value_cache(cache).sealed(get_value_cache(cache).page(0, 16), 0);
"""
    found = package("tail", TAIL, body)
    sizes = {"pages": 3, "scale_pages": 3, "layers": 1, "B": 1}
    arrays = {}
    for seed, t in enumerate(found.Cache.TENSORS):
        shape = tuple(n if isinstance(n, int) else sizes[n] for n in t.shape)
        kind = BF16 if t.name.endswith("tail") else np.float16 if t.name.endswith("scales") else np.uint8
        arrays[t.name] = filled(shape, kind, seed)
    tables = dense([[2, 1]], [20]) | {"k_sealed": np.array([16], np.int32)}
    tail = next(a for n, a in arrays.items() if n.endswith("tail"))
    before = {n: a.copy() for n, a in arrays.items()}
    numbers, x, _ = ask(found, arrays, tables)
    assert numbers[:3] == [1, 1, 1] and numbers[4:8] == [0, 0, 0, 0] and numbers[8:10] == [1, 1]
    assert x[0] != 0 and x[4:6] == [0, 0] and x[6] == float(tail[0, 0, 0, 0, 0])
    changed = [n for n in arrays if arrays[n].tobytes() != before[n].tobytes()]
    (name,) = changed
    assert (arrays[name] != before[name]).sum() == 1, "token 15's byte, and not token 16's"


# ---------------------------------------------------------------- pages that descend
_ROWS = """
  out[0] = keys.row_idx(0, 17);
  out[1] = keys.num_kv_rows();
  out[2] = keys.populate<8, 8>(0, 16).rows[0];
  out[3] = keys.populate<32, 16>(0, 0).rows[1];
  out[4] = keys.scale_row_idx(0, 17);
  out[5] = keys.num_scale_rows();
  out[6] = (uint64_t)keys.get_tma_row(17);
  out[7] = KVCacheScalesMHAOperand<KeyCache>{keys}.populate<32, 16>(0, 0).rows[1];
  out[8] = (uint64_t)keys.block_paged_ptr<1>(0, 17, 1, 4);
  x[0] = keys.load<1, float>(0, 1, 17, 4).e[0];
"""


def descending(scales: bool = True) -> tuple[Any, dict[str, Any]]:
    pool = filled((4, 2, 1, PAGE, 2, 64), np.uint8)[::-1]
    scaling = filled((4, 2, 1, PAGE, 2, 1), np.float32)
    arrays = {"pool": pool, "scales": scaling[::-1] if scales else scaling}
    return ask(package("rows", SCALED, _ROWS), arrays, dense([[2, 3]], [20])), arrays


@proves("KVCacheT", "row_idx")
@proves("ContinuousBatchingKVCache", "num_kv_rows", "get_tma_row")
def test_descending_pages_are_read_and_have_no_rows() -> None:
    from ml_dtypes import float8_e4m3fn

    (numbers, x, cache), arrays = descending()
    place = 3, 0, 0, 1, 1
    assert numbers[:8] == [NONE, 0, NO_ROW, NO_ROW, NONE, 0, NONE, NO_ROW]
    assert numbers[8] == arrays["pool"][place][4:].ctypes.data
    scale = np.float32(arrays["scales"][place][0])
    assert x[0] == np.float32(arrays["pool"][place][4:5].view(float8_e4m3fn)[0]) * scale
    keys, stride = cache.get_key_cache(0), -(2 * PAGE * 128)
    assert keys.page_stride == stride
    message = rf"pool: got stride {stride} along page \(in elements\); .* pass a tensor whose pages ascend"
    calls = (
        lambda: keys.num_kv_rows,
        keys.view,
        keys.row_view,
        keys.page_view,
        lambda: keys.create_tma_tile(PAGE, 64, swizzle=64),
        lambda: keys.create_gather4_tma_tile(64),
        lambda: keys.create_ragged_tma_tile(8, 64, swizzle=64),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match=message):
            call()
    with pytest.raises(ArgumentError, match="scales: got stride -64 along page"):
        keys.create_scale_tma_tile(8)
    with pytest.raises(ArgumentError, match="scales: got stride -64 along page"):
        _ = keys.num_scale_rows


def test_pages_apart_by_part_of_a_row_have_no_rows() -> None:
    """The scales are whole rows apart, the values are not."""
    pool = filled((4, 2 * PAGE * 128 + 48), np.uint8)
    steps = pool.strides[0], PAGE * 128, PAGE * 128, 128, 64, 1
    whole = np.lib.stride_tricks.as_strided(pool, (4, 2, 1, PAGE, 2, 64), steps)
    arrays = {"pool": whole, "scales": filled((4, 2, 1, PAGE, 2, 1), np.float32)}
    numbers, _, cache = ask(package("rows", SCALED, _ROWS), arrays, dense([[2, 3]], [20]))
    row = 3 * 2 * PAGE
    assert numbers[:8] == [NONE, 0, NO_ROW, NO_ROW, row + 1, row + PAGE, NONE, row]
    with pytest.raises(
        ArgumentError, match="pool: got pages 4144 elements apart; numbering rows takes whole rows of 128"
    ):
        _ = cache.get_key_cache(0).num_kv_rows


# ---------------------------------------------------------------- the last tokens that 32 bits count
@proves("KVCacheMHAOperand", "populate")
@pytest.mark.parametrize("cache", [SCALED, SLOTS], ids=["pages", "slots"])
def test_a_tile_does_not_wrap_around(cache: Cache) -> None:
    """Past token 2^32 - 1 there is none, though the table's first pages are good."""
    size = cache.page_tokens or 0
    body = f"""
  constexpr uint32_t kSize = {size};
  const auto rows = keys.populate<4 * kSize, 2 * kSize>(0, 0u - 2 * kSize);
  const auto scales = KVCacheScalesMHAOperand<KeyCache>{{keys}}.populate<4 * kSize, 2 * kSize>(0, 0u - 2 * kSize);
  for (uint32_t i = 0; i < 4; ++i) out[i] = rows.rows[i], out[4 + i] = scales.rows[i];
"""
    found = package(f"wrap_{size}", cache, body)
    arrays = {"pool": filled((4, 2, 1, size, 2, 64), np.uint8), "scales": filled((4, 2, 1, size, 2, 1), np.float32)}
    tables = dense([[2, 3, 1]], [2])
    if size == 1:
        tables = {
            "lengths": tables["lengths"],
            "req_to_token": tables["page_table"],
            "request_ids": np.zeros(1, np.int32),
        }
        kinds = {f.name: f.dtype for f in found.Cache.TABLES}
        tables = {n: a.astype(dtype(kinds[n]).numpy()) for n, a in tables.items()}
    numbers, _, _ = ask(found, arrays, tables)
    assert numbers[:8] == [NO_ROW] * 8
