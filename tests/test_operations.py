"""The operations: each is four files of one name, one line in a list, and a page of the documentation."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from kvgen import ops, reference
from kvgen.paths import templates_root

ROOT = Path(__file__).resolve().parents[1]
NAMES = [op.kind for op in ops.ALL]


def test_the_list_is_whole() -> None:
    """Every operation that a module of ops/ defines is in the list, Custom aside; and every module defines one."""
    folder = ROOT / "kvgen" / "ops"
    modules = {p.stem for p in folder.glob("*.py")} - {"__init__", "base", "custom"}
    assert modules == set(NAMES) and len(NAMES) == len(modules)


@pytest.mark.parametrize("op", ops.ALL, ids=NAMES)
def test_an_operation_is_four_files_of_one_name(op: type[ops.Append]) -> None:
    name = op.kind
    assert op.__module__ == f"kvgen.ops.{name}"
    tree = ast.parse(Path(importlib.import_module(op.__module__).__file__ or "").read_text(encoding="utf-8"))
    kinds = [n for n in tree.body if isinstance(n, ast.ClassDef) and any("kind" in ast.unparse(s) for s in n.body)]
    assert [k.name for k in kinds] == [op.__name__], "one operation a file"
    assert (templates_root() / "ops" / f"{name}.cu.j2").is_file()
    oracle = getattr(importlib.import_module(f"kvgen.reference.{name}"), name)
    assert callable(oracle) and getattr(reference, name) is oracle
    assert (ROOT / "tests" / "ops" / f"test_{name}.py").is_file()


@pytest.mark.parametrize("op", ops.ALL, ids=NAMES)
def test_an_operation_is_documented(op: type[ops.Append]) -> None:
    pages = [p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md")]
    assert any(f"{op.__name__}`" in page or f"{op.__name__}(" in page for page in pages)
