"""Caches that a convert reads and writes as memory, and the call beside its oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvgen import KernelSet, ops
from kvgen.reference import convert
from kvgen.runtime import describe
from tests.support.batches import Batch
from tests.support.harness import hold_memory, on_machine, package
from tests.support.scenes import Scene


def op_of(kernels: KernelSet) -> ops.Convert:
    """The set's only operation."""
    (op,) = kernels.ops
    assert isinstance(op, ops.Convert)
    return op


def scenes(kernels: KernelSet, batch: Batch) -> tuple[Scene, Scene]:
    """The target, whose requests share no page, and the source, filled."""
    target = Scene(kernels, replace(batch, shared=False), batch.totals)
    read = op_of(kernels).source
    own = KernelSet(name="source", q_heads=read.kv_heads, cache=read, ops=(ops.Gather(),))
    source = Scene(own, replace(batch, seed=batch.seed + 1), batch.totals)
    source.fill(batch.totals)
    return target, source


def check(target: Scene, source: Scene, *, max_tokens: int | None = None, **first: int) -> int:
    """Convert and compare all memory, byte for byte, with the oracle's; the error word. `first`: of heads that move."""
    expected, untouched = target.snapshot(), source.snapshot()
    op = op_of(target.kernels)
    wanted = convert(
        target.view,
        target.rows(expected),
        source.view,
        source.rows(),
        max_tokens=max_tokens,
        same_scales=op.same_scales,
        heads=op.heads,
        **first,
    )
    word = np.zeros(1, np.uint64)
    generated = package(target.kernels)
    with on_machine(target.batch):
        cache = generated.Cache(**target.arguments())
        other = generated.ConvertSource(**source.arguments(), max_cache_length=max_tokens)
        errors = word if target.batch.errors else None
        generated.convert(cache[target.layer], source=other[source.layer], **first, errors=errors)
    hold_memory(target, expected)
    hold_memory(source, untouched)
    if target.batch.errors:
        assert int(word[0]) == wanted, f"error word {describe(int(word[0]))}, not {describe(wanted)}"
    return wanted
