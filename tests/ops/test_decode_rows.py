"""decode of several rows a request: every kind of cache and size, drawn batches, rows that know nothing of each other."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, Block, Continuous, Dense, KernelSet, Layout, Paged, PerKV, Quant, Ring, ops, presets
from kvgen.reference import Decoded
from kvgen.runtime import Fault, describe
from tests.support.batches import PLAIN, Batch
from tests.support.decode_steps import Step, step, steps
from tests.support.memory import Raw
from tests.support.tolerance import hold


def _set(name: str, cache: Any, group: int, rows: int, **fields: Any) -> KernelSet:
    decode = ops.Decode(rows=rows, **fields)
    return KernelSet(name=f"drows_{name}", q_heads=cache.kv_heads * group, cache=cache, ops=(decode,))


def _paged(kind: str, heads: int, dim: int, page: int, **fields: Any) -> Paged:
    return Paged(dtype=kind, kv_heads=heads, head_dim=dim, page_size=page, **fields)


SETS = {
    s.name: s
    for s in (
        _set("one", presets.flashinfer_hnd(dtype="bf16", kv_heads=2, head_dim=64, page_size=16), 1, 1, out_dtype="f32"),
        _set(
            "two",
            _paged("f16", 2, 40, 3, table=Dense(dtype="i64", id_multiplier=2), lengths="after", lengths_dtype="i32"),
            3,
            2,
            lse_base="2",
        ),
        _set(
            "four",
            presets.sglang(dtype="bf16", kv_heads=2, head_dim=32),
            5,
            4,
            lse_empty="inf",
            index_dtype="i32",
            split="balanced",
        ),
        _set("eight", _paged("bf16", 1, 128, 64, lengths="after"), 7, 8, split="invariant", chunk=64),
        _set("wide", _paged("f16", 1, 512, 16), 16, 1, out_dtype="bf16"),
        # Q read from shared memory for codes: two fragments of K a word.
        _set("wide_codes", _paged("bf16", 1, 512, 16, quant=Quant(dtype="e4m3", scale_dtype="f32")), 16, 1),
        _set("falcon", _paged("bf16", 1, 32, 16, layout="page kv layer token dim"), 71, 2),
        _set("narrow", _paged("f16", 3, 8, 1, lengths="after"), 3, 4, scale=0.7),
        _set(
            "f32",
            _paged("f32", 2, 24, 16, table=CSR(dtype="u32", id_multiplier=3)),
            3,
            4,
            split="invariant",
            chunk=64,
            q_dtype="e4m3",
        ),
        _set(
            "per_kv",
            Paged(
                dtype="f16",
                kv_heads=2,
                head_dim=32,
                v_head_dim=64,
                page_size=16,
                layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
                table=PerKV(dtype="u32", id_multiplier=2),
            ),
            2,
            2,
        ),
        _set(
            "ring",
            _paged("bf16", 2, 32, 16, table=Ring(window=40, dtype="i64"), lengths="after"),
            4,
            2,
            q_dtype="e4m3",
            out_dtype="e4m3",
        ),
        _set(
            "block",
            Continuous(dtype="f16", kv_heads=2, head_dim=40, max_tokens=70, table_dtype="i64", lengths_dtype="i64"),
            4,
            3,
        ),
        _set(
            "transposed",
            _paged(
                "f16",
                2,
                24,
                5,
                v_head_dim=40,
                layout=Layout(k="page layer token head dim", v="layer page head dim token"),
            ),
            3,
            2,
        ),
        _set(
            "fp8",
            _paged("bf16", 2, 32, 16, quant=Quant(dtype="e4m3", scale_dtype=None)),
            4,
            2,
            q_dtype="e4m3",
            out_dtype="e4m3",
        ),
        _set(
            "mxfp4",
            presets.sglang(dtype="bf16", kv_heads=2, head_dim=64, kv_cache_dtype="fp4_e2m1"),
            4,
            2,
            split="balanced",
        ),
        _set(
            "mxfp8",
            _paged(
                "bf16", 2, 64, 16, quant=Quant(dtype="e4m3", scale_dtype="e8m0", recipe="pow2", block=Block(dim=32))
            ),
            3,
            1,
            split="invariant",
            chunk=64,
        ),
        _set("fp8_scaled", _paged("bf16", 2, 64, 16, quant=Quant(dtype="e4m3", scale_dtype="f32")), 8, 4),
    )
}


# Of kernels that others of these sets have at other sizes or in other orders of axes: a campaign's.
ALIKE = ("drows_wide_codes", "drows_narrow", "drows_per_kv", "drows_block", "drows_transposed", "drows_fp8_scaled")
CAMPAIGN = "KVGEN_FAMILY" in os.environ
RUN = [name for name in SETS if CAMPAIGN or name not in ALIKE]


@pytest.mark.parametrize("name", RUN)
@settings(max_examples=3)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    """Any batch. Unused pages and tails hold NaN or infinity, tables end in poison."""
    data.draw(steps(SETS[name])).check(lse=data.draw(st.sampled_from((True, True, False))))


def _plain(name: str, totals: tuple[int, ...], **fields: Any) -> Batch:
    return replace(PLAIN, totals=totals, new=(0,) * len(totals), **fields)


@pytest.mark.parametrize("name", ["drows_one", "drows_fp8"])
def test_thousands_of_tokens(name: str) -> None:
    """Dominant ends, and counted, beside a request of one."""
    for level in (False, True):
        step(SETS[name], _plain(name, (2000, 2), seed=4), level=level).check()


@pytest.mark.parametrize("name", ["drows_two", "drows_eight", "drows_f32", "drows_falcon"])
def test_schedules_agree(name: str) -> None:
    results = []
    for schedule in ("ascending", "descending", 12345):
        out, lse, _ = step(SETS[name], _plain(name, (150, 9, 33), schedule=schedule)).check()
        assert lse is not None
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("name", [n for n in RUN if SETS[n].cache.lengths == "after" and SETS[n].ops[0].rows > 1])  # type: ignore[attr-defined]
def test_more_rows_than_tokens(name: str) -> None:
    """Rows before a request's first token are as good as others, but see no past; a request may have no token at all."""
    step(SETS[name], _plain(name, (1, 0, 3)), offsets=False).check()


@pytest.mark.parametrize("what", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e4])
@pytest.mark.parametrize("name", ["drows_two", "drows_eight", "drows_f32", "drows_falcon", "drows_fp8", "drows_mxfp4"])
def test_a_garbage_row_is_alone(name: str, value: float, what: str) -> None:
    """The last row of a request is garbage, or the key or the value that came with it: the others are right all the same."""
    found = step(SETS[name], _plain(name, (70, 20)), offsets=False)
    scene, last = found.scene, found.op.rows - 1
    if what == "q":
        found.q[last] = value
    places = scene.view.places(0, 69 // scene.tokens)
    assert isinstance(places, tuple)
    for rows, role, place in zip(scene.rows(), "kv", places, strict=True):
        if what == role:
            garbage = np.full((rows.heads, rows.dim), value).astype(found.q.dtype)
            rows.write(place.page, 69 % scene.tokens, garbage, place.scales)
    hold(found.wanted(), found.numerics, found.q, *found.run(), [row for row in range(len(found.q)) if row != last])


# Bad data ----------------------------------------------------------------------------------------------------------------

VICTIM = 1
_HOSTILE = ("drows_two", "drows_eight", "drows_f32", "drows_falcon", "drows_fp8_scaled", "drows_mxfp8")
HOSTILE = [name for name in _HOSTILE if name in RUN]


def hostile_step(name: str) -> Step:
    """Three requests, the victim in the middle."""
    return step(SETS[name], _plain(name, (40, 70, 20), seed=9), dominant=False)


@cache
def served(name: str) -> tuple[Raw, Raw | None, Decoded]:
    """The rows' results where nothing is wrong."""
    return hostile_step(name).check()


SPOILT = ("minus_one", "pages", "huge", "last", "length", "length_huge")
# All of them in tables of three kinds and on both kinds of cores, a page and a length in the others'.
_ALL_OF_THEM = HOSTILE if CAMPAIGN else ("drows_two", "drows_eight", "drows_f32")


@pytest.mark.parametrize(
    ("name", "what"), [(n, w) for n in HOSTILE for w in SPOILT if n in _ALL_OF_THEM or w in ("huge", "length")]
)
def test_bad_entries(name: str, what: str) -> None:
    """All rows of that request are NaN, the error word says why, and the others keep their bits."""
    found = hostile_step(name)
    _spoil(found, what)
    results = (served(name), found.check())
    victims = np.zeros(len(found.q), bool)
    begin = found.counts[0]
    victims[begin : begin + found.counts[VICTIM]] = True
    (out, lse, wanted), (bad, bad_lse, other) = results
    assert (
        wanted.errors != other.errors and np.isnan(other.out[victims]).all() and np.isfinite(other.out[~victims]).all()
    )
    assert lse is not None and bad_lse is not None
    for clean, spoilt in ((out, bad), (lse, bad_lse)):
        assert np.ascontiguousarray(clean[~victims]).tobytes() == np.ascontiguousarray(spoilt[~victims]).tobytes()
    report = describe(other.errors)
    assert report is not None and report.code is (Fault.LENGTH if "length" in what else Fault.PAGE_ID)


def _spoil(found: Step, what: str) -> None:
    scene = found.scene
    multiplier = scene.cache.page_table.id_multiplier  # type: ignore[union-attr]
    value = {"minus_one": -1, "pages": -(-scene.pages // multiplier), "huge": 2**31 - 1, "last": -1, "length": -1}
    if what.startswith("length"):
        array, at = scene.tables["lengths"], np.array(VICTIM)
    elif isinstance(scene.cache.page_table, CSR):
        array = scene.tables["page_indices"]
        at = scene.tables["page_indptr"][VICTIM + 1] - 1 if what == "last" else scene.tables["page_indptr"][VICTIM]
    else:
        last = (scene.batch.totals[VICTIM] - 1) // scene.tokens
        array, at = scene.tables["page_table"][VICTIM], np.array(last if what == "last" else 0)
    array[int(at)] = np.array(value.get(what, 2**31 - 2), np.int64).astype(array.dtype)


@pytest.mark.parametrize("counts", [(2, 9, 1), (1, 3, 2)])
@pytest.mark.parametrize("name", ["drows_two", "drows_eight", "drows_f32"])
def test_too_many_rows(name: str, counts: tuple[int, ...]) -> None:
    """A request with more rows than the operation is for gives NaN; those beside it do not."""
    rows = SETS[name].ops[0].rows  # type: ignore[attr-defined]
    counts = tuple(min(n, rows + 1) for n in counts)
    found = step(SETS[name], _plain(name, (40, 70, 20)), counts)
    _, _, wanted = found.check()
    too_many = max(counts) > rows
    assert np.isnan(wanted.out).any() == too_many and (describe(wanted.errors) is None) != too_many


@pytest.mark.parametrize(("at", "value"), [(1, 90), (2, 0), (0, 90), (-1, 90), (-1, 1), (1, 2**32 - 1), (2, 1)])
@pytest.mark.parametrize("name", ["drows_two", "drows_four", "drows_f32"])
def test_bad_offsets(name: str, at: int, value: int) -> None:
    """Offsets that decrease or pass the rows: rows that they contradict each other about are NaN."""
    found = step(SETS[name], _plain(name, (40, 70, 20, 33)), (2, 1, 2, 2), dominant=False)
    assert found.row_offsets is not None
    found.row_offsets[at] = np.array(value, np.int64).astype(found.row_offsets.dtype)
    _, _, wanted = found.check()
    report = describe(wanted.errors)
    assert report is not None and report.code is Fault.ROW_OFFSETS


@pytest.mark.parametrize("name", ["drows_two", "drows_eight", "drows_f32"])
def test_fewer_rows_than_requests_have(name: str) -> None:
    """Without offsets the last request's rows must all be there."""
    found = step(SETS[name], _plain(name, (40, 70)), offsets=False)
    found.q = found.q[:-1]
    _, _, wanted = found.check()
    assert np.isnan(wanted.out[found.op.rows :]).all() and np.isfinite(wanted.out[: found.op.rows]).all()
