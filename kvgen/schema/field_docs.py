"""The docstrings under the fields of spec models, read from their source on demand.

Pydantic's `use_attribute_docstrings` reads the source of every model when it is imported: 0.3 s more for every command.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import lru_cache
from itertools import pairwise

from pydantic import BaseModel


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """What each field of `model` is, as one line, by its name; fields whose source is not at hand are left out."""
    found = {}
    for name in model.model_fields:
        for owner in model.__mro__:
            if name in inspect.get_annotations(owner):
                text = _documented(owner.__module__).get(owner.__qualname__, {}).get(name)
                if text:
                    found[name] = text
                break
    return found


@lru_cache
def _documented(module: str) -> dict[str, dict[str, str]]:
    """Class -> field -> docstring, of the classes at the top of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):
        return {}
    return {node.name: _below_fields(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _below_fields(node: ast.ClassDef) -> dict[str, str]:
    found = {}
    for field, below in pairwise(node.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
