"""Caches with an entry for several tokens: where entries go, at every phase; steps in chunks; operations that count tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, KernelSet, Latent, Paged, Ring, ops
from kvgen.errors import SpecError
from kvgen.runtime import Fault, describe
from kvgen.schema.rate import block_entries
from tests.ops.test_fused import call_of, check
from tests.support.append_sets import SETS
from tests.support.batches import PLAIN, batches
from tests.support.harness import check_decode, check_gather, index_name, offsets_of, package, queries
from tests.support.scenes import Scene
from tests.support.slots import check_slots
from tests.support.step_lengths import scene_of

KERNELS = SETS["rate"]
CACHE = KERNELS.kv
RATE, PAGE = CACHE.entry_tokens, CACHE.page_tokens or 0


@settings(max_examples=6)
@given(data=st.data())
def test_slots(data: Any) -> None:
    """What the oracle says, and vLLM's rule in its own words: valid iff (pos + 1) % r == 0, j = pos // r,
    slot = table[request][j // P] * P + j % P, else -1."""
    batch = data.draw(batches(KERNELS))
    scene = scene_of(KERNELS, batch)
    offsets = offsets_of(batch.new, index_name(KERNELS, "slot_mapping"), batch.leading)
    word, slots = check_slots(scene, "slot_mapping", batch.leading + sum(batch.new) + batch.padding, offsets)
    assert describe(word) is None
    table, rows = scene.tables["page_table"].astype(np.int64), iter(slots[batch.leading :])
    for b, (total, new) in enumerate(zip(batch.totals, batch.new, strict=True)):
        for position in range(total - new, total):
            j = position // RATE
            ends = (position + 1) % RATE == 0
            assert next(rows) == (table[b][j // PAGE] * PAGE + j % PAGE if ends else -1)
    assert all(slot == -1 for slot in rows)


@pytest.mark.parametrize("phase", range(RATE))
def test_chunks_are_as_the_whole(phase: int) -> None:
    """A prompt in one step, and in steps that begin and end at every phase: the same bytes; gather finds entry j's row, the one
    of token j * r + r - 1."""
    total, starts = 5 * RATE + phase, (0, phase + 1, phase + 2, 2 * RATE + 1 + phase, 5 * RATE + phase)
    rows, memories = None, []
    for steps in ((total,), tuple(np.diff(starts).tolist())):
        held, memory = 0, None
        for new in steps:
            batch = replace(PLAIN, totals=(total,), new=(new,), fill="bytes", seed=3)
            scene = Scene(KERNELS, batch, (held + new,))
            if memory is not None:
                for name, parts in scene.tensors.items():
                    for part, before in zip(parts, memory[name], strict=True):
                        part.memory[...] = before
            step = call_of(scene, new, {"row_offsets": np.array([0, new], np.int32)})
            rows = np.asarray(scene.rng.standard_normal((total, 1, CACHE.head_dim))) if rows is None else rows
            step.inputs["k"][...] = rows[held : held + new].astype(step.inputs["k"].dtype)
            step.arguments["k_weight"][...] = 1
            check(step)
            memory, held = scene.snapshot(), held + new
        assert memory is not None
        memories.append(memory)
    for name, parts in memories[0].items():
        for one, other in zip(parts, memories[1][name], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    entries = total // RATE
    check_gather(scene, entries, row_offsets=np.array([0, entries], np.int32), starts=None)


def test_pages_that_are_none() -> None:
    """An entry in a bad page, and one past the table, are reported at their first token; rows that end none are silent."""
    batch = replace(PLAIN, totals=(26, 30), new=(26, 30))
    scene = scene_of(KERNELS, batch)
    offsets = offsets_of(batch.new, "i32")
    scene.tables["page_table"][1, 1] = scene.pages
    for run in (
        lambda: check(call_of(scene, 56, {"row_offsets": offsets}))[1],
        lambda: check_slots(scene, "slot_mapping", 56, offsets)[0],
    ):
        report = describe(run())
        assert report is not None and (report.code, report.request, report.position) == (Fault.PAGE_ID, 1, PAGE * RATE)
    scene.trim(1)
    report = describe(check_slots(scene, "slot_mapping", 56, offsets)[0])
    assert report is not None and (report.code, report.request, report.position) == (Fault.POSITION, 0, PAGE * RATE)
    silent = replace(batch, new=(1, 1))
    scene = Scene(KERNELS, silent, silent.totals)
    scene.tables["page_table"][...] = 2**31 - 1  # tokens 25 and 29 end no entry: no page is looked up
    assert check_slots(scene, "slot_mapping", 2, offsets_of((1, 1), "i32"))[0] == 0


DECODE = KernelSet(
    name="rate_decode",
    q_heads=4,
    cache=Paged(dtype="bf16", kv_heads=2, head_dim=16, page_size=5, rate=3),
    ops=[ops.Decode(rows=3)],
    arch=["sm_80"],
)


def test_decode_sees_whole_entries() -> None:
    """Rows at every phase, one to three a request, lengths that do not count them: a row at position p sees (p + 1) // 3 entries,
    and nothing of those behind, which are NaN."""
    totals, counts = (1, 2, 3, 4, 17, 18, 19, 95), (1, 2, 3, 1, 3, 3, 3, 2)
    before = [n - count for n, count in zip(totals, counts, strict=True)]
    scene = Scene(DECODE, replace(PLAIN, totals=totals, new=counts), before)
    scene.fill(totals)
    q = queries(scene, sum(counts))
    out, lse, wanted = check_decode(scene, q, row_offsets=offsets_of(counts, "i32"))
    seen = [(n - count + i + 1) // 3 for n, count in zip(totals, counts, strict=True) for i in range(count)]
    assert [len(one.k) for one in wanted.seen if one is not None] == seen
    assert lse is not None and all(np.isneginf(lse[i]).all() and not out[i].any() for i, n in enumerate(seen) if n == 0)


def test_every_operation_is_for_rates_or_refused() -> None:
    """What an operation says of itself decides; those that count tokens one by one are refused by name."""
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16, rate=4)
    for op in (ops.Extend(), ops.ToCsr(table_dtype="i32"), ops.Reorder(), ops.RowOffsets(), ops.Convert(source=cache)):
        with pytest.raises(SpecError, match=rf"ops: got {op.name} with rate=4.*use it with rate=1"):
            KernelSet(name="x", q_heads=2, cache=cache, ops=[op])
    with pytest.raises(SpecError, match="ops: got convert with rate=4 in ConvertSource"):
        KernelSet(name="x", q_heads=2, cache=cache.model_copy(update={"rate": 1}), ops=[ops.Convert(source=cache)])


def test_a_page_is_entries_and_a_table_is_for_tokens() -> None:
    """max_cache_length counts tokens: a column of the table is page_size * rate of them."""
    scene = scene_of(KERNELS, replace(PLAIN, totals=(13, 1), new=(1, 1)))
    cache = package(KERNELS).Cache(**scene.arguments())
    assert (cache.page_size, cache.rate) == (PAGE, RATE)
    assert cache.max_cache_length == scene.tables["page_table"].shape[1] * PAGE * RATE


def test_entries_of_a_block() -> None:
    assert [block_entries(256, rate) for rate in (1, 4, 128)] == [256, 64, 2]
    for block, rate in ((256, 3), (64, 128), (256, 0)):
        with pytest.raises(ValueError, match=f"rate: got {rate} with blocks of {block} tokens"):
            block_entries(block, rate)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"table": Ring(window=8)}, "rate: got 4 with table=Ring"),
        ({"table": CSR(last_page_len=True), "lengths": "after"}, "rate: got 4 with CSR.last_page_len=True"),
        ({"rate": 0}, "rate: got 0"),
    ],
)
def test_caches_that_have_no_rate(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Latent(**({"dtype": "bf16", "page_size": 8, "rate": 4} | fields))
