"""Plans as numbers: the table's shapes, what is refused and how, and rows that int32 cannot count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgen.emulator import Library
from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import DTYPES
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import (
    PageView,
    RowView,
    TensorMapPlan,
    chunk_elements,
    element,
    fold_chunks,
    folded_tile,
    gather4,
    index_scale_tile,
    kv_tma_coords,
    padded_depth,
    ragged_tile,
    rope_gather4,
    rope_tile,
    rope_view,
    scale_tile,
    split_tile,
)
from tests.emulator.programs import run

BASE = 1 << 20
VIEW = RowView("bf16", BASE, 96, 4, 256, 4 * 256, 256)
PAGES = PageView("bf16", BASE, 6, 5 * 16 * 1024, 16, 1024, 4, 256, 256)
MIXED = RowView("e4m3", BASE, 64, 1, 640, 640, 640)
SCALES = RowView("f32", BASE, 512, 1, 1, 1, 1)


def shape(plan: TensorMapPlan) -> dict[str, Any]:
    """The dimensions of table 1.8, fast to slow; strides in elements."""
    return {
        "dims": plan.dims, "strides": tuple(s // plan.size for s in plan.strides), "box": plan.box,
        "coordinates": plan.coordinates,
    }  # fmt: skip


def test_split() -> None:
    plan = split_tile(VIEW, 64, 256)
    assert shape(plan) == {
        "dims": (256, 4, 96), "strides": (256, 1024), "box": (64, 1, 64), "coordinates": ("depth", "head", "row"),
    }  # fmt: skip
    assert (plan.dtype, plan.address, plan.swizzle, plan.oob_fill) == ("bf16", BASE, 128, "zero")
    assert (plan.gran, plan.boxes, plan.tile_bytes, plan.smem_alignment) == (64, 4, 64 * 256 * 2, 1024)
    small = split_tile(VIEW, 64, 256, page_size=16, swizzle=64)
    assert (small.box, small.issue_rows, small.boxes, small.gran) == ((32, 1, 16), 16, 8 * 4, 32)
    assert split_tile(VIEW, 16, 64, page_size=64).issue_rows == 16
    assert [split_tile(VIEW, 8, 256, swizzle=s).smem_alignment for s in (0, 32, 64, 128)] == [128, 256, 512, 1024]


def test_split_of_pages() -> None:
    plan = split_tile(PAGES, 32, 128, page_size=16)
    assert shape(plan) == {
        "dims": (256, 4, 16, 6), "strides": (256, 1024, 5 * 16 * 1024), "box": (64, 1, 16, 1),
        "coordinates": ("depth", "head", "token", "page"),
    }  # fmt: skip
    assert (plan.boxes, plan.tile_bytes) == (4, 32 * 128 * 2)


def test_folded() -> None:
    plan = folded_tile(VIEW, 64, 128)
    assert shape(plan) == {
        "dims": (64, 96, 4, 4), "strides": (1024, 64, 256), "box": (64, 64, 2, 1),
        "coordinates": ("column", "row", "chunk", "head"),
    }  # fmt: skip
    assert (plan.boxes, plan.tile_bytes) == (1, 64 * 128 * 2)
    plan = folded_tile(VIEW, 64, 128, row_major=True, page_size=16)
    assert shape(plan) == {
        "dims": (64, 8, 4, 12, 4), "strides": (1024, 64, 8 * 1024, 256), "box": (64, 8, 2, 2, 1),
        "coordinates": ("column", "row % 8", "chunk", "row / 8", "head"),
    }  # fmt: skip
    assert (plan.boxes, plan.tile_bytes) == (4, 64 * 128 * 2)
    plan = folded_tile(PAGES, 16, 256, page_size=16)
    assert shape(plan) == {
        "dims": (64, 16, 4, 4, 6), "strides": (1024, 64, 256, 5 * 16 * 1024), "box": (64, 16, 4, 1, 1),
        "coordinates": ("column", "token", "chunk", "head", "page"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("depth", "dim", "rows", "issue", "row_major", "chunks"),
    [
        (128, 128, 64, 64, False, 2), (256, 512, 64, 64, False, 4), (64, 128, 64, 64, False, 1),
        (96, 192, 64, 64, False, 1), (128, 192, 64, 64, False, 1), (128, 128, 64, 16, False, 1),
        (128, 128, 64, 16, True, 2), (128, 128, 64, 4, True, 1), (128, 128, 12, 12, False, 2),
        (128, 128, 12, 12, True, 1),
    ],
)  # fmt: skip
def test_fold_rule(depth: int, dim: int, rows: int, issue: int, row_major: bool, chunks: int) -> None:
    assert fold_chunks(depth, dim, 64, rows=rows, issue_rows=issue, row_major=row_major) == chunks


def test_gather4() -> None:
    plan = gather4(VIEW, 64, 500, l2_promotion=256)
    assert (plan.dims, plan.strides, plan.box, plan.boxes) == ((1024, 96), (2048,), (64, 1), 16 * 8)
    assert (plan.box_bytes, plan.tile_bytes, plan.l2_promotion) == (512, 64 * 512 * 2, 256)
    # fp8 rows as 64-bit words, a row by one box
    plan = gather4(MIXED, 8, 80, tma_dtype="i64", tile_stride=80, swizzle=0)
    assert (plan.dtype, plan.dims, plan.strides, plan.box, plan.boxes) == ("i64", (80, 64), (640,), (80, 1), 2)
    assert gather4(PAGES, 8, 64).dims == (1024, 5 * 5 * 16 + 16)


def test_the_boxes_of_gather4_are_the_rows_that_numpy_would_take() -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 2**16, (96, 1024), np.uint16)
    plan = gather4(VIEW, 16, 200)
    rows = rng.integers(0, 96, 16)
    tile = np.zeros((plan.tile_bytes // 2,), np.uint16)
    for i in range(0, 16, 4):
        for j in range(-(-200 // plan.gran)):
            box = memory[rows[i : i + 4], 300 + j * plan.gran :][:, : plan.box[0]]
            tile[(j * 16 + i) * plan.gran :][: 4 * plan.gran] = box.reshape(-1)
    columns = [tile[j * 16 * plan.gran :][: 16 * plan.gran].reshape(16, -1) for j in range(4)]
    np.testing.assert_array_equal(np.concatenate(columns, 1), memory[rows, 300 : 300 + 256])


def test_rope() -> None:
    plan = rope_tile(MIXED, 32, latent_bytes=512, rope_dim=64, page_size=64)
    assert (plan.dtype, plan.address, plan.dims, plan.strides) == ("bf16", BASE + 512, (64, 1, 64), (640, 640))
    assert (plan.box, plan.boxes) == ((64, 1, 32), 1)
    plan = rope_gather4(MIXED, 32, latent_bytes=512, rope_dim=64)
    assert (plan.address, plan.dims, plan.strides, plan.box) == (BASE + 512, (64, 64), (640,), (64, 1))
    # FlashMLA: 512 fp8, 4 scales, 64 bf16
    row = RowView("u8", BASE, 64, 1, 656, 656, 656)
    assert rope_view(row, offset=528, rope_dim=64).address == BASE + 528


def test_scales() -> None:
    plan = index_scale_tile(SCALES, 64, page_size=128, page_stride=128)
    assert (plan.dims, plan.strides, plan.box, plan.swizzle) == ((512, 1), (2048,), (68, 1), 0)
    plan = index_scale_tile(dataclasses.replace(SCALES, rows=509), 64, page_size=64, page_stride=128)
    assert plan.strides == (2048,)
    plan = scale_tile("f16", BASE, 132, 128)
    assert (plan.dims, plan.strides, plan.box) == ((132, 1), (272,), (128, 1))


def test_ragged() -> None:
    plan = ragged_tile(VIEW, 32, 256)
    assert shape(plan) == {
        "dims": (256, 32, 4 * 97), "strides": (1024, 256), "box": (64, 32, 1),
        "coordinates": ("depth", "row", "(row + n) * heads + head"),
    }  # fmt: skip
    assert plan.address == BASE - 32 * 1024 * 2
    plan = ragged_tile(VIEW, 32, 256, group=2, swizzle=0, blocks=True)
    assert shape(plan) == {
        "dims": (8, 2, 32, 32, 2 * 97), "strides": (256, 1024, 8, 512), "box": (8, 2, 32, 32, 1),
        "coordinates": ("column", "query head", "row", "chunk", "(row + n) * heads + head"),
    }  # fmt: skip


def test_elements_and_chunks() -> None:
    assert {element(d.name) for d in DTYPES.values() if d.bits == 8} == {"u8"} and element("u16") == "u16"
    assert element("bf16") == "bf16"
    assert [chunk_elements("bf16", s) for s in (0, 32, 64, 128)] == [8, 16, 32, 64]
    assert (chunk_elements("e4m3", 128), chunk_elements("f32", 128)) == (128, 32)
    assert [padded_depth(d, 64) for d in (1, 64, 72, 128)] == [64, 64, 128, 128]


def test_a_dimension_of_one_needs_no_stride() -> None:
    plan = split_tile(RowView("f32", BASE, 1, 1, 7, 7, 7), 8, 8, swizzle=32)
    assert plan.strides == (32, 32)


def test_element_strides_count() -> None:
    plan = dataclasses.replace(split_tile(VIEW, 64, 64), element_strides=(1, 1, 3))
    assert plan.box_bytes == 64 * 2 * 22


# ---------------------------------------------------------------- more rows than int32 counts
PITCH, BLOCKS = 11 * 128, 1_840_895
MANY = RowView("bf16", BASE, (BLOCKS - 1) * PITCH + 128, 1, 128, 128, 128)


def test_rows_past_int32(library: Library) -> None:
    assert MANY.rows > 2**31
    refused: list[Callable[[], TensorMapPlan]] = [
        lambda: split_tile(MANY, 64, 128), lambda: folded_tile(MANY, 64, 128), lambda: gather4(MANY, 4, 128),
        lambda: folded_tile(MANY, 64, 128, row_major=True),
        lambda: index_scale_tile(dataclasses.replace(SCALES, rows=2**31), 64, page_size=64, page_stride=64),
    ]  # fmt: skip
    for plan in refused:
        with pytest.raises(ArgumentError, match=r"a coordinate is an int32.*RowView.blocked, kv_tma_coords"):
            plan()
    view = MANY.blocked(PITCH, 128)
    assert (view.pages, view.page_stride, view.tokens) == (BLOCKS, PITCH * 128, 128)
    assert view.as_rows() == MANY
    for plan in (split_tile(view, 64, 128), folded_tile(view, 64, 128)):
        assert all(d <= 2**31 - 256 for d in plan.dims)
        assert len(encode(plan, "cpu")) == 128
        for row in (0, 127, PITCH, 2**31 - 5, 2**31 + 77, MANY.rows - 1):
            token, block = kv_tma_coords(row, PITCH)
            at = dict(zip(plan.coordinates[1:], plan.strides, strict=True))
            assert token * at["token"] + block * at["page"] == row * 256
            assert max(token, block) < 2**31
    rows = np.array([0, 127, PITCH, 2**31 - 5, 2**31 + 77, MANY.rows - 1] * 5 + [5, 6], np.uint64)
    out = np.zeros(64, np.int32)
    run(library, "coordinates", rows, out, PITCH, block=32)
    assert [tuple(pair) for pair in out.reshape(32, 2)] == [kv_tma_coords(int(r), PITCH) for r in rows]


# ---------------------------------------------------------------- refusals
def view(**changes: Any) -> RowView:
    return dataclasses.replace(VIEW, **changes)


def pages(**changes: Any) -> PageView:
    return dataclasses.replace(PAGES, **changes)


def raw(**changes: Any) -> TensorMapPlan:
    return dataclasses.replace(split_tile(VIEW, 64, 128), **changes)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # the hardware's rules
    "address": (lambda: split_tile(view(address=BASE + 8), 64, 64), "address: got 0x100008; it must be a multiple of 16"),
    "address 0": (lambda: split_tile(view(address=0), 64, 64), "address: got 0x0; it must be"),
    "dims": (lambda: raw(dims=(256, 4, 2**32 + 1)), r"dims\[2\]: got 4294967297 \(row\); a dimension has 1 to 2\^32"),
    "stride": (
        lambda: split_tile(view(row_stride=1028), 64, 64),
        r"strides\[1\]: got 2056 bytes \(between neighbours of row\); a stride is a multiple of 16",
    ),
    "stride range": (lambda: split_tile(view(row_stride=2**39), 64, 64), r"strides\[1\]: got \d+ bytes .*2\^40"),
    "negative stride": (lambda: split_tile(view(row_stride=-1024), 64, 64), r"strides\[1\]: got -2048 .*not negative"),
    "box": (lambda: split_tile(VIEW, 512, 64), r"box\[2\]: got 512 \(row\); a box has 1 to 256"),
    "box 0": (lambda: raw(box=(64, 0, 64)), r"box\[1\]: got 0 \(head\); a box has 1 to 256"),
    "inner bytes": (lambda: raw(box=(12, 1, 64)), r"box\[0\]: got 12 x bf16, 24 bytes; it is a multiple of 16"),
    "inner span": (lambda: raw(box=(128, 1, 64)), r"box\[0\]: got 128 x bf16, 256 bytes; it fits the swizzle of 128"),
    "steps": (lambda: raw(element_strides=(1, 9, 1)), r"element_strides\[1\]: got 9; it is 1 to 8"),
    "rank": (lambda: raw(dims=(1,) * 6), "dims: got 6 dimensions; a tensor map has 1 to 5"),
    "lengths": (lambda: raw(strides=(256,)), "strides: got 1 values; rank 3 takes 2"),
    "element": (lambda: raw(dtype="f64"), "dtype: got 'f64'; it is one of u8, u16"),
    "swizzle": (lambda: raw(swizzle=16), "swizzle: got 16; it is 32, 64 or 128 bytes, or 0"),
    "promotion": (lambda: raw(l2_promotion=32), "l2_promotion: got 32; it is 64, 128 or 256 bytes, or 0"),
    "fill": (lambda: raw(oob_fill="one"), "oob_fill: got 'one'; it is 'zero' or 'nan'"),
    "nan": (lambda: split_tile(MIXED, 64, 128, oob_fill="nan"), "oob_fill: got 'nan'; u8 has no NaN; pass 'zero'"),
    "boxes": (lambda: split_tile(VIEW, 3, 32, swizzle=32), "box: got 2 boxes of 96 bytes a tile; each starts at"),
    # views
    "packed": (lambda: split_tile(view(dtype="e2m1"), 64, 64), "dtype: got 'e2m1', whose elements share bytes"),
    "dtype": (lambda: split_tile(view(dtype="f64"), 64, 64), "dtype: got 'f64'; a tensor map holds u8, u16"),
    "x-packed": (lambda: view(dim_stride=8), "dim_stride: got 8; the elements of a token's head must lie next to each other"),
    "x-packed pages": (lambda: pages(dim_stride=128), "dim_stride: got 128; .*use another layout or plain copies"),
    "no rows": (lambda: view(rows=0), "rows: got 0; it is at least 1"),
    "no heads": (lambda: view(heads=0), "heads: got 0; it is at least 1"),
    "no dim": (lambda: pages(dim=0), "dim: got 0; it is at least 1"),
    "no pages": (lambda: pages(pages=0), "pages: got 0; it is at least 1"),
    "HND": (
        lambda: pages(token_stride=256, head_stride=4096).as_rows(),
        "token_stride: got 256, below the 12544 elements of a token's heads; a token's heads are no row",
    ),
    "padded pages": (
        lambda: pages(page_stride=16 * 1024 + 8).as_rows(),
        "page_stride: got 16392, no multiple of a row of 1024 elements; .*pad pages by whole rows",
    ),
    "blocks": (lambda: VIEW.blocked(24, 16), "pitch: got 24 with blocks of 16 rows, 96 rows in all"),
    "narrow blocks": (lambda: VIEW.blocked(8, 16), "pitch: got 8 with blocks of 16 rows"),
    # tiles
    "depth": (lambda: split_tile(VIEW, 64, 80), "depth: got 80; a tile is whole chunks of 64 columns; 128 is"),
    "depth 0": (lambda: split_tile(VIEW, 64, 0), "depth: got 0; a tile is whole chunks of 64 columns; 64 is"),
    "gran": (lambda: split_tile(VIEW, 64, 64, gran=32), "gran: got 32; it is 64, the span of the swizzle"),
    "wide gran": (lambda: split_tile(VIEW, 64, 12, swizzle=0, gran=12), "gran: got 12; it is 8, .*multiple of 16 bytes"),
    "larger than a page": (
        lambda: split_tile(VIEW, 48, 64, page_size=32),
        "rows: got a tile of 48; it is larger than a page of 32 and no whole pages",
    ),
    "across pages": (
        lambda: split_tile(VIEW, 24, 64, page_size=64),
        "rows: got a tile of 24; it does not divide a page of 64; tiles would lie in two pages",
    ),
    "no tile": (lambda: split_tile(VIEW, 0, 64), "rows: got 0; it is at least 1"),
    "no page": (lambda: split_tile(VIEW, 64, 64, page_size=0), "page_size: got 0; it is at least 1; None for a cache"),
    "no tokens apart": (lambda: pages(tokens=1, token_stride=0).as_rows(), "token_stride: got 0; rows are numbered by it"),
    "no group": (lambda: ragged_tile(VIEW, 64, 64, group=0), "group: got 0; it must divide"),
    "page size": (lambda: split_tile(PAGES, 32, 64, page_size=32), "page_size: got 32; the view's pages have 16 tokens"),
    "fold": (lambda: folded_tile(VIEW, 64, 64), "depth: got 64 x 64 of dim 256, 64 rows at a time; folding takes 2 or more"),
    "fold pages": (lambda: folded_tile(VIEW, 64, 128, page_size=32), "depth: got .*, 32 rows at a time; .*inside one page"),
    "fold groups": (
        lambda: folded_tile(VIEW, 12, 128, row_major=True),
        "depth: got 12 x 128 .*rows in a page a multiple of 8; use split_tile",
    ),
    "fold rows": (
        lambda: folded_tile(view(rows=95), 64, 128, row_major=True),
        "rows: got 95 rows in the view; groups of 8 must end where it ends",
    ),
    "fold HND": (
        lambda: folded_tile(pages(token_stride=256, head_stride=4096), 16, 128, row_major=True),
        "token_stride: got 256, .*no row",
    ),
    "height": (lambda: gather4(VIEW, 6, 64), "tile_height: got 6; one copy gathers 4 rows; it is a multiple of 4"),
    "no height": (lambda: gather4(VIEW, 0, 64), "tile_height: got 0; one copy"),
    "cast": (
        lambda: gather4(view(dim=6, row_stride=10, head_stride=6, heads=1), 4, 1, tma_dtype="i64"),
        "tma_dtype: got 'i64'; row_stride is 20 bytes, no multiple of its 8",
    ),
    "tile stride": (lambda: gather4(VIEW, 4, 64, tile_stride=512), "tile_stride: got 512; it is the row pitch, 1024 x bf16"),
    "width": (lambda: gather4(VIEW, 4, 1025), "tile_width: got 1025; a row has 1024 x bf16"),
    "wide gather": (lambda: gather4(VIEW, 4, 512, swizzle=0), r"box\[0\]: got 512 \(column\); a box has 1 to 256"),
    "rope bytes": (lambda: rope_tile(VIEW, 64, latent_bytes=64, rope_dim=64), "dtype: got 'bf16'; a mixed row is given in bytes"),
    "rope end": (lambda: rope_tile(MIXED, 64, latent_bytes=528, rope_dim=64), "rope_dim: got 64 after 528 bytes; the row has"),
    "rope pitch": (
        lambda: rope_tile(dataclasses.replace(MIXED, row_stride=641), 64, latent_bytes=512, rope_dim=64),
        "row_stride: got 641 bytes; bf16 elements lie at even bytes",
    ),
    "rope start": (lambda: rope_tile(MIXED, 64, latent_bytes=500, rope_dim=64), "address: got 0x1001f4; it must be"),
    "scales": (
        lambda: index_scale_tile(dataclasses.replace(SCALES, dim=2), 64, page_size=64, page_stride=64),
        "heads [*] dim: got 1 x 2 scales a token, 1 apart; an index scale tile has one",
    ),
    "scale tile": (
        lambda: index_scale_tile(SCALES, 48, page_size=64, page_stride=64),
        "tile: got 48; it must divide a page of 64",
    ),
    "scale stride": (
        lambda: index_scale_tile(SCALES, 64, page_size=64, page_stride=66),
        "page_stride: got 264 bytes of scales; it must be a multiple of 16",
    ),
    "total": (lambda: scale_tile("f32", BASE, 130, 64), "total: got 130; it must be a multiple of 4; pad the scales"),
    "group": (lambda: ragged_tile(VIEW, 64, 64, group=3), "group: got 3; it must divide the 4 heads of a row"),
    "ragged rows": (lambda: ragged_tile(view(row_stride=1032), 64, 64), "row_stride: got 1032; rows lie close"),
    "ragged depth": (lambda: ragged_tile(VIEW, 64, 96), "depth: got 96; a tile is whole chunks of 64 columns; 128 is"),
    "ragged blocks": (lambda: ragged_tile(VIEW, 64, 64, blocks=True), "blocks: got swizzle 128, dim 256; chunks as a dimension"),
    "ragged many": (lambda: ragged_tile(view(rows=2**29), 64, 64), r"heads \* \(rows \+ 1\): got 2147483652; a coordinate"),
    "ragged base": (lambda: ragged_tile(view(address=4096), 64, 64), "address: got -0x1f000; it must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make()


def test_refusals_are_value_errors() -> None:
    with pytest.raises(ValueError, match="tile_height"):
        gather4(VIEW, 5, 64)
