"""Python decides and templates write C: what kvgen/ops, lowering, codegen and export hand on are numbers, flags and names.

Expressions may be written by kvgen.expr, and the lines of a user's score function by its tracer. Everything else that reads
as C in a string there is found by a walk over the syntax tree; texts that people read, or that Python reads, are no C.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvgen

PACKAGE = Path(kvgen.__file__).parent
ROOMS = ("ops", "lowering", "codegen", "export")
# They write Python: the generated package's `__init__.py` and `_table.py`. `custom` reads C, the user's; the last two write
# comments and Markdown.
OTHERS = (
    "lowering/launcher_module.py", "lowering/launcher_table.py", "lowering/module_tensors.py", "ops/custom.py", "export/docs.py",
    "codegen/sets_page.py",
)  # fmt: skip
# What makes a text C. What an f-string is filled with reads as the name x0.
COMPARED, JOINED = r"[<>=!]=", r"&&|\|\|"
ANY = rf"(?:[-+*/%^&|<>]|<<|>>|{COMPARED}|{JOINED})"
RULES = {
    "an operator": rf"[\w)\]] {ANY} [\w(!~*&-]|[a-z_0-9)\]](?:[*%]|{COMPARED}|{JOINED})[a-z_(!]",
    "part of an operation": rf"^\s*{ANY} | {ANY}\s*$",
    "a choice": r" \? | : $",
    "a member": r"->|(?<![/.\w])(?:at|cache|chunk|claim|found|ids|in|page|pages|shared|source)\.(?!cuh|j2)\w",
    "a scope": r"::",
    "a call": r"\w\(",
    "an element": r"\w\[",
    "a cast": r"\((?:const )?(?:\w+ ?\*+|u?int\d+_t|float|bool|x0)\)(?=[\w(]|$)",
    "a statement": r";\s*$|(?<!\{)\}\s*$|\{\s*$|^\s*\}|^\s*\{[^}]",
    "a literal": r"\b(?:0x\w+|\d+(?:u|ull)|\d+\.0f|x0(?:u|ull|f))\b|\bnullptr\b|\bkU32Max\b|~0",
}
# Texts that people read: by the argument or variable that takes them, by backticks, or as a sentence.
WORDS = ("doc", "title", "field", "fields", "which", "valid")
SENTENCE = re.compile(r"`|^[A-Z][a-z]* .*\.$")


def reads_as_c(text: str) -> str:
    """Which rule says that a text is C; empty where none does."""
    if SENTENCE.search(text):
        return ""
    return next((name for name, rule in RULES.items() if re.search(rule, text)), "")


def _skipped(tree: ast.AST) -> Iterator[ast.AST]:
    """What is no C by where it stands: docs and messages, regular expressions, parts of f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Raise | ast.Assert) or (isinstance(node, ast.keyword) and node.arg in WORDS):
            yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id in WORDS for t in targets):
                yield node
            if isinstance(node, ast.AnnAssign):
                yield node.annotation
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            yield node
        elif isinstance(node, ast.JoinedStr):
            yield from (v for v in node.values if isinstance(v, ast.Constant))


def found_in(source: str) -> list[tuple[int, str, str]]:
    """(line, rule, text) of every string in a module's text that is C."""
    tree = ast.parse(source)
    skipped = {id(inner) for node in _skipped(tree) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "x0" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        rule = reads_as_c(text)
        if rule:
            found.append((node.lineno, rule, text))
    return sorted(found)


def modules() -> dict[str, str]:
    """The text of every module that hands something to templates."""
    paths = sorted(p for room in ROOMS for p in (PACKAGE / room).rglob("*.py"))
    named = {p.relative_to(PACKAGE).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    return {name: text for name, text in named.items() if name not in OTHERS}


def test_python_writes_no_c() -> None:
    found = [
        f"kvgen/{name}:{line}: {rule}: {text!r}"
        for name, source in modules().items()
        for line, rule, text in found_in(source)
    ]
    assert not found, "C belongs in a template; hand it a flag, a number or a name:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ('place = f"cache.{x} + 1"', "an operator"),
        ('place = f"{a} * {b}"', "an operator"),
        ('context(place="(int64_t)row * stride")', "an operator"),
        ('checks.append(f"{i}>=num_pages")', "an operator"),
        ('text = " || ".join(checks)', "part of an operation"),
        ('factor = "" if plain else " * kFactor"', "part of an operation"),
        ('before = f"{n} + "', "part of an operation"),
        ('place = f"valid ? {x} : {y}"', "a choice"),
        ('place = "page->k"', "a member"),
        ('place = f"cache.{x}"', "a member"),
        ('fault = f"Fault::{x}"', "a scope"),
        ('value = "infinity()"', "a call"),
        ('value = f"load_index({x}, b)"', "a call"),
        ('value = "unit[n]"', "an element"),
        ('cast = f"({t}*)"', "a cast"),
        ('cast = "(const float*)"', "a cast"),
        ('line = f"{x};"', "a statement"),
        ('opens = f"namespace {x} {{"', "a statement"),
        ('mask = f"{x:#x}u"', "a literal"),
        ('value = "nullptr"', "a literal"),
        ('found = {"a": ("tokens % 4",)}', "an operator"),
        ('def f() -> str:\n    """Doc."""\n    return f"cache.{x} + 1"', "an operator"),
    ],
)
def test_c_is_found(code: str, rule: str) -> None:
    assert [name for _, name, _ in found_in(code)] == [rule]


@pytest.mark.parametrize(
    "code",
    [
        '"""Where `cache.k + 1` lies."""',
        'class A:\n    """A f(x)."""\n    x: int\n    """Of f(x)."""',
        'raise ValueError(f"got {x}; use CSR() with a[b] + 1;")',
        'Array("k", doc="slot, page id * page_size + offset")',
        'doc = "rows q | k | v"',
        're.search(r"\\w->\\w", text)',
        'x: "dict[str, int]" = {}',
        'why = "a token\'s dims do not lie side by side"',
        'ways = {"slots": "A row goes to page slot // page_size, token slot % page_size."}',
        'place = c(var("element") // size + begin)',
        'template = "cache/cache.cuh.j2" if x else f"places/{x}.j2"',
        'names = ("B+1", "uint32_t", "page_table", f"{name}_stride", f"{x}.cuh")',
        'view = f"Values<{struct}, {value}>"',
        'layout = "page layer head token dim"',
        'number = f"{x!r}"',
    ],
)
def test_what_people_or_python_read_is_no_c(code: str) -> None:
    assert found_in(code) == []


def test_the_walk_sees_every_module() -> None:
    names = set(modules())
    assert {"ops/append.py", "ops/decode.py", "lowering/attention/masks_scores.py", "lowering/tables/base.py"} <= names
    assert "codegen/render.py" in names and set(OTHERS) <= {
        p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py")
    }
