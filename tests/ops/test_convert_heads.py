"""convert of some heads, as between shards of different tensor-parallel sizes: the whole target pool byte for byte, every first
head that a call may name, and what it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Layout, Paged, Quant, ops, presets
from kvgen.errors import ArgumentError, SpecError
from kvgen.plan.params import Scalar
from kvgen.schema.cache import Cache
from tests.support.batches import PLAIN, batches, capacity
from tests.support.conversions import check, op_of, scenes
from tests.support.harness import on_machine, package
from tests.support.scenes import Scene

DIM: Final = 32
I4: Final = Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=16))
PAIRED: Final = Quant(dtype="i8", scale_dtype="f32", block=Block(head=2))
GIVEN: Final = Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None, head=None))
NVFP4: Final = Quant(dtype="e2m1", scale_dtype="e4m3", block=Block(dim=16), recipe="global")
_ENGINE: Final[dict[str, Any]] = {"dtype": "bf16", "kv_heads": 8, "head_dim": DIM, "page_size": 4}
_LAYOUT: Final = Layout(k="page layer token head dim", v="page layer token head dim")


def _cache(heads: int, layout: Any = _LAYOUT, page: int = 4, **more: Any) -> Paged:
    return Paged(**{"dtype": "bf16", "head_dim": DIM, **more}, kv_heads=heads, page_size=page, layout=layout)


def _set(name: str, source: Cache, target: Cache, heads: int, **options: Any) -> KernelSet:
    op = ops.Convert(source=source, heads=heads, **options)
    return KernelSet(name=name, q_heads=target.kv_heads, cache=target, ops=(op,), arch=("sm_90a",))


# K and V are stored in two ways each, so that one kernel shows two: as they are, quantized alike, anew, and dequantized.
SETS: Final = {
    # A shard takes its own of all heads: plain values, and packed codes with their scales and zero points.
    "shard": _set(
        "heads_shard",
        _cache(8, v_quant=I4),
        _cache(2, Layout(k="page layer head token dim", v="page layer head token dim"), 8, v_quant=I4),
        2,
    ),
    # A shard's heads go to their place among all: quantized anew, and cast alike.
    "place": _set(
        "heads_place",
        _cache(2, v_quant=Quant(dtype="e4m3")),
        _cache(8, page=3, k_quant=Quant(dtype="i8", scale_dtype="f32"), v_quant=Quant(dtype="e4m3")),
        2,
    ),
    # Neither all of the source's nor all of the target's, and scales that two heads share: as they are, and anew.
    "paired": _set(
        "heads_paired",
        _cache(6, k_quant=PAIRED),
        _cache(
            8, Layout(k="page head layer token dim", v="page layer token head dim"), 4, quant=PAIRED, total_layers=2
        ),
        2,
    ),
    # vLLM's pages to blocks that KVBM stores, all heads; and a rank's slice of such blocks back, fp8 as it is.
    "stored": _set("heads_stored", presets.vllm(**_ENGINE), presets.kvbm_universal(**_ENGINE, total_layers=2), 8),
    "slice": _set(
        "heads_slice",
        presets.kvbm_universal(**_ENGINE, total_layers=2, kv_cache_dtype="fp8_e4m3"),
        presets.vllm_packed(**{**_ENGINE, "kv_heads": 2}, order="LBHNC", kv_cache_dtype="fp8_e4m3"),
        2,
        same_scales=True,
    ),
    # Scales of the caller's for all heads, and the factor above those of blocks, the same in all shards.
    "given": _set(
        "heads_given",
        _cache(4, k_quant=GIVEN, v_quant=NVFP4),
        _cache(2, k_quant=GIVEN, v_quant=NVFP4),
        1,
        same_scales=True,
    ),
}


def _most(kernels: KernelSet) -> dict[str, Scalar]:
    (plan,) = op_of(kernels).plan(kernels)
    return {p.name: p for p in plan.params if isinstance(p, Scalar)}


def _share_scales(target: Scene, source: Scene) -> None:
    """Both have the same factors, as same_scales says."""
    for name in ("k_scale", "v_scale", "v_global_scale"):
        if name in target.arrays():
            target.arrays()[name][target.layer][...] = source.arrays()[name][source.layer]


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=6)
@given(data=st.data())
def test_heads_move(name: str, data: Any) -> None:
    kernels = SETS[name]
    read = op_of(kernels).source
    own = KernelSet(name="source", q_heads=read.kv_heads, cache=read, ops=(ops.Gather(),))
    batch = data.draw(batches(min(kernels, own, key=capacity)))
    first = {
        head: data.draw(st.sampled_from(range(0, (p.most or 0) + 1, p.multiple)), label=head)
        for head, p in _most(kernels).items()
    }
    target, source = scenes(kernels, replace(batch, arch=None))
    _share_scales(target, source)
    assert check(target, source, **first) == 0


def test_the_arguments_are_those_that_a_cache_has_room_for() -> None:
    """A cache whose heads all move has no argument; where heads share scales, whole blocks move."""
    found = {name: {p.name: (p.most, p.multiple) for p in _most(kernels).values()} for name, kernels in SETS.items()}
    assert found == {
        "shard": {"source_head": (6, 1)},
        "place": {"target_head": (6, 1)},
        "paired": {"source_head": (4, 2), "target_head": (6, 2)},
        "stored": {},
        "slice": {"source_head": (6, 1)},
        "given": {"source_head": (3, 1), "target_head": (1, 1)},
    }
    assert not _most(_set("x", _cache(2), _cache(2), 2))


def test_all_shards_are_the_whole() -> None:
    """Heads taken apart into four shards and put together again are what they were, bit for bit."""
    apart = SETS["shard"]
    together = _set("heads_together", apart.kv, op_of(apart).source, 2)
    batch = replace(PLAIN, totals=(5, 9), new=(0, 0))
    part, source = scenes(apart, batch)
    target = Scene(together, replace(batch, seed=source.batch.seed), batch.totals)
    for first in (0, 2, 4, 6):
        with on_machine(batch):
            small = package(apart).Cache(**part.arguments())
            package(apart).convert(
                small[part.layer],
                source=package(apart).ConvertSource(**source.arguments())[source.layer],
                source_head=first,
            )
            package(together).convert(
                package(together).Cache(**target.arguments())[source.layer],
                source=package(together).ConvertSource(**part.arguments())[part.layer],
                target_head=first,
            )
    for mine, others in zip(target.rows(), source.rows(), strict=True):
        for b, n in enumerate(batch.totals):
            for position in range(n):
                at, there = (s.view.places(b, position // 4) for s in (target, source))
                assert isinstance(at, tuple) and isinstance(there, tuple)
                for a, c in zip(mine.parts, others.parts, strict=True):
                    np.testing.assert_array_equal(
                        a.read(at[0], position % 4).view(np.uint16), c.read(there[0], position % 4).view(np.uint16)
                    )


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ({"source_head": 6, "target_head": 0}, "source_head: got 6; the operation takes a multiple of 2 from 0 to 4"),
        ({"source_head": 0, "target_head": 1}, "target_head: got 1; the operation takes a multiple of 2 from 0 to 6"),
        ({"source_head": -2, "target_head": 0}, "source_head: got -2"),
        ({"source_head": 0}, "target_head"),
    ],
)
def test_heads_that_are_not_there(first: dict[str, int], said: str) -> None:
    """Nothing is written."""
    target, source = scenes(SETS["paired"], replace(PLAIN, totals=(3,), new=(0,)))
    before = target.snapshot()
    generated = package(target.kernels)
    with on_machine(target.batch), pytest.raises((ArgumentError, TypeError), match=said):
        cache, other = generated.Cache(**target.arguments()), generated.ConvertSource(**source.arguments())
        generated.convert(cache[0], source=other[0], **first)
    after = target.snapshot()
    assert all((a == b).all() for name in before for a, b in zip(before[name], after[name], strict=True))


def test_refusals() -> None:
    """tests/errors has the messages of the others."""
    with pytest.raises(SpecError, match="heads: got 3 for a cache in which 2 heads share a scale"):
        _set("x", _cache(8), _cache(4, quant=PAIRED), 3)
    with pytest.raises(SpecError, match="heads: got 2 for a cache in which 4 heads share a scale"):
        _set("x", _cache(2), _cache(4, quant=Quant(dtype="i8", scale_dtype="f32", block=Block(head=None))), 2)
    with pytest.raises(SpecError, match="head_dim=64"):
        _set("x", _cache(8, head_dim=64), _cache(2), 2)
    with pytest.raises(SpecError, match="heads: "):
        _set("x", _cache(8), _cache(2), 0)
