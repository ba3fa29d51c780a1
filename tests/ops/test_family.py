"""Quantized and latent caches against the oracle: append byte for byte, gather exactly, decode within f32's bound.

Every set appends, so that every two factors by which rows become codes meet; each value of each factor is met by gather, by
decode and, where it matters to them, by append by slots (family.operations_of, held by test_sets).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.layout.dtypes import dtype
from tests.ops.test_append import scene_before
from tests.ops.test_decode import decode_scene
from tests.support.batches import batches
from tests.support.engine_sets import ENGINES, QUANTIZED, RECORDS
from tests.support.harness import check_append, check_decode, check_gather, index_name, offsets_of
from tests.support.sets import FAMILY, having

SETS = FAMILY | ENGINES | QUANTIZED
# Rows that other engines store as one of those that are left, or the family, do, under another preset's name and sizes (of 576
# values in bf16, of e4m3, of e2m1 with e4m3 scales, of an indexer's 132 bytes); and odd rows of another type of codes.
ALIKE = (
    "max_paged_fp8", "max_mla", "max_mla_fp8", "max_indexer", "vllm_mla", "sglang_mla", "sglang_mla_fp8", "sglang_indexer",
    "flashinfer_nvfp4", "flashmla_fp8", "tensorrt_llm_nvfp4", "kvbm_universal", "kvbm_operational", "lmdeploy_int8",
    "own", "latent_odd_fp8",
)  # fmt: skip
if "KVGEN_FAMILY" not in os.environ:
    SETS = {name: kernels for name, kernels in SETS.items() if name not in RECORDS and name not in ALIKE}
GATHER = frozenset(having(SETS, "gather"))


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=3)
@given(data=st.data())
def test_append_and_gather(name: str, data: Any) -> None:
    """A step's rows, and then, where the set gathers, everything that the cache holds, theirs and older ones'."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene = scene_before(name, batch)
    offsets = offsets_of(batch.new, index_name(kernels, "append"), batch.leading)
    check_append(scene, batch.leading + sum(batch.new) + batch.padding, row_offsets=offsets)
    if name not in GATHER:
        return
    starts = [int(scene.rng.integers(scene.view.first_token(n), n + 1)) for n in batch.totals]
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    index = index_name(kernels, "gather")
    check_gather(
        scene,
        batch.leading + sum(counts) + batch.padding,
        row_offsets=offsets_of(counts, index, batch.leading),
        starts=np.array(starts, dtype(index).numpy()),
    )


@pytest.mark.parametrize("name", having(SETS, "append_slots"))
@settings(max_examples=1)
@given(data=st.data())
def test_slots(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name], least=1))
    scene = scene_before(name, batch)
    rows = sum(batch.new) + 3
    slots = scene.rng.permutation(scene.pages * scene.tokens)[:rows].astype(np.int64)
    slots[scene.rng.random(len(slots)) < 0.3] = -1
    check_append(scene, len(slots), slots=slots)


@pytest.mark.parametrize("name", having(SETS, "decode"))
@settings(max_examples=2)
@given(data=st.data())
def test_decode(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name], least=0 if SETS[name].cache.lengths == "after" else 1))
    scene, q = decode_scene(name, batch, len(batch.totals) + batch.padding)
    check_decode(scene, q, lse=data.draw(st.booleans()))
