"""What a layout cannot have is a compile-time error that says why, and what to use instead."""

from __future__ import annotations

import pytest

from kvgen import Latent, Quant, ops, presets
from kvgen.compile import UnitError, compile_unit
from kvgen.schema.cache import Cache
from tests.surface.harness import CACHES, unit

HEADS_FIRST, LATENT, GIVEN = CACHES["hnd"], CACHES["latent"], CACHES["given"]
SPLIT = presets.vllm_xpacked(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
PACKED = Latent(dtype="bf16", page_size=64, quant=Quant(dtype="e4m3", scale_dtype="f32", place="row"))
KEYS, OPERAND = "get_key_cache(cache)", "KVCacheMHAOperand<KeyCache>{get_key_cache(cache)}"
SCALES = "KVCacheScalesMHAOperand<KeyCache>{get_key_cache(cache)}"

NO_ROW, COORDS, NO_SCALES = "a token's heads are no row", "kv_tma_coords", "this cache has no rows of scales"
NO_TILE = ("block_paged_ptr: a tile lies in one page", "must divide the page size")
PAGED, SCALED = CACHES["paged"], CACHES["scaled"]

# Name -> cache, what is asked of it, and what the message must say.
REFUSED = {
    "row_idx": (HEADS_FIRST, f"out[0] = {KEYS}.row_idx(0, 0);", "row_idx: " + NO_ROW, COORDS),
    "row_idx_of_runs": (SPLIT, f"out[0] = {KEYS}.row_idx(0, 0);", "row_idx: " + NO_ROW, COORDS),
    "col_idx": (HEADS_FIRST, f"out[0] = {KEYS}.col_idx(0);", "col_idx: " + NO_ROW, COORDS),
    "num_kv_rows": (HEADS_FIRST, f"out[0] = {KEYS}.num_kv_rows();", "num_kv_rows: " + NO_ROW, COORDS),
    "get_tma_row": (HEADS_FIRST, f"out[0] = {KEYS}.get_tma_row(3);", NO_ROW, COORDS),
    "populate": (HEADS_FIRST, f"out[0] = {KEYS}.populate<16, 16>(0, 0).rows[0];", NO_ROW, COORDS),
    "populate_several": (HEADS_FIRST, f"out[0] = {KEYS}.populate<64, 64>(0, 0).rows[0];", NO_ROW, COORDS),
    "operand_row_idx": (HEADS_FIRST, f"out[0] = {OPERAND}.row_idx(0, 0);", "row_idx: " + NO_ROW, COORDS),
    "scale_row_idx": (GIVEN, f"out[0] = {KEYS}.scale_row_idx(0, 0);", "scale_row_idx: " + NO_SCALES, ""),
    "scale_row_idx_without": (PAGED, f"out[0] = {KEYS}.scale_row_idx(0, 0);", "scale_row_idx: " + NO_SCALES, ""),
    "num_scale_rows": (PACKED, f"out[0] = {KEYS}.num_scale_rows();", "num_scale_rows: " + NO_SCALES, ""),
    "v_of_latent": (LATENT, "get_value_cache(cache);", "get_value_cache: this cache stores K only", "V is their first dims"),
    "tile": (PAGED, f"out[0] = (uint64_t){KEYS}.block_paged_ptr<32>(0, 0, 0);", *NO_TILE),
    "tile_operand": (PAGED, f"out[0] = (uint64_t){OPERAND}.block_paged_ptr<12>(0, 0, 0);", *NO_TILE),
    "tile_of_scales": (SCALED, f"out[0] = (uint64_t){SCALES}.block_paged_ptr<32>(0, 0, 0);", *NO_TILE),
    "tile_of_a_page": (PAGED, f"out[0] = (uint64_t){KEYS}.block_paged_ptr<32>({KEYS}.page(0, 0), 0, 0);", *NO_TILE),
    "store_rope": (PAGED, f"{KEYS}.store_rope<2>(0, 0, 0, 0, Vec<bf16, 2>{{}});",
                   "store_rope: rows of this cache have one type throughout", "use store"),
    "store_scale": (GIVEN, f"{KEYS}.store_scale<1>(0, 0, 0, 0, Vec<float, 1>{{}});",
                    "store_scale: the scales of this cache are given by the caller", ""),
    "lengths": (CACHES["csr_last"], f"out[0] = (uint64_t){KEYS}.cache_lengths_nd();",
                "cache_lengths_nd: the lengths of this cache lie in its page table", "use cache_length(b)"),
    "tma_row_of_scales": (SCALED, f"out[0] = {SCALES}.get_tma_row(3);",
                          "get_tma_row: a sparse index names rows of values", "scale_row_idx(b, token)"),
}  # fmt: skip


def kernel(cache: Cache, body: str) -> ops.Custom:
    text = f"""#include "cache.cuh"
extern "C" __global__ void one(const __grid_constant__ Cache cache, uint64_t* out) {{
  {body}
}}
"""
    return ops.Custom(name="one", text=text, params=[ops.Array("out", "u64", ("T",), "out")], grid=1)


@pytest.mark.parametrize("case", REFUSED)
def test_a_name_that_the_layout_cannot_have(case: str) -> None:
    cache, body, why, instead = REFUSED[case]
    with pytest.raises(UnitError) as error:
        compile_unit(unit(cache, kernel(cache, body)), "sm_90a", "ptx", cache=None)
    message = str(error.value)
    assert why in message and instead in message
    assert "has no member" not in message, "the reason comes with noise"


def test_what_is_left_for_layouts_without_rows() -> None:
    body = f"out[0] = {KEYS}.kv_tma_coords(0, 0).block + (uint64_t){KEYS}.block_paged_ptr<16>(0, 0, 0);"
    for cache in (HEADS_FIRST, SPLIT, LATENT, PACKED):
        assert compile_unit(unit(cache, kernel(cache, body)), "sm_90a", "ptx", cache=None).data
