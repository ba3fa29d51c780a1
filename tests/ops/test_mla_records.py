"""mla_decode over the latent rows of requests that are stored as any codes: rows become one type on their way to shared memory,
on sm_90a by warps beside those that multiply."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Latent, Quant, presets
from kvgen.ops import MlaDecode
from kvgen.reference.elements import Elements
from kvgen.reference.segments import Coded
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from tests.support.batches import PLAIN, Batch
from tests.support.harness import Run, launcher, offsets_of, optimized
from tests.support.latent_records import CODES, INTS, NVFP4, SMALL, footers, inline, whole_rows
from tests.support.latent_steps import SCALE, Rows, call, hold_hostile, kernels_of, latent_scene, op_of, steps
from tests.support.memory import aligned
from tests.support.sets import archs_of

ANY_ROW, STORED, WIDENED = "mla_mma rounded", "mla_mma", "mla_sm90"
IN_BYTES = Quant(dtype="e4m3", scale_dtype="e8m0", recipe="pow2", place="row")  # a row is of 513 bytes
BLOCKS = Latent(dtype="bf16", page_size=16, quant=Quant(dtype="i8", scale_dtype="f32", block=Block(dim=128)))
ROPE_BLOCKS = Latent(
    dtype="bf16", page_size=4, quant_rope=True, quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=64))
)
WORDS = Quant(dtype="e2m1", scale_dtype="f32", place="row")  # rows of 260 bytes: codes come 4 bytes at a time
ONE_SCALE = Latent(dtype="bf16", page_size=4, quant=Quant(dtype="e4m3", scale_dtype="e8m0", recipe="pow2"))


def record_set(name: str, arch: str, cache: Cache, heads: int, **fields: Any) -> KernelSet:
    op = MlaDecode(**({"scale": SCALE} | fields))
    return KernelSet(name=f"records_{name}", q_heads=heads, cache=cache, ops=(op,), arch=arch.split())


SMALL_NVFP4 = Latent(dtype="bf16", **SMALL, page_size=4, quant=NVFP4)
SETS = [
    record_set("nvfp4", "sm_80", SMALL_NVFP4, 16, rows=3),
    record_set("i8_balanced", "sm_80", INTS, 8, rows=2, split="balanced"),
    record_set("v32", "sm_90a", presets.flashmla_fp8(page_size=4), 128),
    record_set("v4_balanced", "sm_90a", footers(3), 64, split="balanced", sinks="out"),
]
if "KVGEN_FAMILY" in os.environ:
    SETS += [
        record_set(f"codes_{n}", "sm_80", Latent(dtype="bf16", **SMALL, page_size=4, quant=q), 20)
        for n, q in CODES.items()
    ]
    SETS += [
        record_set("i8_invariant", "sm_80", INTS, 24, split="invariant", chunk=64),
        record_set("wide_nvfp4", "sm_90a", whole_rows(NVFP4), 64, lse_base="2"),
        record_set("wide_words", "sm_90a", whole_rows(WORDS), 40),
        record_set("wide_inline", "sm_90a", inline(2), 20, out_dtype="f32"),
        record_set("wide_blocks", "sm_90a", BLOCKS, 64, split="invariant", chunk=64),
        record_set("rope_blocks", "sm_90a", ROPE_BLOCKS, 64),
        record_set("both", "sm_80 sm_90a", BLOCKS, 64, split="balanced"),
        record_set("v32_balanced", "sm_90a", presets.flashmla_fp8(page_size=4), 64, split="balanced", sinks="lse"),
    ]
ALL = pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)


def some(kernels: KernelSet, *totals: int) -> Batch:
    return replace(PLAIN, arch=archs_of(kernels)[-1], totals=totals, new=(0,) * len(totals), fill="nan")


def rows_of(kernels: KernelSet, requests: int) -> list[Rows]:
    rows = op_of(kernels).rows
    return [Rows(b, b * rows, (b + 1) * rows) for b in range(requests)]


def sinks_of(kernels: KernelSet) -> dict[str, Any]:
    sinks = np.linspace(-3, 9, kernels.q_heads, dtype=np.float32)
    return {"sinks": sinks} if op_of(kernels).sinks else {}


@ALL
@settings(max_examples=2)
@given(data=st.data())
def test_a_step(kernels: KernelSet, data: Any) -> None:
    """Ragged rows or as many each; pages without a token, and what comes after the last token, hold NaN or infinity."""
    batch, rows, total, ragged = data.draw(steps(kernels))
    scene, q = latent_scene(kernels, batch, rows, total)
    offsets = offsets_of([r.end - r.begin for r in rows], scene.cache.lengths_dtype, batch.leading) if ragged else None
    call(scene, q, row_offsets=offsets, lse=data.draw(st.booleans()), **sinks_of(kernels))


@ALL
def test_lengths_around_tiles(kernels: KernelSet) -> None:
    """Before and after where pages, tiles of 32 and 64 and pairs of them end, the longest request last."""
    totals = [max(n, op_of(kernels).rows) for n in (1, 31, 33, 63, 64, 65, 129, 300)]
    scene, q = latent_scene(kernels, some(kernels, *totals), rows_of(kernels, 8), 8 * op_of(kernels).rows)
    call(scene, q, **sinks_of(kernels))


@pytest.mark.parametrize("kernels", [k for k in SETS if not op_of(k).sinks], ids=lambda kernels: kernels.name)
def test_hostile_tables_and_lengths(kernels: KernelSet) -> None:
    """Whatever one request's pages and length are: it is NaN, the error word names it, the others keep their bits."""
    hold_hostile(kernels, some(kernels), ("page", "minus_one", "most"))


@pytest.mark.skipif("KVGEN_FAMILY" not in os.environ, reason="make campaign: a kernel of its own")
def test_a_nan_scale_of_a_whole_row() -> None:
    """It makes NaN of its request, sums and maxima, also where the score would be -inf and the row without weight."""
    kernels = record_set("one_scale", "sm_90a", ONE_SCALE, 64)
    scene, q = latent_scene(kernels, some(kernels, 9, 9), rows_of(kernels, 2), 2)
    was, was_lse, _ = call(scene, q)
    assert was_lse is not None
    scene.write(1, 5, [np.ones((1, 576), q.dtype)])
    q[1] = -np.abs(q[1])
    (keys,) = scene.rows()
    part, place = keys.parts[0], scene.entries[1][1][0]
    assert isinstance(part, Coded) and isinstance(part.scales, Elements)
    part.scales.write(place, 1, np.full_like(part.scales.read(place, 1), np.nan))
    out, lse = np.zeros_like(was), np.zeros_like(was_lse)
    Run(scene, "mla_decode", launcher(scene, "mla_decode"), q=q, out=out, lse=lse)
    assert np.isnan(out[1].astype(np.float32)).all() and np.isnan(lse[1]).all()
    assert out[0].tobytes() == was[0].tobytes() and lse[0].tobytes() == was_lse[0].tobytes()


def test_which_rows_go_through_it() -> None:
    """Rows that another kernel reads as they are stay with it, but for sm_90a's with many columns."""
    found = {
        record_set("a", "sm_80 sm_90a", SMALL_NVFP4, 64): (ANY_ROW, ANY_ROW),
        record_set("b", "sm_80 sm_90a", BLOCKS, 16): (ANY_ROW, ANY_ROW),
        record_set("c", "sm_80 sm_90a", BLOCKS, 64): (ANY_ROW, WIDENED),
        record_set("d", "sm_80 sm_90a", BLOCKS, 64, rows=2): (ANY_ROW, ANY_ROW),
        record_set("scaled_rope", "sm_80 sm_90a", ROPE_BLOCKS, 64): (STORED, STORED),
        record_set("e", "sm_80 sm_90a", presets.flashmla_fp8(), 64): (STORED, WIDENED),
        record_set("f", "sm_80 sm_90a", presets.flashmla_fp8(), 64, rows=2): (STORED, STORED),
        record_set("g", "sm_80 sm_90a", presets.max_mla(page_size=64), 16): (STORED, STORED),
        record_set("h", "sm_90a", presets.max_mla(page_size=64), 64): (WIDENED, WIDENED),
        record_set("i", "sm_90a", whole_rows(IN_BYTES), 64): (ANY_ROW, ANY_ROW),  # codes come a byte at a time
    }
    for kernels, names in found.items():
        assert kernels_of(kernels, ("sm_80", "sm_90a")) == names, kernels
    (rounded, copied) = (record_set(n, "sm_80", c, 16) for n, c in (("j", BLOCKS), ("k", presets.flashmla_fp8())))
    how = [op_of(kernels).choices(kernels)["sm_80"].fit.how for kernels in (rounded, copied)]
    assert how == [
        "rows of one cache, in bf16 on their way to shared memory (rows of i8); tokens on M",
        "rows as they are stored, tokens on M",
    ]


@pytest.mark.parametrize(
    ("cache", "page", "sectors"),
    [
        # Sectors of 64 dims of bf16, and the one of its scales, are asked for twice: the second time L1 has them.
        pytest.param(presets.flashmla_v4(), 37440, 14 + 2 * 4 + 2 * 1, id="e4m3"),
        pytest.param(presets.flashmla(), 64 * 1152, 36, id="bf16"),
    ][: 2 if "KVGEN_FAMILY" in os.environ else 1],
)
def test_each_byte_is_read_once(cache: Cache, page: int, sectors: int) -> None:
    """Sectors of rows against the fewest, and no bank twice, by the warps that widen or copy and by those that multiply."""
    kernels, tokens = record_set(f"traffic_{sectors}", "sm_90a", cache, 64, sparse=True), 1024
    pages = tokens // 64
    memory = aligned(pages * page).reshape(pages, page)
    memory[:] = 0
    rows = memory[:, :37376] if page == 37440 else memory.view(ml_dtypes.bfloat16).reshape(pages, 64, 1, 576)
    kind, dims = ml_dtypes.bfloat16, cache.head_dim
    q, out = np.zeros((1, 64, dims), kind), np.zeros((1, 64, 512), kind)
    indices = np.random.default_rng(1).permutation(tokens)[None].astype(np.int32)
    with optimized(kernels) as generated, machine(arch="sm_90a", mode="check", schedule=7) as log:
        generated.mla_decode(generated.Cache([rows])[0], q=q, out=out, indices=indices)
    counters = log.launches[-1].counters
    read = {n.partition("[")[0]: c.load_sectors for n, c in counters.per_buffer.items() if c.load_requests}
    assert sum(n for name, n in read.items() if name.endswith("pool")) <= tokens * sectors
    assert not [line for line in counters.lines if line.shared.wavefronts > line.shared.ideal_wavefronts]
