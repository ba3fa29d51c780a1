"""Scores: what kernels compute of them, against the same functions and formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from kvgen import Mask, Score, score
from kvgen.score import Tensor
from tests.schema.attend import HEADS, ask, context

# What is computed ----------------------------------------------------------------------------------------------------------


def scaled(s: Any, at: Any, strength: Any, cap: float = 20.0) -> Any:
    return cap * score.tanh(s / cap) + strength


def test_scores_are_compared_by_what_they_compute() -> None:
    def again(s: Any, at: Any, strength: Any) -> Any:
        return 20.0 * score.tanh(s / 20.0) + strength

    def other(s: Any, at: Any, strength: Any) -> Any:
        return 20.0 * score.tanh(s / 20.0) - strength

    first, same, third = (Score(scalars={"strength": "f32"}, function=f) for f in (scaled, again, other))
    assert first.traced is not None and first.traced.text == ("s = 20.0f * tanhf(__fdividef(s, 20.0f)) + in.strength;",)
    assert first == same and first != third and first.model_copy(update={"alibi": True}) != first
    assert first.model_dump()["function"] == ["s = 20.0f * tanhf(__fdividef(s, 20.0f)) + in.strength;"]
    assert hash(first) == hash(same) and len({first, same, third}) == 2


def arithmetic(s: Any, at: Any, by: Any, shift: Any) -> Any:
    d = at.token - at.position
    s = -s * by + 0.5 - d / 3 + 2 / (1.0 + score.abs(s)) - (1 - d) * 2
    s = s + (d // 5) * 3 + d % 7 + at.token // 4 % 3 + (7 - at.i) * 1.5 + (d + shift) % 11
    s = s + score.minimum(score.abs(d), 9) - score.maximum(d, -4) * 0.25 + score.minimum(at.i, 3) + abs(d)
    s = (
        s
        - (at.i - s * by)
        - (s + 0.5 - at.i)
        + s / (at.i / (by + 3) + 1)
        + (at.row - (at.i + 3))
        - (at.tokens - (at.position - at.i)) / 8
    )
    return s + at.kv_head + 10 * at.q_head + at.tokens / 128 + at.row - at.b


def functions(s: Any, at: Any) -> Any:
    x = score.abs(s) + 0.25
    y = score.exp(-x) + score.exp2(-x / 2) + score.log(x) + score.log2(x) + score.tanh(s) + score.sqrt(x)
    return y + score.floor(s) + score.floor(at.i) + score.minimum(s, 0.5) * score.maximum(s, -0.5) + np.float64(2.0) * s


def conditions(s: Any, at: Any) -> Any:
    near = (at.position - at.token < 6) & (at.position - at.token > -3)
    odd = (at.token % 2 == 1) | ~(s >= -1.0) | (at.q_head == 2) & (at.i != 1)
    s = score.where(near & odd, s * 2.0, score.where(near | odd, s - 1, 7))
    s = s + score.where(at.token <= at.position, at.token % 5, at.token - at.position - 40)
    s = s + score.where(at.token - at.position < at.i, 3, score.where(at.i >= at.token - at.position + 4, 0.5, -1))
    return score.where(score.where(odd, near, s < 3.0), s, float("-inf"))


def tables(s: Any, at: Any, slopes: Any, table: Any, wide: Any, words: Any, rows: Any, flags: Any) -> Any:
    d = at.position - at.token
    s = s + slopes[at.q_head] * d + table[at.kv_head, score.minimum(score.maximum(d, 0) // 4, 7)]
    s = s + wide[at.row, d, at.i] + words[d % 9] * 0.5 + words[d] + rows[at.row] - rows[at.token]
    return s + flags[at.token % 5] + flags[at.position - 3] * score.where(words[2] > 3, 1.0, 2.0) + words[8 - at.i]


ROWS: Final = 9
RNG: Final = np.random.default_rng(3)
ARRAYS: Final[dict[str, NDArray[Any]]] = {
    "slopes": RNG.standard_normal(HEADS).astype(np.float32),
    "table": RNG.standard_normal((2, 8)).astype(bfloat16),
    "wide": RNG.standard_normal((ROWS, 5, 3)).astype(np.float32),
    "words": RNG.integers(-99, 99, 9).astype(np.int32),
    "rows": RNG.standard_normal(ROWS).astype(np.float16),
    "flags": RNG.integers(0, 255, 5).astype(np.uint8),
    "alibi_slopes": RNG.standard_normal(HEADS).astype(np.float32),
    "relative_bias": RNG.standard_normal((ROWS, HEADS, 5)).astype(bfloat16),
    "bias": np.where(RNG.random((ROWS, 31)) < 0.2, -np.inf, RNG.standard_normal((ROWS, 31))).astype(np.float32)[:, :30],
}
TENSORS: Final = {
    "slopes": Tensor("f32", ("q_heads",)),
    "table": Tensor("bf16", ("kv_heads", 8)),
    "wide": Tensor("f32", ("T", "X", 3)),
    "words": Tensor("i32", (9,)),
    "rows": Tensor("f16", ("T",)),
    "flags": Tensor("u8", (5,)),
}
NUMBERS: Final[dict[str, Any]] = {"by": 1.25, "shift": -6}


class Elements:
    """A tensor as a score function sees it: 0 outside."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array.astype(np.float64) if array.dtype.kind not in "iu" else array.astype(np.int64)

    def __getitem__(self, at: Any) -> Any:
        places = np.broadcast_arrays(*(at if isinstance(at, tuple) else (at,)))
        inside = np.all([(p >= 0) & (p < n) for p, n in zip(places, self.array.shape, strict=True)], axis=0)
        return np.where(inside, self.array[tuple(np.where(inside, p, 0) for p in places)], 0)


FUNCTIONS: Final[dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]]] = {
    "arithmetic": (arithmetic, {}, {"by": "f32", "shift": "i32"}),
    "functions": (functions, {}, {}),
    "conditions": (conditions, {}, {}),
    "tables": (tables, TENSORS, {}),
}


def drawn() -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """Places of 9 rows, and a score each."""
    rng, n = np.random.default_rng(7), 3000
    tokens = rng.choice([9, 30, 64, 5000], n)
    i = rng.integers(0, 3, n)
    position = np.maximum(tokens - 3 + i, 0)
    token = np.where(
        rng.random(n) < 0.7, np.clip(position + rng.integers(-12, 4, n), 0, tokens - 1), rng.integers(0, tokens)
    )
    columns = {"b": rng.integers(0, 3, n), "row": rng.integers(0, ROWS, n), "q_head": rng.integers(0, HEADS, n), "i": i}
    return columns | {"position": position, "token": token, "tokens": tokens}, (rng.standard_normal(n) * 4).astype(
        np.float32
    )


def test_kernels_compute_what_the_functions_do() -> None:
    columns, scores = drawn()
    at, s = SimpleNamespace(**columns, kv_head=columns["q_head"] // (HEADS // 2)), scores.astype(np.float64)
    cases = {n: (Mask(), Score(function=f, tensors=t, scalars=c)) for n, (f, t, c) in FUNCTIONS.items()}
    answers = ask(cases, columns, scores, ARRAYS | NUMBERS)
    for name, (function, tensors, scalars) in FUNCTIONS.items():
        given = {t: Elements(ARRAYS[t]) for t in tensors} | {c: NUMBERS[c] for c in scalars}
        wanted = function(s, at, **given)
        np.testing.assert_allclose(
            answers[name].score, wanted, rtol=2e-6, atol=2e-3 if name == "tables" else 2e-4, err_msg=name
        )


def test_kernels_compute_what_the_fields_say() -> None:
    columns, scores = drawn()
    s, d = scores.astype(np.float64), columns["position"] - columns["token"]
    row, head, token = columns["row"], columns["q_head"], columns["token"]
    near = (d >= 0) & (d < 5)
    relative = np.where(near, ARRAYS["relative_bias"].astype(np.float64)[row, head, np.where(near, d, 0)], 0)
    bias = np.where(token < 30, ARRAYS["bias"].astype(np.float64)[row, np.minimum(token, 29)], -np.inf)
    slope = -ARRAYS["alibi_slopes"].astype(np.float64)[head] * d
    capped = 6.5 * np.tanh(s / 6.5)
    wanted = {
        "capped": (Score(softcap=6.5), capped),
        "alibi": (Score(alibi=True), s + slope),
        "relative": (Score(relative=5), s + relative),
        "bias": (Score(bias=True), s + bias),
        "all_of_them": (
            Score(softcap=6.5, alibi=True, relative=5, bias=True, scalars={"strength": "f32"}, function=scaled),
            20 * np.tanh((capped + slope + relative + bias) / 20) + 3,
        ),
    }
    for mask in (Mask(), Mask(causal=False)):
        answers = ask({n: (mask, made) for n, (made, _) in wanted.items()}, columns, scores, ARRAYS | {"strength": 3.0})
        for name, (_, result) in wanted.items():
            if mask.causal:
                assert (
                    answers[name].visible
                    == ((d >= 0) & ((token < 30) | ("bias" not in name and name != "all_of_them")))
                ).all()
            np.testing.assert_allclose(answers[name].score, result, rtol=2e-6, atol=2e-4, err_msg=name)


def test_a_hidden_key_is_hidden_whatever_its_score() -> None:
    columns, scores = drawn()
    scores[:] = np.nan
    hidden = np.isneginf(
        np.where(columns["token"] < 30, ARRAYS["bias"][columns["row"], np.minimum(columns["token"], 29)], -np.inf)
    )
    found = ask({"bias": (Mask(), Score(bias=True))}, columns, scores, ARRAYS)["bias"].score
    assert hidden.any() and (np.isneginf(found) == hidden).all() and np.isnan(found[~hidden]).all()


def test_a_later_token_is_at_no_distance() -> None:
    columns: dict[str, Any] = dict.fromkeys(("b", "row", "q_head", "i"), np.zeros(3))
    columns |= {"position": [1, 0, 9], "token": [2**32 - 2, 2**32 - 2, 8], "tokens": np.full(3, 2**32 - 2)}
    arguments = {"relative_bias": np.full((1, HEADS, 5), 3, np.float32)}
    made = Score(relative=5, relative_dtype="f32")
    found = ask({"far": (Mask(causal=False), made)}, columns, np.ones(3, np.float32), arguments)["far"].score
    assert found.tolist() == [1, 1, 4]


def test_extremes_of_a_soft_cap() -> None:
    scores = np.array([0.0, -0.0, 1e-3, 1e30, -1e30, np.inf, -np.inf, np.nan], np.float32)
    columns = dict.fromkeys(("b", "row", "q_head", "i", "position", "token", "tokens"), np.zeros(len(scores)))
    found = ask({"capped": (Mask(), Score(softcap=30.0))}, columns, scores, {})["capped"].score
    np.testing.assert_allclose(found[:7], [0, 0, 1e-3, 30, -30, 30, -30], atol=1e-5)
    assert np.isnan(found[7])


# Memory ---------------------------------------------------------------------------------------------------------------------


def lookups(s: Any, at: Any, words: Any, rows: Any, flags: Any) -> Any:
    t, p = at.token, at.position
    s = s + words[t % 9] + words[(t - p) % 9] + words[score.minimum(t, 8)] + words[score.minimum(score.abs(t - p), 8)]
    s = s + words[score.minimum(t, 9)] + words[score.minimum(score.abs(p - t), 9)] + words[t % 10] + words[(t - p) % 10]
    s = s + words[t] + words[t - p] + words[-t] + words[t * 3] + words[score.maximum(t - p, 0)] + words[t // 1024]
    s = s + rows[t] + rows[p - t] + rows[at.row] + flags[words[0]] + flags[flags[3] // 64] + flags[flags[1] % 5]
    return s + words[score.where(t > p, t, 8)] + words[score.minimum(t - p, 8)] + words[(t + 1) // 2]


def test_no_index_leads_out_of_a_tensor() -> None:
    """The CPU machine's check mode stops at a read outside of an array: places up to the edge of 32 bits."""
    edges = np.array(
        [0, 1, 8, 9, 10, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 8, 2**32 - 10, 2**32 - 2], np.int64
    )
    token, position = (x.ravel() for x in np.meshgrid(edges, edges))
    columns = dict.fromkeys(("b", "q_head", "i"), np.zeros(len(token))) | {"row": np.full(len(token), ROWS - 1)}
    columns |= {"position": position, "token": token, "tokens": np.full(len(token), 2**32 - 2)}
    made = Score(tensors={n: TENSORS[n] for n in ("words", "rows", "flags")}, function=lookups)
    found = ask({"lookups": (Mask(causal=False), made)}, columns, np.zeros(len(token), np.float32), ARRAYS)["lookups"]
    assert np.isfinite(found.score).all()


def test_an_index_that_fits_needs_no_guard() -> None:
    def fits(s: Any, at: Any, slopes: Any, table: Any, words: Any) -> Any:
        return (
            s + slopes[at.q_head] + table[at.kv_head, at.token % 8] + words[score.minimum(at.i, 8)] + words[at.kv_head]
        )

    lines = context(Mask(), Score(tensors={n: TENSORS[n] for n in ("slopes", "table", "words")}, function=fits)).lines
    assert "?" not in "".join(lines)
    assert "in.score_table[at.q_head / 3 * 8 + at.token % 8]" in "".join(lines)


def test_what_is_used_twice_is_computed_once() -> None:
    def twice(s: Any, at: Any) -> Any:
        x = score.exp(s * 0.5)
        return x * x + score.where(x > 1.0, x, 1.0)

    assert context(Mask(), Score(function=twice)).lines == (
        "const float t0 = expf(s * 0.5f);",
        "s = t0 * t0 + (t0 > 1.0f ? t0 : 1.0f);",
    )


def test_a_loop_of_many_steps() -> None:
    """A step of Horner's rule nests in the one before it, deeper than Python recurses."""

    def steps(s: Any, at: Any) -> Any:
        total = s
        for i in range(1500):
            total = total * 0.5 + (s if i % 2 else 1.0)
        return total

    found = Score(function=steps).traced
    assert found is not None
    scope: dict[str, float] = {"s": 0.75}
    for line in found.text:
        exec(
            line.removeprefix("const float ")
            .removesuffix(";")
            .replace("f)", ")")
            .replace("5f", "5")
            .replace("0f", "0"),
            scope,
        )
    assert abs(scope["s"] - steps(0.75, None)) < 1e-12
