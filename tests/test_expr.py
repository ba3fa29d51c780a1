"""Expressions: what they evaluate to, what their bounds promise, and what their C and Python texts compute."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.expr.nodes import U32_MAX, U64_MAX, Expr, ceil_div, const, evaluate, maximum, minimum, var, variables
from kvgen.expr.to_c import c
from kvgen.expr.to_python import python

# Upper bounds of the variables; w is 64 bits wide.
UPPER = {"x": 7, "y": 1000, "z": U32_MAX, "w": 2**40}


def combine(op: str, a: Expr, b: Expr, number: int) -> Expr:
    """An expression of `a` and `b` that stays defined: divisors are positive, differences are not negative."""
    match op:
        case "+":
            return a + b
        case "-":
            return a - a % number
        case "-+":
            return (a + b + number) - (b + number)
        case "*":
            return a * b
        case "/":
            return a // number
        case "/v":
            return a // (b + 1)
        case "%":
            return a % number
        case "%v":
            return a % (b + 1)
        case "min":
            return minimum(a, b)
        case "max":
            return maximum(a, b)
        case "ceil_div":
            return ceil_div(a, b + number)
    return a ^ b


IN_C = ["+", "-", "-+", "*", "/", "/v", "%", "%v", "^"]
EVERY = [*IN_C, "min", "max", "ceil_div"]
NUMBERS = [1, 2, 3, 8, 96, 2**31, 2**32]


def trees(ops: list[str]) -> st.SearchStrategy[Expr]:
    leaves: st.SearchStrategy[Expr] = st.sampled_from([var(n, u) for n, u in UPPER.items()]) | st.sampled_from(
        [const(n) for n in (0, 1, 2, 5, 128, 2**31, 2**32 - 1)]
    )
    return st.recursive(
        leaves,
        lambda inner: st.builds(combine, st.sampled_from(ops), inner, inner, st.sampled_from(NUMBERS)),
        max_leaves=8,
    )


VALUES = st.fixed_dictionaries({n: st.sampled_from([0, 1, u // 2, u]) | st.integers(0, u) for n, u in UPPER.items()})


def reference(expr: Expr, env: dict[str, int]) -> int:
    """Evaluated over the tree's own fields, with Python's own operators."""
    match expr:
        case _ if hasattr(expr, "value"):
            return int(expr.value)
        case _ if hasattr(expr, "name"):
            return env[expr.name]
    tree: Any = expr
    a, b = reference(tree.left, env), reference(tree.right, env)
    table = {"+": a + b, "-": a - b, "*": a * b, "^": a ^ b, "min": min(a, b), "max": max(a, b)}
    if tree.op in table:
        return table[tree.op]
    return {"/": a // b, "%": a % b, "ceil_div": (a + b - 1) // b}[tree.op]


@given(trees(EVERY), VALUES)
@settings(derandomize=True, deadline=None, max_examples=500)
def test_values_bounds_and_python_text(expr: Expr, env: dict[str, int]) -> None:
    value = reference(expr, env)
    assert evaluate(expr, env) == value
    assert 0 <= value <= expr.upper
    assert eval(python(expr), {"min": min, "max": max}, dict(env)) == value
    assert variables(expr) <= set(UPPER)


@given(trees(IN_C), VALUES)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_arrays_evaluate_like_numbers(expr: Expr, env: dict[str, int]) -> None:
    """Over NumPy's integers of any size (dtype object), an element at a time."""
    arrays = {n: np.array([v, 0, UPPER[n]], dtype=object) for n, v in env.items()}
    got = np.broadcast_to(evaluate(expr, arrays), (3,))
    for i in range(3):
        assert got[i] == reference(expr, {n: int(a[i]) for n, a in arrays.items()})


@pytest.mark.parametrize(
    ("make", "upper"),
    [
        (lambda x, y: x + y, 1007),
        (lambda x, y: y - x, 1000),
        (lambda x, y: x * y, 7000),
        (lambda x, y: y // 8, 125),
        (lambda x, y: y // (x + 1), 1000),
        (lambda x, y: y % 8, 7),
        (lambda x, y: x % 8, 7),
        (lambda x, y: y % (x + 1), 7),
        (lambda x, y: x ^ y, 1023),
        (lambda x, y: minimum(x, y), 7),
        (lambda x, y: maximum(x, y), 1000),
        (lambda x, y: ceil_div(y, 16), 63),
    ],
)
def test_bounds_are_reached_or_tight(make: Any, upper: int) -> None:
    expr = make(var("x", 7), var("y", 1000))
    assert expr.upper == upper
    top = max(evaluate(expr, {"x": x, "y": y}) for x in range(8) for y in range(1001))
    assert top <= upper
    assert upper - top <= (23 if "^" in c_or_empty(expr) else 0)


def c_or_empty(expr: Expr) -> str:
    try:
        return c(expr)
    except ValueError:
        return ""


def random_tree(rng: random.Random, depth: int) -> Expr:
    if depth == 0 or rng.random() < 0.15:
        leaf = rng.choice([*UPPER, None])
        return const(rng.choice([0, 1, 3, 7, 128, 2**31, 2**32 - 1, 2**33])) if leaf is None else var(leaf, UPPER[leaf])
    return combine(rng.choice(IN_C), random_tree(rng, depth - 1), random_tree(rng, depth - 1), rng.choice(NUMBERS))


def fits(expr: Expr) -> bool:
    if expr.upper > U64_MAX:
        return False
    return all(fits(part) for part in (getattr(expr, "left", None), getattr(expr, "right", None)) if part is not None)


def test_c_text_computes_the_same(tmp_path: Path) -> None:
    """A batch of expressions through the host compiler: uint32_t variables, values past 2^32 included."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    assert compiler, "a C++ compiler is needed, as for the CPU machine"
    rng = random.Random(7)
    batch: list[Expr] = []
    while len(batch) < 400:
        expr = random_tree(rng, rng.randint(1, 4))
        if fits(expr) and variables(expr):
            batch.append(expr)
    assert sum(e.upper > U32_MAX for e in batch) > 100
    environments = [{n: 0 for n in UPPER}, dict(UPPER)]
    environments += [{n: rng.choice([rng.randint(0, u), u, u // 2]) for n, u in UPPER.items()} for _ in range(8)]
    lines = ["#include <cstdint>", "#include <cstdio>"]
    signature = "uint32_t x, uint32_t y, uint32_t z, uint64_t w"
    lines += [f"static uint64_t f{i}({signature}) {{ return {c(e)}; }}" for i, e in enumerate(batch)]
    lines.append(f"static uint64_t (*const all[])({signature}) = {{{', '.join(f'f{i}' for i in range(len(batch)))}}};")
    rows = ", ".join("{" + ", ".join(f"{env[n]}ull" for n in UPPER) + "}" for env in environments)
    lines.append(f"static const uint64_t rows[][4] = {{{rows}}};")
    lines.append("int main() { for (auto f : all) for (auto& r : rows) printf(")
    lines.append('"%llu\\n", (unsigned long long)f((uint32_t)r[0], (uint32_t)r[1], (uint32_t)r[2], r[3])); }')
    source = tmp_path / "batch.cpp"
    source.write_text("\n".join(lines))
    subprocess.run([compiler, "-std=c++17", "-O0", "-w", "-o", tmp_path / "batch", source], check=True)
    output = subprocess.run([tmp_path / "batch"], check=True, capture_output=True, text=True).stdout.split()
    results = iter(int(word) for word in output)
    wide = 0
    for expr in batch:
        for env in environments:
            want = evaluate(expr, env)
            wide += want > U32_MAX
            assert next(results) == want, f"{c(expr)} with {env}"
    assert wide > 100


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (var("t") * 1 + 0, "t"),
        (var("t") * 0, "0"),
        (0 + 1 * var("t"), "t"),
        (const(6) * 7, "42"),
        ((var("t") // 1) ^ 0, "t"),
        (var("t", 15) * 1024 + var("h", 7) * 128 + var("d", 127), "t * 1024 + h * 128 + d"),
        (var("t") * 1024, "(uint64_t)t * 1024"),
        (var("t") + var("h"), "(uint64_t)t + h"),
        (var("t", 2**40) + var("h"), "t + h"),
        ((var("t") + 1) * 2, "((uint64_t)t + 1) * 2"),
        (var("t") // 8 % 4, "(t / 8) % 4"),
        (var("t") - (var("h") - var("d")), "t - (h - d)"),
        (var("t", 9) + (var("h", 9) ^ var("d", 9)), "t + (h ^ d)"),
        (var("t") % const(2**31), "t % 2147483648u"),
        (var("t", 7) % 8, "t"),
        (var("t", 8) % 8, "t % 8"),
        (var("t", 7) // 8, "0"),
        (var("t", 8) // 8, "t / 8"),
        (var("t") % 1, "0"),
        (var("t", 9) ^ 2**32, "t ^ 4294967296ull"),
    ],
)
def test_c_texts(expr: Expr, text: str) -> None:
    assert c(expr) == text


def test_python_texts_keep_their_order() -> None:
    assert python(ceil_div(var("T"), 8)) == "-(-T // 8)"
    assert python(minimum(var("T"), 4) * 2) == "min(T, 4) * 2"
    assert python(var("T") // 2 // 3) == "(T // 2) // 3"


def test_what_cannot_be_said() -> None:
    with pytest.raises(ValueError, match="const: got -1; expressions are unsigned"):
        const(-1)
    with pytest.raises(ValueError, match="var: 'a b' is no identifier"):
        var("a b")
    for divide in (lambda x: x // 0, lambda x: x % 0, lambda x: ceil_div(x, 0)):
        with pytest.raises(ZeroDivisionError, match="by zero in an expression"):
            divide(var("x"))
    for launcher_only in (minimum(var("x"), 1), maximum(var("x"), 1), ceil_div(var("x"), 2)):
        with pytest.raises(ValueError, match="is for grid rules, which only the launcher evaluates"):
            c(launcher_only + 1)
    with pytest.raises(ValueError, match="an expression can reach 36893488147419103232, past 64 bits"):
        c(var("x", 2**60) * 32)
