"""Bad device data: the victim gets nothing or NaN, everybody else what it gets anyway, the error word says who and where.

The same bits, that is; but for attention with split="balanced": its plan divides all tokens of a step, so a victim without any
moves the chunks of the others, whose partial sums are then others. They are held against the oracle, as the victim's rows are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgen import CSR, Continuous, Indirect, KernelSet, Mapped, Paged, Ring, ops
from kvgen.reference import Decoded
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from kvgen.schema.tables import Offsets
from tests.ops.test_append import scene_before
from tests.ops.test_decode import DECODES, decode_scene
from tests.support.batches import CHUNK, OPEN_TOKENS, PLAIN, Batch, capacity
from tests.support.harness import (
    Run,
    check_append,
    check_decode,
    check_gather,
    index_name,
    launcher,
    offsets_of,
    package,
    queries,
)
from tests.support.memory import Raw
from tests.support.scenes import Scene
from tests.support.sets import RUN, SETS, splits_of

VICTIM = 1
Spoil = Callable[[Scene], None]


def _set(name: str, at: Any, value: int) -> Spoil:
    """Overwrite one entry of a table, with what its type makes of `value`."""

    def spoil(scene: Scene) -> None:
        array = scene.tables[name]
        array[at] = np.array(value).astype(array.dtype) if value >= 0 else np.array(value, np.int64).astype(array.dtype)

    return spoil


def spoils(name: str) -> dict[str, Spoil]:
    """What can go wrong for request VICTIM in the tables of a set of these tests."""
    return spoils_of(SETS[name])


def spoils_of(kernels: KernelSet) -> dict[str, Spoil]:
    """What can go wrong for request VICTIM in the tables of a set."""
    cache = kernels.cache
    found: dict[str, Spoil] = {}
    table = cache.page_table
    bad_ids = {"minus_one": -1, "huge": 2**31 - 1}
    if isinstance(table, Offsets):
        # The end of the last request: nobody else begins there.
        for label, value in (bad_ids | {"decreases": 0}).items():
            found[f"offsets_{label}"] = _set("kv_offsets", -1, value)
        found["offsets_past_the_rows"] = lambda s: _set("kv_offsets", -1, s.pages + 1)(s)
        return found
    if isinstance(table, CSR):
        for label, value in bad_ids.items():
            found[f"page_{label}"] = lambda s, v=value: _set("page_indices", int(s.tables["page_indptr"][VICTIM]), v)(s)
            # The end of the last request: nobody else's slice begins there.
            found[f"indptr_{label}"] = _set("page_indptr", -1, value)
        found["indptr_decreases"] = _set("page_indptr", -1, 0)
        found["page_count"] = lambda s: _set(
            "page_indices", int(s.tables["page_indptr"][VICTIM]), -(-s.pages // table.id_multiplier)
        )(s)
    elif isinstance(table, Indirect):
        for label, value in bad_ids.items():
            found[f"request_{label}"] = _set("request_ids", VICTIM, value)
        found["request_count"] = lambda s: _set("request_ids", VICTIM, len(s.tables["req_to_token"]))(s)
        found["slot"] = lambda s: _set("req_to_token", (s.row(VICTIM), 2), s.pages)(s)
    elif isinstance(table, Mapped):
        for label, value in bad_ids.items():
            found[f"row_{label}"] = _set("idx_mapping", VICTIM, value)
            found[f"page_{label}"] = lambda s, v=value: _set("page_table", (s.row(VICTIM), 0), v)(s)
        found["row_count"] = lambda s: _set("idx_mapping", VICTIM, len(s.tables["page_table"]))(s)
        found["page_count"] = lambda s: _set("page_table", (s.row(VICTIM), 0), -(-s.pages // table.id_multiplier))(s)
    else:
        places = {
            "dense": (VICTIM, 0) if isinstance(cache, Paged) else (VICTIM,),
            "ring": (VICTIM, slice(None)),
            "per_kv": (VICTIM, 1, 0),  # V's alone
        }
        for label, value in bad_ids.items():
            found[f"page_{label}"] = _set("page_table", places[table.kind], value)
        found["page_count"] = lambda s: _set("page_table", places[table.kind], -(-s.pages // table.id_multiplier))(s)
    if isinstance(table, CSR) and table.last_page_len:
        found["last_page_too_long"] = _set("last_page_len", VICTIM, cache.page_tokens + 1)
        found["last_page_minus_one"] = _set("last_page_len", VICTIM, -1)
    else:
        found["length_minus_one"] = _set("lengths", VICTIM, -1)
        if not isinstance(table, Ring):  # a ring holds the last tokens of any number
            found["length_huge"] = _set("lengths", VICTIM, 2**31 - 2)
    return found


def batch_for(name: str, seed: int, *, errors: bool = True) -> Batch:
    """Three requests of up to three pages, the victim in the middle."""
    most = capacity(SETS[name])
    page = SETS[name].cache.page_tokens or most
    if splits_of(SETS[name]) > 1:
        page = CHUNK
    totals = (max(min(page + 1, most), min(3, most)), max(min(2 * page + 1, most), min(3, most)), min(3, most))
    schedule: Any = ("ascending", "descending", 3)[seed % 3]
    return replace(
        PLAIN, totals=totals, new=(1, 2, min(3, most)), padding=seed % 2, seed=seed, errors=errors, schedule=schedule
    )


def gathered(name: str, batch: Batch, damage: Spoil) -> tuple[list[Raw], Raw]:
    """Rows gathered, and their offsets."""
    counts = [min(n, 4) for n in batch.totals]
    offsets = offsets_of(counts, index_name(SETS[name], "gather"))
    scene = Scene(SETS[name], batch, batch.totals)
    scene.fill(batch.totals)
    damage(scene)
    rows = check_gather(scene, sum(counts) + batch.padding, row_offsets=offsets, starts=None)
    return list(rows), offsets


def attended(name: str, batch: Batch, damage: Spoil) -> tuple[Raw, Raw | None, Decoded]:
    """decode's results, and the oracle's."""
    scene, q = decode_scene(name, batch, 3 + batch.padding)
    damage(scene)
    return check_decode(scene, q)


@cache
def served(name: str, errors: bool) -> tuple[list[Raw], tuple[Raw, Raw | None, Decoded] | None]:
    """What a set's requests get where nothing is wrong: the same beside every wrong entry."""
    batch = batch_of(name, errors)
    attention = attended(name, batch, lambda s: None) if name in DECODES else None
    return gathered(name, batch, lambda s: None)[0], attention


def batch_of(name: str, errors: bool) -> Batch:
    """The batch of a set's wrong entries."""
    return batch_for(name, list(SETS).index(name), errors=errors)


CASES = [(name, label) for name in RUN for label in spoils(name)]


def keeps_bits(name: str) -> bool:
    """Whether the bits of a request's attention depend on its own tokens alone, not on how a plan divides the step's."""
    return all(op.split != "balanced" for op in SETS[name].ops if isinstance(op, ops.Decode))


def _same_elsewhere(clean: Raw, spoilt: Raw, victims: Raw) -> None:
    """Rows of the others: the same bits; rows of victims: something else."""
    assert np.ascontiguousarray(clean[~victims]).tobytes() == np.ascontiguousarray(spoilt[~victims]).tobytes()


@pytest.mark.parametrize(("name", "label"), CASES)
def test_tables(name: str, label: str) -> None:
    """One wrong entry: append, gather and decode, with and without an error word."""
    seed = CASES.index((name, label))
    spoil = spoils(name)[label]
    for errors in (True, False) if seed % 4 == 0 else (True,):
        batch = batch_of(name, errors)
        spoilt = scene_before(name, batch)
        spoil(spoilt)
        offsets = offsets_of(batch.new, index_name(SETS[name], "append"))
        check_append(spoilt, sum(batch.new) + batch.padding, row_offsets=offsets)

        right, attention = served(name, errors)
        rows, offsets = gathered(name, batch, spoil)
        victim = np.zeros(len(rows[0]), bool)
        victims = [2] if "indptr" in label or "offsets" in label else [VICTIM]
        for b in victims:
            victim[offsets[b] : offsets[b + 1]] = True
        for clean, other in zip(right, rows, strict=True):
            _same_elsewhere(clean, other, victim)

        if attention is not None:
            found = attended(name, batch, spoil)
            is_victim = np.isin(np.arange(3 + batch.padding), victims)
            assert np.isfinite(attention[0].astype(np.float32)).all()
            assert np.isnan(found[2].out[is_victim]).all() and found[2].errors != attention[2].errors
            for clean_part, other_part in zip(attention[:2], found[:2], strict=True):
                assert clean_part is not None and other_part is not None
                if keeps_bits(name):
                    _same_elsewhere(clean_part, other_part, is_victim)


BAD_OFFSETS = {
    "decrease": (2, 0),
    "first_too_large": (0, 90),
    "past_the_rows": (2, 90),
    "past_the_next": (1, 5),
    "last_past_the_rows": (-1, 90),
    "last_decreases": (-1, 1),
    "minus_one": (1, 2**32 - 1),
}


@pytest.mark.parametrize("label", BAD_OFFSETS)
@pytest.mark.parametrize("name", ["max_paged", "vllm", "csr_multiplied", "falcon"])
def test_row_offsets(name: str, label: str) -> None:
    """Rows whose offsets contradict are nobody's: not stored, left alone by gather, NaN in decode, and reported."""
    at, value = BAD_OFFSETS[label]
    batch = replace(batch_for(name, len(label)), padding=0)
    kernels = SETS[name]

    def spoilt(counts: Any, op: str) -> Raw:
        offsets = offsets_of(counts, index_name(kernels, op))
        offsets[at] = np.array(value, np.int64).astype(offsets.dtype)
        return offsets

    scene = scene_before(name, batch)
    check_append(scene, sum(batch.new), row_offsets=spoilt(batch.new, "append"))
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    check_gather(scene, 9, row_offsets=spoilt((3, 3, 3), "gather"), starts=None)
    scene, q = decode_scene(name, batch, 3)
    _, _, wanted = check_decode(scene, q, row_offsets=spoilt((1, 1, 1), "decode"))
    report = describe(wanted.errors)
    assert report is not None and report.code is Fault.ROW_OFFSETS


@pytest.mark.parametrize("name", ["max_paged", "vllm"])
def test_the_last_offset_of_one_row(name: str) -> None:
    """The last offset is looked at once a launch, which may have one block."""
    batch = replace(batch_for(name, 3), padding=0)
    kernels = SETS[name]
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    offsets = np.array([0, 1, 1, 0]).astype(offsets_of((1, 0, 0), index_name(kernels, "gather")).dtype)
    check_gather(scene, 1, row_offsets=offsets, starts=None)
    check_append(scene_before(name, batch), 1, row_offsets=offsets)


@pytest.mark.parametrize("name", ["max_paged", "flashinfer_hnd"])
def test_two_rows_for_one_request(name: str) -> None:
    """decode takes one row a request."""
    scene, q = decode_scene(name, replace(batch_for(name, 4), padding=0), 4)
    offsets = offsets_of((1, 2, 1), index_name(SETS[name], "decode"))
    out, _, wanted = check_decode(scene, q, row_offsets=offsets)
    assert np.isnan(out[1:3].astype(np.float32)).all() and np.isfinite(out[[0, 3]].astype(np.float32)).all()
    assert str(describe(wanted.errors)).startswith("ROW_OFFSETS")


@pytest.mark.parametrize("name", ["max_paged", "sglang", "continuous_hnd"])
def test_slots(name: str) -> None:
    """Slots outside the pool are skipped and reported, -1 is skipped in silence."""
    batch = batch_for(name, 5)
    scene = scene_before(name, batch)
    inside = scene.pages * scene.tokens
    kind = np.int32 if index_name(SETS[name], "append_slots") == "i32" else np.int64
    slots = np.array([0, inside, -1, inside - 1, -2, np.iinfo(kind).max, np.iinfo(kind).min], kind)
    check_append(scene, len(slots), slots=slots)
    check_append(scene, 2, slots=np.array([-1, 1], kind))


@pytest.mark.parametrize("name", ["max_paged", "ring_f32", "csr_multiplied"])
@pytest.mark.parametrize("start", [-1, 2**31 - 1, 50])
def test_starts(name: str, start: int) -> None:
    """gather from a token that no page can hold."""
    batch = batch_for(name, 6)
    scene = Scene(SETS[name], batch, batch.totals)
    scene.fill(batch.totals)
    index = index_name(SETS[name], "gather")
    offsets = offsets_of((1, 2, 2), index)
    starts = np.array([0, start, 1], np.int64).astype(offsets.dtype)
    check_gather(scene, 5, row_offsets=offsets, starts=starts)


@pytest.mark.parametrize("name", [n for n, s in RUN.items() if not isinstance(s.cache.page_table, Ring | Offsets)])
def test_the_last_entry_and_one_past(name: str) -> None:
    """A table that is full to its last entry serves its last token; the next one lies past it, not in the next row."""
    kernels = SETS[name]
    page = kernels.cache.page_tokens or OPEN_TOKENS
    pages = 1 if isinstance(kernels.cache, Continuous) else 2
    full = pages * page
    batch = replace(batch_for(name, 2), totals=(full, full, min(full, 3)), new=(1, 1, 1), padding=0)
    scene, q = decode_scene(name, batch, 3) if name in DECODES else (scene_before(name, batch), None)
    scene.trim(pages)
    assert scene.view.holds(0, full) and not scene.view.holds(0, full + 1)
    if q is not None:
        _, _, wanted = check_decode(scene, q)
        assert describe(wanted.errors) is None

    def past(scene: Scene) -> None:
        for key in ("lengths", "last_page_len"):
            if key in scene.tables:
                scene.tables[key][VICTIM] += 1

    if q is not None:
        past(scene)
        _, _, wanted = check_decode(scene, q)
        assert describe(wanted.errors) is not None
    scene = scene_before(name, batch)
    scene.trim(pages)
    past(scene)
    check_append(scene, 3, row_offsets=offsets_of((1, 1, 1), index_name(kernels, "append")))
    index = index_name(kernels, "gather")
    starts = np.array([full - 1, full - 1, 0], offsets_of((), index).dtype)
    check_gather(scene, 5, row_offsets=offsets_of((1, 2, 2), index), starts=starts)


def test_a_ring_of_one_column() -> None:
    """A ring whose table has one column serves what lies in the newest token's page, and nothing before it."""
    name = "ring_f32"
    batch = replace(batch_for(name, 3), totals=(3, 5, 2), new=(1, 1, 1), padding=0)
    offsets = offsets_of((1, 1, 1), index_name(SETS[name], "append"))
    scene = scene_before(name, batch)
    assert scene.tokens == 3
    scene.trim(1)
    check_append(scene, 3, row_offsets=offsets)
    scene = Scene(SETS[name], batch, batch.totals)
    scene.fill(batch.totals)
    scene.trim(1)
    out, _ = check_gather(scene, 3, row_offsets=offsets, starts=np.array([2, 2, 1], offsets.dtype))
    assert list(np.isnan(out.astype(np.float32)).all(axis=(1, 2))) == [False, True, False]
    scene, q = decode_scene(name, batch, 3)
    scene.trim(1)
    out, _, wanted = check_decode(scene, q)
    assert list(np.isnan(out.astype(np.float32)).all(axis=(1, 2))) == [False, True, False]
    report = describe(wanted.errors)
    assert report is not None and report.request == VICTIM


LONGEST = 2**32 - 2


@pytest.mark.parametrize(
    ("name", "total"), [("ring_f32", LONGEST), ("ring_f32", LONGEST + 1), ("max_paged", LONGEST + 1)]
)
def test_the_longest_request(name: str, total: int) -> None:
    """A step ends at 2^32 - 2 tokens, which a ring holds, or at one more, which is no length: append, gather and decode agree,
    and the others of the batch are served."""
    kernels, right = SETS[name], total == LONGEST
    batch = replace(
        batch_for(name, 3), totals=(total, 5, 9) if name == "ring_f32" else (6, 5, 9), new=(1, 1, 1), padding=0
    )

    def said(scene: Scene, op: str, **arguments: Any) -> None:
        report = describe(Run(scene, op, launcher(scene, op), **arguments).word)
        assert (report is None) == right, f"{op}: {report}"
        assert report is None or (report.code, report.request) == (Fault.LENGTH, 0), f"{op}: {report}"

    def lengthen(scene: Scene) -> Scene:
        if name != "ring_f32":
            scene.tables["lengths"][0] = total - 1
        return scene

    offsets = offsets_of((1, 1, 1), index_name(kernels, "append"))
    scene = lengthen(scene_before(name, batch))
    new = check_append(scene, 3, row_offsets=offsets)
    said(scene, "append", **new, row_offsets=offsets)

    if right:  # after the step its tokens are the length; before it no gather can ask for the newest
        scene = Scene(kernels, batch, batch.totals)
        scene.fill(batch.totals)
    starts = np.array([total - 1, 3, 7], offsets.dtype)
    out, _ = check_gather(scene, 3, row_offsets=offsets, starts=starts)
    assert np.isnan(out[0].astype(np.float32)).all() != right
    outs = {n: np.zeros_like(out) for n in ("k_out", "v_out")}
    said(scene, "gather", **outs, row_offsets=offsets, starts=starts)

    scene, q = decode_scene(name, batch, 3)
    lengthen(scene)
    out, _, wanted = check_decode(scene, q)
    assert np.isfinite(out[1:].astype(np.float32)).all() and np.isfinite(out[0].astype(np.float32)).all() == right
    assert (describe(wanted.errors) is None) == right
    said(scene, "decode", q=q, out=out)


def test_past_two_to_the_31(tmp_path: Path) -> None:
    """A pool of more than 2^32 elements (a sparse file): tokens in its last pages are stored, found and read."""
    name, pages = "max_paged", 2**32 // (2 * 2 * 16 * 2 * 128) + 3
    kernels = SETS[name]
    shape = (pages, 2, 2, 16, 2, 128)
    kind = queries(Scene(kernels, PLAIN, ()), 0).dtype
    pool: Raw = np.memmap(tmp_path / "pool", kind, "w+", shape=shape)  # a sparse file
    assert pool.size > 2**32
    generated, rng = package(name), np.random.default_rng(2)
    table = np.array([[pages - 1, 0, pages // 2 + 1]], np.uint32)
    new = {n: rng.standard_normal((40, 2, 128)).astype(kind) for n in "kv"}
    offsets, errors = np.array([0, 40], np.uint32), np.zeros(1, np.uint64)
    with machine(mode="check"):
        cache = generated.Cache(pool, lengths=np.array([0], np.uint32), page_table=table)
        generated.append(cache[1], **new, row_offsets=offsets, errors=errors)
        for token in (0, 15, 16, 31, 32, 39):
            for kv, n in enumerate("kv"):
                np.testing.assert_array_equal(pool[table[0, token // 16], kv, 1, token % 16], new[n][token])
        copies = {f"{n}_out": np.zeros_like(new[n]) for n in "kv"}
        cache = generated.Cache(pool, lengths=np.array([39], np.uint32), page_table=table)
        generated.gather(cache[1], **copies, row_offsets=offsets, errors=errors)
        for n in "kv":
            np.testing.assert_array_equal(copies[f"{n}_out"], new[n])
        q, out = np.zeros((1, 8, 128), kind), np.zeros((1, 8, 128), kind)
        generated.decode(cache[1], q, out, errors=errors)
    mean = np.repeat(new["v"].astype(np.float64).mean(axis=0), 4, axis=0)
    np.testing.assert_allclose(out[0].astype(np.float64), mean, atol=4e-3)
    assert describe(errors) is None


def test_every_table_form_is_spoilt() -> None:
    """The cases above reach each form of table, and continuous caches."""
    kinds = {SETS[name].cache.page_table.kind for name, _ in CASES}
    assert kinds == {"dense", "csr", "per_kv", "indirect", "mapped", "ring", "offsets"}
    assert any(isinstance(SETS[name].cache, Continuous) for name, _ in CASES)
