"""Operations that work in place: on every array that they declare, check mode sees no race, and the bytes are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen.layout.dtypes import dtype
from kvgen.ops import Append
from kvgen.runtime import clear
from tests.ops import test_attention_output, test_compact, test_fused, test_merge_states, test_sliced_add
from tests.support import append_sets as fused
from tests.support import slots, stored_rows
from tests.support import step_lengths as lengths
from tests.support.batches import PLAIN, Batch
from tests.support.call_tables import SETS as CHECKED_IN
from tests.support.call_tables import kernels as tables_of
from tests.support.harness import on_machine, package
from tests.support.memory import Raw
from tests.support.page_moves import SETS as MOVING
from tests.support.page_moves import having, moving_scene

STEP = replace(PLAIN, totals=(5, 20, 1), new=(2, 3, 1), padding=1)


# Pairs that the tests below run, or those of their operation (attention_output, indexer_query); the others declare nothing.
RUN = {
    ("q_out", "q"), ("q_out", "qkv"), ("c", "a"), ("new_lengths", "lengths"), ("out", "indices"),
    ("out", "o"), ("weights_out", "weights"), ("out", "out_a"), ("out", "out_b"), ("out", "outs"),
    ("lse", "lse_a"), ("lse", "lse_b"), ("lse", "lses"),
    *((f"new_{table}", table) for table in ("page_table", "page_indices", "req_to_token", "state_ids")),
}  # fmt: skip


def test_every_declaration_is_run() -> None:
    """What the checked-in sets, and those that the tests below run, declare."""
    tables = [kernel.params for name in CHECKED_IN for _, _, kernel in tables_of(name)]
    for tests in (
        fused,
        stored_rows,
        test_attention_output,
        test_merge_states,
        test_sliced_add,
        slots,
        lengths,
        test_compact,
    ):
        tables += [plan.params for kernels in tests.SETS.values() for op in kernels.ops for plan in op.plan(kernels)]
    assert {(p.name, other) for params in tables for p in params for other in getattr(p, "in_place", ())} == RUN


def _same(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(one).view(np.uint8), np.ascontiguousarray(other).view(np.uint8))


def _same_memory(one: dict[str, list[Raw]], other: dict[str, list[Raw]]) -> None:
    for name, parts in one.items():
        for mine, theirs in zip(parts, other[name], strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=name)


def _batch(op: Append) -> Batch:
    if op.rows == "padded" and op.inputs == "qkv":  # rows of q lie between those of k and v: one a request fits
        return replace(STEP, new=(1, 1, 1), padding=0)
    return replace(STEP, strided=True, schedule="descending", seed=3)


OF_Q = [n for n, s in fused.SETS.items() if s.ops[0].takes_q and s.ops[0].q_out == "same" and not s.ops[0].q_out_heads]


@pytest.mark.parametrize("name", OF_Q)
def test_append(name: str) -> None:
    """q_out is q, or q's columns of qkv: rows that are nobody's keep q."""
    op = fused.SETS[name].ops[0]
    assert isinstance(op, Append)
    batch = _batch(op)
    plain, alias = test_fused.call_for(name, batch), test_fused.call_for(name, batch)
    q = alias.inputs["q"]
    alias.arguments["q_out"] = q.reshape(plain.arguments["q_out"].shape)
    assert np.shares_memory(alias.arguments["q_out"], q)
    before = q.copy()
    found, _ = plain.located()
    assert test_fused.run(plain) == test_fused.run(alias)
    wanted = plain.arguments["q_out"].reshape(q.shape)
    for row, at in enumerate(found):
        _same(q[row], before[row] if at.state == "padding" else wanted[row])
    _same_memory(plain.scene.snapshot(), alias.scene.snapshot())


@pytest.mark.parametrize("name", ["inplace_dense", "inplace_kv_inside", "inplace_latent"])
def test_rotate_cache(name: str) -> None:
    batch = replace(STEP, errors=True, shared=False)
    plain, alias = stored_rows.stored(name, batch), stored_rows.stored(name, batch)
    rows = batch.leading + sum(batch.new) + batch.padding
    offsets = np.cumsum([batch.leading, *batch.new]).astype(dtype(plain.cache.lengths_dtype).numpy())
    told, arguments, _ = stored_rows.run(plain, "rotate", rows, offsets)
    q = arguments["q"].copy()
    word = np.zeros(1, np.uint64)
    clear(word)
    generated = package(alias.kernels)
    with on_machine(batch):
        cache = generated.Cache(**alias.arguments())[alias.layer]
        generated.rotate(cache, **arguments | {"q": q, "q_out": q}, errors=word)
    assert int(word[0]) == told
    known = batch.leading + sum(batch.new)
    _same(q[batch.leading : known], arguments["q_out"][batch.leading : known])
    _same(q[known:], arguments["q"][known:])
    _same_memory(plain.snapshot(), alias.snapshot())


@pytest.mark.parametrize(("name", "op"), test_merge_states.CASES)
def test_merge_states_of(name: str, op: str) -> None:
    """The memory of any state for the merged values, where their dtypes agree, and of any for the log-sum-exps."""
    found = test_merge_states.op_of(test_merge_states.SETS[name], op)
    kind = found.dtype or test_merge_states.SETS[name].cache.dtype
    states = 2 if found.states == "two" else 1 if found.first == "rows" else 9
    for place in (0, states - 1):
        for lse_too in (True, False):
            plain, alias = (test_merge_states.Case(name, op, states, 7, strided=False) for _ in range(2))
            for case in (plain, alias):
                case.fill(np.random.default_rng(5))
            if (found.out_dtype or kind) == kind:
                alias.out = alias.outs[place]
            if lse_too:
                alias.lse = alias.lses[states - 1 - place]
            plain.go()
            alias.go(schedule="descending")
            _same(alias.out, plain.out)
            _same(alias.lse, plain.lse)


@pytest.mark.parametrize("name", test_sliced_add.SETS)
def test_sliced_add_to_its_own(name: str) -> None:
    for in_place in (True, False):
        test_sliced_add.check_sliced(test_sliced_add.SETS[name], 7, 5, 4, in_place=in_place, seed=3)


@pytest.mark.parametrize("name", lengths.ADVANCED)
def test_advance(name: str) -> None:
    for in_place in (True, False):
        scene = lengths.scene_of(lengths.SETS[name], STEP)
        offsets = np.cumsum([STEP.leading, *STEP.new]).astype(scene.tables["lengths"].dtype)
        lengths.check_advance(scene, "advance", offsets, in_place=in_place)


@pytest.mark.parametrize("name", slots.SETS)
def test_remap_indices(name: str) -> None:
    for in_place in (True, False):
        scene = lengths.scene_of(slots.SETS[name], STEP)
        offsets = np.cumsum([STEP.leading, *STEP.new])
        whose = [-1] * STEP.leading + [b for b, n in enumerate(STEP.new) for _ in range(n)] + [-1] * STEP.padding
        slots.check_remap(scene, slots.picks(scene, whose, 40), offsets, in_place=in_place)


@pytest.mark.parametrize(
    "name", list({MOVING[n].cache.page_table.kind: n for n in reversed(having("compact"))}.values())
)
def test_compact_into_its_own_table(name: str) -> None:
    for in_place in (True, False):
        scene = moving_scene(MOVING[name], replace(PLAIN, totals=(9, 30, 4), new=(0,) * 3, seed=5))
        test_compact.check(scene, in_place=in_place)
