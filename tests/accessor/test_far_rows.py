"""Rows past 2^31 and 2^32: numbers of caches far larger than any memory, whose pool nobody touches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen import Dense, Paged, Quant, ops
from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, Size
from kvgen.runtime.checks import Dims
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.params import size_of
from kvgen.runtime.role_cache import RoleCache
from kvgen.tensor_map import PageView, RowView
from tests.accessor.grid import Config
from tests.accessor.kernels import kernel_set
from tests.accessor.places import build, session

NO_ROW = 2**31 - 256  # where coordinates end, kNoRow
TOKENS, HEADS, DIM = 16, 2, 64
IDS = [0, 5, 2**26 - 1, 2**26, 2**27, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 3, 2**32 - 2, 2**32 - 1, 2**33 + 5]
TEXT = """#include "cache.cuh"
extern "C" __global__ void numbers(const __grid_constant__ Cache cache, uint64_t* rows, uint32_t* tiles, uint64_t* sparse,
                                   const int32_t* encoded, uint64_t* totals, uint32_t tokens, uint32_t count) {
  pdl_wait();
  const VALUES values = GET(cache);
  for (uint32_t t = threadIdx.x; t < tokens; t += blockDim.x) {
    const KVCoords at = values.kv_tma_coords(0, t);
    rows[t * 4] = values.row_idx(0, t);
    rows[t * 4 + 1] = at.valid ? (uint64_t)at.block << 32 | at.row_in_block : ~0ull;
    rows[t * 4 + 2] = values.scale_row_idx(0, t);
    rows[t * 4 + 3] = values.populate<8, 8>(0, t / 8 * 8).get_row(t % 8);
    const auto several = values.populate<64, 64>(0, t / 64 * 64);
    tiles[t] = several.get_row(t % 64);
  }
  for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) sparse[i] = (uint64_t)values.get_tma_row(encoded[i]);
  if (threadIdx.x == 0) {
    totals[0] = values.num_kv_rows();
    totals[1] = values.num_scale_rows();
  }
}
"""


def config(align: Any) -> Config:
    cache = Paged(
        dtype="bf16", kv_heads=HEADS, head_dim=DIM, page_size=TOKENS, table=Dense(dtype="i64", align=align),
        quant=Quant(dtype="e4m3", scale_dtype="f32"),
    )  # fmt: skip
    return Config(f"far_{align}", cache, "tight")


def far(package: Any, layer: Any, **sizes: int) -> Any:
    """The layer with these sizes in its struct, and pools at addresses that are none."""
    dims = Dims(layer.dims)
    dims.origin = dict(layer.dims.origin)
    dims.update(sizes)
    held: list[int] = []
    for f in package.Cache.FIELDS:
        held.append(
            size_of(f, dims)
            if isinstance(f, Size)
            else layer.tables[f.name].pointer
            if isinstance(f, Array)
            else 1 << 40
        )
    step = replace(layer.step, dims=dims)
    struct = package.Cache._LAYOUT.pack(held)
    return LayerCache(layer.module, layer.layer, layer.device, step, struct, layer.addresses, layer.sizes, layer.kind)


def row32(row: int) -> int:
    """A row that a tensor copy can be given."""
    return row if row < NO_ROW else NO_ROW


@pytest.mark.parametrize("role", ["k", "v"])
@pytest.mark.parametrize(("align", "apart", "pages"), [(1, 2, 2**32 - 2), (4, 37, 2**32 - 1), (8, 2**20, 2**32 - 3)])
def test_rows_of_huge_pools(align: int, apart: int, pages: int, role: str) -> None:
    """`apart` pages of rows from one page to the next; every number is exact in 64 bits, or says that it is none."""
    names = (
        {"VALUES": "KeyCache", "GET": "get_key_cache"}
        if role == "k"
        else {"VALUES": "ValueCache", "GET": "get_value_cache"}
    )
    text = TEXT
    for name, found in names.items():
        text = text.replace(name, found)
    op = ops.Custom(
        name="numbers", text=text, grid=1, threads=64,
        params=[
            ops.Array("rows", "u64", ("T", 4), "out"), ops.Array("tiles", "u32", ("T",), "out"),
            ops.Array("sparse", "u64", ("N",), "out"), ops.Array("encoded", "i32", ("N",)),
            ops.Array("totals", "u64", (2,), "out"), ops.Size("tokens", "T"), ops.Size("count", "N"),
        ],
    )  # fmt: skip
    made = config(align)
    package = build(kernel_set(made, op, of=f"far_{role}"))
    pool = np.zeros((1, 2, 1, TOKENS, HEADS, DIM), np.uint8)
    scales = np.zeros((1, 2, 1, TOKENS, HEADS, 1), np.float32)
    columns = len(IDS) + 1
    wide = np.zeros((1, 16), np.int64)
    wide[0, :columns] = [*IDS, -1]
    start = -wide.ctypes.data % 64 // 8
    table = np.zeros((1, 32), np.int64)[:, start : start + columns]
    raw = np.zeros(64, np.int64)
    offset = -raw.ctypes.data % 64 // 8
    table = raw[offset : offset + 16].reshape(1, 16)[:, :columns]
    table[:] = wide[:, :columns]
    tables = {"lengths": np.array([7], np.int32), "page_table": table}
    pitch, scale_pitch = apart * TOKENS, 3 * TOKENS
    tokens = (columns + 3) // 4 * 64
    out = {"rows": np.zeros((tokens, 4), np.uint64), "tiles": np.zeros(tokens, np.uint32)}
    encoded = np.array([0, 1, TOKENS, 12345, 2**26 + 3, 2**31 - 1, -1, -7, -(2**31)], np.int32)
    out |= {"sparse": np.zeros(len(encoded), np.uint64), "totals": np.zeros(2, np.uint64)}
    with session("cpu", package, {"pool": pool, "scales": scales}, tables) as run:
        sizes = {
            "pages": pages,
            "scale_pages": pages,
            "k_page_stride": pitch * HEADS * DIM,
            "v_page_stride": pitch * HEADS * DIM,
        }
        sizes |= {"k_scales_page_stride": scale_pitch * HEADS, "v_scales_page_stride": scale_pitch * HEADS}
        layer = far(package, run.cache[0], **sizes)
        package.numbers(layer, encoded=encoded, **out)
    none = 2**64 - 1
    ids = [*IDS, -1]
    for t in range(tokens):
        page, at = divmod(t, TOKENS)
        number = ids[page] if page < len(ids) and 0 <= ids[page] < 2**32 - 1 else None
        valid = number is not None and number < pages
        row = number * pitch + at if valid and number is not None else none
        assert [int(x) for x in out["rows"][t]] == [
            row,
            number << 32 | at if valid and number is not None else none,
            number * scale_pitch + at if valid and number is not None else none,
            row32(number * pitch + at - at % 8) + at % 8 if valid and number is not None else NO_ROW + at % 8,
        ], (t, number)
        first = row32(number * pitch) if valid and number is not None else NO_ROW
        assert int(out["tiles"][t]) == first + at, (t, number)
    for given, found in zip(encoded, out["sparse"].view(np.int64), strict=True):
        e = int(given)
        assert int(found) == (e if e < 0 else e // TOKENS * pitch + e % TOKENS)
    assert [int(x) for x in out["totals"]] == [(pages - 1) * pitch + TOKENS, (pages - 1) * scale_pitch + TOKENS]


def test_the_host_says_the_same() -> None:
    """Below 2^31 rows a map numbers rows, above it pages; more pages than a coordinate counts are refused."""
    made = config(1)
    package = build(kernel_set(made, ops.Gather(), of="far_host"))
    pool = np.zeros((1, 2, 1, TOKENS, HEADS, DIM), np.uint8)
    tables = {"lengths": np.array([7], np.int32), "page_table": np.zeros((1, 1), np.int64)}
    cache = package.Cache(pool=pool, scales=np.zeros((1, 2, 1, TOKENS, HEADS, 1), np.float32), **tables)
    first = cache.get_key_cache(0)
    pitch = 2 * TOKENS
    for pages, view in ((2**26 - 8, RowView), (2**26 + 1, PageView), (2**31 - 256, PageView)):
        layer = far(package, cache[0], pages=pages, k_page_stride=pitch * HEADS * DIM)
        keys = RoleCache(layer, first.role, first.kv_params, TOKENS)
        assert keys.num_kv_rows == (pages - 1) * pitch + TOKENS
        assert isinstance(keys.view(), view)
        assert keys.create_tma_tile(TOKENS, 128).plan.rank == (3 if view is RowView else 4)
    layer = far(package, cache[0], pages=2**31, k_page_stride=pitch * HEADS * DIM)
    with pytest.raises(ArgumentError, match="pages"):
        RoleCache(layer, first.role, first.kv_params, TOKENS).create_tma_tile(TOKENS, 128)
