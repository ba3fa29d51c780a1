"""The names of the sets that a spec file gives, read off its text: what a selector needs before any spec runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def set_names(text: str, stem: str) -> tuple[str, ...] | None:
    """The sets that the spec file `stem`.py gives; None where its text alone does not tell.

    Told are files that assign `kernels` once, to a call of KernelSet or to a list of such calls, whose `name` is a string
    or absent. A loop, a function of the file's own or a set taken from another file has to be run.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values = list(_assigned(tree))
    if len(values) != 1:
        return None
    value = values[0]
    calls = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    names = [_name(call, stem) for call in calls]
    found = tuple(name for name in names if name is not None)
    return found if found and len(found) == len(names) else None


def _assigned(tree: ast.Module) -> Iterator[ast.expr | None]:
    """What each statement gives `kernels`; None for one that does more than assign it at the top of the file."""
    top = {id(node): node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)}
    plain: set[int] = set()
    for node in top.values():
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == "kernels":
            plain.add(id(targets[0]))
            yield node.value
    for other in ast.walk(tree):
        if isinstance(other, ast.Name) and other.id == "kernels" and id(other) not in plain:
            yield None  # `kernels += [...]`, `kernels.append(...)`
        elif isinstance(other, ast.alias) and (other.asname or other.name) in ("kernels", "*"):
            yield None


def _name(call: ast.expr | None, stem: str) -> str | None:
    """The name that a call of KernelSet gives its set; None for anything else, or a name that is worked out."""
    if not isinstance(call, ast.Call):
        return None
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function != "KernelSet":
        return None
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        if keyword.arg == "name":
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            return (value or stem) if isinstance(value, str) else None
    return stem
