"""Expressions as C++ for hosts: grid rules, and places in memory, in a header that engines compile."""

from __future__ import annotations

from typing import Final

from kvgen.expr.nodes import PRECEDENCE, U32_MAX, Binary, Const, Expr, Var, needs_parentheses

# Functions of templates/export/kvgen.h.
_CALLS: Final = {"min": "least", "max": "most", "ceil_div": "ceil_div"}


def cpp(expr: Expr) -> str:
    """C++ text over the same variable names, which are 64 bits wide or kvgen::Blocks; literals are wide enough by themselves.

    Raises ValueError for `^`, which occurs in places inside a page alone.
    """
    return _render(expr, 0, False)


def _render(expr: Expr, parent: int, right_side: bool) -> str:
    if isinstance(expr, Const):
        return f"{expr.value}{'' if expr.value <= U32_MAX // 2 else 'ull'}"
    if isinstance(expr, Var):
        return expr.name
    assert isinstance(expr, Binary)
    if expr.op in _CALLS:
        return f"{_CALLS[expr.op]}({_render(expr.left, 0, False)}, {_render(expr.right, 0, False)})"
    if expr.op == "^":
        raise ValueError("^ is for places inside a page, which only kernels work out")
    level = PRECEDENCE[expr.op]
    text = f"{_render(expr.left, level, False)} {expr.op} {_render(expr.right, level, True)}"
    return f"({text})" if needs_parentheses(expr, parent, right_side) else text
