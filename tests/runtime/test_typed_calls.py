"""Calls of a generated package, as a type checker sees them: what is derived from a signature is checked as that is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvgen import paths

_CALLS: Final = """
from generated.engine_llama3_8b import Cache, append, copy_pages, decode
from kvgen.runtime import Workspace

def right(cache: Cache, workspace: Workspace, x: object) -> None:
    step = append.bind(cache[0], x, x, x, x, x, errors=x, stream=x)
    step(x)
    append(cache[0], x, x, x, x, x, errors=x, stream=x)
    decode.plan(cache[0], decode.workspace(3), rows=3, row_offsets=x)
    copy_pages(cache, x, check=True)

def wrong(cache: Cache, workspace: Workspace, x: object) -> None:
    append(cache[0], x, x, x, x)  # call-arg
    append.bind(cache[0], x, x, x, x)  # call-arg
    append(cache, x, x, x, x, x)  # arg-type
    append.bind(cache, x, x, x, x, x)  # arg-type
    append(cache[0], x, x, x, x, x, error=x)  # call-arg
    append.bind(cache[0], x, x, x, x, x, error=x)  # call-arg
    append(cache[0], x, x, x, x, x)()  # misc
    append.bind(cache[0], x, x, x, x, x).launch()  # attr-defined
    decode(cache[0], x, x, x)  # arg-type
    decode.plan(cache[0], x)  # arg-type
    decode.bind_plan(cache[0], workspace, rows="3")  # arg-type
    copy_pages(cache[0], x)  # arg-type
    copy_pages.check(cache, x, num=x)  # call-arg
"""


def test_calls_and_bound_calls_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "calls.py"
    path.write_text(_CALLS, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", path]
    done = subprocess.run(command, cwd=paths.templates_root().parent, capture_output=True, text=True, check=False)
    found = re.findall(r"calls\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M)
    wanted = [(str(n), line.split("#")[1].strip()) for n, line in enumerate(_CALLS.split("\n"), 1) if "#" in line]
    assert found == wanted, done.stdout + done.stderr
