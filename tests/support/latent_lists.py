"""Steps of mla_decode over lists of rows, in one cache or several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvgen import KernelSet, Keys
from kvgen.ops import Gather
from kvgen.schema.cache import Cache
from tests.support.batches import Batch
from tests.support.latent_steps import latent_set, op_of
from tests.support.memory import Raw, rows_array
from tests.support.scenes import Scene
from tests.support.sets import archs_of


def source_set(name: str, cache: Cache, heads: int, *others: Cache, **fields: Any) -> KernelSet:
    """A set over lists in its own cache and in others, which are called a, b and so on."""
    keys = tuple(Keys(name=letter, cache=other) for letter, other in zip("abc", others, strict=False))
    return latent_set(f"sources_{name}", cache, heads, sparse=True, sources=keys, **fields)


def other_scenes(kernels: KernelSet, batch: Batch) -> dict[str, Scene]:
    """Every other cache of a set with rows of its own, as many requests with other lengths."""
    found = {}
    for n, keys in enumerate(op_of(kernels).sources):
        counts = tuple(max(1, (t * (3 + n)) // 4) for t in batch.totals)
        its = replace(batch, totals=counts, seed=batch.seed + n + 1)
        scene = Scene(KernelSet(name="other", q_heads=1, cache=keys.cache, ops=(Gather(),)), its, counts)
        scene.fill(counts)
        found[keys.name] = scene
    return found


def lists_of(scene: Scene, rows: int, width: int, rng: np.random.Generator) -> Raw:
    """Lists of stored rows of any request among holes, a row twice now and then; memory behind each list says nothing."""
    stored = []
    for b, n in enumerate(total // scene.cache.entry_tokens for total in scene.batch.totals):
        for t in range(scene.view.first_token(n), n):
            places = scene.view.places(b, t // scene.tokens)
            assert isinstance(places, tuple)
            stored.append(places[0].page * scene.tokens + t % scene.tokens)
    lists, _ = rows_array(rows, (width,), "i32", strided=scene.batch.strided)
    lists[...] = rng.choice(np.array([*stored, -1, -1]), (rows, width)) if stored else -1
    return lists


def step(kernels: KernelSet, batch: Batch, rows: int, widths: tuple[int, ...]) -> tuple[Scene, Raw, dict[str, Any]]:
    """A scene, q, and what a call brings: lists of the given widths, sinks, the other caches."""
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    q, _ = rows_array(rows, (kernels.q_heads, kernels.cache.head_dim), kernels.cache.dtype, strided=batch.strided)
    q[...] = scene.values(*q.shape)
    others, rng = other_scenes(kernels, batch), np.random.default_rng(batch.seed)
    arguments: dict[str, Any] = {"others": others}
    for (name, its), width in zip({"": scene, **others}.items(), widths, strict=True):
        arguments[f"{name}_indices".lstrip("_")] = lists_of(its, rows, width, rng)
    if op_of(kernels).split != "none":  # a plan is made of lengths
        arguments |= {
            f"{n}_topk_lengths".lstrip("_"): np.full(rows, w, np.int32)
            for n, w in zip(("", *others), widths, strict=True)
        }
    if op_of(kernels).sinks:
        arguments["sinks"] = (3 * rng.standard_normal(kernels.q_heads)).astype(np.float32)
    return scene, q, arguments


@st.composite
def batches(draw: Any, kernels: KernelSet) -> Batch:
    return Batch(
        totals=tuple(draw(st.sampled_from((1, 2, 5, 9))) for _ in range(draw(st.integers(1, 2)))),
        new=(0, 0, 0),
        padding=0,
        shared=False,
        fill=draw(st.sampled_from(("nan", "inf"))),
        strided=draw(st.booleans()),
        errors=True,
        arch=draw(st.sampled_from(archs_of(kernels))),
        schedule=draw(st.sampled_from(("ascending", "descending", 7))),
        seed=draw(st.integers(0, 2**32 - 9)),
        leading=0,
    )
