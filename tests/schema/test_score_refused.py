"""What a score cannot be: fields that contradict, and Python that is no expression, refused at its line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from kvgen import Mask, Score, score
from kvgen.lowering.attention.masks_scores import check_arguments
from kvgen.plan.params import Array
from kvgen.score import Tensor
from tests.schema.attend import SET, context
from tests.schema.test_validation import mistakes

HERE: Final = __file__

# Functions, each with its mistake in the line that says so ---------------------------------------------------------------------


def branch(s: Any, at: Any) -> Any:
    if at.token > 3:  # here
        return s
    return -s


def both(s: Any, at: Any) -> Any:
    return score.where(at.token > 3 and at.i < 2, s, 0.0)  # here


def chained(s: Any, at: Any) -> Any:
    return score.where(0 < at.token < 3, s, 0.0)  # here


def smallest(s: Any, at: Any) -> Any:
    return min(s, 3.0)  # here


def by_math(s: Any, at: Any) -> Any:
    return math.tanh(s)  # here


def by_numpy(s: Any, at: Any) -> Any:
    return np.tanh(s)  # here


def clipped(s: Any, at: Any) -> Any:
    return np.clip(s, 0, 1)  # here


def power(s: Any, at: Any) -> Any:
    return s**2  # here


def method(s: Any, at: Any) -> Any:
    return s.exp()  # here


def nowhere(s: Any, at: Any) -> Any:
    return s + at.tokn  # here


def nothing(s: Any, at: Any) -> Any:  # here
    s * 2.0


def a_condition(s: Any, at: Any) -> Any:  # here
    return s > 0.0


def sum_of_conditions(s: Any, at: Any) -> Any:
    return s + (at.token > 3)  # here


def anded_numbers(s: Any, at: Any) -> Any:
    return score.where(at.token & 3, s, 0.0)  # here


def inverted(s: Any, at: Any) -> Any:
    return ~at.token  # here


def no_condition(s: Any, at: Any) -> Any:
    return score.where(at.token, s, 0.0)  # here


def divided(s: Any, at: Any) -> Any:
    return s // 2  # here


def by_a_value(s: Any, at: Any) -> Any:
    return s + at.token % at.tokens  # here


def by_zero(s: Any, at: Any) -> Any:
    return s + at.token % 0  # here


def bare(s: Any, at: Any, slopes: Any) -> Any:
    return s * slopes  # here


def bare_numpy(s: Any, at: Any, slopes: Any) -> Any:
    return score.exp(slopes) + s  # here


def two_indices(s: Any, at: Any, slopes: Any) -> Any:
    return s + slopes[at.b, 0]  # here


def sliced(s: Any, at: Any, slopes: Any) -> Any:
    return s + slopes[:2]  # here


def by_a_score(s: Any, at: Any, slopes: Any) -> Any:
    return s + slopes[s]  # here


def outside(s: Any, at: Any, slopes: Any) -> Any:
    return s + slopes[4]  # here


def unknown_name(s: Any, at: Any) -> Any:
    return s + missing  # type: ignore[name-defined]  # noqa: F821  # here


def text(s: Any, at: Any) -> Any:
    return s + "3"  # here


def huge(s: Any, at: Any) -> Any:
    return s * 1e39  # here


def huge_int(s: Any, at: Any) -> Any:
    return at.token + 2**31  # here


def no_number(s: Any, at: Any) -> Any:
    return s + float("nan")  # here


def loop(s: Any, at: Any) -> Any:
    for _ in range(at.i):  # here
        s = s + 1.0
    return s


def helper(x: Any) -> Any:
    return x if x > 0.0 else 0.0  # here


def through_a_helper(s: Any, at: Any) -> Any:
    return helper(s)


def only_s(s: Any) -> Any:  # here
    return s


def unknown_parameter(s: Any, at: Any, slope: Any) -> Any:  # here
    return s


def unread(s: Any, at: Any) -> Any:  # here
    return s


def a_tensor(s: Any, at: Any, slopes: Any) -> Any:  # here
    return slopes


BRANCH: Final = (
    "got a branch that depends on a score or its place (if, while, and, or, not, a < b < c, min() or max()); a kernel "
    "evaluates one expression for all scores; write kvgen.score.where(condition, a, b), combine conditions with &, | and ~, "
    "and take kvgen.score.minimum or maximum"
)
NUMBER: Final = (
    "got a conversion to a Python number (float(), int(), a function of math, range() or an index of a list); scores and "
    "places are known on the device only; take the functions of kvgen.score: exp, exp2, log, log2, tanh, sqrt, abs, "
    "minimum, maximum, floor, where"
)
SLOPES: Final = {"slopes": Tensor("f32", (4,))}
NAMES: Final = "exp, exp2, log, log2, tanh, sqrt, abs, minimum, maximum, floor, where"
REFUSED: Final[list[tuple[Callable[..., Any], dict[str, Any], str]]] = [
    *((f, {}, BRANCH) for f in (branch, both, chained, smallest, through_a_helper)),
    (by_math, {}, NUMBER),
    (loop, {}, NUMBER),
    (
        by_numpy, {},
        "got numpy.tanh of a score or its place, which are known on the device only; take kvgen.score.tanh",
    ),
    (
        clipped, {},
        f"got numpy.clip of a score or its place, which are known on the device only; take the functions of "
        f"kvgen.score ({NAMES})",
    ),
    (power, {}, "got **; write x * x, or kvgen.score.exp2(y * kvgen.score.log2(x))"),
    (method, {}, f"got .exp of a number; the functions of kvgen.score take it: {NAMES}"),
    (
        nowhere, {},
        "got at.tokn; at has b, q_head, kv_head, row, i, position, token, tokens; did you mean at.token?",
    ),
    (nothing, {}, "got nothing from nothing; it returns the new score: end it with return s"),
    (
        a_condition, {},
        "got a condition from a_condition; it returns the new score; write where(condition, s, float('-inf')) to hide a token",
    ),
    (
        sum_of_conditions, {},
        "got a condition in +, which takes numbers; write kvgen.score.where(condition, 1.0, 0.0)",
    ),
    (
        anded_numbers, {},
        "got & on numbers; &, | and ~ combine conditions, such as (at.token > 3) & (s > 0.0)",
    ),
    (inverted, {}, "got ~ on a number; &, | and ~ combine conditions, such as ~(at.token > 3)"),
    (no_condition, {}, "got a whole number as where's condition; write where(x > 0, a, b)"),
    (
        divided, {},
        "got // of a number by 2; // divides whole numbers by a constant from 1 on; otherwise write kvgen.score.floor(a / b)",
    ),
    (
        by_a_value, {},
        "got % of a whole number by a whole number; % divides whole numbers by a constant from 1 on; otherwise write a - b * "
        "kvgen.score.floor(a / b)",
    ),
    (
        by_zero, {},
        "got % of a whole number by 0; % divides whole numbers by a constant from 1 on; otherwise write a - b * "
        "kvgen.score.floor(a / b)",
    ),
    (bare, SLOPES, "got the tensor slopes in *; take an element of it, as in slopes[at.q_head]"),
    (bare_numpy, SLOPES, "got the tensor slopes without an index; take an element of it, as in slopes[at.q_head]"),
    (two_indices, SLOPES, "got slopes with 2 indices; its shape is [4]"),
    (sliced, SLOPES, "got a slice of slopes; an index is a whole number on every axis"),
    (by_a_score, SLOPES, "got a number as an index of slopes; indices are whole numbers"),
    (outside, SLOPES, "got 4 as an index of slopes, whose axis has 4 elements from 0 on"),
    (
        unknown_name, {},
        "got NameError: name 'missing' is not defined; a score function computes with s, at, its tensors and scalars",
    ),
    (text, {}, "got str '3' in +; it takes numbers, and what follows from s, at, tensors and scalars"),
    (huge, {}, "got 1e+39 in *; numbers are f32: below 3.4028235e38, or an infinity"),
    (huge_int, {}, "got 2147483648 in +; whole numbers have 32 bits; write 2147483648.0 for a number of f32"),
    (no_number, {}, "got nan in +; numbers are f32: below 3.4028235e38, or an infinity"),
    (only_s, {}, "got only_s(s: 'Any') -> 'Any'; it takes (s, at) first"),
    (
        unknown_parameter, SLOPES,
        "got the parameter slope; it must be one of tensors and scalars (slopes), or have a default",
    ),
    (unread, SLOPES, "got no parameter slopes, which tensors or scalars have; take it, or leave it out there"),
    (a_tensor, SLOPES, "got the tensor slopes without an index from a_tensor; it returns the new score"),
]  # fmt: skip


def line_of(function: Callable[..., Any]) -> tuple[int, str]:
    """The line that the function's mistake is on: the next one that says so."""
    lines = open(HERE, encoding="utf-8").read().split("\n")  # noqa: SIM115
    start = (helper if function is through_a_helper else function).__code__.co_firstlineno
    number = next(n for n in range(start, len(lines) + 1) if lines[n - 1].endswith("# here"))
    return number, lines[number - 1].strip()


@pytest.mark.parametrize(("function", "tensors", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_a_function_that_is_no_expression(function: Callable[..., Any], tensors: Any, message: str) -> None:
    number, written = line_of(function)
    assert mistakes(Score, function=function, tensors=tensors) == [
        f"function: {HERE}:{number} (`{written}`): {message}"
    ]


FIELDS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"softcap": 0.0}, "Score.softcap: got 0.0; input should be greater than 0"),
    ({"softcap": float("inf")}, "Score.softcap: got inf; input should be a finite number"),
    ({"relative": -1}, "Score.relative: got -1; input should be greater than or equal to 1"),
    (
        {"relative_dtype": "f32"},
        "relative_dtype: got 'f32' without relative; it is the dtype of its argument; leave it out",
    ),
    (
        {"function": "s + 1"},
        "function: got 's + 1'; it is a Python function, def my_score(s, at): return ...",
    ),
    (
        {"tensors": {"slopes": Tensor("f32", (4,))}},
        "tensors: got 'slopes' without a function, which alone reads it; give function=..., or leave it out",
    ),
    (
        {"scalars": {"by": "f32"}},
        "scalars: got 'by' without a function, which alone reads it; give function=..., or leave it out",
    ),
    (
        {"tensors": {"class": Tensor("f32", (4,))}},
        "tensors: got 'class'; it is an argument of a Python function: letters, digits and _, a letter first, at most 40 "
        "characters, no Python keyword, and none of cache, stream, self, errors, workspace, object",
    ),
    (
        {"tensors": SLOPES, "scalars": {"slopes": "f32"}, "function": bare},
        "scalars: got 'slopes', which is a tensor too; every argument has a name of its own",
    ),
    ({"scalars": {"by": "f64"}, "function": unread}, "Score.scalars.by: got 'f64'; input should be 'f32', 'i32' or 'u32'"),
    ({"soft_cap": 30.0}, "Score.soft_cap: unknown field; Score has softcap, alibi, relative, relative_dtype, bias, tensors, "
     "scalars, function; did you mean softcap?"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_what_a_score_cannot_be(fields: dict[str, Any], message: str) -> None:
    assert mistakes(Score, **fields) == [message]


def test_what_a_tensor_cannot_be() -> None:
    for shape, message in (
        ((), "Tensor.shape: got (); it must have at least 1 item"),
        ((0,), "shape: got 0; a dimension is at least 1 and below 2^31"),
        (("a b",), "shape: got 'a b'; a dimension is a whole number or a name such as 'q_heads' or 'T'"),
        (("T", "K"), "shape: got 'K', which is an axis of bias and mask; choose another name"),
        (("P",), "shape: got 'P', which is an axis of page_lists; choose another name"),
    ):
        assert mistakes(lambda shape: Tensor("f32", shape), shape=shape) == [message]
    with pytest.raises(ValueError, match="dtype"):
        Tensor("f64", (3,))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lengths", "bias", "q", "extent_X"])
def test_an_argument_that_is_called_as_another(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def taken(s, at, {name}, table): return s * {name} + table[at.i]", scope)
    table = {"table": Tensor("f32", ("X",))}
    made = Score(scalars={name: "f32"}, tensors=table, bias=True, function=scope["taken"])
    params = (Array("q", "f32", ("T",)), *context(Mask(), made).params)
    with pytest.raises(
        ValueError, match=f"ops: decode: got a tensor or scalar of its score called '{name}', which is ano"
    ):
        check_arguments("decode", params, SET)
    check_arguments("decode", context(Mask(), Score(scalars={"by": "f32"}, function=taking_by)).params, SET)


def taking_by(s: Any, at: Any, by: Any) -> Any:
    return s * by


def endless(s: Any, at: Any) -> Any:
    for i in range(10_000):
        s = s * (i + 0.5)
    return s


def recursive(s: Any, at: Any) -> Any:
    return recursive(s, at)


def test_scores_of_too_many_operations() -> None:
    (said,) = mistakes(Score, function=endless)
    assert "`s = s * (i + 0.5)`): got more than 4096 different operations; a score of that many" in said
    (said,) = mistakes(Score, function=recursive)
    assert "`return recursive(s, at)`): got RecursionError: maximum recursion depth exceeded" in said
