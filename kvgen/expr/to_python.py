"""Expressions as Python text, for grid rules in launchers."""

from __future__ import annotations

from kvgen.expr.nodes import CALLS, PRECEDENCE, Binary, Const, Expr, Var, needs_parentheses

# Nothing binds tighter than a unary minus, so composite operands beside one keep their parentheses.
_TIGHT = PRECEDENCE["*"] + 1


def python(expr: Expr) -> str:
    """Python text over the same variable names."""
    return _render(expr, 0, False)


def _render(expr: Expr, parent: int, right_side: bool) -> str:
    if isinstance(expr, Const):
        return str(expr.value)
    if isinstance(expr, Var):
        return expr.name
    assert isinstance(expr, Binary)
    if expr.op == "ceil_div":
        return f"-(-{_render(expr.left, _TIGHT, False)} // {_render(expr.right, _TIGHT, True)})"
    if expr.op in CALLS:
        return f"{expr.op}({_render(expr.left, 0, False)}, {_render(expr.right, 0, False)})"
    level = PRECEDENCE[expr.op]
    sign = "//" if expr.op == "/" else expr.op
    text = f"{_render(expr.left, level, False)} {sign} {_render(expr.right, level, True)}"
    return f"({text})" if needs_parentheses(expr, parent, right_side) else text
