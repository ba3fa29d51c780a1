"""Cascade attention: a prefix that requests share is attended to once for all of them, and merged with what each has itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvgen import KernelSet, Mask, Paged, ops
from kvgen.reference import decode, merge_states
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import package, queries
from tests.support.memory import rows_array
from tests.support.scenes import Scene

Floats = NDArray[np.float64]
HEADS, DIM = 3, 8

SET = KernelSet(
    name="cascade",
    q_heads=4,
    cache=Paged(dtype="bf16", kv_heads=2, head_dim=16, page_size=16, lengths="after"),
    ops=(
        ops.Decode(out_dtype="f32"),
        ops.Extend(name="prefix", mask=Mask(causal=False), cross=True, out_dtype="f32"),
        ops.MergeStates(dtype="f32"),
    ),
)
# States of other kernels, with another base.
MANY = SET.model_copy(
    update={"name": "cascade_many", "ops": (ops.MergeStates(states="many", dtype="f32", lse_base="2"),)}
)
PREFIX = 32  # tokens that all requests begin with


def attention(q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats]:
    """q `[T, heads, dim]`, k and v `[n, heads, dim]` -> out `[T, heads, dim]` and the log-sum-exps `[T, heads]`."""
    if not len(k):
        return np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    scores = np.einsum("thd,nhd->thn", q, k)
    weights = np.exp(scores)
    return np.einsum("thn,nhd->thd", weights, v) / weights.sum(2)[..., None], np.log(weights.sum(2))


def parts_of(rng: np.random.Generator, keys: int, parts: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Attention over a random share of the keys each, and over all of them: (outs, lses, out, lse)."""
    q, k, v = rng.standard_normal((5, HEADS, DIM)), *rng.standard_normal((2, keys, HEADS, DIM))
    whose = rng.integers(0, parts, keys)
    found = [attention(q, k[whose == s], v[whose == s]) for s in range(parts)]
    return np.stack([o for o, _ in found]), np.stack([s for _, s in found]), *attention(q, k, v)


@settings(max_examples=20)
@given(data=st.data())
def test_parts_of_the_keys_make_the_whole(data: Any) -> None:
    """However the keys are dealt out, parts without keys among them; in either base; two by two as well as at once."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    outs, lses, out, lse = parts_of(rng, data.draw(st.integers(0, 20)), data.draw(st.integers(2, 6)))
    for base, unit in (("e", 1.0), ("2", np.log(2))):
        merged = merge_states(outs, lses / unit, base=base)
        np.testing.assert_allclose(merged[0], out, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(merged[1] * unit, lse, rtol=1e-12)
    so_far = outs[0], lses[0]
    for part, its in zip(outs[1:], lses[1:], strict=True):
        so_far = merge_states(np.stack([so_far[0], part]), np.stack([so_far[1], its]))
    np.testing.assert_allclose(so_far[0], out, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("parts", [2, 5, 11])
def test_the_kernel_makes_the_whole(parts: int) -> None:
    """Parts in f32, merged on the machine, against attention over all keys."""
    rng = np.random.default_rng(parts)
    q, k, v = rng.standard_normal((3, 4, 16)) / 4, *rng.standard_normal((2, 40, 4, 16))
    found = [attention(q, k[s::parts], v[s::parts]) for s in range(parts)]
    outs = np.stack([o for o, _ in found]).astype(np.float32)
    lses = (np.stack([s for _, s in found]) / np.log(2)).astype(np.float32)
    out, lse = np.zeros((3, 4, 16), np.float32), np.zeros((3, 4), np.float32)
    scene = Scene(MANY, PLAIN, ())
    with machine(mode="check"):
        package(MANY).merge_states(package(MANY).Cache(**scene.arguments())[0], outs, lses, out, lse=lse)
    whole, sums = attention(q, k, v)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse * np.log(2), sums, rtol=1e-5)


@pytest.mark.parametrize("totals", [(33, 40, 50), (32, 47, 33, 64, 35, 80, 32, 41, 100)])
def test_a_shared_prefix(totals: tuple[int, ...]) -> None:
    """The prefix as one request that has all rows, the rest by the pages behind it: merged, as one decode."""
    batch = replace(PLAIN, totals=totals, new=(0,) * len(totals), shared=True, seed=len(totals))
    scene = Scene(SET, batch, totals)
    scene.fill(totals)
    assert all(pages[:2] == scene.entries[0][:2] for pages in scene.entries)
    rows, heads, generated = len(totals), SET.q_heads, package(SET)
    q, arguments = queries(scene, rows), scene.arguments()
    table = arguments["page_table"]
    shared = arguments | {
        "page_table": np.ascontiguousarray(table[:1, :2]),
        "lengths": np.full(1, PREFIX, arguments["lengths"].dtype),
    }
    behind = arguments | {
        "page_table": np.ascontiguousarray(table[:, 2:]),
        "lengths": arguments["lengths"] - np.array(PREFIX, arguments["lengths"].dtype),
    }
    outs = [rows_array(rows, (heads, 16), "f32", strided=False)[0] for _ in range(2)]
    lses = [rows_array(rows, (heads,), "f32", strided=False)[0] for _ in range(2)]
    with machine(mode="check"):
        prefix = generated.Cache(**shared)[scene.layer]
        workspace = generated.prefix.workspace(max_rows=rows, multiprocessors=2)
        generated.prefix.plan(prefix, workspace, rows=rows)
        generated.prefix(prefix, q, outs[0], workspace, lse=lses[0])
        cache = generated.Cache(**behind)[scene.layer]
        generated.decode(cache, q, outs[1], lse=lses[1])
        generated.merge_states(cache, outs[0], lses[0], outs[1], lses[1], outs[0], lse=lses[0])
    wanted = decode(scene.view, scene.rows(), q)
    size = np.abs(wanted.out).max() + 1
    # P is rounded to bf16 on the way.
    np.testing.assert_allclose(outs[0], wanted.out, atol=2.0**-8 * size)
    np.testing.assert_allclose(lses[0], wanted.lse, atol=1e-3)
