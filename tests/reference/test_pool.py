"""Logical rows and raw memory, on examples small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from kvgen import Layout, Paged
from kvgen.reference import cache_rows
from kvgen.reference.elements import Elements


def test_max_pool() -> None:
    """MAX's own example: flat index 118 is K of layer 1, block 1, token 0, head 1, dim 2."""
    pool = np.arange(4 * 2 * 3 * 2 * 2 * 4, dtype=np.float32).reshape(4, 2, 3, 2, 2, 4)
    keys, values = cache_rows(Paged(dtype="f32", kv_heads=2, head_dim=4, page_size=2), [pool], 1)
    assert (keys.pages, keys.tokens) == (4, 2)
    assert keys.read(1, 0)[1, 2] == 118
    assert values.read(1, 0)[1, 2] == 118 + 3 * 2 * 2 * 4
    np.testing.assert_array_equal(values.logical(), pool[:, 1, 1])


def test_head_before_token() -> None:
    pool = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)  # page head token dim
    rows = Elements(pool, "page head token dim", heads=3, dim=5)
    np.testing.assert_array_equal(rows.read(1, 2), pool[1, :, 2])
    np.testing.assert_array_equal(rows.logical(), pool.transpose(0, 2, 1, 3))


def test_split_dim() -> None:
    """vLLM's keys: dim d of a head at [d / 8][token][d % 8]."""
    pool = np.arange(2 * 3 * 2 * 4 * 8).reshape(2, 3, 2, 4, 8)
    rows = Elements(pool, "page head dim/8 token dim%8", heads=3, dim=16)
    row = rows.read(1, 3)
    for head in range(3):
        for dim in range(16):
            assert row[head, dim] == pool[1, head, dim // 8, 3, dim % 8]


def test_split_three_ways() -> None:
    """Factors in any order: dim 0..23 as dim/12, dim/4%3, dim%4."""
    pool = np.arange(2 * 4 * 3 * 2).reshape(1, 2, 4, 3, 2)  # page token dim%4 dim/4%3 dim/12
    row = Elements(pool, "page token dim%4 dim/4%3 dim/12", heads=1, dim=24).read(0, 1)
    for dim in range(24):
        assert row[0, dim] == pool[0, 1, dim % 4, dim // 4 % 3, dim // 12]


def test_split_token() -> None:
    pool = np.arange(2 * 3 * 4).reshape(1, 2, 3, 4)  # page token/4 dim token%4
    rows = Elements(pool, "page token/4 dim token%4", heads=1, dim=3)
    assert rows.tokens == 8
    np.testing.assert_array_equal(rows.read(0, 6)[0], pool[0, 1, :, 2])


def test_write_goes_where_read_looks() -> None:
    """And nowhere else, with padded pages too."""
    memory = np.zeros(200, np.int64)
    pool = as_strided(memory, (3, 2, 2, 4), (50 * 8, 20 * 8, 4 * 8, 8))  # page layer token dim
    rows = Elements(pool, "page layer token dim", heads=1, dim=4, layer=1)
    rows.write(2, 1, np.array([[1, 2, 3, 4]]))
    np.testing.assert_array_equal(np.flatnonzero(memory), 2 * 50 + 20 + 4 + np.arange(4))
    np.testing.assert_array_equal(rows.read(2, 1), [[1, 2, 3, 4]])


def test_read_is_a_copy() -> None:
    pool = np.zeros((1, 1, 4))
    row = Elements(pool, "page token dim", heads=1, dim=4).read(0, 0)
    row[:] = 1
    assert not pool.any()


def test_swizzle() -> None:
    """bits=1, base=1, shift=1: elements 4..7 of every 8 swap their pairs."""
    pool = np.arange(8).reshape(1, 2, 4)
    rows = Elements(pool.copy(), "page token dim", heads=1, dim=4, swizzle=(1, 1, 1))
    np.testing.assert_array_equal(rows.logical()[0, :, 0], [[0, 1, 2, 3], [6, 7, 4, 5]])
    np.testing.assert_array_equal(rows.read(0, 1), [[6, 7, 4, 5]])
    rows.write(0, 1, np.array([[60, 70, 40, 50]]))
    np.testing.assert_array_equal(rows.read(0, 1), [[60, 70, 40, 50]])
    np.testing.assert_array_equal(rows.read(0, 0), [[0, 1, 2, 3]])


def test_swizzle_follows_the_page_not_the_axes() -> None:
    """The offset that is permuted is the one in the page's own order, here head before token."""
    pool = np.arange(8).reshape(1, 2, 2, 2)
    rows = Elements(pool, "page head token dim", heads=2, dim=2, swizzle=(1, 1, 1))
    np.testing.assert_array_equal(rows.read(0, 0), [[0, 1], [6, 7]])


def test_swizzle_wants_a_packed_page() -> None:
    with pytest.raises(ValueError, match="must be neighbours"):
        Elements(np.zeros((1, 2, 2, 4)), "page token kv dim", heads=1, dim=4, swizzle=(1, 1, 1))


def test_tensors_a_layer() -> None:
    layout = Layout(k="page token head dim", v="page head dim token", layers="pointers")
    cache = Paged(dtype="f32", kv_heads=2, head_dim=3, page_size=4, layout=layout)
    keys = [np.full((5, 4, 2, 3), layer, np.float32) for layer in range(2)]
    values = [np.full((5, 2, 3, 4), 10 + layer, np.float32) for layer in range(2)]
    k, v = cache_rows(cache, [keys, values], 1)
    assert (k.read(4, 3) == 1).all() and (v.read(4, 3) == 11).all()


def test_wrong_rank() -> None:
    with pytest.raises(ValueError, match="3 dimensions for the axes 'page token'"):
        Elements(np.zeros((1, 2, 3)), "page token", heads=1, dim=1)
    with pytest.raises(ValueError, match="not 2 heads of 4"):
        Elements(np.zeros((1, 2, 3)), "page token dim", heads=2, dim=4)
