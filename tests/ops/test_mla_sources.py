"""mla_decode over lists of rows in several caches, and with sinks, against the oracle in float64; hostile lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, Keys, Latent, Quant, presets
from kvgen.ops import Gather
from kvgen.reference.elements import Elements
from kvgen.reference.segments import Coded
from kvgen.runtime.cpu import machine
from kvgen.spec.cache import Cache
from tests.support.batches import PLAIN, Batch
from tests.support.harness import package
from tests.support.latent_steps import Rows, call, latent_scene, latent_set, layer_of, op_of
from tests.support.memory import Raw, rows_array
from tests.support.scenes import Scene
from tests.support.sets import archs_of

SMALL: dict[str, Any] = {"latent_dim": 64, "rope_dim": 16}
BF16 = presets.max_mla(**SMALL, page_size=4)
SLOTS = presets.sglang_mla(**SMALL)  # a page a token
INTS = Latent(dtype="bf16", **SMALL, page_size=2, quant=Quant(dtype="i8", scale_dtype="f32"), quant_rope=True)
POOL = presets.max_mla_fp8(**SMALL, page_size=8)
ROWS = presets.vllm_mla_fp8()


def source_set(name: str, cache: Cache, heads: int, *others: Cache, **fields: Any) -> KernelSet:
    """A set over lists in its own cache and in others, which are called a, b and so on."""
    keys = tuple(Keys(name=letter, cache=other) for letter, other in zip("abc", others, strict=False))
    return latent_set(f"sources_{name}", cache, heads, sparse=True, sources=keys, **fields)


SETS = {
    kernels.name: kernels
    for kernels in (
        source_set("two", BF16, 16, INTS, sinks="out", lse_empty="inf"),
        source_set("three", POOL, 40, SLOTS, INTS, sinks="lse", lse_base="2", out_dtype="f32"),
        source_set("rows", ROWS, 8, presets.flashmla(page_size=2)),
        source_set(
            "many", presets.max_mla(dtype="f16", **SMALL, page_size=3), 128, presets.max_mla(dtype="f16", **SMALL)
        ),
        source_set("one", INTS, 20, sinks="out"),
    )
}


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
    stored = [
        scene.entries[b][t // scene.tokens][0] * scene.cache.page_table.id_multiplier * scene.tokens + t % scene.tokens
        for b, n in enumerate(scene.batch.totals)
        for t in range(n)
    ]
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
    if op_of(kernels).sinks:
        arguments["sinks"] = (3 * rng.standard_normal(kernels.q_heads)).astype(np.float32)
    return scene, q, arguments


@st.composite
def batches(draw: Any, kernels: KernelSet) -> Batch:
    return Batch(
        totals=tuple(draw(st.sampled_from((1, 2, 5, 9))) for _ in range(draw(st.integers(1, 3)))),
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


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=3)
@given(data=st.data())
def test_lists_in_several_caches(name: str, data: Any) -> None:
    """Any number of rows, lists that end anywhere or are empty, counts of some lists; unwritten slots hold NaN or infinity."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    rows = data.draw(st.integers(1, 4))
    widths = tuple(data.draw(st.sampled_from((0, 1, 31, 32, 33, 70))) for _ in range(1 + len(op_of(kernels).sources)))
    scene, q, arguments = step(kernels, batch, rows, widths)
    for prefix, width in zip(("", *(f"{k.name}_" for k in op_of(kernels).sources)), widths, strict=True):
        if data.draw(st.booleans()):
            counts = [data.draw(st.sampled_from((0, 1, width // 2, width))) for _ in range(rows)]
            arguments[f"{prefix}topk_lengths"] = np.minimum(counts, width).astype(np.int32)
            for row, count in zip(arguments[f"{prefix}indices"], counts, strict=True):
                row[count:] = 2**31 - 1  # never read
    call(scene, q, lse=data.draw(st.booleans()), **arguments)


def some(name: str, **fields: Any) -> Batch:
    return replace(PLAIN, arch=archs_of(SETS[name])[0], totals=(9, 40), new=(0, 0), **fields)


@pytest.mark.parametrize("name", ["mla_sources_two", "mla_sources_three"])
def test_hostile_lists(name: str) -> None:
    """An index that a cache does not have, a count that is negative or above the list's width: that row is NaN, the others keep
    their bits."""
    batch = some(name)
    scene, q, arguments = step(SETS[name], batch, 4, (40, 33, 5)[: 1 + len(op_of(SETS[name]).sources)])
    was, was_lse, _ = call(scene, q, **arguments)
    other = arguments["others"]["a"]
    wrong: list[tuple[str, int, int]] = [("indices", 2, scene.pages * scene.tokens), ("a_indices", 2, -2)]
    wrong += [("a_indices", 2, other.pages * other.tokens), ("indices", 2, 2**31 - 1), ("a_indices", 2, -(2**31))]
    for array, row, entry in wrong:
        given = arguments | {array: arguments[array].copy()}
        given[array][row, -1] = entry
        hold_others(call(scene, q, **given), (was, was_lse), row)
    for array, width in (("topk_lengths", 40), ("a_topk_lengths", 33)):
        for count in (-1, width + 1, 2**31 - 1):
            counts = np.full(4, width, np.int32)
            counts[1] = count
            hold_others(call(scene, q, **arguments | {array: counts}), (was, was_lse), 1)


def hold_others(found: tuple[Raw, Raw | None, Any], was: tuple[Raw, Raw | None], row: int) -> None:
    """Row `row` is NaN and reported, the others have the bits that they had."""
    out, lse, wanted = found
    assert lse is not None and was[1] is not None and wanted.errors and wanted.seen[row] is None
    others = [n for n in range(len(out)) if n != row]
    assert out[others].tobytes() == was[0][others].tobytes() and lse[others].tobytes() == was[1][others].tobytes()


def test_a_cache_without_rows_is_as_if_it_were_not_there() -> None:
    """Lists of nothing but holes in all caches but one: the bits of a call whose lists there have no entries."""
    name = "mla_sources_three"
    scene, q, arguments = step(SETS[name], some(name), 2, (33, 40, 40))
    for holes in ("a_indices", "b_indices"):
        arguments[holes][...] = -1
    was, was_lse, _ = call(scene, q, **arguments)
    none = {f"{n}_topk_lengths": np.zeros(2, np.int32) for n in "ab"}
    out, lse, _ = call(scene, q, **arguments, **none)
    assert was_lse is not None and lse is not None
    assert was.tobytes() == out.tobytes() and was_lse.tobytes() == lse.tobytes()


def test_a_listed_nan_is_its_row_s_alone() -> None:
    """A row of NaN in one of the caches makes NaN of the rows that list it, and of no others."""
    name = "mla_sources_two"
    scene, q, arguments = step(SETS[name], some(name), 2, (9, 9))
    other = arguments["others"]["a"]
    lists = arguments["a_indices"]
    lists[0], lists[1] = -1, -1
    was, _, _ = call(scene, q, **arguments)
    place = other.entries[0][0][0]
    (keys,) = other.rows()
    (part,) = keys.parts
    assert isinstance(part, Coded) and isinstance(part.scales, Elements)
    part.scales.write(place, 0, np.full_like(part.scales.read(place, 0), np.nan))
    lists[1, 3] = place * other.tokens
    assert np.isnan(keys.numbers(place, 0)).all()
    generated, out = package(SETS[name]), np.zeros_like(was)
    brought = {n: a for n, a in arguments.items() if n != "others"} | {"a_cache": layer_of(SETS[name], "a", other)}
    with machine(arch=scene.batch.arch, mode="check", schedule=7):
        generated.mla_decode(generated.Cache(**scene.arrays())[scene.layer], q=q, out=out, **brought)
    assert out[0].tobytes() == was[0].tobytes() and np.isnan(out[1].astype(np.float32)).all()


DENSE = {
    kernels.name: kernels
    for kernels in (
        latent_set("sinks", POOL, 6, rows=3, sinks="out"),
        latent_set("sinks_balanced", BF16, 16, rows=2, split="balanced", sinks="lse", lse_base="2"),
    )
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("totals", [(0, 5, 300), (40,)])
def test_sinks_of_whole_requests(name: str, totals: tuple[int, ...]) -> None:
    """Once a column, also where a request is several chunks; a request without tokens has no sink either."""
    kernels = DENSE[name]
    rows = op_of(kernels).rows
    totals = tuple(max(n, rows if kernels.cache.lengths == "before" else 0) for n in totals)
    batch = replace(PLAIN, arch=archs_of(kernels)[0], totals=totals, new=(0,) * len(totals), fill="nan")
    scene, q = latent_scene(
        kernels, batch, [Rows(b, b * rows, (b + 1) * rows) for b in range(len(totals))], rows * len(totals)
    )
    sinks = (3 * scene.rng.standard_normal(kernels.q_heads)).astype(np.float32)
    sinks[0], sinks[1] = 30, -30
    call(scene, q, sinks=sinks)
