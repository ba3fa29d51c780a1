"""Ranges are stated alike in pyproject.toml and docs/dependencies.md."""

from __future__ import annotations

import re

import pytest
from packaging.utils import canonicalize_name

from kvgen.cli.app import VERBS as APPLICATION
from tests.versions.__main__ import PYTHONS
from tests.versions.bounds import BASE, BUILD_SYSTEM, ROOT, Range, ranges
from tests.versions.trial import VERBS


def _words(of: Range) -> str:
    """A range as the page writes it: `>= 1.26, < 3`."""
    return ", ".join(
        re.sub(r"([<>=]+)", r"\1 ", str(s)) for s in sorted(of.allowed, key=lambda s: s.operator, reverse=True)
    )


def _rows() -> dict[tuple[str, str, str], str]:
    """(where, package, Python) -> range, of the page's table; the Python is "" where the row says none."""
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    found: dict[tuple[str, str, str], str] = {}
    for packages, allowed, where in re.findall(r"^\| ([a-z][^|]*) \| (>=[^|]*) \| ([^|]*) \|", page, re.M):
        for words, bounds in zip(packages.split(", "), allowed.split("; "), strict=True):
            name, _, python = words.partition(" on Python ")
            for place in where.split(", "):
                extra = re.fullmatch(r"`kvgen\[(\w+)\]`", place)
                key = (extra[1] if extra else place.strip("`"), canonicalize_name(name.partition("[")[0]), python)
                assert key not in found, f"{key}: two rows"
                found[key] = bounds
    return found


def test_every_range_has_two_ends() -> None:
    for each in (each for python in PYTHONS for each in ranges(python)):
        assert sorted(s.operator for s in each.allowed) == ["<", ">="], each


@pytest.mark.parametrize("python", PYTHONS)
def test_the_table_has_every_range(python: str) -> None:
    rows = _rows()
    stated = {key[:2]: rows.get((*key[:2], python), rows[(*key[:2], "")]) for key in rows}
    assert stated == {(each.where, each.name): _words(each) for each in ranges(python)}


def test_build_and_test_have_the_same_backend() -> None:
    backends = {each.where: each.allowed for each in ranges(PYTHONS[0]) if each.name == "hatchling"}
    assert set(backends) == {BUILD_SYSTEM, "test"} and len(set(map(str, backends.values()))) == 1
    assert {each.name for each in ranges(PYTHONS[0]) if each.where == BASE} == {"cuda-core", "ml-dtypes", "numpy"}


def test_the_trial_asks_every_verb_for_help_and_every_python_is_tried() -> None:
    assert sorted(VERBS) == sorted(APPLICATION)
    workflow = (ROOT / ".github/workflows/versions.yml").read_text(encoding="utf-8")
    assert re.findall(r'"(3\.\d+)"', workflow) == list(PYTHONS)
