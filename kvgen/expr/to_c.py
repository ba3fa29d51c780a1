"""Expressions as CUDA C text: the place where 32 bits end is written here, and nowhere else."""

from __future__ import annotations

from kvgen.expr.nodes import CALLS, PRECEDENCE, U32_MAX, U64_MAX, Binary, Const, Expr, Var, needs_parentheses


def c(expr: Expr) -> str:
    """CUDA C text; variables are uint32_t unless their bound says more. Raises ValueError past 64 bits."""
    return _render(expr, 0, False)


def _literal(value: int) -> str:
    suffix = "" if value <= U32_MAX // 2 else "u" if value <= U32_MAX else "ull"
    return f"{value}{suffix}"


def _render(expr: Expr, parent: int, right_side: bool) -> str:
    if isinstance(expr, Const):
        return _literal(expr.value)
    if isinstance(expr, Var):
        return expr.name
    assert isinstance(expr, Binary)
    if expr.op in CALLS:
        raise ValueError(f"{expr.op} is for grid rules, which only the launcher evaluates")
    if expr.upper > U64_MAX:
        raise ValueError(f"an expression can reach {expr.upper}, past 64 bits; give its variables tighter bounds")
    level = PRECEDENCE[expr.op]
    left, right = _render(expr.left, level, False), _render(expr.right, level, True)
    # Where the result can pass 32 bits and no operand has more, the left one is widened.
    if expr.upper > U32_MAX and expr.left.upper <= U32_MAX and expr.right.upper <= U32_MAX:
        left = _render(expr.left, 0, False)
        left = f"(uint64_t){left if isinstance(expr.left, (Var, Const)) else f'({left})'}"
    text = f"{left} {expr.op} {right}"
    return f"({text})" if needs_parentheses(expr, parent, right_side) else text
