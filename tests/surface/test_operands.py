"""LayoutTensorMHAOperand and RaggedMHAOperand: the surface of a cache's operand over tensors, hostile offsets included."""

from __future__ import annotations

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime import TensorOperand
from tests.surface.harness import BF16, MAX, OFFSETS, PAGE, Array, filled, package, run
from tests.surface.marks import proves
from tests.surface.tables import exact

BATCH, TOKENS, HEADS, DEPTH, GROUPS, NONE, NO_ROW = 2, 20, 3, 24, 2, 2**64 - 1, 0x7FFFFF00
ROWS = BATCH * TOKENS
M = "KVCacheMHAOperand"


def say(offset: str, offsets: list[int]) -> list[tuple[tuple[int, int, int, int], list[int], list[int], Array, Array]]:
    """(query, LayoutTensor's answers, Ragged's, the tensor, the scales) for tokens inside and outside."""
    tensor = filled((BATCH, TOKENS, HEADS, DEPTH), BF16, 1)
    scales = filled((BATCH, TOKENS, HEADS, GROUPS), np.float32, 2)
    tokens = (0, 1, TOKENS - 1, TOKENS, 39, 40, 4000)
    requests = len(offsets) - 1
    queries = [(b, t, h, d) for b in range(requests + 1) for t in tokens for h in range(HEADS) for d in (0, 12, 23)]
    numbers = np.zeros((len(queries), 2, 16), np.uint64)
    pool = np.zeros((1, 2, 1, PAGE, MAX["kv_heads"], MAX["head_dim"]), BF16)
    layer = package(f"operands_{offset}").Cache(
        pool, lengths=np.zeros(1, np.int32), page_table=np.zeros((1, 1), np.int32)
    )[0]
    run(
        package(f"operands_{offset}").operands, layer, tensor=tensor, scales=scales, offsets=exact(offsets, offset),
        queries=np.array(queries, np.uint32), numbers=numbers, requests=requests,
    )  # fmt: skip
    return [(q, *numbers[i].tolist(), tensor, scales) for i, q in enumerate(queries)]


def check(row: int | None, query: tuple[int, int, int, int], n: list[int], tensor: Array, scales: Array) -> None:
    """An operand's answers about the token in `row`; None: there is none."""
    _, token, head, dim = query
    if row is None:
        assert n[0] == n[1] == n[6] == n[7] == NONE
        assert n[2] == n[13] == 0 and n[10] == NO_ROW
    else:
        flat, numbers = tensor.reshape(ROWS, HEADS, DEPTH), scales.reshape(ROWS, HEADS, GROUPS)
        assert n[0] == (row * HEADS + head) * DEPTH + dim
        assert n[1] == (row * HEADS + head) * GROUPS + dim // 12
        assert n[2] == numbers[row, head, dim // 12].view(np.uint32)
        assert n[13] == flat[row, head, dim].view(np.uint16)
        assert n[6] == n[7] == n[10] == row
        assert n[11] == row + 17  # not the leader: the second half of 32 rows
    assert n[5] == ROWS and n[9] == 0
    assert n[8] == (token - 5) % 2**64


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_contiguous_tensor(offset: str) -> None:
    for query, n, _, tensor, scales in say(offset, [0, 5, ROWS]):
        b, token, *_ = query
        inside = b < BATCH and token < TOKENS
        check(b * TOKENS + token if inside else None, query, n, tensor, scales)
        assert (n[3], n[4], n[12]) == (TOKENS, TOKENS, ord("L"))


HOSTILE = (
    [0, 5, 40],
    [3, 3, 17],
    [0, 41, 40],  # past the rows, then decreasing
    [10, 5, 40],
    [0, 2**31 - 1, 2**31 - 1],
)
NEGATIVE = ([-5, 10, 40], [0, -1, 20], [-(2**31), 2**31 - 1, 0])


@pytest.mark.parametrize("offset", OFFSETS)
def test_ragged_rows(offset: str) -> None:
    """A request whose offsets contradict has no tokens: nothing of it is read, nothing past the rows ever."""
    cases = [*HOSTILE, *(NEGATIVE if offset != "u32" else []), *([[0, 2**40, 2**33]] if offset == "i64" else [])]
    for offsets in cases:
        for query, _, n, tensor, scales in say(offset, list(offsets)):
            b, token, *_ = query
            begin, end = (offsets[b], offsets[b + 1]) if b < len(offsets) - 1 else (0, 0)
            length = end - begin if 0 <= begin <= end <= ROWS else 0
            check(begin + token if token < length else None, query, n, tensor, scales)
            assert (n[3], n[4], n[12]) == (length, 77, ord("R"))


@proves(M, "create_tma_tile", "create_scale_tma_tile", "create_ragged_tma_tile", "create_gather4_tma_tile")
def test_tensor_maps_of_tensors() -> None:
    """Of `[batch, tokens, heads, depth]` and of its rows the same maps: dims, strides and boxes by hand."""
    tensor, scales = filled((2, 24, 3, 64), BF16), filled((2, 24, 3, 2), np.float32)
    for operand in (TensorOperand(tensor, scales), TensorOperand(tensor.reshape(48, 3, 64), scales.reshape(48, 3, 2))):
        tile = operand.create_tma_tile(16, 64)
        assert (tile.plan.address, tile.plan.dims, tile.plan.strides, tile.plan.box) == (
            tensor.ctypes.data, (64, 3, 48), (128, 384), (64, 1, 16),
        )  # fmt: skip
        assert len(tile.data) == 128 and operand.create_tma_tile(16, 64) is tile
        folded = operand.create_tma_tile(16, 64, swizzle=64, fold=True)
        assert (folded.plan.dims, folded.plan.box) == ((32, 48, 2, 3), (32, 16, 2, 1))
        flat = operand.create_scale_tma_tile(32)
        assert (flat.plan.address, flat.plan.dims, flat.plan.box) == (scales.ctypes.data, (288, 1), (32, 1))
        ragged = operand.create_ragged_tma_tile(16, 64)
        assert ragged.plan.address == tensor.ctypes.data - 16 * 384
        assert (ragged.plan.dims, ragged.plan.box) == ((64, 16, 3 * 49), (64, 16, 1))
        rows = operand.create_gather4_tma_tile(64, tile_height=8)
        assert (rows.plan.dims, rows.plan.strides, rows.plan.box, rows.plan.boxes) == ((192, 48), (384,), (64, 1), 2)
        assert operand.num_kv_rows == 48


def test_tensors_that_are_no_operand() -> None:
    tensor = filled((4, 24, 3, 64), BF16)
    with pytest.raises(ArgumentError, match=r"tensor: got shape \(24, 64\); it is \[batch"):
        TensorOperand(tensor[0, :, 0]).create_tma_tile(16, 64)
    with pytest.raises(ArgumentError, match=r"tensor: got strides .*; rows are numbered through all"):
        TensorOperand(tensor[::2]).create_tma_tile(16, 64)
    with pytest.raises(ArgumentError, match=r"scales: got None; this operand has none"):
        TensorOperand(tensor).create_scale_tma_tile(16)
    with pytest.raises(ArgumentError, match=r"total: got 6; it must be a multiple of 4"):
        TensorOperand(tensor[0, :6], np.zeros((6, 1, 1), np.float32)).create_scale_tma_tile(16)
    with pytest.raises(
        ArgumentError, match=r"scales: got shape \(6, 1, 1\) for a tensor .*; both have the same tokens"
    ):
        TensorOperand(tensor, np.zeros((6, 1, 1), np.float32)).create_scale_tma_tile(16)
    with pytest.raises(ArgumentError, match=r"scales: got strides .*; they are numbered through"):
        TensorOperand(tensor, np.zeros((4, 24, 3, 4), np.float32)[..., :2]).create_scale_tma_tile(16)
