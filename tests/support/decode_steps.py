"""Decode steps: a scene, query rows of several requests, and what masks, scores and sinks take; run and held to the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvgen import Continuous, KernelSet
from kvgen.layout.dtypes import dtype
from kvgen.ops import Decode, Extend
from kvgen.reference import Decoded, decode
from kvgen.schema.mask import TREE_ROWS
from tests.support.batches import OPEN_TOKENS, Batch
from tests.support.dominant_tokens import DominantToken, raise_edges
from tests.support.harness import (
    Run,
    brought_by,
    check_decode,
    decode_of,
    index_name,
    launcher,
    offsets_of,
    planned,
)
from tests.support.memory import Raw, rows_array
from tests.support.scenes import Scene
from tests.support.tolerance import Numerics, hold_counts, numerics


@dataclass
class Step:
    """One step of decode `op`: request b has `counts[b]` rows of q, behind `row_offsets` or, without, `op.rows` each."""

    scene: Scene
    op: Decode
    counts: tuple[int, ...]
    q: Raw
    row_offsets: Raw | None
    arguments: dict[str, Any]
    dominant: list[DominantToken]
    level: bool = False

    @property
    def numerics(self) -> Numerics:
        """The numerics that the oracle computes in."""
        return numerics(self.scene.kernels, self.op, self.arguments)

    def wanted(self) -> Decoded:
        """The oracle's result."""
        return decode(
            self.scene.view, self.scene.rows(), self.q, row_offsets=self.row_offsets, **self.numerics.oracle()
        )

    def check(self, *, lse: bool = True, workspace: Any = None) -> tuple[Raw, Raw | None, Decoded]:
        """Run it and hold out, lse, the error word and all memory to the oracle; with a workspace planned
        here where it takes one and none is given."""
        found = check_decode(
            self.scene,
            self.q,
            row_offsets=self.row_offsets,
            lse=lse,
            op=self.op.name,
            arguments=self.arguments,
            workspace=workspace,
        )
        if self.level and found[1] is not None and self.op.score is None and self.op.sinks is None:
            hold_counts(found[2], self.numerics, found[1])
        return found

    def run(self, *, workspace: Any = None) -> tuple[Raw, Raw]:
        """Run it; out and log-sum-exp as they come, for what the oracle cannot say."""
        shape = (len(self.q), self.q.shape[1])
        out = np.zeros((*shape, self.scene.cache.v_dim), dtype(self.numerics.out).numpy())
        lse = np.zeros(shape, np.float32)
        brought = brought_by(self.scene, self.op.name, self.q, self.arguments, self.row_offsets, workspace)
        Run(self.scene, self.op.name, launcher(self.scene, self.op.name), q=self.q, out=out, lse=lse, **brought)
        return out, lse

    def planned(self, more: int = 1, multiprocessors: int | None = None) -> Any:
        """A workspace of garbage, then planned for this step; for `more` rows more than needed."""
        return planned(
            self.scene,
            len(self.q),
            self.op.name,
            arguments=self.arguments,
            row_offsets=self.row_offsets,
            more=more,
            multiprocessors=multiprocessors,
        )


def step(
    kernels: KernelSet,
    batch: Batch,
    counts: Sequence[int] | None = None,
    *,
    op: str = "decode",
    offsets: bool = True,
    dominant: bool = True,
    level: bool = False,
) -> Step:
    """A scene whose request b holds batch.totals[b] tokens, counts[b] of them (by default as many as there can be) this
    step's, and a row of q each; `level` queries are 0: every token weighs the same, and a log-sum-exp counts them.

    With `offsets` batch.leading rows of nobody come first; batch.padding follow in any case.
    """
    spec = decode_of(kernels, op)
    counts = tuple([spec.rows] * len(batch.totals) if counts is None else counts)
    assert offsets or all(n == spec.rows for n in counts)
    before = kernels.cache.lengths == "before" and not spec.cross
    totals = tuple(max(n, c) if before else n for n, c in zip(batch.totals, counts, strict=True))
    batch = replace(batch, totals=totals, new=(0,) * len(totals), leading=batch.leading if offsets else 0)
    scene = Scene(kernels, batch, [n - c * before for n, c in zip(totals, counts, strict=True)])
    scene.fill(totals)
    rows = batch.leading + sum(counts) + batch.padding
    q, _ = rows_array(
        rows, (kernels.q_heads, scene.cache.head_dim), spec.q_dtype or scene.cache.dtype, strided=batch.strided
    )
    q[...] = 0 if level else scene.values(*q.shape)
    starts = np.cumsum([batch.leading, *counts])
    ranges = [(int(a), int(b)) for a, b in pairwise(starts)]
    found = Step(scene, spec, counts, q, None, arguments_of(scene, spec, ranges, rows), [], level)
    if offsets:
        found.row_offsets = offsets_of(counts, index_name(kernels, op), batch.leading)
    if dominant and not level:
        found.dominant = raise_edges(scene, q, totals, rows=ranges, given=found.numerics)
    return found


# What masks, scores and sinks take ----------------------------------------------------------------------------------------


def arguments_of(scene: Scene, op: Decode | Extend, ranges: Sequence[tuple[int, int]], rows: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    longest = max(scene.batch.totals, default=0)
    if op.mask.padding:
        index = dtype(index_name(scene.kernels, op.name)).numpy()
        choices = [scene.rng.choice([0, 1, n // 2, max(n - 1, 0), n, n + 3]) for n in scene.batch.totals]
        found["valid_tokens"] = np.array(choices, index)
    if op.mask.tree == "packed":
        found["tree_mask"] = _tree(scene, ranges, rows)
    if op.mask.tree == "mask":
        mask = _columns(scene, rows, longest, "u8")
        mask[...] = scene.rng.integers(1, 256, mask.shape) * (scene.rng.random(mask.shape) < 0.7)
        found["mask"] = mask
    if op.score is not None:
        found |= _score_arguments(scene, op.score, rows, longest, found.get("mask"))
    if op.sinks is not None:
        found["sinks"] = scene.rng.normal(1, 2, scene.kernels.q_heads).astype(np.float32)
    if op.q_dtype is not None and scene.rng.random() < 0.8:
        found["q_scale"] = scene.rng.uniform(0.5, 2, 1).astype(np.float32)
    if op.out_dtype == "e4m3" and scene.rng.random() < 0.8:  # results of some 20 at most
        found["out_scale"] = scene.rng.uniform(0.06, 3, 1).astype(np.float32)
    return found


def _columns(scene: Scene, rows: int, longest: int, element: str, columns: int | None = None) -> Raw:
    """An array `[T, K]`, strided where the batch is, K around the longest request's tokens where it is not given."""
    columns = columns or max(1, longest + int(scene.rng.integers(-3, 4)))
    return rows_array(rows, (columns,), element, strided=scene.batch.strided)[0]


def _tree(scene: Scene, ranges: Sequence[tuple[int, int]], rows: int) -> Raw:
    """Every row sees itself, mostly, and what a random earlier row of its request sees; bits past its rows are noise."""
    words = scene.rng.integers(0, 2**32, rows, np.uint64).astype(np.uint32)
    for begin, end in ranges:
        end = min(end, begin + TREE_ROWS)
        for i in range(end - begin):
            parent = 0 if i == 0 else int(words[begin + int(scene.rng.integers(i))])
            mine = parent | (scene.rng.random() < 0.9) << i
            noise = int(words[begin + i]) >> (end - begin) << (end - begin)
            words[begin + i] = np.uint32(mine & (1 << (end - begin)) - 1 | noise)
    return words


def _score_arguments(scene: Scene, score: Any, rows: int, longest: int, mask: Raw | None) -> dict[str, Any]:
    heads, rng, found = scene.kernels.q_heads, scene.rng, dict[str, Any]()
    if score.alibi:
        found["alibi_slopes"] = (2.0 ** -rng.uniform(3, 9, heads)).astype(np.float32)
    if score.relative is not None:
        element = "f32" if score.relative_dtype == "f32" else scene.cache.dtype
        shape = (rows, heads, score.relative)
        found["relative_bias"] = rng.standard_normal(shape).astype(dtype(element).numpy())
    if score.bias:
        columns = None if mask is None else mask.shape[1]  # both are [T, K]
        bias = _columns(scene, rows, longest, "f32", columns)
        bias[...] = np.where(rng.random(bias.shape) < 0.2, -np.inf, rng.standard_normal(bias.shape))
        found["bias"] = bias
    sizes: Mapping[str, int] = {
        "T": rows,
        "B": len(scene.batch.totals),
        "q_heads": heads,
        "kv_heads": scene.cache.kv_heads,
    }
    for name, tensor in score.tensors.items():
        shape = tuple(n if isinstance(n, int) else sizes.get(n, 7) for n in tensor.shape)
        kind = dtype(tensor.dtype).numpy()
        whole = tensor.kind == "int"
        found[name] = (rng.integers(0, 5, shape) if whole else rng.standard_normal(shape)).astype(kind)
    for name, kind in score.scalars.items():
        found[name] = 0.25 if kind == "f32" else 3
    return found


# Drawn steps ------------------------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn, kernels: KernelSet, op: str = "decode", most: int = 130) -> Step:
    """Steps of a set: up to four requests, whose tokens crowd around the ends of pages, tiles, windows and
    groups of tokens."""
    spec, cache = decode_of(kernels, op), kernels.cache
    page = cache.page_tokens or OPEN_TOKENS
    if isinstance(cache, Continuous):
        most = cache.max_tokens or OPEN_TOKENS
    edges = {0, 1, 2, most} | {e + d for e in (page, 2 * page, 16, 64, 128) for d in (-1, 0, 1)}
    ring = getattr(cache.page_table, "window", None)
    extents = [n for n in (spec.mask.window, spec.mask.chunk, ring, cache.storage.residual) if n]
    edges |= {n * times + d for n in extents for times in (1, 2) for d in (-1, 0, 1, spec.rows)}
    length = st.one_of(st.sampled_from(sorted(e for e in edges if 0 <= e <= most)), st.integers(0, most))
    totals = draw(st.lists(length, max_size=4))
    offsets = draw(st.booleans())
    row_count = st.one_of(st.just(spec.rows), st.integers(0, spec.rows))
    counts = [draw(row_count) if offsets else spec.rows for _ in totals]
    batch = Batch(
        totals=tuple(totals),
        new=(0,) * len(totals),
        padding=draw(st.integers(0, 3)),
        shared=draw(st.booleans()),
        fill=draw(st.sampled_from(("nan", "inf", "bytes"))),
        strided=draw(st.booleans()),
        errors=draw(st.sampled_from((True, True, False))),
        schedule=draw(st.sampled_from(("ascending", "descending", 7))),
        seed=draw(st.integers(0, 2**32 - 1)),
        leading=draw(st.sampled_from((0, 2))),
    )
    level = draw(st.sampled_from((False, False, True)))
    return step(kernels, batch, counts, op=op, offsets=offsets, level=level)
