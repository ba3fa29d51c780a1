"""norm_cache and rotate_cache: the step's rows change where they are stored, everything else stays, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from kvgen import ops
from kvgen.layout.dtypes import dtype
from kvgen.reference.append import Change, changed, locate
from kvgen.runtime import describe
from kvgen.runtime.cpu import machine
from kvgen.spec.cache import Cache
from kvgen.spec.kernel_set import Op
from kvgen.spec.norm import RmsNorm
from tests.ops.batches import PLAIN, Batch, batches
from tests.ops.chosen import CHOSEN, chosen
from tests.ops.fused import GEMMA, NEOX, YARN
from tests.ops.harness import on_machine, package
from tests.ops.memory import rows_array
from tests.ops.scenes import Scene
from tests.ops.test_fused import check_q, check_row, fill

# Which operations each cache has. Both find rows and read and write them in the same way, so that each kind of table, of layout
# and of storing is met by one of them; by both: plain values, codes with scales, with zero points, of half a byte, given scales.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "dense": ("norm_k", "norm_v", "rotate", "rotate_k"),
    "hnd": ("norm_k",),
    "kv_inside": ("rotate",),
    "flashinfer": ("rotate",),
    "per_kv": ("norm_v", "rotate_k"),
    "indirect": ("norm_k",),
    "ring": ("norm_k",),
    "continuous": ("rotate",),
    "continuous_open": ("norm_k",),
    "latent": ("norm_k", "rotate"),
    "k_only": ("rotate",),
    "xpacked": ("norm_v",),
    "swizzled": ("rotate_k",),
    "latent_row": ("norm_k",),
    "latent_pool": ("rotate",),
    "fp8": ("norm_k",),
    "given": ("norm_k", "norm_v", "rotate"),
    "mixed": ("norm_v", "rotate"),
    "int8_own_table": ("norm_k", "rotate_k"),
    "int4_in_page": ("norm_k", "rotate"),
    "nvfp4": ("rotate",),
    "nvfp4_swizzled": ("norm_k",),
}


def operations(cache: Cache) -> Sequence[Op]:
    (has,) = (OPERATIONS[name] for name in OPERATIONS if CHOSEN[name] is cache)
    whole = "row" if not cache.rope_part and cache.kv_heads > 1 else "head"
    rope = YARN if cache.rope_part else NEOX
    found: tuple[Op, ...] = (
        ops.NormCache(name="norm_k", norm=RmsNorm(over=whole) if whole == "row" else RmsNorm()),  # type: ignore[arg-type]
        ops.NormCache(name="norm_v", role="v", norm=GEMMA),
        ops.RotateCache(name="rotate", rope=rope),
        ops.RotateCache(name="rotate_k", rope=rope, q_out="none"),
    )
    return [op for op in found if op.name in has]


SETS = chosen("inplace", operations, OPERATIONS)


def run(scene: Scene, name: str, rows: int, offsets: Any) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Launch one of the set's operations; returns the error word, its arguments, and the memory around q_out."""
    generated, kernels = package(scene.kernels), scene.kernels
    launcher, arguments, outer = getattr(generated, name), dict[str, Any](row_offsets=offsets), dict[str, Any]()
    for spec in launcher.KERNEL.arguments:
        if spec.name in ("errors", "row_offsets"):
            continue
        if spec.name == "num_rows":
            arguments["num_rows"] = rows
            continue
        shape = [n if isinstance(n, int) else rows for n in spec.shape]
        array = np.zeros(shape, dtype(spec.dtype).numpy())
        if spec.strided:
            array, outer[spec.name] = rows_array(rows, shape[1:], spec.dtype, strided=scene.batch.strided)
        if spec.access == "in":
            fill(scene, spec.name, array)
        arguments[spec.name] = array
    word = np.zeros(1, np.uint64)
    with on_machine(scene.batch):
        launcher(generated.Cache(**scene.arguments())[scene.layer], **arguments, errors=word)
    assert kernels is scene.kernels
    return int(word[0]), arguments, outer


def check(scene: Scene, name: str) -> int:
    """Run it on a scene whose step is stored, and compare all memory; returns the error word."""
    batch, cache = scene.batch, scene.cache
    op = next(o for o in scene.kernels.ops if o.name == name)
    role = getattr(op, "role", "k")
    turning = isinstance(op, ops.RotateCache)
    rows = batch.leading + sum(batch.new) + batch.padding
    offsets = np.cumsum([batch.leading, *batch.new]).astype(dtype(cache.lengths_dtype).numpy())
    found, wanted = locate(scene.view, rows, row_offsets=offsets)
    expected = scene.snapshot()
    which = "kv".index(role)
    before = scene.rows()[which]
    values = np.zeros((rows, before.heads, before.dim))
    for row, at in enumerate(found):
        if at.places is not None:
            values[row] = before.numbers(at.places[which].page, at.token, at.places[which].scales)
    unstored = ~np.isfinite(values).all(axis=(1, 2))  # tokens that no ring keeps, which the scene has not stored
    values[unstored] = 0
    word, arguments, outer = run(scene, name, rows, offsets)
    latent = before.dim - cache.rope_part if cache.rope_part else 0
    positions = np.array([p.position or 0 for p in found], np.int64) if turning else None
    rope = getattr(op, "rope", None)
    norm = getattr(op, "norm", None)
    # Rows count in the cache's dtype where a norm casts between; they are read dequantized, not rounded.
    do = Change(norm=norm, weight=arguments.get(f"{role}_weight"), rope=rope, positions=positions, latent=latent)
    change = changed(values, replace(do), kind=dtype(cache.dtype).numpy())
    mine, theirs = scene.rows()[which], scene.rows(expected)[which]
    change.lost[unstored] = np.inf
    for row, at in enumerate(found):
        if at.places is None:
            continue
        check_row(mine, theirs, at.places[which], at.token, change, row, f"{role} of row {row}")
    for memory, parts in scene.snapshot().items():
        for part, right in zip(parts, expected[memory], strict=True):
            np.testing.assert_array_equal(part, right, err_msg=memory)
    if "q_out" in arguments:
        q = changed(arguments["q"], Change(rope=rope, positions=positions))
        check_q(arguments["q_out"], outer["q_out"], found, q)
    assert word == wanted, f"error word {describe(word)}, not {describe(wanted)}"
    return word


def stored(name: str, batch: Batch) -> Scene:
    """A scene whose step has been appended; lengths are those of the step's start."""
    kernels = SETS[name]
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(batch.totals)
    return scene


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=2)
@drawn(data=st.data())
def test_drawn_batches(name: str, data: Any) -> None:
    # Where requests share pages, a full one may hold new tokens of two requests.
    batch = replace(data.draw(batches(SETS[name])), errors=True, shared=False)
    for op in SETS[name].ops:
        check(stored(name, batch), op.name)


STEP = replace(PLAIN, totals=(5, 40, 1), new=(2, 3, 1), padding=1)


@pytest.mark.parametrize("op", ["norm_k", "norm_v", "rotate"])
@pytest.mark.parametrize("value", [-1, 2**31 - 1, 99])
def test_a_bad_page(op: str, value: int) -> None:
    """The request whose page is wrong is left alone and named; the others change."""
    name = next(n for n in SETS if n.endswith("_dense"))
    scene = stored(name, STEP)
    scene.tables["page_table"][1] = np.array(value, np.int64).astype(scene.tables["page_table"].dtype)
    report = describe(check(scene, op))
    assert report is not None and report.request == 1


def test_one_launch_each() -> None:
    name = next(n for n in SETS if n.endswith("_dense"))
    for op in SETS[name].ops:
        with machine(mode="check") as log:
            scene = stored(name, STEP)
            generated = package(scene.kernels)
            launcher = getattr(generated, op.name)
            given: dict[str, Any] = {"row_offsets": np.array([0, 2, 5, 6], np.uint32)}
            for spec in launcher.KERNEL.arguments:
                if spec.name not in ("errors", "row_offsets"):
                    shape = [] if spec.name == "num_rows" else [n if isinstance(n, int) else 7 for n in spec.shape]
                    given[spec.name] = 7 if spec.name == "num_rows" else np.ones(shape, dtype(spec.dtype).numpy())
            launcher(generated.Cache(**scene.arguments())[0], **given)
        assert len(log.launches) == 1
