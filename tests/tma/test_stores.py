"""Ragged stores: every byte of the memory afterwards, and plain asynchronous copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgen import emulator
from kvgen.compile.flatten import flatten
from kvgen.emulator import Library
from kvgen.paths import templates_root
from kvgen.tensor_map import RowView, ragged_tile
from tests.emulator.programs import aligned, nvrtc_ptx, run
from tests.tma.kernels import HERE, STORES, Kernel, run_store
from tests.tma.scenes import dtype_of, padded


def each_store(test: Any) -> Any:
    found: Any = given(kernel=st.sampled_from(STORES), seed=st.integers(0, 2**32 - 1))(test)
    for i, kernel in enumerate(STORES):
        found = example(kernel=kernel, seed=i)(found)
    return settings(max_examples=150)(found)


@each_store
def test_ragged(library: Library, kernel: Kernel, seed: int) -> None:
    """Only rows [row, row + valid) of one head change; all else keeps its canary."""
    rng = np.random.default_rng(seed)
    group, blocks = kernel.issue, kernel.form == "blocks"
    heads = int(rng.integers(1, 4))
    dim = padded(int(rng.integers(1, 2 * kernel.depth + 1)), kernel.size, 0)
    if blocks:
        dim = kernel.depth * int(rng.integers(1, 3))
    rows = int(rng.integers(1, 3 * kernel.rows))
    before, after = (16 * int(rng.integers(0, 40)) for _ in range(2))
    memory = aligned(before + rows * heads * group * dim * kernel.size + after)
    memory[:] = rng.integers(0, 256, memory.nbytes)
    view = RowView(
        dtype_of(rng, kernel.size), memory.ctypes.data + before, rows, heads * group, dim, heads * group * dim, dim
    )  # fmt: skip
    plan = ragged_tile(view, kernel.rows, kernel.depth, group=group, blocks=blocks, swizzle=kernel.swizzle)
    assert plan.gran == kernel.gran
    assert plan.tile_bytes == kernel.rows * group * kernel.depth * kernel.size
    assert plan.rank == 3 + (group > 1) + blocks
    row = int(rng.integers(0, rows))
    valid = int(rng.choice([0, 1, kernel.rows, rng.integers(0, kernel.rows + 1)]))
    valid = min(valid, rows - row)
    head = int(rng.integers(0, heads))
    depth = kernel.depth * int(rng.integers(0, -(-dim // kernel.depth)))

    tile = aligned(kernel.rows * group * kernel.depth * kernel.size)
    tile[:] = rng.integers(0, 256, tile.nbytes)
    values = tile.view(f"u{kernel.size}").reshape(kernel.rows, group, kernel.depth)
    wanted = memory.copy()
    inside = wanted[before : len(wanted) - after].view(f"u{kernel.size}").reshape(rows, heads, group, dim)
    width = min(kernel.depth, dim - depth)
    inside[row : row + valid, head, :, depth : depth + width] = values[:valid, :, :width]
    run_store(library, kernel, plan, memory, tile, heads, row=row, valid=valid, head=head, depth=depth)
    np.testing.assert_array_equal(memory, wanted, err_msg=str((kernel, view)))


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64])
def test_plain_copies(n: int) -> None:
    """cp_async.cuh, for sm_80: rows by an index list, zeros for what is not valid or not there."""
    source = (HERE / "cp_async.cu").read_text()
    read = {"cp_async.cu": source}
    whole = flatten("cp_async.cu", lambda path: read.get(path) or (templates_root() / path).read_text())
    library = emulator.build([nvrtc_ptx(whole, arch="compute_80", name="cp_async.cu")], mode="check")
    rng = np.random.default_rng(n)
    memory = aligned(40 * 16)
    memory[:] = rng.integers(0, 256, memory.nbytes)
    rows = np.where(rng.random(64) < 0.3, -1, rng.integers(0, 40, 64)).astype(np.int32)
    out = aligned(64 * 16)
    run(library, "rows16", memory, out, rows, n, block=32, read_only=(0, 2))
    wanted = np.where((rows < 0) | (np.arange(64) >= n), 0, 1)[:, None] * memory.reshape(40, 16)[rows]
    np.testing.assert_array_equal(out.reshape(64, 16), wanted)


def test_the_buffer_of_a_ragged_map_is_the_memory_alone() -> None:
    """Its base lies early, where nobody's memory may be; no address that it gives does."""
    view = RowView("bf16", 1 << 20, 7, 3, 64, 192, 64)
    plan = ragged_tile(view, 16, 64)
    assert plan.address == (1 << 20) - 16 * 192 * 2
    row, valid, head = 0, 1, 2
    first = plan.address + ((row + valid) * 3 + head) * plan.strides[1] + (16 - valid) * plan.strides[0]
    assert first == view.address + head * 128
