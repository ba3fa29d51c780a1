"""Commands that pages tell to type: their verbs and options exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvgen.cli.app import app
from tests.docs.blocks import PAGES, ROOT, commands

LATER = {"new"}  # verbs that the pages name and that are on their way


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_verbs_and_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    seen = 0
    for line in commands(page):
        for part in re.split(r"&&|\|", line):
            words = shlex.split(part)
            if words[:1] == ["make"]:
                makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
                assert re.search(rf"^{words[1]}:", makefile, re.M), f"{line}: make has no such target"
            if (
                words[:1] == ["python"]
                and words[1] == "-m"
                and words[2].split(".")[0] in ("tests", "benchmarks", "docpages")
            ):
                path = ROOT / words[2].replace(".", "/")
                assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), line
            if words[:1] != ["kvgen"] or not words[1:] or words[1] in LATER - set(group.commands):
                continue
            verb = group.commands[words[1]]
            known = {o for p in verb.params for o in p.opts} | {"-h", "--help"}
            given = {w.split("=")[0] for w in words[2:] if w.startswith("-")}
            assert given <= known, f"{line}: kvgen {words[1]} has no {', '.join(sorted(given - known))}"
            seen += 1
    assert seen or not any(c.startswith("kvgen") for c in commands(page) if not c.startswith("kvgen new"))
