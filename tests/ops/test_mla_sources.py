"""mla_decode over lists of rows in several caches, and with sinks, against the oracle in float64; hostile lists."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Keys, Latent, Layout, Quant, presets
from kvgen.ops import Gather, MlaDecode
from kvgen.reference.elements import Elements
from kvgen.reference.segments import Coded
from kvgen.runtime.cpu import machine
from kvgen.spec.cache import Cache
from kvgen.spec.codebooks import lloyd_max
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


def footers(page_size: int) -> Latent:
    """DeepSeek V4's 584 bytes: 448 e4m3 and 64 bf16, then 7 e8m0 and a zero a token behind the rows of a page."""
    return Latent(
        dtype="bf16",
        latent_dim=448,
        page_size=page_size,
        values="row",
        layout=Layout(kv="page token head dim", layers="pointers", page_align=576),
        quant=Quant(
            dtype="e4m3",
            scale_dtype="e8m0",
            block=Block(dim=64),
            recipe="pow2",
            place="page",
            scale_pad=8,
            amax_min=1e-4,
        ),
    )


def inline(page_size: int) -> Latent:
    """528 bytes: 512 e4m3, then an e8m0 each 32 of them."""
    quant = Quant(dtype="e4m3", scale_dtype="e8m0", block=Block(dim=32), recipe="pow2", place="row")
    layout = Layout(kv="page token head dim", layers="pointers")
    return Latent(
        dtype="bf16", latent_dim=448, page_size=page_size, values="row", quant_rope=True, quant=quant, layout=layout
    )


def source_set(name: str, cache: Cache, heads: int, *others: Cache, **fields: Any) -> KernelSet:
    """A set over lists in its own cache and in others, which are called a, b and so on."""
    keys = tuple(Keys(name=letter, cache=other) for letter, other in zip("abc", others, strict=False))
    return latent_set(f"sources_{name}", cache, heads, sparse=True, sources=keys, **fields)


FOOTERS = source_set("footers", footers(4), 12, footers(2), sinks="out", lse_empty="inf")
# What every run has, and what a campaign has besides.
SETS = [
    source_set("two", BF16, 16, INTS, sinks="out", lse_empty="inf"),
    source_set("three", POOL, 40, SLOTS, INTS, sinks="lse", lse_base="2", out_dtype="f32"),
    FOOTERS,
]
if "KVGEN_FAMILY" in os.environ:
    small = {"dtype": "f16", **SMALL}
    SETS += [
        source_set("rows", presets.vllm_mla_fp8(), 8, presets.flashmla(page_size=2)),
        source_set("many", presets.max_mla(**small, page_size=3), 128, presets.max_mla(**small)),
        source_set("one", INTS, 20, sinks="out"),
        source_set("footers_eight", footers(3), 8, lse_base="2", out_dtype="f32"),
        source_set("inline", inline(4), 16, inline(1), inline(2), sinks="lse"),
        source_set("unlike", footers(4), 16, inline(2), sinks="out"),
    ]
    # Latent rows of every other code.
    fp4: dict[str, Any] = {"dtype": "e2m1", "scale_dtype": "e4m3"}
    CODES = {
        "nvfp4": Quant(**fp4, block=Block(dim=16), place="row"),
        "nvfp4_global": Quant(**fp4, recipe="global"),
        "mxfp4": Quant(dtype="e2m1", scale_dtype="e8m0", recipe="pow2", block=Block(dim=32), place="row"),
        "book": Quant(dtype="i4", scale_dtype="f16", codebook=lloyd_max(4, 64), recipe="unit", place="row"),
        "least": Quant(dtype="i4", scale_dtype="f16", zero=True, recipe="min", block=Block(dim=32), place="row"),
        "i8_row": Quant(dtype="i8", scale_dtype="f32", place="row"),
        "of_3_bits": Quant(dtype="i3", scale_dtype="f16", zero=True, recipe="min", place="row"),
        "signs": Quant(
            dtype="i4", scale_dtype="f16", zero=True, recipe="signs", codebook=lloyd_max(3, 64), place="row"
        ),
        "of_2_bits": Quant(
            dtype="i2", scale_dtype="f16", codebook=lloyd_max(2, 64), recipe="unit", block=Block(dim=16)
        ),
    }
    SETS += [
        source_set(name, Latent(dtype="bf16", **SMALL, page_size=4, quant=quant), 16) for name, quant in CODES.items()
    ]
ALL = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)


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


@ALL
@settings(max_examples=3)
@given(data=st.data())
def test_lists_in_several_caches(kernels: KernelSet, data: Any) -> None:
    """Any number of rows, lists that end anywhere or are empty, counts of some lists; unwritten slots hold NaN or infinity."""
    batch = data.draw(batches(kernels))
    rows = data.draw(st.integers(1, 3))
    widths = tuple(data.draw(st.sampled_from((0, 1, 16, 31, 33, 70))) for _ in range(1 + len(op_of(kernels).sources)))
    scene, q, arguments = step(kernels, batch, rows, widths)
    for prefix, width in zip(("", *(f"{k.name}_" for k in op_of(kernels).sources)), widths, strict=True):
        if data.draw(st.booleans()):
            counts = [data.draw(st.sampled_from((0, 1, width // 2, width))) for _ in range(rows)]
            arguments[f"{prefix}topk_lengths"] = np.minimum(counts, width).astype(np.int32)
            for row, count in zip(arguments[f"{prefix}indices"], counts, strict=True):
                row[count:] = 2**31 - 1  # never read
    call(scene, q, lse=data.draw(st.booleans()), **arguments)


def some(kernels: KernelSet, **fields: Any) -> Batch:
    return replace(PLAIN, arch=archs_of(kernels)[0], totals=(9, 40), new=(0, 0), **fields)


@ALL
def test_long_lists(kernels: KernelSet) -> None:
    """More tiles than wait in shared memory, of every cache."""
    lists = 1 + len(op_of(kernels).sources)
    scene, q, arguments = step(kernels, some(kernels, fill="nan"), 1, (300, 210, 40)[:lists])
    call(scene, q, **arguments)


@ALL
def test_hostile_lists(kernels: KernelSet) -> None:
    """An index that a cache does not have, a count that is negative or above the list's width: that row is NaN, the others keep
    their bits."""
    widths = (40, 33, 5)[: 1 + len(op_of(kernels).sources)]
    scene, q, arguments = step(kernels, some(kernels), 3, widths)
    was, was_lse, _ = call(scene, q, **arguments)
    scenes = {"": scene} | {f"{name}_": other for name, other in arguments["others"].items()}
    for (prefix, its), width in zip(scenes.items(), widths, strict=True):
        for entry in (its.pages * its.tokens, -2, 2**31 - 1)[: 3 if prefix else 2]:
            given = arguments | {f"{prefix}indices": arguments[f"{prefix}indices"].copy()}
            given[f"{prefix}indices"][2, -1] = entry
            hold_others(call(scene, q, **given), (was, was_lse), 2)
        for count in (-1, width + 1)[: 2 if prefix else 1]:
            counts = np.full(3, width, np.int32)
            counts[1] = count
            hold_others(call(scene, q, **arguments | {f"{prefix}topk_lengths": counts}), (was, was_lse), 1)


def hold_others(found: tuple[Raw, Raw | None, Any], was: tuple[Raw, Raw | None], row: int) -> None:
    """Row `row` is NaN and reported, the others have the bits that they had."""
    out, lse, wanted = found
    assert lse is not None and was[1] is not None and wanted.errors and wanted.seen[row] is None
    others = [n for n in range(len(out)) if n != row]
    assert out[others].tobytes() == was[0][others].tobytes() and lse[others].tobytes() == was[1][others].tobytes()


@pytest.mark.parametrize("kernels", SETS[1:3], ids=lambda kernels: kernels.name)
def test_a_cache_without_rows_is_as_if_it_were_not_there(kernels: KernelSet) -> None:
    """Lists of nothing but holes in all caches but one: the values of a call whose lists there have no entries."""
    names = [keys.name for keys in op_of(kernels).sources]
    scene, q, arguments = step(kernels, some(kernels), 2, (33, 40, 40)[: 1 + len(names)])
    for name in names:
        arguments[f"{name}_indices"][...] = -1
    was, was_lse, _ = call(scene, q, **arguments)
    out, lse, _ = call(scene, q, **arguments, **{f"{name}_topk_lengths": np.zeros(2, np.int32) for name in names})
    assert was_lse is not None and lse is not None
    assert was.tobytes() == out.tobytes() and was_lse.tobytes() == lse.tobytes()


@pytest.mark.parametrize("kernels", [SETS[0], FOOTERS], ids=lambda kernels: kernels.name)
def test_a_listed_nan_is_its_row_s_alone(kernels: KernelSet) -> None:
    """A row with a scale that is NaN in one of the caches makes NaN of the rows that list it, whole, and of no others."""
    scene, q, arguments = step(kernels, some(kernels), 2, (9, 9))
    other, lists = arguments["others"]["a"], arguments["a_indices"]
    place = other.entries[0][0][0]
    lists[...] = -1
    was, _, _ = call(scene, q, **arguments)
    (keys,) = other.rows()
    part = keys.parts[0]
    assert isinstance(part, Coded) and isinstance(part.scales, Elements)
    scales = part.scales.read(place, 0)
    scales[..., -1] = np.nan
    part.scales.write(place, 0, scales)
    lists[1, 3] = place * other.tokens
    assert np.isnan(keys.numbers(place, 0)).any()
    generated, out = package(kernels), np.zeros_like(was)
    brought = {n: a for n, a in arguments.items() if n != "others"} | {"a_cache": layer_of(kernels, "a", other)}
    with machine(arch=scene.batch.arch, mode="check", schedule=7):
        generated.mla_decode(generated.Cache(**scene.arrays())[scene.layer], q=q, out=out, **brought)
    assert out[0].tobytes() == was[0].tobytes() and np.isnan(out[1].astype(np.float32)).all()


def test_which_kernel_lists_go_through() -> None:
    """Few columns over codes with e8m0 scales, alike in every cache; everything else is widened; one cache as it always was."""
    few, wide, stored = "mla_decode_pairs", "mla_decode_lists", "mla_decode"
    layout = Layout(k="page token head dim", layers="pointers")
    found = {
        source_set("a", footers(64), 16, footers(2)): few,
        source_set("b", inline(64), 8): few,
        source_set("c", footers(64), 17, footers(2)): wide,
        source_set("d", footers(64), 8, inline(64)): wide,
        source_set("e", footers(64), 64, footers(2)): wide,
        source_set("f", presets.flashmla_fp8(), 16): stored,
        source_set("g", presets.flashmla_fp8(), 16, presets.flashmla()): wide,
        source_set("h", Latent(dtype="bf16", page_size=64, values="row", layout=layout), 16): stored,
        KernelSet(
            q_heads=16,
            cache=footers(64),
            ops=[MlaDecode(scale=1.0, sparse=True)],
            arch=["sm_80", "sm_89"],
        ): wide,
    }
    for kernels, kernel in found.items():
        assert op_of(kernels).plan(kernels)[0].template == f"ops/{kernel}.cu.j2", kernels


DENSE = {
    kernels.name: kernels
    for kernels in (latent_set("sinks_balanced", BF16, 16, rows=2, split="balanced", sinks="lse", lse_base="2"),)
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
