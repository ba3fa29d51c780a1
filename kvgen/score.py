"""What a score function computes with: `from kvgen import score`, then score.exp(s) and so on.

Every function takes what a kernel's score function is traced with, NumPy arrays and numbers, so that the same Python
function can be run by hand. Conditions are combined with &, | and ~. `Tensor` describes a tensor that it reads.
"""

from __future__ import annotations

from typing import Any

from kvgen.expr.score_trace import Value, call
from kvgen.schema.score import Score, Tensor

__all__ = [
    "Score", "Tensor", "abs", "exp", "exp2", "floor", "log", "log2", "maximum", "minimum", "sqrt", "tanh", "where",
]  # fmt: skip


def _apply(name: str, numpy_name: str, *given: Any) -> Any:
    if any(isinstance(x, Value) for x in given):
        return call(name, *given)
    import numpy as np

    with np.errstate(all="ignore"):
        return getattr(np, numpy_name)(*given)


def exp(x: Any) -> Any:
    """e^x."""
    return _apply("exp", "exp", x)


def exp2(x: Any) -> Any:
    """2^x."""
    return _apply("exp2", "exp2", x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return _apply("log", "log", x)


def log2(x: Any) -> Any:
    """The logarithm to base 2."""
    return _apply("log2", "log2", x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _apply("tanh", "tanh", x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return _apply("sqrt", "sqrt", x)


def abs(x: Any) -> Any:
    """The magnitude."""
    return _apply("abs", "abs", x)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two; of a NaN and a number the number."""
    return _apply("minimum", "fmin", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two; of a NaN and a number the number."""
    return _apply("maximum", "fmax", a, b)


def floor(x: Any) -> Any:
    """The largest whole number that is not above x."""
    return _apply("floor", "floor", x)


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`."""
    return _apply("where", "where", condition, a, b)
