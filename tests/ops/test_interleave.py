"""Tokens dealt to ranks: slot_mapping against the oracle, and ranks whose merged results are those of one cache of all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, Interleave, KernelSet, Mapped, Paged, Ring, ops
from kvgen.errors import SpecError
from kvgen.reference import slot_mapping
from kvgen.reference.slot_mapping import tokens_of_rank
from kvgen.runtime import describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, batches
from tests.support.harness import offsets_of, package
from tests.support.step_lengths import go, hold, scene_of, vector

DEALT: Final = Interleave(ranks=3, size=2)
CACHE: Final = Paged(
    dtype="bf16", kv_heads=2, head_dim=16, page_size=4, table=Mapped(), lengths="after", lengths_dtype="i32"
)
SET: Final = KernelSet(
    name="dealt",
    q_heads=4,
    cache=CACHE,
    ops=(ops.SlotMapping(interleave=DEALT), ops.Append(rows="slots"), ops.Decode()),
    arch=("sm_90a",),
)


@settings(max_examples=6)
@given(data=st.data())
def test_slots_of_a_rank(data: Any) -> None:
    batch, rank = data.draw(batches(SET)), data.draw(st.integers(0, 2))
    scene = scene_of(SET, batch)
    offsets = offsets_of(batch.new, "i32", batch.leading)
    rows = batch.leading + sum(batch.new) + batch.padding
    slots, lengths = vector(rows, "i64"), vector(rows, "i32")
    wanted = slots[0].copy(), lengths[0].copy()
    word = slot_mapping(scene.view, offsets, wanted[0], interleave=DEALT, rank=rank, local_lengths=wanted[1])
    found = go(scene, "slot_mapping", row_offsets=offsets, slots=slots[0], local_lengths=lengths[0], rank=rank)
    hold(slots, wanted[0])
    hold(lengths, wanted[1])
    assert not batch.errors or found == word, f"{describe(found)}, not {describe(word)}"


def test_tokens_of_a_rank() -> None:
    """Their number is that of a count one by one, also where a length is as long as lengths can be."""
    for ranks, size in ((2, 1), (3, 2), (4, 5)):
        dealt = Interleave(ranks=ranks, size=size)
        for rank in range(ranks):
            for n in range(3 * ranks * size):
                assert tokens_of_rank(n, dealt, rank) == sum(i // size % ranks == rank for i in range(n))
        assert sum(tokens_of_rank(2**32 - 2, dealt, rank) for rank in range(ranks)) == 2**32 - 2


def test_a_length_past_the_table() -> None:
    """Its rows have no slots but those of other ranks' tokens; it is reported, and the other requests have theirs."""
    scene = scene_of(SET, replace(PLAIN, totals=(9, 8), new=(2, 3), errors=True))
    offsets, most = offsets_of((2, 3), "i32"), 2**31 - 1
    scene.tables["lengths"][0] = most
    slots, lengths = np.zeros(5, np.int64), np.zeros(5, np.int32)
    wanted = slots.copy(), lengths.copy()
    word = slot_mapping(scene.view, offsets, wanted[0], interleave=DEALT, rank=0, local_lengths=wanted[1])
    found = go(scene, "slot_mapping", row_offsets=offsets, slots=slots, local_lengths=lengths, rank=0)
    np.testing.assert_array_equal(slots, wanted[0])
    np.testing.assert_array_equal(lengths, wanted[1])
    assert found == word and (slots[2:] >= 0).any()


def test_ranks_together_see_what_one_gpu_sees() -> None:
    """A prompt's chunk, then a step of two drafts a request: each rank stores its own tokens and attends to them, row by row;
    results are merged by their LSE."""
    generated, rng = package(SET), np.random.default_rng(6)
    totals, drafts = (9, 1, 23, 14), 2
    k, v = (rng.standard_normal((2, sum(totals) + drafts * 4, 2, 16))).astype(ml_dtypes.bfloat16)
    q = rng.standard_normal((drafts * 4, 4, 16)).astype(ml_dtypes.bfloat16)
    numbers = np.arange(4, dtype=np.int32)
    outs, sums = np.zeros((3, *q.shape), ml_dtypes.bfloat16), np.zeros((3, *q.shape[:2]), np.float32)
    for rank in range(3):
        pool = np.full((14, 2, 1, 4, 2, 16), np.nan, ml_dtypes.bfloat16)
        # This rank's pages alone: 12 tokens of 25 at most.
        table = rng.permutation(14)[:12].reshape(4, 3).astype(np.int32)
        row = 0
        for counts, before in ((totals, (0, 0, 0, 0)), ((drafts,) * 4, totals)):
            new = sum(counts)
            lengths = np.array([b + n for b, n in zip(before, counts, strict=True)], np.int32)
            cache = generated.Cache(pool, lengths=lengths, page_table=table, idx_mapping=numbers)
            slots, seen = np.zeros(new, np.int64), np.zeros(new, np.int32)
            word = np.zeros(1, np.uint64)
            with machine(mode="check"):
                offsets = offsets_of(counts, "i32")
                generated.slot_mapping(cache[0], offsets, slots, seen, rank, errors=word)
                generated.append(cache[0], k=k[row : row + new], v=v[row : row + new], slots=slots, errors=word)
            assert describe(word) is None
            row += new
        # Each draft's row is a request of its own, which sees the rank's tokens up to it.
        whose = np.repeat(numbers, drafts)
        rows = generated.Cache(pool, lengths=seen, page_table=table, idx_mapping=whose)
        with machine(mode="check"):
            generated.decode(rows[0], q, out=outs[rank], lse=sums[rank], errors=word)
        assert describe(word) is None
    weights = np.exp(sums - sums.max(0))
    merged = (outs.astype(np.float64) * (weights / weights.sum(0))[..., None]).sum(0)
    begins = np.cumsum([0, *totals])
    for b, total in enumerate(totals):
        for i in range(drafts):
            step = slice(sum(totals) + b * drafts, sum(totals) + b * drafts + i + 1)
            for head in range(4):
                keys, values = (
                    np.concatenate([x[begins[b] : begins[b] + total, head // 2], x[step, head // 2]]).astype(np.float64)
                    for x in (k, v)
                )
                s = keys @ q[b * drafts + i, head].astype(np.float64) / 4
                p = np.exp(s - s.max())
                np.testing.assert_allclose(merged[b * drafts + i, head], p / p.sum() @ values, atol=2**-6)


@pytest.mark.parametrize("table", [Ring(window=8), CSR(last_page_len=True)])
def test_refused(table: Any) -> None:
    cache = CACHE.model_copy(update={"table": table})
    with pytest.raises(
        SpecError, match=r"interleave: got ranks=3 with table=\w+\(\) and rate=1; lengths are those of whole"
    ):
        KernelSet(q_heads=4, cache=cache, ops=(ops.SlotMapping(interleave=DEALT),))
