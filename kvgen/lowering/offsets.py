"""Where an element or a scale lies in its page, in numbers: places/offsets.j2 writes the functions of cache.cuh from them.

An offset is a sum over token, head and dim: each divided, taken modulo and multiplied by numbers, its strides. A swizzle takes
such steps of the whole sum and xors the result onto it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.expr.nodes import U32_MAX, Binary, Const, Expr, Var

_STEPS: Final = {"/": "divide", "%": "modulo", "*": "times"}


@dataclass(frozen=True)
class StepContext:
    """A step: the value so far divided by, modulo, or times the number that is not 0; `wide`: in 64 bits from here on."""

    wide: bool
    divide: int = 0
    modulo: int = 0
    times: int = 0


@dataclass(frozen=True)
class TermContext:
    """A part of the sum: token, head or dim after its steps; `wide`: the sum has 64 bits from here on."""

    name: str
    steps: tuple[StepContext, ...]
    wide: bool


@dataclass(frozen=True)
class OffsetContext:
    """An offset of `bits` bits: the sum of the terms, and the steps of it that are xored onto it, if any."""

    terms: tuple[TermContext, ...]
    swizzle: tuple[StepContext, ...]
    bits: int


def offset_context(offset: Expr) -> OffsetContext:
    """The parts of an offset over token, head and dim."""
    bits = 32 if offset.upper <= U32_MAX else 64
    if isinstance(offset, Binary) and offset.op == "^":
        total, steps = _chain(offset.right, offset.left)
        assert total == offset.left
        return OffsetContext(_terms(offset.left), steps, bits)
    return OffsetContext(_terms(offset), (), bits)


def _widens(expr: Binary) -> bool:
    return expr.upper > U32_MAX and expr.left.upper <= U32_MAX and expr.right.upper <= U32_MAX


def _chain(expr: Expr, base: Expr | None = None) -> tuple[Expr, tuple[StepContext, ...]]:
    """What the steps of an expression begin with, `base` or a variable, and the steps."""
    if expr == base or not isinstance(expr, Binary):
        return expr, ()
    assert expr.op in _STEPS and isinstance(expr.right, Const), expr
    first, steps = _chain(expr.left, base)
    return first, (*steps, StepContext(_widens(expr), **{_STEPS[expr.op]: expr.right.value}))


def _terms(expr: Expr) -> tuple[TermContext, ...]:
    if expr == Const(0):
        return ()
    if isinstance(expr, Binary) and expr.op == "+":
        (last,) = _terms(expr.right)
        return (*_terms(expr.left), TermContext(last.name, last.steps, _widens(expr)))
    first, steps = _chain(expr)
    assert isinstance(first, Var), expr
    return (TermContext(first.name, steps, False),)
