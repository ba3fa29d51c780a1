"""Lowering: a cache is worked out once, and what was worked out is handed on."""

from __future__ import annotations

import ast
from pathlib import Path

import kvgen
from kvgen import Paged, presets
from kvgen.lowering.lowered import lower

PACKAGE = Path(kvgen.__file__).parent
# What a LoweredCache is made of, and the modules that make it.
PARTS = {"segments", "cache_fields", "table_form", "cache_kind"}
MAKERS = {"lowering/lowered.py", "lowering/cache_struct.py", "lowering/segments.py", "lowering/cache_kinds.py"}


def calls(path: Path) -> set[str]:
    """The parts that a module works out itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} & PARTS


def test_nobody_else_works_out_what_a_lowered_cache_has() -> None:
    found = {p.relative_to(PACKAGE).as_posix(): calls(p) for p in PACKAGE.rglob("*.py")}
    asked = {n: c for n, c in found.items() if c and n not in MAKERS and not n.startswith("lowering/tables/")}
    assert asked == {}
    assert found["lowering/lowered.py"] == PARTS


def test_equal_caches_are_lowered_once() -> None:
    first, again = (Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16) for _ in range(2))
    assert lower(first) is lower(again)
    assert lower(first) is not lower(presets.vllm(dtype="bf16", kv_heads=2, head_dim=64, page_size=16))
    assert [s.role for s in lower(first).segments] == ["k", "v"] and len(lower(first).segments_of("v")) == 1
