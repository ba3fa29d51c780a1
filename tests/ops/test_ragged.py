"""Ragged caches: keys and values one after another, found by offsets that nobody vouches for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Layout, Mask, Ragged, ops, presets
from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import dtype
from kvgen.reference import gather_rows
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.ops.test_decode import decode_scene
from tests.support.batches import PLAIN, batches
from tests.support.harness import (
    Run,
    check_append,
    check_decode,
    check_gather,
    hold_memory,
    index_name,
    launcher,
    offsets_of,
    package,
    queries,
    surroundings,
)
from tests.support.memory import CANARY, rows_array
from tests.support.scenes import Scene
from tests.support.sets import ALL

ROWS = KernelSet(
    name="rows_ragged",
    q_heads=2,
    cache=Ragged(dtype="bf16", kv_heads=2, head_dim=24, layout=Layout(k="token head dim", v="token dim head",
                                                                     layers="pointers")),
    ops=(ops.GatherRows(roles="kv"),),
)  # fmt: skip
TOTALS = (7, 5, 0, 9)


def spoilt(scene: Scene, at: int, value: int) -> None:
    """Overwrite an offset with what its type makes of `value`."""
    array = scene.tables["kv_offsets"]
    array[at] = np.array(value, np.int64).astype(array.dtype)


# Which offset is wrong, how, and whose requests' it is.
BAD: dict[str, tuple[int, Callable[[Scene], int], set[int]]] = {
    "first_minus_one": (0, lambda s: -1, {0}),
    "decreases": (2, lambda s: int(s.tables["kv_offsets"][1]) - 1, {1}),  # request 2 gets rows of others
    "past_the_rows": (4, lambda s: s.pages + 1, {3}),
    "huge": (2, lambda s: 2**31 - 1, {1, 2}),
    "minus_one": (2, lambda s: -1, {1, 2}),
    "last_decreases": (4, lambda s: 0, {3}),
}


@pytest.mark.parametrize("label", BAD)
@pytest.mark.parametrize("name", ["flash_attention_varlen", "ragged_scales", "ragged_splits"])
def test_bad_offsets(name: str, label: str) -> None:
    """Requests of bad offsets are NaN and reported, and nothing is written for them; the others get their bits."""
    at, value, victims = BAD[label]
    batch = replace(PLAIN, totals=TOTALS, new=(2, 1, 0, 3), seed=len(label))
    kernels = ALL[name]
    outputs, rows = [], []
    for wrong in (False, True):
        scene, q = decode_scene(name, batch, 4)
        if wrong:
            spoilt(scene, at, value(scene))
        outputs.append(check_decode(scene, q))
        offsets = offsets_of([min(n, 4) for n in TOTALS], index_name(kernels, "gather"))
        rows.append(check_gather(scene, int(offsets[-1]), row_offsets=offsets, starts=None))
    moved = {2} if label == "decreases" else set()  # begins elsewhere, in rows that there are
    (clean, _, _), (bad, _, wanted) = outputs
    for b in range(4):
        assert np.isnan(bad[b].astype(np.float32)).all() == (b in victims)
        if b not in victims | moved:
            assert bad[b].tobytes() == clean[b].tobytes()
            for one, other in zip(*rows, strict=True):
                assert one[offsets[b] : offsets[b + 1]].tobytes() == other[offsets[b] : offsets[b + 1]].tobytes()
    report = describe(wanted.errors)
    assert report is not None and report.code is Fault.LENGTH and report.request in victims

    scene = Scene(kernels, batch, TOTALS)
    scene.fill([n - new for n, new in zip(TOTALS, batch.new, strict=True)])
    spoilt(scene, at, value(scene))
    check_append(scene, sum(batch.new), row_offsets=offsets_of(batch.new, index_name(kernels, "append")))


@pytest.mark.parametrize("name", ["ragged", "ragged_heads"])
def test_tokens_past_a_request_are_no_tokens(name: str) -> None:
    """What follows a request's rows are another one's: gather gives NaN for them, and says where."""
    kernels = ALL[name]
    scene = Scene(kernels, replace(PLAIN, totals=(5, 4), new=(0, 0)), (5, 4))
    scene.fill((5, 4))
    index = index_name(kernels, "gather")
    offsets, starts = offsets_of((3, 3), index), np.array((3, 3), dtype(index).numpy())
    for out in check_gather(scene, 6, row_offsets=offsets, starts=starts):
        values = out.astype(np.float32)
        assert np.isnan(values[[2, 4, 5]]).all() and np.isfinite(values[[0, 1, 3]]).all()


@settings(max_examples=4)
@given(data=st.data())
def test_gather_rows(data: Any) -> None:
    """Any tokens of a request, holes, and tokens of nobody's."""
    batch = data.draw(batches(ROWS))
    scene = Scene(ROWS, batch, batch.totals)
    scene.fill(batch.totals)
    counts = [data.draw(st.integers(0, 2)) for _ in batch.totals]
    slots = scene.rng.integers(-1, 40, (sum(counts), 5)).astype(np.int32)
    outs = {}
    memory = []
    for n, role in zip("kv", scene.rows(), strict=True):
        outs[f"{n}_out"], around = rows_array(len(slots), (5, role.heads, role.dim), "bf16", strided=batch.strided)
        memory.append(around)
    places = {"row_offsets": offsets_of(counts, "i32"), "slots": slots}
    wanted = gather_rows(scene.view, scene.rows(), list(outs.values()), **places)
    pool = scene.snapshot()
    run = Run(scene, "gather_rows", launcher(scene, "gather_rows"), **outs, **places)
    for out, right, around in zip(outs.values(), wanted.outputs, memory, strict=True):
        assert np.isnan(out[wanted.failed].astype(np.float32)).all()
        assert out[~wanted.failed].tobytes() == right[~wanted.failed].tobytes()
        assert (surroundings(out, around) == CANARY).all(), "written beside the rows"
    hold_memory(scene, pool)
    run.expect_word(wanted.errors)


def test_prefix_of_a_larger_tensor() -> None:
    """Heads lie `total_tokens` rows apart whatever the tensor shows, and nothing past what it shows is a request's."""
    kernels, rng = ALL["ragged_heads"], np.random.default_rng(3)
    whole = rng.standard_normal((2, 2, 2, 180, 64)).astype(dtype("bf16").numpy())
    generated = package(kernels)
    out = {f"{n}_out": np.zeros((9, 2, 64), whole.dtype) for n in "kv"}
    with machine(mode="check"):
        cache = generated.Cache(whole[..., :20, :], kv_offsets=np.array([3, 8, 12], np.int32))
        generated.gather(cache[1], **out, row_offsets=np.array([0, 5, 9], np.int32))
    for i, rows in enumerate(out.values()):
        np.testing.assert_array_equal(rows, whole[1, i][:, 3:12].transpose(1, 0, 2))
    with pytest.raises(ArgumentError, match="got stride 1280 in dimension 2"):
        generated.Cache(np.ascontiguousarray(whole[..., :20, :]), kv_offsets=np.array([0], np.int32))


def test_the_host_sees_one_page_of_rows() -> None:
    """Shapes and lengths as MAX's collection names them; no rows at all are no error."""
    generated = package("ragged_fp8")
    pools = [np.zeros((11, 2, 64), np.uint8)] * 3
    cache = generated.Cache(pools, pools, kv_offsets=np.array([0, 5, 11], np.int32))
    assert (cache.name_str, cache.page_size, cache.max_cache_length, len(cache)) == ("ragged", 0, 11, 3)
    keys = cache.get_key_cache(2)
    assert (keys.shape, keys.strides[1:], keys.num_kv_rows) == ((1, 11, 2, 64), (128, 64, 1), 11)
    assert cache.lookup_table is not None and cache.cache_lengths is None
    with pytest.raises(ArgumentError, match="cache_length: the lengths of this cache lie in its page table"):
        cache.cache_length(0)
    empty = [np.zeros((0, 2, 64), np.uint8)]
    assert generated.Cache(empty, empty, kv_offsets=np.array([0], np.int32)).empty_cache
    with pytest.raises(ArgumentError, match="kv_offsets: got shape"):
        generated.Cache(pools, pools, kv_offsets=np.zeros(0, np.int32))
    with pytest.raises(ArgumentError, match="v_pool"):
        generated.Cache(pools, [p[:4] for p in pools], kv_offsets=np.array([0], np.int32))


CROSS = {
    f"cross_{dtype}": KernelSet(
        name=f"cross_{dtype}",
        q_heads=6,
        cache=presets.flash_attention_varlen(dtype=dtype, kv_heads=2, head_dim=64, v_head_dim=32),
        ops=(ops.Decode(rows=4, mask=Mask(causal=False)),),
    )
    for dtype in ("bf16", "f32")
}


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize(
    ("totals", "counts"), [((9, 90, 5, 0), (3, 1, 0, 4)), ((70, 4, 3, 1), (4, 0, 3, 1)), ((2, 90, 5, 1), (3, 1, 0, 4))]
)
def test_cross_attention(name: str, totals: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Queries of one sequence, keys of another: every row sees all keys, be they fewer than the rows, or none."""
    batch = replace(PLAIN, totals=totals, new=(0,) * 4, fill="inf")
    scene = Scene(CROSS[name], batch, totals)
    scene.fill(totals)
    q = queries(scene, sum(counts) + 1)
    out, lse, wanted = check_decode(scene, q, row_offsets=offsets_of(counts, "i32"))
    assert lse is not None and describe(wanted.errors) is None
    seen = [len(s.k) for s in wanted.seen if s is not None]
    assert seen == [n for n, rows in zip(totals, counts, strict=True) for _ in range(rows)] + [0]
    empty = [i for i, n in enumerate(seen) if not n]
    assert not out[empty].astype(np.float32).any() and np.isneginf(lse[empty]).all()


PACKED = KernelSet(
    name="packed_ragged",
    q_heads=4,
    cache=presets.flash_attention_varlen(dtype="bf16", kv_heads=2, head_dim=32, row_elements=(4 + 2 * 2) * 32),
    ops=(ops.Gather(), ops.Decode(), ops.Append()),
)


def test_views_of_packed_rows() -> None:
    """K and V are views of rows q | k | v, as a fused projection leaves them: read there, and written without a touch of q."""
    rng, offsets = np.random.default_rng(3), np.array([0, 7, 7, 40], np.int32)
    qkv = rng.standard_normal((40, 8, 32)).astype(dtype("bf16").numpy())
    keys, values = qkv[:, 4:6], qkv[:, 6:]
    generated = package(PACKED)
    with pytest.raises(ArgumentError, match=r"k_pool\[0\]: got stride 64 in dimension 0 .* it must be 256"):
        generated.Cache([keys.copy()], [values], kv_offsets=offsets)
    cache = generated.Cache([keys], [values], kv_offsets=offsets)
    k_out, v_out = np.zeros_like(keys.copy()), np.zeros_like(values.copy())
    q = qkv[[6, 6, 39], :4].copy()
    out = np.zeros_like(q)
    with machine(arch="sm_80", mode="check"):
        generated.gather(cache[0], offsets, k_out, v_out)
        generated.decode(cache[0], q, out)
    assert k_out.tobytes() == keys.tobytes() and v_out.tobytes() == values.tobytes()
    for b in (0, 2):
        k, v = (x[offsets[b] : offsets[b + 1]].astype(np.float64).repeat(2, axis=1) for x in (keys, values))
        scores = np.einsum("hd,nhd->hn", q[b].astype(np.float64), k) / 32**0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        right = np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v)
        assert np.abs(out[b].astype(np.float64) - right).max() < 0.02
    assert not out[1].any()
    wanted, new = qkv.copy(), rng.standard_normal((2, 3, 2, 32)).astype(qkv.dtype)
    wanted[[6, 38, 39], 4:6], wanted[[6, 38, 39], 6:] = new
    with machine(arch="sm_80", mode="check"):
        generated.append(cache[0], k=new[0], v=new[1], row_offsets=np.array([0, 1, 1, 3], np.int32))
    assert qkv.tobytes() == wanted.tobytes()
