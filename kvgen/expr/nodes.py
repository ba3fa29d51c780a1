"""Unsigned integer expressions: with the score tracer beside them, the only Python that writes arithmetic in C.

A layout's offsets, a grid rule and a scalar kernel argument are expressions over named variables with known upper bounds.
One tree renders as CUDA (`to_c.c`), as Python (`to_python.python`) and evaluates on ints or NumPy arrays (`evaluate`). The
bounds decide where 32 bits end: a product or sum that can pass 2^32 - 1 is widened to 64 bits at exactly that operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

U32_MAX: Final = 2**32 - 1
U64_MAX: Final = 2**64 - 1
Op = Literal["+", "-", "*", "/", "%", "^", "min", "max", "ceil_div"]
PRECEDENCE: Final[dict[str, int]] = {"^": 1, "+": 2, "-": 2, "*": 3, "/": 3, "%": 3}
CALLS: Final = ("min", "max", "ceil_div")


@dataclass(frozen=True)
class Expr:
    """A value in [0, upper]; build with `var`, `const` and the operators."""

    upper: int

    def __add__(self, other: Expr | int) -> Expr:
        return _binary("+", self, other)

    def __radd__(self, other: int) -> Expr:
        return _binary("+", const(other), self)

    def __sub__(self, other: Expr | int) -> Expr:
        return _binary("-", self, other)

    def __mul__(self, other: Expr | int) -> Expr:
        return _binary("*", self, other)

    def __rmul__(self, other: int) -> Expr:
        return _binary("*", const(other), self)

    def __floordiv__(self, other: Expr | int) -> Expr:
        return _binary("/", self, other)

    def __mod__(self, other: Expr | int) -> Expr:
        return _binary("%", self, other)

    def __xor__(self, other: Expr | int) -> Expr:
        return _binary("^", self, other)


@dataclass(frozen=True)
class Const(Expr):
    """A literal."""

    @property
    def value(self) -> int:
        """The literal itself: its own upper bound."""
        return self.upper


@dataclass(frozen=True)
class Var(Expr):
    """A named variable; `name` is an identifier in C and in Python."""

    name: str


@dataclass(frozen=True)
class Binary(Expr):
    """`left op right`, folded where both sides are literals."""

    op: Op
    left: Expr
    right: Expr


def const(value: int) -> Const:
    """The literal `value` >= 0."""
    if value < 0:
        raise ValueError(f"const: got {value}; expressions are unsigned")
    return Const(value)


_ZERO: Final = Const(0)
_ONE: Final = Const(1)


def var(name: str, upper: int = U32_MAX) -> Var:
    """The variable `name`, at most `upper`."""
    if not name.isidentifier():
        raise ValueError(f"var: {name!r} is no identifier")
    return Var(upper, name)


def ceil_div(a: Expr | int, b: Expr | int) -> Expr:
    """a / b rounded up; b > 0."""
    whole, part = _lift(a), _lift(b)
    if isinstance(whole, Binary) and whole.op == "ceil_div":
        inner = whole.right
        if isinstance(inner, Const) and isinstance(part, Const):
            return _binary("ceil_div", whole.left, const(inner.value * part.value))
    return _binary("ceil_div", whole, part)


def minimum(a: Expr | int, b: Expr | int) -> Expr:
    """The smaller of the two."""
    return _binary("min", _lift(a), b)


def maximum(a: Expr | int, b: Expr | int) -> Expr:
    """The larger of the two."""
    return _binary("max", _lift(a), b)


def _lift(x: Expr | int) -> Expr:
    return x if isinstance(x, Expr) else const(x)


def _apply(op: Op, a: Any, b: Any) -> Any:
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    if op == "/":
        return a // b
    if op == "%":
        return a % b
    if op == "^":
        return a ^ b
    if op == "ceil_div":
        return -(-a // b)
    if op == "min":
        return min(a, b)
    return max(a, b)


def _upper(op: Op, a: Expr, b: Expr) -> int:
    if op == "+":
        return a.upper + b.upper
    if op == "*":
        return a.upper * b.upper
    if op == "%":
        return min(a.upper, max(b.upper - 1, 0))
    if op == "^":
        return (1 << max(a.upper.bit_length(), b.upper.bit_length())) - 1
    if op == "min":
        return min(a.upper, b.upper)
    if op == "max":
        return max(a.upper, b.upper)
    if op in ("/", "ceil_div") and isinstance(b, Const):
        return int(_apply(op, a.upper, b.value))
    return a.upper


def _identity(op: Op, left: Expr, right: Expr) -> Expr | None:
    """The operand that the operation leaves as it is, if any: keeps `token * 1 + 0` out of the generated text."""
    l0, r0 = left == _ZERO, right == _ZERO
    l1, r1 = left == _ONE, right == _ONE
    if op == "+" and (l0 or r0):
        return right if l0 else left
    if op == "*" and (l0 or r0):
        return _ZERO
    if op == "*" and (l1 or r1):
        return right if l1 else left
    if op in ("/", "ceil_div") and r1:
        return left
    if op in ("-", "^") and r0:
        return left
    if op == "%" and isinstance(right, Const):
        if right.value == 1:
            return _ZERO
        if left.upper < right.value:
            return left
    if op == "/" and isinstance(right, Const) and left.upper < right.value:
        return _ZERO
    return None


def _binary(op: Op, left: Expr, other: Expr | int) -> Expr:
    right = _lift(other)
    if op in ("/", "%", "ceil_div") and right == _ZERO:
        raise ZeroDivisionError(f"{op} by zero in an expression")
    if isinstance(left, Const) and isinstance(right, Const):
        return const(int(_apply(op, left.value, right.value)))
    return _identity(op, left, right) or Binary(_upper(op, left, right), op, left, right)


def evaluate(expr: Expr, env: Mapping[str, Any]) -> Any:
    """The value of `expr` with the variables of `env`: ints, or (min and max aside) NumPy arrays wide enough for the bound."""
    if isinstance(expr, Const):
        return expr.value
    if isinstance(expr, Var):
        return env[expr.name]
    assert isinstance(expr, Binary)
    return _apply(expr.op, evaluate(expr.left, env), evaluate(expr.right, env))


def needs_parentheses(expr: Binary, parent: int, right_side: bool) -> bool:
    """Whether `expr` as text is parenthesised as an operand of an operator that binds as tightly as `parent`."""
    level = PRECEDENCE[expr.op]
    # Division and remainder bind to their left only: keep explicit parentheses beside products.
    return level < parent or (level == parent and (right_side or expr.op in "/%-"))


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """`expr` with these in place of the variables so named."""
    if isinstance(expr, Var):
        return values.get(expr.name, expr)
    if isinstance(expr, Binary):
        return _binary(expr.op, substitute(expr.left, values), substitute(expr.right, values))
    return expr


def variables(expr: Expr) -> frozenset[str]:
    """The names `expr` reads."""
    if isinstance(expr, Var):
        return frozenset({expr.name})
    if isinstance(expr, Binary):
        return variables(expr.left) | variables(expr.right)
    return frozenset()
