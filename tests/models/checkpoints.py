"""The checked-in configs, changed or whole, and the model a spec's text builds."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from kvgen import models
from kvgen.models.features import lacking
from kvgen.schema import model as model_module
from kvgen.schema.model import Model

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "tests" / "models" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
# Those of which init writes a spec; it reads the facts of all.
WRITTEN = [n for n in NAMES if lacking(models.facts(models.read(CONFIGS / f"{n}.json")).kinds) is None]


def config(name: str) -> dict[str, Any]:
    return models.read(CONFIGS / f"{name}.json")


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**config(name), **fields}


def without(name: str, *fields: str) -> dict[str, Any]:
    return {key: value for key, value in config(name).items() if key not in fields}


def model_in(text: str) -> Model:
    """The model a spec's text builds, without importing the operations."""
    *before, shared, assignment = ast.parse(text).body
    known = dict(vars(model_module))
    for statement in before:  # ropes that kinds of layers share
        if isinstance(statement, ast.Assign):
            assert isinstance(statement.targets[0], ast.Name)
            code = compile(ast.Expression(statement.value), "spec", "eval")
            known[statement.targets[0].id] = eval(code, {"__builtins__": {}}, known)
    assert isinstance(assignment, ast.Assign)
    if isinstance(shared, ast.Assign):  # of several sets
        node = shared.value
    else:
        # Of latent rows: the first set has it, the second is for prompts.
        first = assignment.value.elts[0] if isinstance(assignment.value, ast.List) else assignment.value
        assert isinstance(first, ast.Call)
        node = next(keyword.value for keyword in first.keywords if keyword.arg == "model")
    built = eval(compile(ast.Expression(node), "spec", "eval"), {"__builtins__": {}}, known)
    assert isinstance(built, Model)
    return built
