"""What mypy says of calls: the right ones pass, and every wrong one is found where it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

RIGHT: Final = """
import numpy as np
from kvgen import ErrorWord
from generated.engine_llama3_8b import Cache, append, copy_pages, decode, gather

array = np.zeros(1, np.float32)
cache = Cache.empty(layers=2, requests=1, pages=4)
q = append(cache[0], array, array, array, array, array, errors=ErrorWord("cpu"))
workspace = decode.workspace(1)
decode.plan(cache, workspace)
decode.plan(cache[0], workspace, rows=1)
out = decode(cache[0], q, array, workspace).out
rows = gather(cache[1], array, array, array, starts=None).k_out
later = cache.step(array, max_cache_length=7)
bound = append.bind(later[1], array, array, array, array, array, stream=0)
bound(cache=cache[1], q=out, k=rows)
copy_pages(cache, array, check=True)
"""

WRONG: Final = (
    "append(cache[0], array, array, array, array, array).launch()",
    "append.bind(cache[0], array, array, array, array)",
    "append.bind(cache, array, array, array, array, array)",
    "append.bind(cache[0], array, array, array, array, array).launch()",
    'decode.bind_plan(cache[0], workspace, rows="3")',
    "copy_pages(cache[0], array)",
    "copy_pages.check(cache, array, num=array)",
    'append(cache[0], "q", array, array, array, array)',
    "append(cache[0], array, None, array, array, array)",
    "append(cache, array, array, array, array, array)",
    "append(cache[0], array, array, array, array)",
    "append(cache[0], array, array, array, array, array, error=None)",
    "append(cache[0], array, array, array, array, [0, 1])",
    "decode(cache[0], array, array)",
    "decode(cache[0], array, array, array)",
    "decode(cache[0], array, array, workspace).output",
    "decode.plan(workspace)",
    'decode.workspace("64")',
    "decode.workspace(64, multiprocessors=1.5)",
    "Cache(3, lengths=array, page_table=array)",
    "Cache(array, array, array)",
    'cache["0"]',
    "cache.step(length=array)",
    "Cache.empty(layers=1)",
    "bound(k='k')",
    "bound(cache=cache)",
    "append.bind(cache[0], array, array, array, array, array)(0, 1)",
)


def mypy(program: str, folder: Path) -> str:
    """What mypy says of a program."""
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_right_calls_pass_and_wrong_ones_are_found(tmp_path: Path) -> None:
    said = mypy(RIGHT + "\n".join(WRONG) + "\n", tmp_path)
    first = RIGHT.count("\n") + 1
    found = {int(n) for n in re.findall(r"program\.py:(\d+): error: ", said)}
    assert not {n for n in found if n < first}, said
    missed = [call for n, call in enumerate(WRONG, start=first) if n not in found]
    assert not missed, said
