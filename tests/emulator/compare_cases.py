"""Comparison, selection and plain moves against Python comparisons."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.emulator.cases import Suite
from tests.emulator.float_cases import dotted, flush
from tests.emulator.forms import form, pairwise

SUITE = Suite("compare")
add = SUITE.add
Test = Callable[[Any, Any], bool]
EQUAL: dict[str, Test] = {"eq": operator.eq, "ne": operator.ne}
ORDER: dict[str, Test] = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
UNSIGNED: dict[str, Test] = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}


def unordered(a: float, b: float) -> bool:
    return math.isnan(a) or math.isnan(b)


FLOAT_TESTS: dict[str, Test] = {
    **{name: (lambda a, b, f=f: not unordered(a, b) and f(a, b)) for name, f in {**EQUAL, **ORDER}.items()},
    **{f"{name}u": (lambda a, b, f=f: unordered(a, b) or f(a, b)) for name, f in {**EQUAL, **ORDER}.items()},
    "num": lambda a, b: not unordered(a, b),
    "nan": unordered,
}
FOLDS = {"": lambda t, c: t, "and": operator.and_, "or": operator.or_, "xor": operator.xor}
FLUSHED = ("f32", "f16", "f16x2")


def tests_of(kind: str) -> dict[str, Test]:
    if kind[0] == "b" and kind[1] != "f":
        return EQUAL
    return {"s": {**EQUAL, **ORDER}, "u": {**EQUAL, **ORDER, **UNSIGNED}}.get(kind[0], FLOAT_TESTS)


def operand(kind: str) -> str:
    return f"u{kind[1:]}" if kind[0] == "b" and kind[1] != "f" else kind


PLAIN = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
TYPES = (*PLAIN, "f16", "bf16", "f16x2", "bf16x2")


def variants(opcode: str, kind: str, results: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """(test, fold, flush, result): every pair of them, as the whole product of set has 3264 forms."""
    flushes = ("", "ftz") if kind in FLUSHED else ("",)
    product = [
        (name, fold, ftz, d)
        for name, fold, ftz, d in itertools.product(tests_of(kind), FOLDS, flushes, results)
        if not (ftz and d == "bf16")
    ]
    random.Random(kind).shuffle(product)
    named = {form(opcode, [*filter(None, v[:3]), *filter(None, (v[3], kind))]): v for v in product}
    return (named[f] for f in pairwise(named))


def results_of(kind: str) -> tuple[str, ...]:
    if kind.endswith("x2"):
        return ("u32", "s32", kind)
    if kind == "bf16":
        return ("u32", "s32", "u16", "s16", "bf16")
    return ("u32", "s32", "u16", "s16", "f16", "bf16") if kind == "f16" else ("u32", "s32", "f32", "f16", "bf16")


def value(test: Test, kind: str, ftz: str, fold: str, negated: bool, one: float = 1) -> Callable[..., float]:
    holds = (lambda a, b: test(flush(a, kind), flush(b, kind))) if ftz else test
    return lambda a, b, c=0: one * int(FOLDS[fold](bool(holds(a, b)), bool(c) ^ negated))


for t in TYPES:
    k, packed, half = operand(t), t.endswith("x2"), t in ("f16", "bf16")
    tests = tests_of(t)
    for name, fold, ftz, _ in variants("setp", t, ("",)):
        negated = fold == "or"
        tail = f", {'!' if negated else ''}{{c}}" if fold else ""
        words = f"setp.{name}{dotted(fold, ftz)}.{t}"
        first = value(tests[name], t, ftz, fold, negated)
        if half:  # a 16-bit comparison has no second predicate
            add(f"{words} {{d}}, {{a}}, {{b}}{tail};", f"{k} {k} pred", "pred", first)
            continue
        code = f"{words} %p5|%p6, {{a}}, {{b}}{tail}; selp.u32 {{d}}, 1, 0, %p5; @%p6 add.u32 {{d}}, {{d}}, 65536;"
        if packed:
            add(code, f"{t} {t} pred", "u16x2", first)
            continue
        second = value(lambda a, b, f=tests[name]: not f(a, b), t, ftz, fold, negated)
        both = lambda a, b, c, p=first, q=second: p(a, b, c) + 65536 * q(a, b, c)  # noqa: E731
        add(code, f"{k} {k} pred", "u32", both)
    for name, fold, ftz, d in variants("set", t, results_of(t)):
        out = "s16x2" if packed and d != t else d
        one = 1.0 if d[0] in "fb" else -1
        code = f"set.{name}{dotted(fold, ftz)}.{d}.{t} {{d}}, {{a}}, {{b}}{', {c}' if fold else ''};"
        add(code, f"{k} {k} pred", out, value(tests[name], t, ftz, fold, False, one))

# ---------------------------------------------------------------- selp slct mov
for t in PLAIN:
    k = operand(t)
    bits = {"f32": "u32", "f64": "u64"}.get(k, k)  # selection copies NaNs bit for bit
    register = {"f32": ("%f", "mov.b32"), "f64": ("%fd", "mov.b64")}.get(k)
    if register:
        file, move = register
        load = f"{move} {file}3, {{a}}; {move} {file}4, {{b}};"
        a, b, d, store = f"{file}3", f"{file}4", f"{file}5", f"{move} {{d}}, {file}5;"
    else:
        load, a, b, d, store = "", "{a}", "{b}", "{d}", ""
    add(f"{load} selp.{t} {d}, {a}, {b}, {{c}}; {store}", f"{bits} {bits} pred", bits, lambda a, b, c: a if c else b)
    add(f"{load} slct.{t}.s32 {d}, {a}, {b}, {{c}}; {store}", f"{bits} {bits} s32", bits,
        lambda a, b, c: a if c >= 0 else b)  # fmt: skip
    for ftz in ("", ".ftz"):
        code = f"{load} slct{ftz}.{t}.f32 {d}, {a}, {b}, {{c}}; {store}"

        def by_float(a: int, b: int, c: float, ftz=ftz) -> int:
            return a if (flush(c) if ftz else c) >= 0 else b

        add(code, f"{bits} {bits} f32", bits, by_float)
    add(f"{load} mov.{t} {d}, {a}; {store}", f"{bits} {bits}", bits, lambda a, b: a)
