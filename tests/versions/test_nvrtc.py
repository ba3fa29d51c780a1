"""Older versions of NVRTC, of those that pyproject.toml allows: a handful of kernels compile, and a copied page is right.

Each in a process of its own, for cuda.bindings loads one library. `make test` puts the libraries into .venv-nvrtc, from wheels;
`make campaign` compiles every template by them, and `make versions` has environments with the first version of each range.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.versions.kernels import HANDFUL
from tests.versions.under import FOLDER, OLD, libraries

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", OLD)
def test_a_handful_compiles(version: str) -> None:
    if not libraries(version):
        pytest.skip(f"NVRTC {version} is not in {FOLDER.name}: `make test` puts it there")
    command = (sys.executable, "-m", "tests.versions.under", version, "tests.versions.kernels")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    minor = ".".join(version.split(".")[:2])
    assert done.stdout.startswith(f"NVRTC {minor}: {len(HANDFUL)} kernels compile"), done.stdout
