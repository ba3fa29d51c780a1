"""Tiles that tensor copies bring, against NumPy indexing of the same memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgen.emulator import KernelFault, Library
from kvgen.tensor_map import (
    PageView,
    RowView,
    TensorMapPlan,
    chunk_elements,
    element,
    folded_tile,
    gather4,
    index_scale_tile,
    padded_depth,
    rope_gather4,
    rope_tile,
    scale_tile,
    split_tile,
)
from tests.emulator.programs import aligned
from tests.tma.kernels import GATHERS, LOADS, Kernel, run_load
from tests.tma.scenes import Rng, Scene, dtype_of, padded, page_scene, row_scene

U32_MAX = 2**32 - 1
SEEDS = st.integers(0, 2**32 - 1)


def of(*forms: str) -> list[Kernel]:
    return [k for k in (*LOADS, *GATHERS) if k.form in forms]


def drawn(*forms: str) -> Any:
    """Each kernel of these forms once, and hypothesis' choice of kernel and seed."""

    def wrap(test: Any) -> Any:
        found: Any = given(kernel=st.sampled_from(of(*forms)), seed=SEEDS)(test)
        for i, kernel in enumerate(of(*forms)):
            found = example(kernel=kernel, seed=i)(found)
        return settings(max_examples=120)(found)

    return wrap


def expect(plan: TensorMapPlan, kernel: Kernel) -> None:
    """What the plan tells the device side."""
    assert plan.gran == kernel.gran
    assert plan.tile_bytes == kernel.rows * kernel.depth * kernel.size
    assert 1024 % plan.smem_alignment == 0


def same(actual: np.ndarray, wanted: np.ndarray, about: object) -> None:
    np.testing.assert_array_equal(actual, wanted, err_msg=str(about))


def corner(rng: Rng, extent: int, tile: int) -> int:
    """Where a tile starts: before, in, and past a dimension."""
    return int(rng.choice([0, -1, extent - 1, extent, 1 - tile, -tile, *rng.integers(-tile, extent + 2, 4)]))


@drawn("split")
def test_split(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = row_scene(rng, kernel)
    plan = split_tile(
        scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle, gran=kernel.wide or None, l2_promotion=256
    )
    expect(plan, kernel)
    row, head = corner(rng, scene.view.rows, kernel.rows), int(rng.integers(0, scene.view.heads + 1))
    depth = corner(rng, scene.view.dim, kernel.depth)
    tile = run_load(library, kernel, plan, scene.memory, row=row, head=head, depth=depth, schedule=int(rng.integers(5)))
    same(tile, scene.row_tile(row + np.arange(kernel.rows), head, depth, kernel.depth), (kernel, scene.view))


@drawn("page")
def test_page(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, 3 * kernel.rows))
    scene = page_scene(rng, kernel, tokens)
    plan = split_tile(scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle)
    expect(plan, kernel)
    row, head = corner(rng, tokens, kernel.rows), int(rng.integers(0, scene.view.heads))
    page, depth = corner(rng, scene.view.pages, 1), corner(rng, scene.view.dim, kernel.depth)
    tile = run_load(library, kernel, plan, scene.memory, row=row, page=page, head=head, depth=depth)
    at = row + np.arange(kernel.rows)
    same(tile, scene.page_tile(np.full(len(at), page), at, head, depth, kernel.depth), (kernel, scene.view))


def sub_pages(rng: Rng, kernel: Kernel, starts: int, step: int) -> tuple[np.ndarray, int]:
    """Where sub-pages start, some at ids that no cache has, and how many there are."""
    n = kernel.rows // kernel.issue
    rows = step * rng.integers(0, starts, n)
    bad = rng.random(n) < 0.2
    return np.where(bad, rng.choice([U32_MAX, 2**31, step * (starts + 9)], n), rows), int(rng.integers(0, n + 1))


def past(starts: np.ndarray) -> np.ndarray:
    """As signed numbers that are outside where the kernel must read nothing."""
    return np.where(starts >= 2**31, -(2**40), starts).astype(np.int64)


@drawn("paged", "paged_fill", "paged_row_major")
def test_paged(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    major = kernel.form == "paged_row_major"
    rows = kernel.issue * int(rng.integers(1, 7))
    scene = row_scene(rng, kernel, rows=rows, dim=kernel.depth * int(rng.integers(1, 3)) if major else None)
    if major:
        plan = folded_tile(
            scene.view, kernel.rows, kernel.depth, row_major=True, swizzle=kernel.swizzle, page_size=kernel.issue
        )
    else:
        plan = split_tile(scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle, page_size=kernel.issue)
    expect(plan, kernel)
    assert plan.issue_rows == kernel.issue
    starts, valid = sub_pages(rng, kernel, rows // kernel.issue, kernel.issue)
    head = int(rng.integers(0, scene.view.heads))
    depth = kernel.depth * int(rng.integers(0, scene.view.dim // kernel.depth)) if major else int(rng.integers(-4, 9))
    check_sub_pages(library, kernel, plan, scene, starts, valid, head, depth)


def check_sub_pages(
    library: Library, kernel: Kernel, plan: TensorMapPlan, scene: Scene, starts: np.ndarray, valid: int, head: int,
    depth: int,
) -> None:  # fmt: skip
    tile = run_load(library, kernel, plan, scene.memory, rows=list(starts), valid=valid, head=head, depth=depth)
    at = np.arange(kernel.rows)
    if isinstance(scene.view, PageView):
        pages = past(starts)[at // kernel.issue]
        wanted = scene.page_tile(pages, at % kernel.issue, head, depth, kernel.depth)
    else:
        wanted = scene.row_tile(past(starts)[at // kernel.issue] + at % kernel.issue, head, depth, kernel.depth)
    present = valid * kernel.issue
    same(tile[:present], wanted[:present], (kernel, scene.view, starts))
    if kernel.form in ("paged", "pages"):
        assert (tile[present:].view(np.uint8) == 0xEE).all()
    else:
        assert not tile[present:].any()


@drawn("pages", "pages_fill")
def test_pages(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = page_scene(rng, kernel, kernel.issue)
    plan = split_tile(scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle, page_size=kernel.issue)
    expect(plan, kernel)
    starts, valid = sub_pages(rng, kernel, scene.view.pages, 1)
    head, depth = int(rng.integers(0, scene.view.heads)), int(rng.integers(-4, 9))
    check_sub_pages(library, kernel, plan, scene, starts, valid, head, depth)


@drawn("folded", "row_major")
def test_folded(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    major = kernel.form == "row_major"
    rows = 8 * int(rng.integers(1, 3 * kernel.rows // 8 + 1)) if major else None
    scene = row_scene(rng, kernel, dim=kernel.depth * int(rng.integers(1, 4)), rows=rows)
    plan = folded_tile(scene.view, kernel.rows, kernel.depth, row_major=major, swizzle=kernel.swizzle)
    expect(plan, kernel)
    assert plan.boxes == 1
    row, head = corner(rng, scene.view.rows, kernel.rows), int(rng.integers(0, scene.view.heads))
    if major:
        row = row // 8 * 8
    depth = kernel.depth * int(rng.integers(0, scene.view.dim // kernel.depth))
    tile = run_load(library, kernel, plan, scene.memory, row=row, head=head, depth=depth)
    same(tile, scene.row_tile(row + np.arange(kernel.rows), head, depth, kernel.depth), (kernel, scene.view))


@drawn("folded_page")
def test_folded_page(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(1, 3 * kernel.rows))
    scene = page_scene(rng, kernel, tokens, dim=kernel.depth * int(rng.integers(1, 3)))
    plan = folded_tile(scene.view, kernel.rows, kernel.depth, swizzle=kernel.swizzle)
    expect(plan, kernel)
    row, page = corner(rng, tokens, kernel.rows), corner(rng, scene.view.pages, 1)
    head, depth = int(rng.integers(0, scene.view.heads)), kernel.depth * (scene.view.dim // kernel.depth - 1)
    tile = run_load(library, kernel, plan, scene.memory, row=row, page=page, head=head, depth=depth)
    at = row + np.arange(kernel.rows)
    same(tile, scene.page_tile(np.full(len(at), page), at, head, depth, kernel.depth), (kernel, scene.view))


def mixed(rng: Rng, rows: int) -> tuple[np.ndarray, RowView, int, int]:
    """Rows of 8-bit latent and bf16 rope, close or with something after the rope, in memory that ends with the rope."""
    latent, rope = 16 * int(rng.integers(1, 9)), int(rng.integers(1, 65))
    pitch = -(-(latent + 2 * rope) // 16) * 16 + 16 * int(rng.integers(0, 3))
    memory = aligned((rows - 1) * pitch + latent + 2 * rope)
    memory[:] = rng.integers(0, 256, memory.nbytes)
    view = RowView("e4m3", memory.ctypes.data, rows, 1, latent + 2 * rope, pitch, pitch)
    return memory, view, latent, rope


def mixed_tile(memory: np.ndarray, view: RowView, latent: int, rope: int, rows: np.ndarray, n: int) -> np.ndarray:
    wanted = np.zeros((len(rows), n), np.uint16)
    for i, row in enumerate(rows):
        if 0 <= row < view.rows:
            start = int(row) * view.row_stride + latent
            part = memory[start : start + 2 * rope].view(np.uint16)[:n]
            wanted[i, : len(part)] = part
    return wanted


@drawn("rope")
def test_rope(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory, view, latent, rope = mixed(rng, int(rng.integers(1, 40)))
    plan = rope_tile(view, kernel.rows, latent_bytes=latent, rope_dim=rope, swizzle=kernel.swizzle)
    assert plan.dims == (rope, 1, view.rows)
    assert plan.tile_bytes == kernel.rows * 2 * padded_depth(rope, chunk_elements("bf16", kernel.swizzle))
    row = corner(rng, view.rows, kernel.rows)
    tile = run_load(library, kernel, plan, memory, row=row)
    same(tile, mixed_tile(memory, view, latent, rope, row + np.arange(kernel.rows), kernel.depth), (kernel, view))


@drawn("scale")
def test_scale(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = 4 * int(rng.integers(1, 200))
    memory = aligned(total * kernel.size)
    memory[:] = rng.integers(0, 256, memory.nbytes)
    plan = scale_tile(dtype_of(rng, kernel.size), memory.ctypes.data, total, kernel.rows)
    assert (plan.gran, plan.tile_bytes) == (kernel.rows, kernel.rows * kernel.size)
    first = corner(rng, total, kernel.rows)
    tile = run_load(library, kernel, plan, memory, row=first)[:, 0]
    scales, at = memory.view(f"u{kernel.size}"), first + np.arange(kernel.rows)
    inside = (at >= 0) & (at < total)
    same(tile, np.where(inside, scales[np.where(inside, at, 0)], 0), kernel)


@drawn("index_scale")
def test_index_scale(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size, stride = kernel.rows * int(rng.integers(1, 4)), 16 * int(rng.integers(0, 3)) // kernel.size
    stride += padded(page_size, kernel.size, 0)
    rows = (int(rng.integers(1, 5)) - 1) * stride + page_size
    memory = aligned(rows * kernel.size)
    memory[:] = rng.integers(0, 256, memory.nbytes)
    view = RowView(dtype_of(rng, kernel.size), memory.ctypes.data, rows, 1, 1, 1, 1)
    plan = index_scale_tile(view, kernel.rows, page_size=page_size, page_stride=stride)
    assert plan.box == (kernel.rows + 16 // kernel.size, 1)
    assert plan.tile_bytes == kernel.rows * kernel.size + 16
    row = int(rng.integers(0, rows))
    tile = run_load(library, kernel, plan, memory, row=row)[:, 0]
    wanted = np.zeros(kernel.rows, f"u{kernel.size}")
    found = memory.view(f"u{kernel.size}")[row : row + kernel.rows]
    wanted[: len(found)] = found
    same(tile, wanted, (kernel, row))


@drawn("gather4")
def test_gather4(library: Library, kernel: Kernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scene = row_scene(rng, kernel, dim=padded(int(rng.integers(kernel.depth, 3 * kernel.depth)), kernel.size, 0))
    view = scene.view
    assert isinstance(view, RowView)
    kind = element(view.dtype)  # the copy's, whatever the rows are: here bytes
    seen = dataclasses.replace(
        view, dtype="e4m3", dim=view.dim * kernel.size, row_stride=view.row_stride * kernel.size,
        head_stride=view.head_stride * kernel.size,
    )  # fmt: skip
    # The last box may be wider than what is left of the tile.
    width = kernel.depth - (int(rng.integers(0, kernel.gran)) if kernel.swizzle else 0)
    plan = gather4(
        seen if rng.integers(2) else view, kernel.rows, width, tma_dtype=kind, tile_stride=view.row_stride,
        swizzle=kernel.swizzle,
    )  # fmt: skip
    expect(plan, kernel)
    rows = rng.integers(0, view.rows + 2, kernel.rows)
    rows[rng.random(kernel.rows) < 0.2] = U32_MAX  # -1, as lists of indices are padded
    row_width = (view.heads - 1) * view.head_stride + view.dim
    column = int(rng.integers(0, row_width))
    tile = run_load(library, kernel, plan, scene.memory, rows=list(rows), depth=column)
    at, signed = column + np.arange(kernel.depth), past(rows)
    inside = ((signed >= 0) & (signed < view.rows))[:, None] & (at < row_width)
    same(tile, scene.element((signed[:, None] * view.row_stride + at) * kernel.size, inside), (kernel, view, rows))


def test_rope_gather4(library: Library) -> None:
    """Its pitch is the whole row's, and it ends where the last row ends."""
    rng = np.random.default_rng(1)
    kernel = next(k for k in GATHERS if k.size == 2 and k.swizzle == 64)
    for rope in (8, 32, 64):
        latent, pitch, n = 48, 48 + 2 * rope + 16 * int(rng.integers(0, 3)), int(rng.integers(1, 40))
        memory = aligned((n - 1) * pitch + latent + 2 * rope)
        memory[:] = rng.integers(0, 256, memory.nbytes)
        view = RowView("e4m3", memory.ctypes.data, n, 1, latent + 2 * rope, pitch, pitch)
        plan = rope_gather4(view, kernel.rows, latent_bytes=latent, rope_dim=rope, swizzle=64)
        assert plan.strides == (pitch,)
        rows = rng.integers(0, n, kernel.rows)
        tile = run_load(library, kernel, plan, memory, rows=list(rows))
        n_columns = min(kernel.depth, plan.boxes // (kernel.rows // 4) * kernel.gran)
        same(tile[:, :n_columns], mixed_tile(memory, view, latent, rope, rows, n_columns), (kernel, view))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_nan_fill(library: Library, dtype: str) -> None:
    rng = np.random.default_rng(2)
    size = {"f16": 2, "bf16": 2, "f32": 4}[dtype]
    kernel = next(k for k in of("split") if k.size == size and k.swizzle == 128)
    scene = row_scene(rng, kernel, rows=5)
    assert isinstance(scene.view, RowView)
    view = dataclasses.replace(scene.view, dtype=dtype)
    plan = split_tile(view, kernel.rows, kernel.depth, oob_fill="nan")
    tile = run_load(library, kernel, plan, scene.memory, row=3)
    numbers = tile.view({"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}[dtype])
    assert np.isnan(numbers[2:].astype(np.float32)).all()
    wanted = scene.row_tile(np.array([3, 4]), 0, 0, min(kernel.depth, view.dim))
    same(tile[:2, : view.dim], wanted, kernel)


def test_rows_of_other_layers_are_read_by_nobody(library: Library) -> None:
    """A view of every third row: what lies between is none of its memory."""
    kernel = next(k for k in of("paged") if k.size == 2)
    rng = np.random.default_rng(4)
    scene = row_scene(rng, kernel, rows=kernel.issue)
    assert isinstance(scene.view, RowView)
    wider = dataclasses.replace(scene.view, rows=scene.view.rows + 1)
    plan = split_tile(wider, kernel.rows, kernel.depth, swizzle=kernel.swizzle, page_size=kernel.issue)
    with pytest.raises(KernelFault, match="global_out_of_bounds"):
        run_load(library, kernel, plan, scene.memory, rows=[1, 0, 0, 0], valid=1)
