"""decode on tensor cores where K has a scale a channel over groups of tokens, and the newest of them wait in 16 bits (KIVI)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, Block, KernelSet, Layout, Paged, Quant, Score, ops
from kvgen.lowering.attention.decode_mma import DecodeMma
from kvgen.reference.elements import Elements
from kvgen.reference.segments import Coded
from kvgen.runtime import Fault, describe
from kvgen.schema.mask import Mask
from tests.support.batches import PLAIN
from tests.support.decode_steps import Step, step, steps
from tests.support.scenes import Scene


def _set(
    name: str, page: int, heads: int, dim: int, group: int, keys: Quant, *, rows: int = 1, **fields: Any
) -> KernelSet:
    """A set with decode alone, whose V has a scale and a zero point a group of 16 or 32 dims."""
    own = {n: fields.pop(n) for n in ("table", "lengths") if n in fields}
    cache = Paged(
        dtype="f16",
        kv_heads=heads,
        head_dim=dim,
        page_size=page,
        k_quant=keys,
        v_quant=Quant(dtype=keys.dtype, scale_dtype="f16", zero=True, block=Block(dim=32 if dim % 64 == 0 else 16)),
        layout=Layout(k="page layer token head dim", v="page layer head token dim"),
        **own,
    )
    decode = ops.Decode(rows=rows, **fields)
    return KernelSet(name=f"channels_{name}", q_heads=heads * group, cache=cache, ops=(decode,))


def _keys(tokens: int, codes: Any, zero: bool = True) -> Quant:
    return Quant(dtype=codes, scale_dtype="f16", zero=zero, block=Block(token=tokens, dim=1), residual=tokens)


SETS: Final = {
    "window": _set("window", 64, 2, 64, 3, _keys(32, "i4"), rows=4, mask=Mask(window=70)),
    # 40 columns: several warps have the tokens of a tile.
    "tree": _set("tree", 16, 1, 96, 8, _keys(16, "i8", zero=False), rows=5, mask=Mask(tree="packed"), sinks="lse"),
    "bias": _set(
        "bias",
        64,
        2,
        128,
        2,
        _keys(64, "i4", zero=False),
        rows=2,
        mask=Mask(causal=False, padding=True),
        score=Score(bias=True, softcap=20.0),
        sinks="out",
        split="balanced",
        table=CSR(last_page_len=True),
        lengths="after",
    ),
    "split": _set("split", 32, 3, 32, 4, _keys(32, "i8"), split="invariant", chunk=64, lse_base="2"),
}


def _residual(name: str) -> int:
    found = SETS[name].cache.storage.residual
    assert found
    return found


def _step(name: str, totals: tuple[int, ...], **fields: Any) -> Step:
    batch = replace(PLAIN, totals=totals, new=(0,) * len(totals), seed=sum(totals))
    return step(SETS[name], replace(batch, **{n: fields.pop(n) for n in ("fill", "schedule") if n in fields}), **fields)


@pytest.mark.parametrize("name", SETS)
def test_tensor_cores(name: str) -> None:
    """The sets are for what tensor cores do, one of them in several warps a tile."""
    kernels, (op,) = SETS[name], SETS[name].ops
    context = op.plan(kernels)[0].context
    assert isinstance(context, DecodeMma) and (context.shape.team_warps > 1) == (name == "tree")


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    """Any batch, any arguments; lengths crowd around groups."""
    data.draw(steps(SETS[name])).check(lse=data.draw(st.sampled_from((True, True, False))))


@pytest.mark.parametrize("fill", ["nan", "inf"])
@pytest.mark.parametrize("name", SETS)
def test_around_a_group(name: str, fill: Any) -> None:
    """Lengths around one group and around several; what is behind them, codes, scales and places of the tail, is no number."""
    size = _residual(name)
    for first in (0, size, 3 * size):
        totals = tuple(n for n in (first - 1, first, first + 1) if n >= 0)
        for level in (False, True):
            _step(name, totals, fill=fill, level=level).check()


@pytest.mark.parametrize("name", SETS)
def test_schedules_agree(name: str) -> None:
    results = []
    for schedule in ("ascending", "descending", 12345):
        out, lse, _ = _step(name, (150, 9, 2 * _residual(name)), schedule=schedule).check()
        assert lse is not None
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


VICTIM = 1
# By what they spoil: a page that has sealed tokens, the newest tokens' page (whose V is there), how many are sealed.
SPOILS: Final = ("sealed_page", "newest_page", "too_few_sealed", "too_many_sealed", "sealed_is_negative")


@pytest.mark.parametrize("what", SPOILS)
@pytest.mark.parametrize("name", SETS)
def test_bad_data(name: str, what: str) -> None:
    """All rows of that request are NaN, the error word says why, the others keep their bits."""
    size, results = _residual(name), []
    for spoil in (False, True):
        found = _step(name, (size + 5, 2 * size + 3, size), dominant=False)
        for argument in found.arguments.keys() & {"valid_tokens"}:
            found.arguments[argument][...] = 3 * size
        if spoil:
            _spoil(found, what)
        results.append(found.check())
    begin, count = sum(found.counts[:VICTIM]), found.counts[VICTIM]
    victims = np.zeros(len(found.q), bool)
    victims[begin : begin + count] = True
    (out, lse, _), (bad, bad_lse, other) = results
    assert lse is not None and bad_lse is not None
    assert np.isnan(bad[victims].astype(np.float32)).all() and np.isfinite(bad[~victims].astype(np.float32)).all()
    assert bad[~victims].tobytes() == out[~victims].tobytes() and bad_lse[~victims].tobytes() == lse[~victims].tobytes()
    report = describe(other.errors)
    assert report is not None and report.request == VICTIM
    assert report.code is (Fault.PAGE_ID if "page" in what else Fault.LENGTH)


def _spoil(found: Step, what: str) -> None:
    scene, size = found.scene, found.scene.residual
    if "page" in what:
        total = scene.batch.totals[VICTIM]
        page = (total - 1) // scene.tokens if what == "newest_page" else (total - 10) // scene.tokens
        if isinstance(scene.cache.page_table, CSR):
            array, at = scene.tables["page_indices"], int(scene.tables["page_indptr"][VICTIM]) + page
        else:
            array, at = scene.tables["page_table"][VICTIM], page
        array[at] = np.array(scene.pages).astype(array.dtype)
        return
    sealed = scene.arrays()["k_sealed"]
    values = {"too_few_sealed": size, "too_many_sealed": 3 * size, "sealed_is_negative": -size}
    sealed[VICTIM] = np.array(values[what]).astype(sealed.dtype)


def _no_numbers(scene: Scene, role: int, b: int, token: int) -> None:
    """Make the scales of a token NaN, of K those of its whole group; the row itself where it waits."""
    places, rows = scene.view.places(b, token // scene.tokens), scene.rows()[role]
    part = rows.parts[0]
    assert isinstance(places, tuple) and isinstance(part, Coded) and isinstance(part.scales, Elements)
    if role == 0 and rows.tail is not None and token >= scene.batch.totals[b] // scene.residual * scene.residual:
        rows.tail[b, token % scene.residual] = np.nan
        return
    at = token % scene.tokens // (1 if role else scene.residual)
    found = part.scales.read(places[role].scales, at)
    part.scales.write(places[role].scales, at, np.full_like(found, np.nan))


@pytest.mark.parametrize("role", [0, 1], ids="kv")
def test_hidden_tokens_are_no_numbers(role: int) -> None:
    """A group and a token that waits, hidden by biases of -inf: NaN there changes no bit."""
    name, results = "bias", []
    size = _residual(name)
    hidden = [*range(size, 2 * size), 2 * size + 3]
    for spoil in (False, True):
        found = _step(name, (2 * size + 7,), dominant=False)
        found.arguments["valid_tokens"][...] = 3 * size
        found.arguments["bias"][:, hidden] = -np.inf
        for token in hidden if spoil else ():
            _no_numbers(found.scene, role, 0, token)
        out, lse, _ = found.check()
        assert lse is not None
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1]


@pytest.mark.parametrize("role", [0, 1], ids="kv")
@pytest.mark.parametrize("name", ["window", "tree", "split"])
def test_no_number_in_sight(name: str, role: int) -> None:
    """NaN that a request sees makes it NaN, whether in a group or in the tail, and no other."""
    size = _residual(name)
    clean = _step(name, (size + 5, 2 * size + 3, size), dominant=False)
    for found, tokens in (
        (clean, ()),
        *((_step(name, (size + 5, 2 * size + 3, size), dominant=False), (n,)) for n in (size + 2, 2 * size)),
    ):
        for token in tokens:
            _no_numbers(found.scene, role, VICTIM, token)
        if "tree_mask" in found.arguments:
            found.arguments["tree_mask"][...] = 2**32 - 1
        out, lse = found.run()
        begin, end = sum(found.counts[:VICTIM]), sum(found.counts[: VICTIM + 1])
        assert np.isnan(out[begin:end].astype(np.float32)).any() == bool(tokens)
        if not tokens:
            wanted, wanted_lse = out, lse
        others = [*range(begin), *range(end, len(out))]
        assert (
            out[others].tobytes() == wanted[others].tobytes() and lse[others].tobytes() == wanted_lse[others].tobytes()
        )
