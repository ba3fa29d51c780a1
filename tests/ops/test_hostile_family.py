"""Bad device data of quantized caches: ids of scale pages, scales, values that no scale fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvgen.reference.elements import Elements
from kvgen.reference.segments import Coded
from kvgen.runtime import Fault, describe
from tests.ops.test_append import scene_before
from tests.ops.test_decode import decode_scene
from tests.support.batches import PLAIN
from tests.support.harness import (
    Run,
    check_append,
    check_decode,
    check_gather,
    index_name,
    launcher,
    new_rows,
    offsets_of,
)
from tests.support.scenes import Scene
from tests.support.sets import ALL, FAMILY, having

GATHER = frozenset(having(FAMILY, "gather"))
VICTIM = 1
BATCH = replace(PLAIN, totals=(9, 17, 3), new=(1, 2, 3))


def _shorter(scene: Scene) -> None:
    scene.tables["scales_page_table"] = scene.tables["scales_page_table"][:, :1].copy()


def _entry(value: Callable[[Scene], int]) -> Callable[[Scene], None]:
    def spoil(scene: Scene) -> None:
        table = scene.tables["scales_page_table"]
        table[VICTIM, 0] = np.array(value(scene), np.int64).astype(table.dtype)

    return spoil


SPOILS: dict[str, Callable[[Scene], None]] = {
    "minus_one": _entry(lambda s: -1),
    "huge": _entry(lambda s: 2**31 - 1),
    "one_past": _entry(lambda s: s.scale_pages),
    "shorter": _shorter,
}


@pytest.mark.parametrize("label", SPOILS)
@pytest.mark.parametrize("name", ["own_k", "grouped_own"])
def test_scale_pages(name: str, label: str) -> None:
    """A bad id, or none: nothing is stored, gathered rows and attention are NaN, the others' bits are theirs."""
    spoil = SPOILS[label]
    scene = scene_before(name, BATCH)
    spoil(scene)
    check_append(scene, 6, row_offsets=offsets_of(BATCH.new, index_name(ALL[name], "append")))
    results = []
    for damage in (lambda s: None, spoil):
        scene, q = decode_scene(name, BATCH, 3)
        damage(scene)
        offsets = offsets_of((8, 8, 3), index_name(ALL[name], "gather"))
        gathered = check_gather(scene, 19, row_offsets=offsets, starts=np.array([1, 9, 0], offsets.dtype))
        out, _, wanted = check_decode(scene, q)
        results.append((out, gathered, describe(wanted.errors)))
    (clean, rows, _), (spoilt, spoilt_rows, report) = results
    victims = [0, 1] if label == "shorter" else [VICTIM]
    assert np.isnan(spoilt[victims].astype(np.float32)).all() and np.isfinite(clean.astype(np.float32)).all()
    assert spoilt[2].tobytes() == clean[2].tobytes()
    for one, other in zip(rows, spoilt_rows, strict=True):
        assert one[16:].tobytes() == other[16:].tobytes()
    assert report is not None and report.code is (Fault.LENGTH if label == "shorter" else Fault.PAGE_ID)


@pytest.mark.parametrize("name", ["own_k", "grouped_own"])
def test_ids_of_values_are_decoys(name: str) -> None:
    """Ids of values that name other scales, and ids of scales past the values' pool: each table says its own."""
    scene, q = decode_scene(name, replace(BATCH, fill="inf"), 3)
    values, scales = scene.tables["page_table"], scene.tables["scales_page_table"]
    shared = min(values.shape[1], scales.shape[1])
    assert (values[:, :shared] != scales[:, :shared]).any()
    check_decode(scene, q)
    scene = scene_before(name, BATCH)
    check_append(scene, 6, row_offsets=offsets_of(BATCH.new, index_name(ALL[name], "append")))


def _kinds() -> dict[tuple[Any, ...], str]:
    """A set of every way to choose a scale; those that gather first, then those with few tokens a page."""
    found: dict[tuple[Any, ...], str] = {}
    order = sorted(FAMILY.items(), key=lambda item: (item[0] not in GATHER, (item[1].cache.page_tokens or 8) > 8))
    for name, kernels in order:
        for quant in kernels.cache.quants.values():
            if quant is not None:
                key = (quant.dtype, quant.scale_dtype, quant.scale, quant.zero, quant.recipe)
                found.setdefault(key, name)
    return found


def _gathered(scene: Scene, totals: tuple[int, ...]) -> None:
    """What gather makes of the step that was appended, where the set has it."""
    if scene.kernels.name not in GATHER:
        return
    if scene.cache.lengths == "before" and scene.cache.page_table.kind == "ring":
        scene.tables["lengths"][...] = totals
    index = index_name(scene.kernels, "gather")
    check_gather(scene, sum(totals), row_offsets=offsets_of(totals, index), starts=None)


def test_values_of_every_kind_are_gathered() -> None:
    """Every format of codes and every type of scale is among the sets whose values without scales are gathered."""
    quants = [(n, q) for n in set(_kinds().values()) for q in ALL[n].cache.quants.values() if q is not None]
    gathered = [q for n, q in quants if n in GATHER]
    for part in ("dtype", "scale_dtype", "scale", "zero"):
        assert {getattr(q, part) for q in gathered} == {getattr(q, part) for _, q in quants}, part


@pytest.mark.parametrize("name", sorted(set(_kinds().values())))
def test_values_without_scales(name: str) -> None:
    """NaN, infinities, the largest and the smallest numbers, alone in a row and beside others: as the contract says."""
    totals = (5, 6, 4)
    scene = scene_before(name, replace(PLAIN, totals=totals, new=totals))
    new = new_rows(scene, sum(totals))
    kind = next(iter(new.values())).dtype
    largest = 65504.0 if kind == np.float16 else 3.3e38
    for rows in new.values():
        for row, value in enumerate((np.nan, np.inf, -np.inf, largest, 1e-40, -0.0, 6e-8)):
            rows[row, 0, ...] = np.float32(value) if row % 2 else rows[row, 0, ...]
            rows[row, -1, row % rows.shape[2]] = np.array(value, np.float32).astype(kind)
        rows[7, 0, :2] = np.array([np.inf, -np.inf], np.float32).astype(kind)
    check_append(scene, sum(totals), new, row_offsets=offsets_of(totals, index_name(ALL[name], "append")))
    _gathered(scene, totals)


GIVEN = [n for n, s in FAMILY.items() if any(t.given for t in s.cache.storage.tensors)]


@pytest.mark.parametrize("value", [0.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", GIVEN[:6])
def test_given_scales(name: str, value: float) -> None:
    """Of one head or group, or of the whole tensor: codes and values as the contract says."""
    totals = (5, 3)
    scene = scene_before(name, replace(PLAIN, totals=totals, new=totals))
    for tensor in scene.cache.storage.tensors:
        if tensor.given:
            found = scene.arrays()[tensor.name]
            for array in found if isinstance(found, list) else [found]:
                array[..., 0] = value
    check_append(scene, 8, row_offsets=offsets_of(totals, index_name(ALL[name], "append")))
    _gathered(scene, totals)


@pytest.mark.parametrize("role", [0, 1], ids="kv")
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_in_memory(role: int, value: float) -> None:
    """A request whose scales are NaN or infinite gets no numbers there; the others have the bits they have without."""
    outputs, name = [], "own_k"  # K's scales have a table of their own, V's lie in the pages of their values
    for spoil in (False, True):
        scene, q = decode_scene(name, BATCH, 3)
        if spoil:
            place, part = scene.view.places(VICTIM, 0), scene.rows()[role].parts[0]
            assert isinstance(place, tuple) and isinstance(part, Coded) and isinstance(part.scales, Elements)
            row = part.scales.read(place[role].scales, 1)
            part.scales.write(place[role].scales, 1, np.full_like(row, value))
        offsets = offsets_of((9, 9, 3), index_name(ALL[name], "gather"))
        rows = check_gather(scene, 21, row_offsets=offsets, starts=None)
        outputs.append((_decoded(scene, q), rows))
    (clean, _), (spoilt, rows) = outputs
    assert not np.isfinite(rows[role][10].astype(np.float32)).any()
    if np.isnan(value):  # an infinite key may just have no weight
        assert np.isnan(spoilt[VICTIM].astype(np.float32)).all()
    for b in (0, 2):
        assert clean[b].tobytes() == spoilt[b].tobytes()


def _decoded(scene: Scene, q: Any) -> Any:
    """What decode makes of it, without the oracle, whose bounds are NaN as well."""
    out = np.zeros((len(q), q.shape[1], scene.cache.v_dim), q.dtype)
    Run(scene, "decode", launcher(scene, "decode"), q=q, out=out)
    return out
