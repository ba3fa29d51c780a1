"""Steps of an indexer's scores: scenes with every key stored, q and weights; grids of few blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvgen import KernelSet, ops
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.indexer import TOKENS
from tests.support.batches import PLAIN, Batch
from tests.support.harness import offsets_of, package
from tests.support.memory import Raw, rows_array
from tests.support.scenes import Scene


def op_of(kernels: KernelSet, name: str = "indexer_scores") -> ops.IndexerScores:
    """The operation of a set that has this name."""
    op = next(o for o in kernels.ops if o.name == name)
    assert isinstance(op, ops.IndexerScores)
    return op


def scores_scene(kernels: KernelSet, batch: Batch, total: int) -> tuple[Scene, Raw, Raw]:
    """A scene with every token stored, `total` rows of q and their weights."""
    before = batch.new if kernels.cache.lengths == "before" else [0] * len(batch.totals)
    scene = Scene(kernels, batch, [n - m for n, m in zip(batch.totals, before, strict=True)])
    scene.fill(batch.totals)
    quant = scene.cache.quants["k"]
    kind = quant.codes.name if quant is not None else scene.cache.dtype
    shape = (kernels.q_heads, scene.cache.head_dim)
    if kind == "e2m1":
        q, _ = rows_array(total, (shape[0], shape[1] // 2), "u8", strided=batch.strided)
        q[...] = scene.rng.integers(0, 256, q.shape)
    else:
        q, _ = rows_array(total, shape, kind, strided=batch.strided)
        q[...] = scene.rng.standard_normal((total, *shape)).astype(dtype(kind).numpy())
    weights, _ = rows_array(total, shape[:1], "f32", strided=batch.strided)
    weights[...] = scene.rng.standard_normal((total, shape[0])) * np.float32(0.1)
    return scene, q, weights


def scales_of(scene: Scene, q: Raw) -> dict[str, Raw]:
    """Four e8m0 scales a head where q is codes of 4 bits; the same for the same row, wherever it stands."""
    if q.dtype != np.uint8:
        return {}
    scales, _ = rows_array(len(q), q.shape[1:2], "i32", strided=scene.batch.strided)
    scales[...] = (q[..., :4].astype(np.int64) % 7 + 122) @ np.array([1, 1 << 8, 1 << 16, 1 << 24])
    return {"q_scales": scales}


@contextmanager
def few_blocks(kernels: KernelSet, most: int, name: str = "indexer_scores") -> Iterator[None]:
    """At most so many blocks take all work, as a GPU's multiprocessors do; here a launch has one a tile."""
    kernel = getattr(package(kernels), name).KERNEL
    before = kernel.grid
    object.__setattr__(kernel, "grid", lambda dims: (min(most, before(dims)[0]), 1, 1))
    try:
        yield
    finally:
        object.__setattr__(kernel, "grid", before)


@st.composite
def steps(draw: Any, kernels: KernelSet, name: str = "indexer_scores") -> tuple[Batch, bool]:
    """A batch whose new tokens are rows of q: any number of each request, or, without offsets, as many of every one."""
    page, most, rate = kernels.cache.page_tokens or 1, op_of(kernels, name).rows, kernels.cache.entry_tokens
    edges = sorted({0, 1, 2, 5} | {n * rate + d for n in (page, TOKENS, 2 * TOKENS) for d in (-1, 0, 1)})
    ragged = draw(st.booleans())
    count = draw(st.integers(0, 3))
    totals = sorted(draw(st.sampled_from(edges)) for _ in range(count))
    new = [draw(st.integers(0, min(2 * most + 1, n))) if ragged else most for n in totals]
    batch = Batch(
        totals=tuple(totals),
        new=tuple(new),
        padding=draw(st.integers(0, 2)),
        shared=ragged and draw(st.booleans()),
        fill=draw(st.sampled_from(("nan", "inf"))),
        strided=draw(st.booleans()),
        errors=True,
        schedule=draw(st.sampled_from(("ascending", "descending", 7))),
        seed=draw(st.integers(0, 2**32 - 1)),
        leading=draw(st.sampled_from((0, 2))) if ragged else 0,
    )
    return batch, ragged


def ragged_step(
    kernels: KernelSet, totals: tuple[int, ...], new: tuple[int, ...], name: str = "indexer_scores", **fields: Any
) -> tuple[Scene, Raw, Raw, Raw]:
    """A scene whose requests have so many keys, its q, weights and offsets."""
    batch = replace(PLAIN, totals=tuple(n * kernels.cache.entry_tokens for n in totals), new=new, **fields)
    scene, q, weights = scores_scene(kernels, batch, sum(new) + batch.padding)
    kind = op_of(kernels, name).index_dtype or scene.cache.lengths_dtype
    return scene, q, weights, offsets_of(new, kind)
