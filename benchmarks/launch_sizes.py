"""Launch sizes that a revision's launchers have for its kernels: grid, threads, shared memory, and how a step is split.

They are read from the text of `generated/<set>/_table.py` (up to ABI 7: `__init__.py`), which may be of another runtime ABI and
is not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from types import ModuleType
from typing import Any, Final

from kvgen.errors import ToolError
from kvgen.plan.split_plan import SplitPlan
from kvgen.runtime.kernel import Grid

# Launcher class -> attribute ("KERNEL", "PLAN", "SPLIT_PLAN", ...) -> fields of what it holds.
Sizes = Mapping[str, Mapping[str, Mapping[str, Any]]]

_KERNEL: Final = {"grid", "threads", "threads_by_arch", "shared", "shared_by_arch"}
_SPLIT_PLAN: Final = {f.name for f in fields(SplitPlan)}
# What a launcher leaves out.
_KERNEL_DEFAULTS: Final[dict[str, Any]] = {"threads_by_arch": {}, "shared_by_arch": {}}
_SPLIT_PLAN_DEFAULTS: Final = {f.name: f.default for f in fields(SplitPlan) if f.default is not MISSING}
_CALLED: Final = {"min": min, "max": max}
_ARITHMETIC: Final = (
    *(ast.Tuple, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
    *(ast.Subscript, ast.Constant, ast.Call, ast.Name, ast.Load),
)


def launch_sizes(text: str) -> Sizes:
    """What the launchers of this text say. ToolError where they say it otherwise than any launcher did."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    found = {c.name: {a: s for line in c.body for a, s in _attribute(line)} for c in classes}
    return {name: attributes for name, attributes in found.items() if attributes}


def give(package: ModuleType, sizes: Sizes) -> None:
    """Have the launchers of a package launch with these sizes; what it has no launcher for is left out."""
    for title, attributes in sizes.items():
        launcher = getattr(package, title, None)
        for name, values in attributes.items():
            if hasattr(launcher, name):
                setattr(launcher, name, replace(getattr(launcher, name), **values))


def _attribute(line: ast.stmt) -> list[tuple[str, dict[str, Any]]]:
    """The attribute that this line of a launcher's body assigns, and its sizes; nothing for other lines."""
    if not (isinstance(line, ast.Assign) and isinstance(line.value, ast.Call)):
        return []
    (target,), call = line.targets, line.value
    made = (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )
    if not isinstance(target, ast.Name):
        return []
    given = {k.arg: k.value for k in call.keywords}
    if made == "Kernel":
        known = {n: _grid(node) if n == "grid" else _value(node) for n, node in given.items() if n in _KERNEL}
        sizes, names = _KERNEL_DEFAULTS | known, _KERNEL
    elif made == "SplitPlan":
        sizes, names = _SPLIT_PLAN_DEFAULTS | {str(n): _value(node) for n, node in given.items()}, _SPLIT_PLAN
    else:
        return []
    if sizes.keys() != names:
        raise ToolError(f"line {line.lineno}: its {made} has other fields than today's")
    return [(target.id, sizes)]


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ToolError(f"line {node.lineno}: got `{ast.unparse(node)}`, which is no number") from None


def _grid(node: ast.expr) -> Callable[[Mapping[str, int]], Grid]:
    """A grid's rule: arithmetic on the sizes of a call."""
    known = isinstance(node, ast.Lambda) and all(isinstance(n, _ARITHMETIC) for n in ast.walk(node.body))
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    if not known or names - {"d", *_CALLED}:
        raise ToolError(f"line {node.lineno}: got `{ast.unparse(node)}`, which is no grid")
    rule = eval(compile(ast.Expression(node), "<grid>", "eval"), {"__builtins__": _CALLED})

    def grid(dims: Mapping[str, int]) -> Grid:
        try:
            found: Grid = rule(dims)
        except KeyError as error:
            raise ToolError(f"its grid needs {error}, which a call has no more") from None
        return found

    return grid
