"""sliced_add against the oracle: every bit of c, and nothing beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, ops, presets
from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import dtype
from kvgen.reference import sliced_add
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.ops.test_lora_add import sectors_of
from tests.support.harness import package, surroundings
from tests.support.memory import CANARY, Raw, rows_array

SIZES: dict[str, Any] = {"kv_heads": 2, "page_size": 16}


def _set(name: str, element: Any, head_dim: int, op: ops.SlicedAdd) -> KernelSet:
    return KernelSet(
        name=name, q_heads=6, cache=presets.max_paged(dtype=element, head_dim=head_dim, **SIZES), ops=(op,)
    )


SETS = {
    s.name: s
    for s in (
        _set("sliced_bf16", "bf16", 64, ops.SlicedAdd()),
        _set("sliced_device", "f16", 64, ops.SlicedAdd(end="device")),
        _set("sliced_odd", "f32", 64, ops.SlicedAdd(columns=37)),
        _set("sliced_wide", "bf16", 64, ops.SlicedAdd(end="device", columns=5000)),  # a row in parts
    )
}


def columns_of(kernels: KernelSet) -> int:
    (op,) = kernels.ops
    assert isinstance(op, ops.SlicedAdd)
    return op.columns or kernels.q_heads * kernels.cache.head_dim


def layer_of(kernels: KernelSet) -> Any:
    """A cache that the operation takes and does not look at."""
    made = package(kernels)
    pool = np.zeros((1, 2, 1, 16, 2, 64), dtype(kernels.cache.dtype).numpy())
    return made.Cache(pool, page_table=np.zeros((1, 1), np.uint32), lengths=np.zeros(1, np.uint32))[0]


def check_sliced(kernels: KernelSet, rows: int, b_rows: int, m: int, *, in_place: bool, seed: int = 0) -> int:
    """Add, with rows apart, and compare every byte; returns the error word."""
    rng, width, kind = np.random.default_rng(seed), columns_of(kernels), kernels.cache.dtype
    a, around = rows_array(rows, (width,), kind, strided=True)
    b, _ = rows_array(b_rows, (width,), kind, strided=bool(seed % 2))
    for x in (a, b):
        x[...] = rng.standard_normal(x.shape) * 2.0 ** rng.integers(-9, 9, (len(x), 1))
    if rows > m >= 0:
        a[m:, 0] = np.nan  # a row that is copied keeps its bits, and has nothing added
    c, memory = (a, around) if in_place else rows_array(rows, (width,), kind, strided=bool(seed % 3))
    wanted, word = sliced_add(a, b, lora_end_idx=m)
    found = np.zeros(1, np.uint64)
    on_device = getattr(kernels.ops[0], "end", "") == "device"
    end: Any = np.array([m], np.int64) if on_device or m % 2 else m
    with machine(mode="check"):
        package(kernels).sliced_add(layer_of(kernels), a, b, c, end, errors=found)
    bits = np.dtype(f"u{c.itemsize}")
    np.testing.assert_array_equal(np.ascontiguousarray(c).view(bits), wanted.view(bits))
    assert (surroundings(c, memory) == CANARY).all(), "written beside the rows"
    assert int(found[0]) == word
    return word


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=8)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    rows = data.draw(st.integers(0, 9))
    m = data.draw(st.integers(0, rows))
    b_rows = m + data.draw(st.integers(0, 3))
    seed = data.draw(st.integers(0, 100))
    check_sliced(SETS[name], rows, b_rows, m, in_place=data.draw(st.booleans()), seed=seed)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("rows", "b_rows", "m"), [(5, 9, 6), (5, 3, 4), (5, 5, -1), (5, 5, 2**32 + 2), (5, 0, 2**62)])
def test_an_end_past_the_rows(rows: int, b_rows: int, m: int, in_place: bool) -> None:
    """Nothing is added, and the word names the first row that is not there."""
    report = describe(check_sliced(SETS["sliced_device"], rows, b_rows, m, in_place=in_place))
    assert report is not None and report.code is Fault.LORA_END
    assert report.position == (0 if m < 0 else min(rows, b_rows))


def test_without_rows_the_end_is_not_looked_at() -> None:
    kernels = SETS["sliced_bf16"]
    nothing: Raw = np.zeros((0, columns_of(kernels)), dtype("bf16").numpy())
    one = np.zeros((1, columns_of(kernels)), nothing.dtype)
    with machine() as log:
        for end in (None, np.zeros(0, np.int64)):
            package(kernels).sliced_add(layer_of(kernels), nothing, nothing, nothing, end)
            with pytest.raises(ArgumentError, match="lora_end_idx: got "):
                package(kernels).sliced_add(layer_of(kernels), one, one, one, end)
    assert not log.launches


@pytest.mark.parametrize(("rows", "b_rows", "name"), [(3, 9, "[ac]"), (9, 3, "b")])
def test_an_end_of_the_host_past_the_rows(rows: int, b_rows: int, name: str) -> None:
    kernels = SETS["sliced_bf16"]
    a, b = (np.zeros((n, columns_of(kernels)), dtype("bf16").numpy()) for n in (rows, b_rows))
    with pytest.raises(ArgumentError, match=rf"^lora_end_idx: got 4; {name} has 3 rows; pass at most 3"):
        package(kernels).sliced_add(layer_of(kernels), a, b, a, 4)


def test_no_sector_is_moved_twice() -> None:
    """Every row is read and written once; in a's own memory, the rows that have something added alone."""
    kernels = SETS["sliced_bf16"]
    for in_place in (False, True):
        a, b = sectors_of(1024, 384), sectors_of(256, 384)
        c = a if in_place else sectors_of(1024, 384)
        with machine(mode="check") as log:
            package(kernels).sliced_add(layer_of(kernels), a, b, c, 256)
        (launched,) = log.launches
        row, rows = 384 * 2 // 32, 256 if in_place else 1024
        counted = launched.counters.per_buffer
        assert sum(x.load_sectors for n, x in counted.items() if set(n) & {"a", "b", "c"}) == row * (rows + 256)
        assert sum(x.store_sectors for x in counted.values()) == row * rows
        assert (c[:256] == 2).all() and (c[256:] == 1).all()
