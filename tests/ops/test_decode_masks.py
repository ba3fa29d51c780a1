"""decode under every mask, score modification and sink: drawn batches, tokens that no row sees, and rows that see none."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import CSR, KernelSet, Paged, Quant, Ring, ops, presets, score
from kvgen.runtime import Fault, describe
from kvgen.schema.mask import Mask
from kvgen.score import Score, Tensor
from tests.support.batches import PLAIN, Batch
from tests.support.decode_steps import Step, step, steps


def _set(name: str, cache: Any, group: int, rows: int, **fields: Any) -> KernelSet:
    decode = ops.Decode(rows=rows, **fields)
    return KernelSet(name=f"masks_{name}", q_heads=cache.kv_heads * group, cache=cache, ops=(decode,))


def _paged(kind: str, heads: int, dim: int, page: int, **fields: Any) -> Paged:
    return Paged(dtype=kind, kv_heads=heads, head_dim=dim, page_size=page, **fields)


def everything(s: Any, at: Any, table: Any, counts: Any, lift: Any, shift: Any) -> Any:
    """A tensor of numbers, one of whole numbers that leads to it, both scalars, a condition that hides."""
    chosen = counts[at.b, at.token % 7]
    bent = s + lift * score.tanh(table[at.q_head, chosen]) - score.maximum(s * 0.125, 0.0)
    far = (at.position - at.token > 40) & (at.kv_head == 0)
    return score.where(far | ((at.token + shift) % 11 == 5), float("-inf"), bent)


_FUNCTION = Score(
    tensors={"table": Tensor("f32", ("q_heads", 4)), "counts": Tensor("i32", ("B", "columns"))},
    scalars={"lift": "f32", "shift": "i32"},
    function=everything,
)
_MUCH = Score(
    softcap=8.0,
    alibi=True,
    relative=9,
    bias=True,
    tensors=_FUNCTION.tensors,
    scalars=_FUNCTION.scalars,
    function=everything,
)
SETS = {
    s.name: s
    for s in (
        # Masks.
        _set("window", _paged("bf16", 2, 64, 16), 4, 1, mask=Mask(window=33)),
        _set("window_rows", _paged("f16", 1, 40, 3), 3, 4, mask=Mask(window=5), sinks="lse", lse_base="2"),
        _set(
            "window_open",
            _paged("bf16", 1, 32, 16, table=Ring(window=40), lengths="after"),
            7,
            4,
            mask=Mask(causal=False, window=20, ahead=2),
        ),
        _set("chunk", _paged("bf16", 2, 32, 16), 4, 4, mask=Mask(chunk=32)),
        _set(
            "chunk_open",
            presets.flashinfer_hnd(dtype="f16", kv_heads=1, head_dim=32, page_size=16),
            4,
            8,
            mask=Mask(chunk=24, causal=False, ahead=5, tree="mask"),
        ),
        _set("chunk_window", _paged("f32", 2, 16, 3), 3, 4, mask=Mask(chunk=32, window=20)),
        _set("blocks", _paged("f32", 1, 16, 3, lengths="after"), 3, 4, mask=Mask(block=5, window=9)),
        _set(
            "padding", _paged("f16", 2, 32, 16, lengths="after"), 2, 4, mask=Mask(causal=False, padding=True, window=30)
        ),
        _set("tree", _paged("bf16", 2, 32, 16), 4, 8, mask=Mask(tree="packed"), split="invariant", chunk=64),
        _set("tree_window", _paged("f32", 1, 24, 3, lengths="after"), 3, 4, mask=Mask(tree="packed", window=20)),
        _set("mask", _paged("bf16", 1, 32, 16), 7, 4, mask=Mask(tree="mask"), cross=True),
        # Scores and sinks.
        _set("softcap", _paged("bf16", 2, 32, 16), 4, 2, score=Score(softcap=5.0), split="balanced"),
        _set(
            "alibi",
            _paged("f16", 2, 32, 16),
            3,
            4,
            score=Score(alibi=True, relative=5, relative_dtype="f32"),
            mask=Mask(causal=False, ahead=2),
        ),
        _set("relative", _paged("bf16", 1, 32, 16), 4, 2, score=Score(relative=16)),
        _set("bias", _paged("bf16", 2, 32, 16), 2, 2, score=Score(bias=True), sinks="out", lse_empty="inf"),
        _set("function", _paged("bf16", 2, 32, 16), 2, 2, score=_FUNCTION),
        _set(
            "everything",
            _paged("f32", 2, 24, 3, table=CSR(dtype="u32")),
            3,
            3,
            mask=Mask(causal=False, window=50, ahead=1, padding=True),
            score=_MUCH,
            sinks="out",
            split="balanced",
        ),
        _set(
            "fp8",
            _paged("bf16", 2, 32, 16, quant=Quant(dtype="e4m3", scale_dtype="f32")),
            4,
            2,
            mask=Mask(window=33),
            score=Score(softcap=20.0),
        ),
    )
}


# Masks and scores that others of these sets have, alone or over another cache: a campaign's.
ALIKE = ("masks_window_rows", "masks_chunk", "masks_softcap", "masks_relative")
RUN = [name for name in SETS if "KVGEN_FAMILY" in os.environ or name not in ALIKE]


@pytest.mark.parametrize("name", RUN)
@settings(max_examples=4)
@given(data=st.data())
def test_drawn(name: str, data: Any) -> None:
    """Any batch, any arguments: rows whose masks hide everything, biases of -inf, bits of trees past the rows."""
    data.draw(steps(SETS[name])).check(lse=data.draw(st.sampled_from((True, True, False))))


def _plain(name: str, totals: tuple[int, ...], **fields: Any) -> Batch:
    return replace(PLAIN, totals=totals, new=(0,) * len(totals), **fields)


# Tokens that no row may see are not looked up -------------------------------------------------------------------------------

HIDING = {
    "masks_window": (200, 90),
    "masks_window_rows": (40, 11),
    "masks_chunk": (80, 66),
    "masks_chunk_window": (60, 70),
}


@pytest.mark.parametrize("name", [name for name in HIDING if name in RUN])
def test_pages_that_no_row_sees(name: str) -> None:
    """Entries of such pages may be anything, pages hold NaN: the same bits as without, and no fault."""
    results = []
    for spoil in (False, True):
        found = step(SETS[name], _plain(name, HIDING[name], seed=5))
        if spoil:
            assert _forget(found)
        results.append(found.check())
    (out, lse, wanted), (other, other_lse, _) = results
    assert lse is not None and other_lse is not None and describe(wanted.errors) is None
    assert out.tobytes() == other.tobytes() and lse.tobytes() == other_lse.tobytes()


def _forget(found: Step) -> int:
    """Make the entries of pages that no row sees -1, and their tokens NaN; how many there were."""
    scene, count = found.scene, 0
    wanted = found.wanted()
    for b, total in enumerate(scene.batch.totals):
        seen = [s.tokens for s in wanted.seen if s is not None and s.at.b == b]
        first = int(min(tokens[0] for tokens in seen)) // scene.tokens
        for token in range(first * scene.tokens):
            rows = [np.full((r.heads, r.dim), np.nan).astype(found.q.dtype) for r in scene.rows()]
            scene.write(b, token, rows)
        for page in range(first):
            entry = np.array(-1).astype(scene.tables["page_table"].dtype)
            scene.tables["page_table"][b, page] = entry
        count += first
        assert total > first * scene.tokens
    return count


@pytest.mark.parametrize("name", ["masks_window", "masks_chunk_window"])
def test_a_bad_page_in_sight(name: str) -> None:
    """The oldest page that a row sees is bad: NaN, and reported at the first token that it sees there."""
    found = step(SETS[name], _plain(name, (90, 70)), dominant=False)
    first = min(int(s.tokens[0]) for s in found.wanted().seen if s is not None and s.at.b == 1)
    found.scene.tables["page_table"][1, first // found.scene.tokens] = np.array(2**31 - 1)
    _, _, wanted = found.check()
    report = describe(wanted.errors)
    assert report is not None and (report.code, report.request, report.position) == (Fault.PAGE_ID, 1, first)


@pytest.mark.parametrize("name", ["masks_padding", "masks_everything"])
def test_valid_tokens(name: str) -> None:
    """None, all and more than all; a number that is none makes the request NaN."""
    for values, code in (((0, 1, 40, 1000), None), ((3, -1, 2, 1), Fault.LENGTH)):
        found = step(SETS[name], _plain(name, (40, 40, 40, 40)))
        kind = found.arguments["valid_tokens"].dtype
        found.arguments["valid_tokens"][...] = np.array(values, np.int64).astype(kind)
        _, _, wanted = found.check()
        report = describe(wanted.errors)
        assert (report and report.code) == code


# Rows that see nothing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["masks_tree", "masks_mask", "masks_bias", "masks_padding", "masks_everything"])
def test_rows_that_see_nothing(name: str) -> None:
    """0 and the empty log-sum-exp, beside rows that see something."""
    found = step(SETS[name], _plain(name, (SETS[name].ops[0].rows, 40)), dominant=False)  # type: ignore[attr-defined]
    empty = {"tree_mask": 0, "mask": 0, "bias": -np.inf, "valid_tokens": 0}
    for argument in empty.keys() & found.arguments.keys():
        # Of a row, or, where that is a request's, of the first one.
        found.arguments[argument][0] = empty[argument]
    if "valid_tokens" in found.arguments:
        found.arguments["valid_tokens"][1] = 40
    out, lse, _ = found.check()
    assert lse is not None and not out[0].any() and (lse[0] == float(found.op.lse_empty)).all()
    assert out[-1].any()


@pytest.mark.parametrize("name", ["masks_tree_window", "masks_alibi", "masks_padding", "masks_window_open"])
def test_more_rows_than_tokens(name: str) -> None:
    """Masks count from where rows stand, which may be before the first token."""
    if SETS[name].cache.lengths == "after":
        step(SETS[name], _plain(name, (1, 0, 2)), offsets=False).check()
    step(SETS[name], _plain(name, (4, 5)), offsets=False).check()


@pytest.mark.parametrize("name", ["masks_window_rows", "masks_tree", "masks_everything"])
def test_schedules_agree(name: str) -> None:
    results = []
    for schedule in ("ascending", "descending", 12345):
        out, lse, _ = step(SETS[name], _plain(name, (100, 9, 33), schedule=schedule)).check()
        assert lse is not None
        results.append((out.tobytes(), lse.tobytes()))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("role", [0, 1])
def test_a_bias_hides_what_is_nan(role: int) -> None:
    """-inf hides a token from all heads whatever its key, or its value, is."""
    found = step(SETS["masks_bias"], _plain("masks_bias", (40,)), dominant=False)
    found.arguments["bias"][:, 7] = -np.inf
    rows, place = found.scene.rows()[role], found.scene.view.places(0, 0)
    assert isinstance(place, tuple)
    rows.write(place[role].page, 7, np.full((rows.heads, rows.dim), np.nan).astype(found.q.dtype))
    found.check()
