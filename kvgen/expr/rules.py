"""Grid rules as text: "ceil_div(T, 4) * 8" -> Expr. Parsed, never evaluated as Python."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import reduce
from typing import Final

from kvgen.expr.nodes import Expr, ceil_div, const, maximum, minimum, var

_OPERATORS: Final[dict[type[ast.operator], Callable[[Expr, Expr], Expr]]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
FUNCTIONS: Final[dict[str, Callable[[Expr, Expr], Expr]]] = {"min": minimum, "max": maximum, "ceil_div": ceil_div}
_MOST: Final = 200  # characters of a rule
_ALLOWED: Final = "a rule is made of names such as T, whole numbers, + - * // %, min, max and ceil_div"


def parse_rule(text: str) -> Expr:
    """The expression that a text spells; raises ValueError with the part that is none and what is allowed."""
    if len(text) > _MOST:
        raise ValueError(f"got {text[:40]!r}... of {len(text)} characters; a rule has at most {_MOST}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = (error.msg if isinstance(error, SyntaxError) else str(error)) or "nested too deep"
        raise ValueError(f"got {text!r}; it cannot be read ({reason}); {_ALLOWED}") from None
    return _convert(tree, text.strip())


def _convert(node: ast.expr, text: str) -> Expr:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return const(number)
        case ast.Name(id=name) if name not in FUNCTIONS:
            return var(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _apply(_OPERATORS[type(op)], [_convert(left, text), _convert(right, text)], node, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            if len(args) < 2 or (name == "ceil_div" and len(args) > 2):
                raise ValueError(
                    f"got {text!r}; {_part(node, text)!r} needs {'two' if name == 'ceil_div' else 'two or more'} arguments"
                )
            return _apply(FUNCTIONS[name], [_convert(a, text) for a in args], node, text)
    raise ValueError(f"got {text!r}; {_part(node, text)!r} is not allowed; {_ALLOWED}")


def _apply(operation: Callable[[Expr, Expr], Expr], operands: list[Expr], node: ast.expr, text: str) -> Expr:
    try:
        return reduce(operation, operands)
    except (ValueError, ZeroDivisionError):  # of literals: 3 - 5, 4 // 0
        reason = (
            "divides by zero" if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Sub) else "is negative"
        )
        if isinstance(node, ast.Call):
            reason = "divides by zero"
        raise ValueError(f"got {text!r}; {_part(node, text)!r} {reason}") from None


def _part(node: ast.expr, text: str) -> str:
    return ast.get_source_segment(text, node) or text
