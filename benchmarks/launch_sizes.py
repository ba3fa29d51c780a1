"""Launch sizes that a revision's launchers have for its kernels: files, grid, threads, shared memory, and how a step is split.

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

_BY_ARCH: Final = ("threads_by_arch", "shared_by_arch", "grid_by_arch", "blocks_by_arch", "files")
_KERNEL: Final = {"grid", "threads", "shared", *_BY_ARCH}
_SPLIT_PLAN: Final = {f.name for f in fields(SplitPlan)}
# What a launcher leaves out.
_KERNEL_DEFAULTS: Final[dict[str, Any]] = {name: {} for name in _BY_ARCH}
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
            if hasattr(launcher, name) and name != "SPLIT_PLANS":
                setattr(launcher, name, replace(getattr(launcher, name), **values))
        if hasattr(launcher, "SPLIT_PLANS"):
            by_arch = attributes.get("SPLIT_PLANS", {})
            launcher.SPLIT_PLANS = tuple((arch, SplitPlan(**sizes)) for arch, sizes in by_arch.items())


def _attribute(line: ast.stmt) -> list[tuple[str, dict[str, Any]]]:
    """The attribute that this line of a launcher's body assigns, and its sizes; nothing for other lines."""
    if not isinstance(line, ast.Assign):
        return []
    (target,) = line.targets
    if not isinstance(target, ast.Name):
        return []
    if target.id == "SPLIT_PLANS" and isinstance(line.value, ast.Tuple):
        return [(target.id, {_value(arch): _split(plan) for arch, plan in map(_pair, line.value.elts)})]
    made = _made(line.value)
    if made == "Kernel":
        given = _given(line.value)
        sizes = _KERNEL_DEFAULTS | {n: _of_kernel(n, node) for n, node in given.items() if n in _KERNEL}
        return [(target.id, _whole(line, made, sizes, _KERNEL))]
    return [(target.id, _split(line.value))] if made == "SplitPlan" else []


def _made(node: ast.expr) -> str:
    """The name of what a call makes; "" for anything else."""
    called = node.func if isinstance(node, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _given(node: ast.expr) -> dict[str, ast.expr]:
    return {str(k.arg): k.value for k in node.keywords} if isinstance(node, ast.Call) else {}


def _pair(node: ast.expr) -> tuple[ast.expr, ast.expr]:
    if not isinstance(node, ast.Tuple) or len(node.elts) != 2:
        raise ToolError(f"line {node.lineno}: got `{ast.unparse(node)}`, which is no architecture with its SplitPlan")
    return node.elts[0], node.elts[1]


def _split(node: ast.expr) -> dict[str, Any]:
    """The fields of a SplitPlan."""
    sizes = _SPLIT_PLAN_DEFAULTS | {n: _value(value) for n, value in _given(node).items()}
    return _whole(node, "SplitPlan", sizes, _SPLIT_PLAN)


def _of_kernel(name: str, node: ast.expr) -> Any:
    """The value of a Kernel's field."""
    if name == "grid":
        return _grid(node)
    if name == "grid_by_arch" and isinstance(node, ast.Dict):
        return {
            _value(arch): _grid(rule) for arch, rule in zip(node.keys, node.values, strict=True) if arch is not None
        }
    return _value(node)


def _whole(node: ast.AST, made: str, sizes: dict[str, Any], names: set[str]) -> dict[str, Any]:
    if sizes.keys() != names:
        raise ToolError(f"line {getattr(node, 'lineno', 0)}: its {made} has other fields than today's")
    return sizes


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
