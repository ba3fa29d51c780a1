"""The rule that attention is held to: an honest kernel of low precision passes, one that loses or adds one token does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvgen import KernelSet, Paged, Quant, Ring, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import Decoded
from kvgen.reference.attention import Arguments, RowPosition, modified
from kvgen.reference.decode import VisibleKeys, products, weighted
from kvgen.schema.mask import Mask
from kvgen.score import Score
from tests.support.batches import PLAIN
from tests.support.decode_steps import Step, step
from tests.support.dominant_tokens import DominantToken
from tests.support.memory import Raw
from tests.support.tolerance import Numerics, hold, hold_counts, rounder


def _set(name: str, cache: Any, group: int, **fields: Any) -> KernelSet:
    return KernelSet(
        name=f"close_{name}", q_heads=cache.kv_heads * group, cache=cache, ops=(ops.Decode(**fields),), arch=("sm_80",)
    )


def _paged(kind: str, heads: int, dim: int, page: int, **fields: Any) -> Paged:
    return Paged(dtype=kind, kv_heads=heads, head_dim=dim, page_size=page, **fields)


SETS = {
    s.name: s
    for s in (
        _set("one", _paged("bf16", 2, 128, 16), 4),
        _set("small", _paged("bf16", 1, 8, 1), 1, rows=2),
        _set("f16", _paged("f16", 2, 64, 3), 3, rows=8, out_dtype="f32"),
        _set("f32", _paged("f32", 2, 40, 16), 3, rows=4),
        _set("fp8", _paged("bf16", 2, 64, 16, quant=Quant(dtype="e4m3")), 4, rows=2),
        _set("large", _paged("bf16", 1, 512, 64), 16),
        _set("e4m3", _paged("bf16", 1, 64, 16), 7, rows=2, out_dtype="e4m3"),
        _set("window", _paged("bf16", 2, 64, 16), 5, rows=4, mask=Mask(window=33)),
        _set("ring", _paged("f16", 1, 64, 16, table=Ring(window=100)), 4),
        _set("chunk", _paged("f16", 2, 64, 16), 2, rows=8, mask=Mask(chunk=64), sinks="lse"),
        _set(
            "padding", _paged("bf16", 1, 128, 16), 4, mask=Mask(causal=False, padding=True), sinks="out", lse_base="2"
        ),
        _set("tree", _paged("bf16", 1, 64, 16), 4, rows=8, mask=Mask(tree="packed")),
        _set("mask", _paged("f16", 1, 64, 16), 4, rows=4, mask=Mask(tree="mask")),
        _set("softcap", _paged("bf16", 1, 64, 16), 4, rows=2, score=Score(softcap=5.0)),
    )
}


def imitated(
    found: Step, wanted: Decoded, change: DominantToken | None = None, *, twice: bool = False
) -> tuple[Raw, Raw]:
    """Output and sums of an honest kernel, weights rounded to the type it computes in. With `change` only that row, whose
    token it leaves out if it is visible (or takes `twice`), else takes."""
    given = found.numerics
    rounded, kind = rounder(given.compute), dtype(given.out).numpy()
    out, lse = wanted.out.copy(), wanted.lse.copy()
    for row, seen in enumerate(wanted.seen):
        if seen is None or (change is not None and change.row != row):
            continue
        if change is not None:
            seen = _changed(found, seen, change, twice)
        if not len(seen.k):
            out[row], lse[row] = 0, float(given.lse_empty)
            continue
        scores = products(found.q[row].astype(np.float64) * given.q_scale, seen.k, given.scale)
        arguments = Arguments(given.arguments or {}, len(scores), seen.k.shape[1])
        scores = modified(given.score, seen.at, seen.tokens, scores[None], arguments)[0]
        sinks = None if given.sinks is None else given.sinks.astype(np.float64)
        _, lse[row] = weighted(scores, seen.v, sinks, sinks_in_lse=given.sinks_in_lse)
        _, whole = weighted(scores, seen.v, sinks)
        heads = np.arange(len(scores)) // (len(scores) // seen.v.shape[1])
        top = scores.max(axis=1, keepdims=True)
        weights = rounded(np.exp(scores - top)) * np.exp(top - whole[:, None])
        out[row] = np.einsum("hn,nhd->hd", weights, seen.v[:, heads]) / given.out_scale
        lse[row] /= np.log(2) if given.lse_base == "2" else 1
    return out.astype(kind), lse.astype(np.float32)


def _changed(found: Step, seen: VisibleKeys, change: DominantToken, twice: bool) -> VisibleKeys:
    here = seen.tokens == change.token
    if change.visible and not twice:
        return replace(seen, k=seen.k[~here], v=seen.v[~here], tokens=seen.tokens[~here])
    places = found.scene.view.places(change.b, change.token // found.scene.tokens)
    assert isinstance(places, tuple)
    k, v = (r.token_numbers(change.b, change.token, p) for r, p in zip(found.scene.rows(), places, strict=True))
    tokens = np.append(seen.tokens, change.token)
    return replace(seen, k=np.concatenate([seen.k, k[None]]), v=np.concatenate([seen.v, v[None]]), tokens=tokens)


# A head whose weights are rounded to bf16, and its output is not.
ALONE = _set("alone", _paged("bf16", 1, 16, 16), 1, out_dtype="f32")

# Longer than windows, chunks and rings are; without them shorter.
LONGER = ("close_window", "close_ring", "close_chunk", "close_mask")
TOTALS = {name: (300, 65, 17) if name in LONGER else (129, 64, 3) for name in SETS}


@pytest.mark.parametrize(("name", "totals"), TOTALS.items(), ids=TOTALS)
def test_one_token_shows(name: str, totals: tuple[int, ...]) -> None:
    """Honest results pass; each dominant token that is lost, taken twice, or seen though it is hidden, fails the output alone,
    and the log-sum-exp alone."""
    _one_token_shows(step(SETS[name], replace(PLAIN, totals=totals, new=(0, 0, 0), seed=sum(totals))))


def test_one_token_in_thousands_shows() -> None:
    _one_token_shows(step(SETS["close_small"], replace(PLAIN, totals=(5000,), new=(0,))))


def _one_token_shows(found: Step) -> None:
    given = found.numerics
    wanted = found.wanted()
    out, lse = imitated(found, wanted)
    hold(wanted, given, found.q, out, lse)
    assert any(one.visible for one in found.dominant)
    for one in found.dominant:
        for twice in (False, True)[: 1 + one.visible]:
            bad, bad_lse = imitated(found, wanted, one, twice=twice)
            seen = wanted.seen[one.row]
            alone = twice and seen is not None and len(seen.k) == 1  # all weight is its anyway
            for values, sums in ((out, bad_lse), (bad, None))[: 1 if alone else 2]:
                with pytest.raises(AssertionError):
                    hold(wanted, given, found.q, values, sums, [one.row])


def test_where_naive_attention_is_right() -> None:
    """With one token and one head it may be, to the bit: honest roundings pass all the same, and no more than these."""
    found = step(ALONE, replace(PLAIN, totals=(1,), new=(0,)), dominant=False)
    found.q[...] = 1
    k, v = (
        np.full((r.heads, r.dim), value, found.q.dtype) for r, value in zip(found.scene.rows(), (0.25, 10), strict=True)
    )
    found.scene.write(0, 0, [k, v])
    given, wanted = found.numerics, found.wanted()
    assert wanted.lse[0, 0] == 1
    for off, right in ((0, True), (2.0**-11, True), (2.0**-6, False)):
        for out, lse in ((wanted.out * (1 + off), wanted.lse), (wanted.out, wanted.lse * (1 + off))):
            with nullcontext() if right else pytest.raises(AssertionError):
                hold(wanted, given, found.q, out.astype(np.float32), lse.astype(np.float32))


def test_dims_of_one_scale_are_rounded_alike() -> None:
    """Codes times scales become bf16 before products: equal codes are off by the same share, and so are the parts of a score that
    add up to little. Of 120 rows two are then further off than naive attention, whose other roundings undo that, and than
    independent roundings usually are. A kernel that rounds rows and weights alone passes, one of another scale fails."""
    codes, rounded = np.array([1, -1.5]), rounder("bf16")
    given = Numerics(scale=0.1, compute="bf16", out="bf16")
    for seed in range(120):
        rng = np.random.default_rng(seed)
        n = int(rng.choice([1, 2, 14]))
        q = rng.standard_normal((1, 1, 80)).astype(ml_dtypes.bfloat16)
        scales = rng.uniform(0.2, 1, (n, 1, 1)).astype(np.float32).astype(np.float64)
        k = scales * rng.choice(codes, (n, 1, 80)) * np.sign(q.astype(np.float64))
        at = RowPosition(0, 0, np.array([0]), 1, n)
        seen = VisibleKeys(k, k[:, :, :64], at, np.arange(n))
        right_out, right_lse = _attended(q[0], k)
        wanted = Decoded(right_out[None], right_lse[None], 0, (seen,))
        for factor, right in ((1, True), (1 + 2.0**-5, False)):
            out, lse = _attended(q[0], factor * rounded(k), rounded)
            with nullcontext() if right else pytest.raises(AssertionError):
                hold(wanted, given, q, out[None].astype(q.dtype), lse[None].astype(np.float32))


def _attended(q: Raw, k: Raw, rounded: Callable[[Raw], Raw] = np.asarray) -> tuple[Raw, Raw]:
    """Out and log-sum-exp of latent rows of 64 dims of V, with weights rounded."""
    scores = products(q.astype(np.float64), k, 0.1)
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=1, keepdims=True)
    return rounded(weights) @ k[:, 0, :64] / total, (top + np.log(total))[:, 0]


def test_level_queries_count_tokens() -> None:
    """Where all scores are 0, a token more or less among thousands shows in the log-sum-exp, dominant or not."""
    found = step(SETS["close_one"], replace(PLAIN, totals=(5000,), new=(0,)), level=True)
    given = found.numerics
    wanted = found.wanted()
    out, lse = imitated(found, wanted)
    hold(wanted, given, found.q, out, lse)
    hold_counts(wanted, given, lse)
    for twice in (False, True):
        _, bad = imitated(found, wanted, DominantToken(0, 2345, 0, 0, True), twice=twice)
        with pytest.raises(AssertionError):
            hold_counts(wanted, given, bad)
