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
from generated.llama3_8b import Cache, append, decode, gather

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
"""

WRONG: Final = {
    'append(cache[0], "q", array, array, array, array)': "arg-type",
    "append(cache[0], array, None, array, array, array)": "arg-type",
    "append(cache, array, array, array, array, array)": "arg-type",
    "append(cache[0], array, array, array, array)": "call-arg",
    "append(cache[0], array, array, array, array, array, error=None)": "call-arg",
    "append(cache[0], array, array, array, array, [0, 1])": "arg-type",
    "decode(cache[0], array, array)": "call-arg",
    "decode(cache[0], array, array, array)": "arg-type",
    "decode(cache[0], array, array, workspace).output": "attr-defined",
    "decode.plan(workspace)": "call-arg",
    'decode.workspace("64")': "arg-type",
    "decode.workspace(64, multiprocessors=1.5)": "arg-type",
    "Cache(3, lengths=array, page_table=array)": "arg-type",
    "Cache(array, array, array)": "misc",
    'cache["0"]': "index",
    "cache.step(length=array)": "call-arg",
    "Cache.empty(layers=1)": "call-arg",
    "bound(k='k')": "arg-type",
    "bound(cache=cache)": "arg-type",
    "append.bind(cache[0], array, array, array, array, array)(0, 1)": "call-arg",
}


def mypy(program: str, folder: Path) -> str:
    """What mypy says of a program."""
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_right_calls_pass_and_wrong_ones_are_found(tmp_path: Path) -> None:
    said = mypy(RIGHT + "\n".join(WRONG) + "\n", tmp_path)
    first = RIGHT.count("\n") + 1
    found = {int(m[1]): m[2] for m in re.finditer(r"program\.py:(\d+): error: .*\[([\w-]+)\]$", said, re.MULTILINE)}
    assert {n: code for n, code in found.items() if n < first} == {}, said
    lines = {first + i: call for i, call in enumerate(WRONG)}
    missed = [call for n, call in lines.items() if n not in found]
    assert not missed, said
    assert {lines[n]: code for n, code in found.items() if n in lines} == WRONG
