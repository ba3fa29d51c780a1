"""What pages show: blocks of code with the file that their first line names, and commands in indented blocks."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.cli.conftest import Folder

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE: Final = re.compile(r"^```(\w+)\n(.*?)^```", re.S | re.M)
_FILE: Final = re.compile(r"(?:#|//) (\S+\.\w+)\n")
_COMMAND: Final = re.compile(r"^    (?=(?:kvgen|pip|make|python) )(.+)$", re.M)

# A process that has read kvgen's modules for a launch and the packages below them, and splits off another for each request.
_SERVER: Final = """
import json, multiprocessing.process, os, runpy, sys, traceback
import cuda.core, ml_dtypes, numpy, kvgen.compile, kvgen.emulator, kvgen.runtime
for request in sys.stdin:
    root, programs, environment, printed, complained = json.loads(request)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    os.chdir(root)
    multiprocessing.process.ORIGINAL_DIR = root  # it notes the folder that a process begins in
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate((os.devnull, printed, complained)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
    raised = {}
    for program in programs:
        try:
            runpy.run_path(program, run_name="__main__")
        except BaseException:
            raised[program] = traceback.format_exc()
    print(json.dumps(raised))
    break
"""


def fences(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each fenced block."""
    return [(m[1], m[2]) for m in _FENCE.finditer(page.read_text(encoding="utf-8"))]


def files(page: Path) -> dict[str, str]:
    """Text by the file name in its first line, of the blocks that have one; without that line."""
    found = {}
    for _, text in fences(page):
        match = _FILE.match(text)
        if match:
            found[match[1]] = text[match.end() :]
    return found


def commands(page: Path) -> list[str]:
    """The commands that a page tells to type, without comments."""
    return [re.sub(r"\s+#.*", "", m[1]) for m in _COMMAND.finditer(page.read_text(encoding="utf-8"))]


def project(root: Path, *pages: Path) -> Folder:
    """A project with the files of these pages."""
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    for page in pages:
        for name, text in files(page).items():
            if name != "pyproject.toml":
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
    return Folder(root)


@functools.cache
def _server() -> subprocess.Popen[str]:
    command, environment = (sys.executable, "-c", _SERVER), os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def run(root: Path, *programs: str) -> tuple[dict[str, str], str]:
    """Each program as `python PROGRAM` runs it, all in one new process: what those raise that do not end well, by their names;
    and all that is printed."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        printed, complained = Path(folder) / "stdout", Path(folder) / "stderr"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        print(
            json.dumps((str(root), programs, environment, str(printed), str(complained))), file=server.stdin, flush=True
        )
        assert server.stdout.readline() == "0\n", complained.read_text() if complained.exists() else "the server ended"
        *lines, last = printed.read_text(encoding="utf-8").splitlines()
    raised: dict[str, str] = json.loads(last)
    return raised, "\n".join(lines)
