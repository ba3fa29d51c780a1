"""mla_decode by products of warpgroups, of several rows or of rows in two pools: against the oracle in float64; hostile data;
poisoned memory; traffic and registers."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import KernelSet, presets
from kvgen.codegen.emit import render_device, render_set, units_of
from kvgen.compile import Unit, compile_unit, default_cache
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.mla_sm90_rows import NAME
from kvgen.ops import MlaDecode
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from kvgen.schema.loader import LoadedSet
from tests.support.batches import PLAIN, Batch
from tests.support.harness import offsets_of, package
from tests.support.latent_steps import SCALE, Rows, call, hold_hostile, latent_scene, op_of
from tests.support.memory import aligned


def wgmma_set(name: str, cache: Cache, heads: int, **fields: Any) -> KernelSet:
    """A set for sm_90a alone, whose mla_decode has enough columns, of two rows a request unless `fields` say more."""
    op = MlaDecode(**({"scale": SCALE, "rows": 2} | fields))
    return KernelSet(name=f"wgmma_{name}", q_heads=heads, cache=cache, arch=("sm_90a",), ops=(op,))


SETS = {
    kernels.name: kernels
    for kernels in (
        wgmma_set("plain", presets.max_mla(page_size=64), 32),
        # One row, of which the RoPE part lies in a pool of its own: no copy brings it behind the other dims.
        wgmma_set(
            "two_tiles",
            presets.flashinfer_mla(dtype="f16", page_size=16),
            128,
            rows=1,
            lse_base="2",
            lse_empty="inf",
        ),
        # Two pools, pages that end within tiles, columns that do not fill the last block.
        wgmma_set("rows", presets.flashinfer_mla(dtype="bf16", page_size=3), 20, rows=8, out_dtype="f32"),
        wgmma_set("balanced", presets.flashinfer_mla(dtype="bf16", page_size=16), 64, split="balanced"),
    )
}
# Plans are read as tests/ops/test_mla_families.py has it, whose kernels are these: a campaign has this one's too.
CAMPAIGN = "KVGEN_FAMILY" in os.environ
ALL = pytest.mark.parametrize("name", [name for name in SETS if CAMPAIGN or name != "wgmma_balanced"])
SCHEDULES = ("ascending", "descending", 7)


def batch_of(totals: tuple[int, ...], **fields: Any) -> Batch:
    return replace(PLAIN, arch="sm_90a", totals=totals, new=(0,) * len(totals), **fields)


def rows_of(kernels: KernelSet, requests: int) -> list[Rows]:
    rows = op_of(kernels).rows
    return [Rows(b, b * rows, (b + 1) * rows) for b in range(requests)]


@st.composite
def steps(draw: Any, name: str) -> tuple[Batch, list[int]]:
    """A batch, and how many rows of q each request has."""
    kernels = SETS[name]
    page, most, before = kernels.cache.page_tokens or 1, op_of(kernels).rows, kernels.cache.lengths == "before"
    edges = sorted({0, 1, 2, 100} | {n + d for n in (page, 32, 64, 96) for d in (-1, 0, 1)})
    counts = [draw(st.integers(0, most)) for _ in range(draw(st.integers(0, 3)))]
    totals = tuple(max(draw(st.sampled_from(edges)), r if before else 0) for r in counts)
    batch = batch_of(
        totals,
        padding=draw(st.integers(0, 2)),
        fill=draw(st.sampled_from(("nan", "inf"))),
        strided=draw(st.booleans()),
        schedule=draw(st.sampled_from(SCHEDULES)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    return batch, counts


@ALL
@settings(max_examples=3)
@given(data=st.data())
def test_a_step(name: str, data: Any) -> None:
    """Ragged rows; pages without a token, and what comes after the last token, hold NaN or infinity."""
    batch, counts = data.draw(steps(name))
    ends = np.cumsum([0, *counts]).tolist()
    rows = [Rows(b, ends[b], ends[b + 1]) for b in range(len(counts))]
    scene, q = latent_scene(SETS[name], batch, rows, ends[-1] + batch.padding)
    offsets = offsets_of(counts, scene.cache.lengths_dtype, 0)
    call(scene, q, row_offsets=offsets, lse=data.draw(st.booleans()))


@pytest.mark.parametrize("name", ["wgmma_two_tiles", *(["wgmma_balanced"] if CAMPAIGN else [])])
def test_lengths_around_tiles(name: str) -> None:
    """Tokens before and after where pages, tiles and pairs of them end; padding after the last request."""
    kernels = SETS[name]
    least = op_of(kernels).rows if kernels.cache.lengths == "before" else 0
    totals = tuple(max(n, least) for n in (0, 1, 16, 17, 32, 33, 64, 65, 97, 161))
    rows = rows_of(kernels, len(totals))
    scene, q = latent_scene(kernels, batch_of(totals, fill="nan", schedule="descending"), rows, rows[-1].end + 1)
    call(scene, q)


@pytest.mark.parametrize("name", ["wgmma_rows", *(["wgmma_plain"] if CAMPAIGN else [])])
def test_schedules_agree(name: str) -> None:
    """Three orders of the threads, the same bits; requests of two tiles, of three, of five."""
    kernels, results = SETS[name], []
    totals = (140, 65, 33)
    for schedule in SCHEDULES:
        scene, q = latent_scene(kernels, batch_of(totals, schedule=schedule), rows := rows_of(kernels, 3), rows[-1].end)
        out, lse, _ = call(scene, q)
        assert lse is not None
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", ["wgmma_plain", *(["wgmma_balanced"] if CAMPAIGN else [])])
def test_hostile_tables_and_lengths(name: str) -> None:
    """Whatever one request's pages and length are: it is NaN, the error word names it, the others keep their bits."""
    hold_hostile(SETS[name], batch_of(()), ("page", "most"))


def test_a_garbage_token_is_its_own_rows_alone() -> None:
    """The last row's token is NaN throughout: rows before it keep their bits, it becomes NaN."""
    kernels = SETS["wgmma_rows"]
    rows = op_of(kernels).rows
    scene, q = latent_scene(kernels, batch_of((66,)), rows_of(kernels, 1), rows)
    was, _, _ = call(scene, q)
    (keys,) = scene.rows()
    scene.write(0, 65, [np.full((1, keys.dim), np.nan, q.dtype)])
    generated = package(kernels)
    out = np.zeros_like(was)
    with machine(arch="sm_90a", mode="check", schedule=7):
        generated.mla_decode(generated.Cache(**scene.arguments())[scene.layer], q=q, out=out)
    assert out[: rows - 1].tobytes() == was[: rows - 1].tobytes()
    assert np.isnan(out[rows - 1].astype(np.float32)).all()


def test_each_byte_is_read_once() -> None:
    """Sectors of rows against the fewest, and no bank twice."""
    kernels, tokens = SETS["wgmma_plain"], 1024
    memory = aligned(tokens * 1152)
    kind = dtype(kernels.cache.dtype).numpy()
    arguments: dict[str, Any] = {
        "pool": memory.view(kind).reshape(tokens // 64, 1, 1, 64, 1, 576),
        "page_table": np.random.default_rng(1).permutation(tokens // 64)[None].astype(np.uint32),
        "lengths": np.array([tokens - 2], dtype(kernels.cache.lengths_dtype).numpy()),
    }
    q, out = np.zeros((2, 32, 576), kind), np.zeros((2, 32, 512), kind)
    generated = package(kernels)
    with machine(arch="sm_90a", mode="check", schedule=7) as log:
        generated.mla_decode(generated.Cache(**arguments)[0], q=q, out=out)
    counters = log.launches[-1].counters
    read = {n.partition("[")[0]: c.load_sectors for n, c in counters.per_buffer.items() if c.load_requests}
    assert read["pool"] <= 1.02 * tokens * 1152 / 32
    twice = [line for line in counters.lines if line.shared.wavefronts > line.shared.ideal_wavefronts]
    assert not twice


@ALL
def test_sums_stay_in_registers(name: str) -> None:
    """No spills, and no product that waits for the one before: the assembler says so where it serialises them."""
    loaded = LoadedSet(SETS[name], "tests/ops/test_mla_sm90_rows.py", "")
    files = render_set(loaded) | render_device()
    units: dict[str, Unit] = {u.name: u for u in units_of(loaded, files, "generated")}
    image = compile_unit(units[f"{name}/mla_decode"], "sm_90a", "cubin", cache=default_cache())
    assert image.resources is not None and not image.resources.spill_stores
    assert "serialized" not in image.log


def test_which_sets_have_it() -> None:
    """Several rows of 16 bits with 64 columns together, whatever else a set is for; one row where its parts lie apart. Why not is
    said of each architecture."""
    plain = SETS["wgmma_plain"]
    assert name_of(plain) == name_of(SETS["wgmma_two_tiles"]) == NAME
    assert name_of(replace_set(plain, arch=("sm_80", "sm_90a", "sm_120f"))) == NAME
    reasons = {
        "a product has 64 columns": replace_set(plain, q_heads=16),
        "rows are not of 16-bit elements": replace_set(plain, cache=presets.flashmla_fp8()),
        "rows are not 512 dims and a multiple of 64": replace_set(
            plain, cache=presets.max_mla(latent_dim=256, page_size=64)
        ),
    }
    for reason, kernels in reasons.items():
        assert name_of(kernels) == "mla_mma" and why_not(kernels) == reason
    one_row = replace_set(plain, q_heads=64, ops=(MlaDecode(scale=SCALE),))
    assert name_of(one_row) == "mla_sm90", "which comes first, and rows are copied for the same products"
    lists = replace_set(plain, cache=presets.max_mla(latent_dim=256, page_size=64), q_heads=64, ops=(LISTS,))
    assert why_not(lists) == "lists name rows one by one"
    ampere = replace_set(plain, arch=("sm_80", "sm_100f"))
    assert {why_not(ampere, arch) for arch in ampere.arch} == {"no wgmma"}


LISTS = MlaDecode(scale=SCALE, sparse=True)


def name_of(kernels: KernelSet) -> str:
    return op_of(kernels).choices(kernels)["sm_90a"].name


def why_not(kernels: KernelSet, arch: str = "sm_90a") -> str:
    return dict(op_of(kernels).choices(kernels)[arch].why_not)[NAME]


def replace_set(kernels: KernelSet, **fields: Any) -> KernelSet:
    given: dict[str, Any] = {name: getattr(kernels, name) for name in ("name", "q_heads", "cache", "arch", "ops")}
    return KernelSet(**(given | fields))
