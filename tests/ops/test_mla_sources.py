"""mla_decode over lists of rows in several caches, and with sinks, against the oracle in float64; hostile lists."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Latent, Layout, Quant, presets
from kvgen.architectures import Arch
from kvgen.bench.tiles import Tile, tile_of
from kvgen.cli.kernel_choice import attention
from kvgen.errors import ArgumentError
from kvgen.ops import MlaDecode
from kvgen.reference.elements import Elements
from kvgen.reference.segments import Coded
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from tests.support.batches import PLAIN, Batch
from tests.support.harness import Run, launcher, package
from tests.support.latent_lists import batches, source_set, step
from tests.support.latent_records import (
    BF16,
    CODES,
    HALVES,
    INTS,
    NVFP4,
    POOL,
    SLOTS,
    SMALL,
    footers,
    inline,
    plain,
    whole_rows,
)
from tests.support.latent_steps import Rows, call, kernels_of, latent_scene, latent_set, layer_of, op_of, planned_for
from tests.support.memory import Raw
from tests.support.sets import archs_of


def only(arch: Arch, kernels: KernelSet) -> KernelSet:
    """A set for one of its architectures: sm_90a has a kernel of its own for few columns."""
    return kernels.model_copy(update={"name": f"{kernels.name}_{arch}", "arch": (arch,)})


FOOTERS, WARPGROUPS = (
    only(arch, source_set("footers", footers(4), 12, footers(2), sinks="out", lse_empty="inf"))
    for arch in ("sm_80", "sm_90a")
)
WIDENED = only("sm_90a", source_set("widened", footers(4), 64, footers(2), sinks="out"))
PLANNED = [
    only("sm_80", source_set("planned", POOL, 24, INTS, split="balanced")),
    only("sm_80", source_set("planned_stored", presets.flashmla_fp8(page_size=4), 20, split="balanced")),
    only("sm_80", source_set("planned_pairs", footers(4), 8, footers(2), sinks="out", split="balanced")),
    only("sm_90a", source_set("planned_warpgroups", footers(4), 16, split="balanced")),
    only("sm_90a", source_set("planned_widened", plain(4), 128, inline(2), lse_base="2", split="balanced")),
]
# What every run has, and what a campaign has besides.
SETS = [
    source_set("two", BF16, 16, INTS, sinks="out", lse_empty="inf"),
    source_set("three", POOL, 40, SLOTS, INTS, sinks="lse", lse_base="2", out_dtype="f32"),
    FOOTERS,
    WARPGROUPS,
    WIDENED,
    *PLANNED,
]
if "KVGEN_FAMILY" in os.environ:
    small = {"dtype": "f16", **SMALL}
    SETS += [
        source_set("rows", presets.vllm_mla_fp8(), 8, presets.flashmla(page_size=2)),
        source_set("many", presets.max_mla(**small, page_size=3), 128, presets.max_mla(**small)),
        source_set("one", INTS, 20, sinks="out"),
        source_set("footers_eight", footers(3), 8, lse_base="2", out_dtype="f32"),
        source_set("footers_three", footers(4, **HALVES), 5, footers(1, **HALVES), footers(2, **HALVES)),
        source_set("footers_all", footers(3, quant_rope=True), 16, footers(2, quant_rope=True), sinks="lse"),
        source_set("inline", inline(4), 16, inline(1), inline(2), sinks="lse"),
        source_set("unlike", footers(4), 16, inline(2), sinks="out"),
        # Two architectures, each with a file and a plan of its own.
        source_set("planned_both", footers(4), 64, footers(2), split="balanced", sinks="lse"),
        source_set("planned_few", footers(4), 16, footers(2), split="balanced"),
        only("sm_90a", source_set("planned_unlike", footers(4), 128, inline(2), lse_base="2", split="balanced")),
    ]
    wide = {
        "two_tiles": (footers(4), 128, footers(3)),
        "some": (footers(3), 20, footers(2)),
        "inline": (inline(4), 64, inline(2)),
        "unlike": (footers(4), 64, inline(2)),
        "v41": (presets.flashmla_v41(page_size=4), 64, presets.flashmla_v41(page_size=2, place="page")),
        "v41_fp4": (presets.flashmla_v41(page_size=4), 64, presets.flashmla_v41_fp4(page_size=2)),
        "v32": (presets.flashmla_fp8(page_size=4), 64, presets.flashmla(page_size=2)),
        "copied": (presets.flashmla(page_size=4), 128),
        "nvfp4": (whole_rows(NVFP4), 64, footers(4)),
        "mxfp4": (whole_rows(CODES["mxfp4"]), 40),
        "blocks": (
            Latent(dtype="bf16", page_size=4, quant=Quant(dtype="i8", scale_dtype="f32", block=Block(dim=128))),
            64,
        ),
        "sglang": (presets.sglang_v4_fp4(), 64),
        "flashinfer": (presets.flashinfer_v4_nvfp4(page_size=4), 64),
    }
    SETS += [
        only("sm_90a", source_set(f"widened_{n}", cache, heads, *others)) for n, (cache, heads, *others) in wide.items()
    ]
    SETS += [
        source_set(name, Latent(dtype="bf16", **SMALL, page_size=4, quant=quant), 16) for name, quant in CODES.items()
    ]
ALL = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)


@ALL
@settings(max_examples=3 if "KVGEN_FAMILY" in os.environ else 1)
@given(data=st.data())
def test_lists_in_several_caches(kernels: KernelSet, data: Any) -> None:
    """Any number of rows, lists that end anywhere or are empty, counts of some lists; unwritten slots hold NaN or infinity."""
    batch = data.draw(batches(kernels))
    rows = data.draw(st.integers(1, 3))
    widths = tuple(data.draw(st.sampled_from((0, 1, 16, 31, 33, 70))) for _ in range(1 + len(op_of(kernels).sources)))
    scene, q, arguments = step(kernels, batch, rows, widths)
    for prefix, width in zip(("", *(f"{k.name}_" for k in op_of(kernels).sources)), widths, strict=True):
        if data.draw(st.booleans()) or op_of(kernels).split != "none":
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


@pytest.mark.parametrize("kernels", PLANNED, ids=lambda kernels: kernels.name)
def test_short_lists_of_many_rows(kernels: KernelSet) -> None:
    """A block has several rows one after another: the next row's tiles come when the row before has been stored."""
    scene, q, arguments = step(kernels, some(kernels, fill="nan"), 8, (20, 20, 5)[: 1 + len(op_of(kernels).sources)])
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


@pytest.mark.parametrize("kernels", [FOOTERS, WARPGROUPS, WIDENED], ids=lambda kernels: kernels.name)
def test_scales_that_rise_along_a_list(kernels: KernelSet) -> None:
    """Every row counts about as much, and scales of 64 dims rise along a list from 2^-127 and 2^-14 on: sums follow each time. In
    one list, and dims that q has no part in, they rise beyond what f16 holds of them."""
    scene, q, arguments = step(kernels, some(kernels), 2, (520, 33))
    q[...] *= 2.0**-12
    q[..., 320:384] = 0
    (keys,) = scene.rows()
    part = keys.parts[0]
    assert isinstance(part, Coded) and isinstance(part.scales, Elements)
    group = np.arange(7)
    for row in range(scene.pages * 4):
        exponents = row % 4 * 2 + group % 3 - 14 + 20 * (group == 5) * (row % 4 == 3)
        part.scales.write(row // 4, row % 4, np.exp2(np.where(group == row % 9, -127, exponents))[None])
    stored = [scene.entries[b][t // 4][0] * 4 + t % 4 for b, n in enumerate(scene.batch.totals) for t in range(n)]
    for indices, most in zip(arguments["indices"], (3, 2), strict=True):
        listed = scene.rng.choice([row for row in stored if row % 4 <= most], 520)
        indices[...] = sorted(listed, key=lambda row: row % 4)
    call(scene, q, **arguments)


@pytest.mark.parametrize("kernels", [SETS[0], FOOTERS, WARPGROUPS, WIDENED], ids=lambda kernels: kernels.name)
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


@pytest.mark.parametrize("kernels", PLANNED, ids=lambda kernels: kernels.name)
def test_lengths_that_changed_since_the_plan(kernels: KernelSet) -> None:
    """A row whose lists have become longer or shorter by tiles is NaN and reported, the others keep their bits."""
    widths = (300, 40)[: 1 + len(op_of(kernels).sources)]
    scene, q, arguments = step(kernels, some(kernels), 3, widths)
    was, was_lse, _ = call(scene, q, **arguments)
    assert was_lse is not None
    planned = {n: a for n, a in arguments.items() if n.endswith("topk_lengths")}
    workspace = planned_for(scene, 3, **planned)
    out, lse = np.zeros_like(was), np.zeros_like(was_lse)
    arguments |= {f"{n}_cache": layer_of(kernels, n, other) for n, other in arguments.pop("others").items()}
    arguments["topk_lengths"][1] = 20
    run = Run(
        scene, "mla_decode", launcher(scene, "mla_decode"), q=q, out=out, lse=lse, workspace=workspace, **arguments
    )
    report = describe(run.word)
    assert report is not None and (report.code, report.request) == (Fault.STALE, 1)
    assert np.isnan(out[1].astype(np.float32)).all() and np.isnan(lse[1]).all()
    assert out[[0, 2]].tobytes() == was[[0, 2]].tobytes() and lse[[0, 2]].tobytes() == was_lse[[0, 2]].tobytes()


def test_a_plan_is_made_of_as_many_lengths_in_every_list() -> None:
    """And of as many as its rows are where those are given; none is left out."""
    kernels = PLANNED[0]
    scene, _, _ = step(kernels, some(kernels), 3, (5, 5))
    generated = package(kernels)
    cache = generated.Cache(**scene.arguments())[scene.layer]
    three, two = np.ones(3, np.int32), np.ones(2, np.int32)
    plan = generated.mla_decode.plan
    with machine(arch=scene.batch.arch):
        workspace = generated.mla_decode.workspace(max_rows=4, multiprocessors=5)
        with pytest.raises(ArgumentError, match="the plan has planned_rows = 3 but a_topk_lengths has 2"):
            plan(cache, workspace, three, two)
        with pytest.raises(ArgumentError, match="the plan has planned_rows = 2 but topk_lengths has 3"):
            plan(cache, workspace, three, three, rows=2)
        with pytest.raises(ArgumentError, match="a_topk_lengths: got None"):
            plan(cache, workspace, three, None)


def test_which_kernel_lists_go_through() -> None:
    """Few columns over codes with e8m0 scales, alike in every cache, with a kernel of sm_90a's own where 64 dims share a scale;
    everything else is rounded on its way, on sm_90a with more columns by warps beside those that multiply; one cache of rows that
    another kernel reads as it always was. Each architecture has its own: sm_89's memory has no room for few columns."""
    few, many, any_row, stored = "mla_mma_few_heads", "mla_sm90_few_heads", "mla_mma rounded", "mla_mma"
    wide = "mla_sm90"
    layout = Layout(k="page token head dim", layers="pointers")
    tall = footers(64, latent_dim=256, rope_dim=256)  # 768 bytes a row: two tiles of 64 do not fit
    found = {
        source_set("a", footers(64), 16, footers(2)): (few, many),
        source_set("b", inline(64), 8): (few, few),
        source_set("c", footers(64), 17, footers(2)): (any_row, wide),
        source_set("d", footers(64), 8, inline(64)): (any_row, any_row),
        source_set("e", footers(64), 64, footers(2), split="balanced"): (any_row, wide),
        source_set("f", presets.flashmla_fp8(), 16): (stored, stored),
        source_set("f64", presets.flashmla_fp8(), 64): (stored, wide),
        source_set("g", presets.flashmla_fp8(), 16, presets.flashmla()): (any_row, any_row),
        source_set("h", Latent(dtype="bf16", page_size=64, values="row", layout=layout), 16): (stored, stored),
        source_set("copied", presets.flashmla(), 64): (stored, wide),
        source_set("short", POOL, 64, INTS): (any_row, any_row),
        ops_of(footers(64), 16, ["sm_80", "sm_89"]): (few, any_row),
        ops_of(footers(64), 16, ["sm_89", "sm_90a"]): (any_row, many),
        ops_of(footers(64), 16, ["sm_89", "sm_80", "sm_90a"]): (any_row, few, many),
        ops_of(footers(64), 16, ["sm_90a"]): (many,),
        ops_of(footers(64), 64, ["sm_90a"]): (wide,),
        ops_of(tall, 16, ["sm_90a"]): (few,),
    }
    for kernels, names in found.items():
        assert kernels_of(kernels, kernels.arch) == names, kernels
        choices = op_of(kernels).choices(kernels)
        assert [choices[arch].name for arch in kernels.arch] == [name.removesuffix(" rounded") for name in names]


def test_what_is_said_of_few_columns() -> None:
    """Which of both files an architecture has, and why; what is on its way there. Bytes are a token's, 584, in whole tiles."""
    kernels = source_set("said", footers(64), 16, footers(2))
    op = op_of(kernels)
    found, tiles = {}, []
    for plan, archs in op.plan(kernels)[0].files(kernels.arch):
        found |= {plan.name: attention(kernels, op, plan, archs)}
        tiles.append(tile_of(plan))
    pairs, warpgroups = found["mla_decode"], found["mla_decode_sm_90a"]
    assert pairs is not None and warpgroups is not None
    assert (pairs["kernel"], pairs["team_warps"]) == ("mla_mma_few_heads", 2)
    assert pairs["how"] == "codes as they are stored, half of 512 dims a warp; tokens on M"
    assert list(pairs["on"]) == ["sm_80"] and pairs["on"]["sm_80"]["why_not"]["mla_sm90_few_heads"] == "no wgmma"
    assert warpgroups["kernel"] == "mla_sm90_few_heads"
    assert warpgroups["how"] == "codes as they are stored, products of warpgroups; tokens on M"
    assert warpgroups["on"] == {"sm_90a": {"why_not": {}, "stages": 2, "blocks": 1, "bytes_in_flight": 2 * 64 * 584}}
    assert (warpgroups["teams"], warpgroups["team_warps"], warpgroups["tile_tokens"]) == (2, 4, 64)
    assert tiles == [Tile(64, 8, 1, 64 * 584), Tile(128, 8, 1, 128 * 584)]
    only_pairs = ops_of(inline(64), 8, ["sm_90a"])
    said = attention(only_pairs, op_of(only_pairs), op_of(only_pairs).plan(only_pairs)[0], ["sm_90a"])
    assert said is not None and said["on"]["sm_90a"]["why_not"] == {
        "mla_sm90_few_heads": "a product has 64 dims, which share no scale",
        "mla_sm90": "8 columns leave most of a product of 64 empty; from 17 on it is worth it",
        "mla_sm90_rows": "lists name rows one by one",
    }


def ops_of(cache: Cache, heads: int, arch: list[str]) -> KernelSet:
    return KernelSet(q_heads=heads, cache=cache, ops=[MlaDecode(scale=1.0, sparse=True)], arch=arch)


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
