"""The words of docstrings and comments, and the width of generated CUDA: clean in every file that changes, counted in the others.

tests/language.txt has the files that still have offences, each with the digest of its text: a file whose text has changed since
must have none. A last line counts the lines of generated CUDA that are too wide: there may not be more of them. `python -m
tests.test_language` writes it, once the files that changed are clean.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = ROOT / "tests" / "language.txt"
WIDEST: Final = 130  # columns of generated CUDA
# Sentences that begin with a pronoun for a noun that the reader does not have yet.
OPENING: Final = re.compile(r"(?:What|Those|Of|Whether|The same)\b")
# Where one may begin: behind the quotes of a string, or behind the slashes of a comment.
BEGINS: Final = re.compile(rf"""(?:["']\\?|//)\s*{OPENING.pattern}""")
# A number that the plural of a noun contradicts: "1 heads".
ONE: Final = re.compile(
    r"\b1 (?:blocks|bytes|columns|elements|groups|heads|keys|layers|requests|rows|tiles|tokens|warps)\b"
)
PYTHON: Final = ("kvgen", "tests", "benchmarks", "docpages", "specs")
CUDA: Final = ("templates",)


def docstrings(text: str) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, and those under fields."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for statement in node.body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


def comments(text: str) -> Iterator[str]:
    """The sentences that begin a comment of CUDA: a `//` at the beginning of a line that continues none."""
    before = False
    for line in text.splitlines():
        found = re.match(r"\s*// ?(.*)", line)
        if found and not before:
            yield found[1]
        before = found is not None


def offences(path: Path) -> int:
    """How many docstrings or comments of a file begin as none should."""
    text = path.read_text(encoding="utf-8")
    if not BEGINS.search(text):  # parsing all of them takes seconds
        return 0
    said = docstrings(text) if path.suffix == ".py" else comments(text)
    return sum(OPENING.match(sentence) is not None for sentence in said)


def written() -> Iterator[tuple[str, int, str]]:
    """Every file that people write, its offences, and the digest of its text."""
    for folders, patterns in ((PYTHON, ("*.py",)), (CUDA, ("*.j2", "*.cuh"))):
        for folder in folders:
            for pattern in patterns:
                for path in sorted((ROOT / folder).rglob(pattern)):
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
                    yield path.relative_to(ROOT).as_posix(), offences(path), digest


def wide() -> int:
    """How many lines of generated CUDA are too wide."""
    texts = (p.read_text(encoding="utf-8") for s in ("*.cu", "*.cuh") for p in (ROOT / "generated").rglob(s))
    return sum(len(line) > WIDEST for text in texts for line in text.splitlines())


def table() -> dict[str, tuple[int, str]]:
    """The lines of tests/language.txt: offences and digest of each file, and the wide lines of "generated", without a digest."""
    rows = (line.split() for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {name: (int(count), digest[0] if digest else "") for name, count, *digest in rows}


def test_files_that_change_are_clean() -> None:
    known = table()
    wrong = [
        f"{name}: {count} docstrings or comments begin with What, Those, Of, Whether or The same; begin with the noun"
        for name, count, digest in written()
        if count and known.get(name, (0, ""))[1] != digest
    ]
    assert not wrong, "\n".join(wrong)


def test_generated_lines_do_not_become_wider() -> None:
    assert wide() <= table()["generated"][0]


def test_a_single_thing_is_no_plural() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in sorted(p for suffix in ("*.cu", "*.cuh") for p in (ROOT / "generated").rglob(suffix))
        for line in path.read_text(encoding="utf-8").splitlines()
        if "//" in line and (found := ONE.search(line.partition("//")[2]))
    ]
    assert not wrong, "\n".join(wrong)


def test_what_it_finds(tmp_path: Path) -> None:
    """A docstring and a comment that begin wrongly are found, a continued comment is none."""
    python, cuda = tmp_path / "a.py", tmp_path / "a.cuh"
    python.write_text(
        '"""Modules."""\n\n\ndef f():\n    """Those of the row."""\n\n\nclass A:\n    x: int\n    """Whether x."""\n'
    )
    cuda.write_text("// What a row has.\nint a;\n// A row,\n// Of tokens.\n")
    assert (offences(python), offences(cuda)) == (2, 1)
    assert ONE.search("of 1 heads") and not ONE.search("of 11 heads") and not ONE.search("1 head")


if __name__ == "__main__":
    lines = [f"{name} {count} {digest}" for name, count, digest in written() if count]
    lines += [f"generated {wide()}"]
    head = "# Sentences that begin as none should, by file with its digest; wide lines of generated CUDA. See test_language.py.\n"
    TABLE.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
