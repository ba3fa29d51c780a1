"""move_tokens against the oracle: all memory of all layers, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Latent, Paged, Quant, ops, presets
from kvgen.reference import cache_rows, move_tokens
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN
from tests.support.harness import hold_memory, on_machine, package
from tests.support.page_moves import moving_scene
from tests.support.scenes import LAYERS, Scene

_SIZES: dict[str, Any] = {"kv_heads": 2, "page_size": 4}
I4 = Quant(dtype="i4", scale_dtype="f16", block=Block(dim=8))
E4 = Quant(dtype="e4m3", scale_dtype="f32")
SETS = {
    name: KernelSet(name=f"tokens_{name}", q_heads=16, cache=cache, ops=[ops.MoveTokens(slots_dtype=slots)])
    for name, cache, slots in (
        # Rows of several vectors a thread, so that few pairs are on their way at once; a tensor a layer, K and V together.
        ("wide", Paged(dtype="f32", kv_heads=16, head_dim=128, page_size=2), "i64"),
        ("codes", Paged(dtype="bf16", head_dim=16, quant=I4, **_SIZES), "i32"),
        ("latent", Latent(dtype="bf16", latent_dim=32, rope_dim=8, page_size=8, quant=E4), "i64"),
        ("across", presets.vllm_xpacked(dtype="f16", kv_heads=2, head_dim=16, page_size=16), "i64"),
    )
}  # fmt: skip


def check(scene: Scene, src: Any, dst: Any, offsets: Any) -> int:
    """Move, and compare all memory with the oracle's."""
    op = scene.kernels.ops[0]
    assert isinstance(op, ops.MoveTokens)
    kind = {"i32": np.int32, "i64": np.int64}[op.slots_dtype]
    src, dst = (np.array(x, np.int64).astype(kind) for x in (src, dst))
    row_offsets = np.array(offsets, np.int64).astype(np.int32 if scene.cache.lengths_dtype == "i32" else np.uint32)
    expected = scene.snapshot()
    layers = [cache_rows(scene.cache, scene.arrays(expected), layer) for layer in range(LAYERS)]
    wanted = move_tokens(scene.view, layers, src, dst, row_offsets=row_offsets)
    word = np.zeros(1, np.uint64)
    with on_machine(scene.batch):
        package(scene.kernels).move_tokens(
            package(scene.kernels).Cache(**scene.arguments()), src, dst, row_offsets, errors=word
        )
    hold_memory(scene, expected)
    assert int(word[0]) == wanted, (describe(int(word[0])), describe(wanted))
    return wanted


def drafts(rng: np.random.Generator, slots: list[int], verified: int) -> tuple[list[int], list[int]]:
    """Of a request's slots in the order of positions: `verified` accepted drafts, ascending, onto the first places."""
    taken = np.sort(rng.permutation(len(slots))[:verified])
    return [slots[i] for i in taken], slots[:verified]


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=5)
@given(data=st.data())
def test_accepted_drafts(name: str, data: Any) -> None:
    """Every request moves what it accepted onto the places behind its last token, which may be those of other drafts: requests
    of up to 40 drafts, some with none, some pairs skipped."""
    counts = [data.draw(st.sampled_from((0, 1, 5, 12, 40))) for _ in range(data.draw(st.integers(1, 3)))]
    batch = replace(
        PLAIN, totals=tuple(counts), new=(0,) * len(counts), seed=data.draw(st.integers(0, 99)), errors=True
    )
    scene = moving_scene(
        SETS[name],
        replace(
            batch,
            totals=tuple(max(n, 1) for n in counts),
            schedule=data.draw(st.sampled_from(("ascending", "descending", 3))),
        ),
    )
    free = [int(x) for x in scene.rng.permutation(scene.pages * scene.tokens)]
    src: list[int] = []
    dst: list[int] = []
    offsets = [0]
    for count in counts:
        slots, free = free[:count], free[count:]
        mine = drafts(scene.rng, slots, int(scene.rng.integers(0, len(slots) + 1)))
        for one, other in zip(*mine, strict=True):
            skipped = scene.rng.random() < 0.1
            src.append(-1 if skipped else one)
            dst.append(other)
        offsets.append(len(src))
    check(scene, [*src, 0, 0], [*dst, 1, 1], offsets)


def scene_of(name: str) -> Scene:
    return moving_scene(SETS[name], replace(PLAIN, totals=(9, 9, 9), new=(0, 0, 0), errors=True))


@pytest.mark.parametrize("bad", [-2, -(2**63), 2**62, None])
@pytest.mark.parametrize("which", ["src", "dst"])
def test_a_slot_outside_the_pool(which: str, bad: int | None) -> None:
    """Its pair is reported by its number and skipped; the others move."""
    scene = scene_of("latent")
    src, dst = [0, 3, 5], [1, 4, 6]
    (src if which == "src" else dst)[1] = scene.pages * scene.tokens if bad is None else bad
    report = describe(check(scene, src, dst, [0, 1, 3, 3]))
    assert report is not None and (report.code, report.request, report.position) == (Fault.SLOT, 1, 1)


@pytest.mark.parametrize("offsets", [(0, 3, 2, 4), (0, 1, -1, 4), (0, 2, 9, 9), (-1, 2, 3, 4), (1, 1, 1, 2**31 - 1)])
def test_bad_offsets(offsets: tuple[int, ...]) -> None:
    """The request with them moves nothing and is reported."""
    report = describe(check(scene_of("codes"), [0, 1, 2, 3], [8, 9, 10, 11], offsets))
    assert report is not None and report.code is Fault.ROW_OFFSETS


def test_nothing_to_move() -> None:
    assert check(scene_of("codes"), [], [], [0, 0, 0, 0]) == 0


def test_each_byte_once() -> None:
    """What a token stores is read and written once a layer."""
    scene = scene_of("wide")
    with machine(mode="check") as log:
        src, dst = np.array([0, 1, 2], np.int64), np.array([4, 5, 6], np.int64)
        package(scene.kernels).move_tokens(
            package(scene.kernels).Cache(**scene.arguments()), src, dst, np.array([0, 3, 3, 3], np.int32)
        )
    (launched,) = log.launches
    moved = 3 * LAYERS * 2 * 16 * 128 * 4
    counted = [launched.counters.per_buffer[name] for name in scene.tensors]
    assert sum(x.store_bytes for x in counted) == sum(x.load_bytes for x in counted) == moved
