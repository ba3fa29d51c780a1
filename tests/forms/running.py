"""A drawn set run on the CPU machine in check mode, every result held to its oracle in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st

from kvgen import KernelSet, ops
from kvgen.architectures import Arch
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.indexer import TOKENS
from kvgen.plan.params import Scalar
from tests.ops import (
    test_copied_layers,
    test_decode_page_lists,
    test_fused,
    test_gather,
    test_indexer_candidates,
    test_indexer_scores,
)
from tests.support import conversions, decode_steps, extend_steps, indexer_steps, latent_lists, latent_steps
from tests.support.batches import Batch, batches, capacity
from tests.support.harness import index_name, offsets_of
from tests.support.scenes import Scene


def run(kernels: KernelSet, arch: Arch, data: Any) -> None:
    """One step of the set's operation on an architecture of its own."""
    _RUNS[type(kernels.ops[0])](kernels, arch, data)


def _batch(kernels: KernelSet, arch: Arch, data: Any, **fields: Any) -> Batch:
    """A batch with tokens, and with entries that stand for several."""
    found: Batch = data.draw(
        batches(kernels, least=kernels.cache.entry_tokens).filter(lambda batch: len(batch.totals) > 0)
    )
    return replace(found, arch=arch, **fields)


# Attention ------------------------------------------------------------------------------------------------------------


def _decode(kernels: KernelSet, arch: Arch, data: Any) -> None:
    op = kernels.ops[0]
    assert isinstance(op, ops.Decode)
    if op.pages == "per_head":
        return _decode_lists(kernels, arch, data)
    batch = _batch(kernels, arch, data, errors=True)
    most = [min(op.rows, n) if kernels.cache.lengths == "before" else op.rows for n in batch.totals]
    counts = [data.draw(st.integers(1, n)) for n in most]
    decode_steps.step(kernels, batch, counts, dominant=kernels.cache.entry_tokens == 1).check()


def _decode_lists(kernels: KernelSet, arch: Arch, data: Any) -> None:
    batch = _batch(kernels, arch, data, errors=True, leading=0, padding=0)
    step = decode_steps.step(kernels, batch, offsets=False, dominant=False)
    lists = test_decode_page_lists.lists_of(step.scene, [*range(len(batch.totals))], 3)
    test_decode_page_lists.check(step.scene, step.q, lists, arguments=step.arguments)


def _extend(kernels: KernelSet, arch: Arch, data: Any) -> None:
    op = kernels.ops[0]
    assert isinstance(op, ops.Extend)
    most = min(capacity(kernels), 90, 32 if op.mask.tree == "packed" else 90)
    window = getattr(kernels.cache.page_table, "window", None)
    counts = data.draw(st.lists(st.integers(1, min(most, window or most)), min_size=1, max_size=3))
    batch = _batch(kernels, arch, data, errors=True)
    totals = [min(n + data.draw(st.integers(0, 150)), capacity_of_extend(kernels)) for n in counts]
    batch = replace(batch, totals=tuple(totals), new=(0,) * len(totals))
    extend_steps.step(kernels, batch, [min(a, b) for a, b in zip(counts, totals, strict=True)]).check()


def capacity_of_extend(kernels: KernelSet) -> int:
    """Tokens that a request of an extend may have."""
    bounded = not hasattr(kernels.cache, "table")
    return capacity(kernels) if bounded else 300


def _mla_decode(kernels: KernelSet, arch: Arch, data: Any) -> None:
    op = latent_steps.op_of(kernels)
    if not op.sparse:
        batch, rows, total, ragged = data.draw(
            latent_steps.steps(kernels).filter(lambda step: len(step[1]) > 0 and step[2] > 0)
        )
        scene, q = latent_steps.latent_scene(kernels, replace(batch, arch=arch), rows, total)
        given: dict[str, Any] = {}
        if ragged:
            given["row_offsets"] = offsets_of(
                [r.end - r.begin for r in rows], index_name(kernels, op.name), batch.leading
            )
        if op.sinks:
            given["sinks"] = (3 * scene.rng.standard_normal(kernels.q_heads)).astype(np.float32)
        latent_steps.call(scene, q, **given)
        return
    batch = replace(data.draw(latent_lists.batches(kernels)), arch=arch)
    widths = [data.draw(st.sampled_from((1, 16, 33, 70))) for _ in range(1 + len(op.sources))]
    scene, q, arguments = latent_lists.step(kernels, batch, data.draw(st.integers(1, 3)), tuple(widths))
    latent_steps.call(scene, q, **arguments)


def _indexer_scores(kernels: KernelSet, arch: Arch, data: Any) -> None:
    op = kernels.ops[0]
    assert isinstance(op, ops.IndexerScores)
    name = "block_scores" if op.block_max else "candidate_scores" if op.candidates else op.name
    kernels = kernels.model_copy(
        update={"name": f"{kernels.name}_{name}", "ops": (op.model_copy(update={"name": name}),)}
    )
    batch, ragged = data.draw(indexer_steps.steps(kernels, name).filter(lambda step: sum(step[0].new) > 0))
    batch = replace(batch, arch=arch)
    scene, q, weights = indexer_steps.scores_scene(kernels, batch, batch.leading + sum(batch.new) + batch.padding)
    offsets = offsets_of(batch.new, index_name(kernels, name), batch.leading) if ragged else None
    keys = max(batch.totals) // scene.cache.entry_tokens + data.draw(st.sampled_from((0, 3)))
    with indexer_steps.few_blocks(kernels, data.draw(st.sampled_from((1, 5, 1000))), name):
        if op.block_max:
            test_indexer_candidates.block_scores(scene, q, weights, keys, -(-keys // op.block_max) or 1, offsets)
        elif op.candidates:
            lists = test_indexer_candidates.drawn_lists(data, len(q), -(-keys // op.candidates))
            test_indexer_candidates.listed_scores(scene, q, weights, lists, offsets)
        else:
            test_indexer_scores.call(scene, q, weights, max(keys, TOKENS + 3), offsets)


# Rows -----------------------------------------------------------------------------------------------------------------


def _append(kernels: KernelSet, arch: Arch, data: Any) -> None:
    op = kernels.ops[0]
    assert isinstance(op, ops.Append)
    batch = _batch(kernels, arch, data, errors=True)
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(before)
    test_fused.check(test_fused.call_of(scene, *test_fused.places_of(scene, op)))


def _copies(kernels: KernelSet, arch: Arch, data: Any) -> None:
    """gather and scatter, by rows of every kind, of one layer and of all."""
    op: Any = kernels.ops[0]
    batch = _batch(kernels, arch, data)
    reads = isinstance(op, ops.Gather)
    batch = replace(batch, shared=batch.shared and reads)
    scene = Scene(kernels, batch, batch.totals)
    if reads:
        test_copied_layers.fill_layers(scene, batch.totals)
    rows, where = _where(scene, op, batch, data)
    (test_copied_layers.check_gather if reads else test_copied_layers.check_scatter)(scene, op, rows, where)


def _where(scene: Scene, op: Any, batch: Batch, data: Any) -> tuple[int, dict[str, Any]]:
    """Rows of a call, and which tokens they are."""
    kind = index_name(scene.kernels, op.name) if op.rows != "slots" else op.index_dtype or "i64"
    if op.rows == "slots":
        rows = data.draw(st.integers(1, 40))
        return rows, {"slots": test_copied_layers.slots_of(scene, rows, wrong=data.draw(st.booleans()), kind=kind)}
    starts = [int(scene.rng.integers(scene.view.first_token(n), n + 1)) for n in batch.totals]
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    where: dict[str, Any] = {"starts": np.array(starts, dtype(kind).numpy())}
    if op.rows == "runs":
        gaps = [data.draw(st.integers(0, 3)) for _ in range(len(counts) + 1)]
        runs = test_gather.runs_of(counts, gaps, kind)
        return int(runs.begins[-1]) + counts[-1] + gaps[-1], where | {"row_offsets": runs}
    offsets = offsets_of(counts, kind, batch.leading)
    return int(offsets[-1]) + batch.padding, where | {"row_offsets": offsets}


def _convert(kernels: KernelSet, arch: Arch, data: Any) -> None:
    op = conversions.op_of(kernels)
    own = KernelSet(name="source", q_heads=op.source.kv_heads, cache=op.source, ops=(ops.Gather(),))
    batch = _batch(min(kernels, own, key=capacity), arch, data)
    (plan,) = op.plan(kernels)
    heads = [p for p in plan.params if isinstance(p, Scalar)]
    first = {p.name: data.draw(st.sampled_from(range(0, (p.most or 0) + 1, p.multiple))) for p in heads}
    target, source = conversions.scenes(kernels, replace(batch, arch=arch))
    conversions.check(target, source, **first)


_RUNS: Final[Mapping[type[Any], Callable[[KernelSet, Arch, Any], None]]] = {
    ops.Decode: _decode,
    ops.Extend: _extend,
    ops.MlaDecode: _mla_decode,
    ops.IndexerScores: _indexer_scores,
    ops.Append: _append,
    ops.Gather: _copies,
    ops.Scatter: _copies,
    ops.Convert: _convert,
}
