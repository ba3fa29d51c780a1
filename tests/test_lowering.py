"""Lowering: a cache is worked out once, and what was worked out is handed on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvgen
from kvgen import Paged, presets
from kvgen.codegen.render import environment
from kvgen.expr.nodes import Expr, const, var
from kvgen.expr.to_c import c
from kvgen.layout.axes import Swizzle
from kvgen.lowering.lowered import lower
from kvgen.lowering.offsets import offset_context

PACKAGE = Path(kvgen.__file__).parent
# What a LoweredCache is made of, and the modules that make it.
PARTS = {"segments", "cache_fields", "table_form", "allocation_of"}
MAKERS = {"lowering/lowered.py", "lowering/cache_struct.py", "lowering/segments.py", "lowering/allocation.py"}


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


TOKEN, HEAD, DIM, ANY = var("token", 63), var("head", 7), var("dim", 127), var("token")


@pytest.mark.parametrize(
    "offset",
    [
        const(0),
        HEAD,
        TOKEN * 1024 + HEAD * 128 + DIM,
        HEAD * 1024 + DIM // 16 // 4 * 512 + TOKEN % 32 * 16 + TOKEN // 32 * 4 + DIM // 16 % 4,
        ANY * 1024 + HEAD * 128 + DIM,  # 64 bits from the first product on
        ANY + HEAD * 128 + DIM,
        TOKEN * 2**26 + HEAD * 2**31 + DIM,  # and from the first sum on
        ANY // 3 * 2**31 + DIM,
        Swizzle(3, 3, 3).apply(TOKEN * 64 + DIM),
        Swizzle(2, 4, 3).apply(DIM),
    ],
    ids=c,
)
def test_offsets_are_written_from_their_numbers(offset: Expr) -> None:
    """The template writes what the expression is as C, of numbers, names and flags."""
    offsets = environment().get_template("places/offsets.j2").module
    assert offsets.offset(offset_context(offset)) == c(offset)  # type: ignore[attr-defined]
    assert offset_context(offset).bits == (32 if offset.upper < 2**32 else 64)
