"""Page tables: each form is five files of one name, and who asks for the class of a table or a cache is listed here."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgen.lowering.tables import table_form
from kvgen.paths import templates_root
from kvgen.reference.tables.view import reading_of
from kvgen.schema import tables
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.cache import Cache, Continuous, Latent, Paged
from kvgen.schema.ragged import Ragged
from kvgen.schema.state import State
from kvgen.schema.tables import CSR, Dense, Indirect, Mapped, Offsets, PageTable, PerKV, Ring, States

PACKAGE = Path(tables.__file__).parents[2]
FORMS: tuple[PageTable, ...] = (
    *(Dense(), CSR(), CSR(last_page_len=True), PerKV(), Indirect(), Mapped(), Ring(window=9), Offsets(), States()),
)
KINDS = [form.model_dump()["kind"] for form in FORMS]
# Where classes are asked for, by function: the one place of each room that may.
DISPATCHES = {
    ("lowering/tables/__init__.py", "table_form"),
    ("lowering/allocation.py", "allocation_of"),
    ("lowering/lowered.py", "lower_pages"),
    ("schema/kernel_set.py", "kv"),
    ("reference/tables/view.py", "reading_of"),
}


def cache_of(table: PageTable) -> AnyCache:
    """A cache with this table."""
    if isinstance(table, States):
        return State(bytes=64)
    if isinstance(table, Offsets):
        return Ragged(dtype="bf16", kv_heads=1, head_dim=64)
    layout = "page layer token head dim" if table.separate_kv else "page kv layer token head dim"
    size = 1 if table.token_slots else 16
    return Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=size, table=table, layout=layout, lengths="after")


def test_the_list_is_whole() -> None:
    """Every form that schema/tables/ defines is here, and every module defines one."""
    folder = PACKAGE / "schema" / "tables"
    assert {p.stem for p in folder.glob("*.py")} - {"__init__", "base"} == set(KINDS)
    assert {type(f) for f in FORMS} == set(PageTable.__subclasses__())


@pytest.mark.parametrize("table", FORMS, ids=KINDS)
def test_a_form_is_five_files_of_one_name(table: PageTable) -> None:
    kind = table.model_dump()["kind"]
    cache = cache_of(table)
    assert type(table).__module__ == f"kvgen.schema.tables.{kind}"
    assert callable(importlib.import_module(f"kvgen.lowering.tables.{kind}").form)
    assert type(reading_of(cache, {}, 1, 1)).__module__ == f"kvgen.reference.tables.{kind}"
    template = Path(table_form(cache).template)
    assert (templates_root() / "cache" / f"{kind}.j2").is_file() and (templates_root() / template).is_file()
    if not isinstance(table, States):
        header = templates_root() / "device" / "cache" / table_form(cache).header
        assert f"struct {table_form(cache).policy} " in header.read_text(encoding="utf-8")
    assert template.stem.startswith(kind), "a second text of a form has its name first"


@pytest.mark.parametrize("room", ["lowering/tables", "reference/tables"])
def test_a_room_has_no_other_form(room: str) -> None:
    modules = {p.stem for p in (PACKAGE / room).glob("*.py")}
    assert modules - {"__init__", "base", "view", "rows"} == set(KINDS)


def test_no_text_is_of_no_form() -> None:
    texts = {p.stem for p in (templates_root() / "cache").glob("*.j2")} - {"cache.cuh", "states.cuh"}
    assert texts == {Path(table_form(cache_of(t)).template).stem for t in FORMS}


@pytest.mark.parametrize("table", FORMS, ids=KINDS)
def test_what_a_form_says_agrees(table: PageTable) -> None:
    """Facts of the user's model and of the lowered form that stand for the same."""
    form = table_form(cache_of(table))
    assert form.ids == (("k_id", "v_id") if table.separate_kv else ("id",))
    assert bool(form.window) == table.drops_tokens == form.wraps
    assert form.array == form.fields[0].name, "the launcher's lookup_table is the first array"
    assert [e.id for e in form.entries] == ([] if isinstance(table, Offsets) else list(form.ids))


CLASSES = {
    *(c.__name__ for c in PageTable.__subclasses__()),
    *(c.__name__ for c in (AnyCache, Cache, Continuous, Latent, Paged, Ragged, State, PageTable)),
}


def names(*nodes: ast.AST) -> set[str]:
    """The last parts of the names in expressions and patterns."""
    every = [n for node in nodes for n in ast.walk(node)]
    return {n.id for n in every if isinstance(n, ast.Name)} | {n.attr for n in every if isinstance(n, ast.Attribute)}


def asks(node: ast.AST) -> bool:
    """True where it asks for the class of a table or cache: isinstance, a class pattern, `type(x) is C`, `table.kind == ...`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
        return bool(names(*node.args[1:]) & CLASSES)
    if isinstance(node, ast.MatchClass):
        return bool(names(node.cls) & CLASSES)
    if isinstance(node, ast.Compare):
        sides = [ast.unparse(n) for n in (node.left, *node.comparators)]
        classes = any(s.startswith("type(") and s.endswith(")") for s in sides) and bool(names(node) & CLASSES)
        return classes or any(s.endswith("table.kind") for s in sides)
    return False


def questions(tree: ast.AST, function: str = "") -> Iterator[tuple[str, int]]:
    """(function, line) wherever that is asked."""
    for node in ast.iter_child_nodes(tree):
        if asks(node):
            yield function, node.cls.lineno if isinstance(node, ast.MatchClass) else getattr(node, "lineno", 0)
        yield from questions(node, node.name if isinstance(node, ast.FunctionDef) else function)


def test_one_place_of_a_room_asks_for_a_class() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), function, line)
        for path in sorted(PACKAGE.rglob("*.py"))
        for function, line in questions(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert {(f, function) for f, function, _ in found} >= DISPATCHES, "a listed place asks no more: drop it"
    wrong = [f"kvgen/{f}:{line} ({function})" for f, function, line in sorted(found) if (f, function) not in DISPATCHES]
    assert not wrong, (
        f"{', '.join(wrong)}: ask kvgen.lowering.tables, kvgen.lowering.allocation, or the model's own facts"
    )


def test_the_search_sees_what_it_should() -> None:
    text = """
def f(table, cache):
    if isinstance(cache.page_table, Dense | Indirect) or isinstance(table, (spec.CSR, int)):
        pass
    match table:
        case Ring(window=w):
            pass
    return type(table) is PerKV or table.kind == "csr" or isinstance(cache, Paged)
def g(x):
    return isinstance(x, str), type(x).__name__, "CSR" in x
"""
    assert [line for _, line in questions(ast.parse(text))] == [3, 3, 6, 8, 8, 8]
    assert {function for function, _ in questions(ast.parse(text))} == {"f"}
