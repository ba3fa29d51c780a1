"""Compiling exported headers with the host's compiler, and running them against the stub of libcuda."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from cuda.pathfinder import find_nvidia_header_directory

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wpedantic", "-O0")


@functools.cache
def compiler() -> str:
    """The host's C++ compiler."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.fail("exported headers are compiled by g++ or clang++; install one")
    return found


@functools.cache
def cuda_include() -> str:
    """The folder of cuda.h: of the wheel nvidia-cuda-runtime, which the extra `test` has, or of a toolkit."""
    found = find_nvidia_header_directory("cudart")
    if found is None or not (Path(found) / "cuda.h").is_file():
        pytest.fail("cuda.h: found in no wheel and no toolkit; `pip install 'kvgen[test]'` brings it")
    return found


def compile_cpp(source: Path, out: Path, *include: Path) -> None:
    """An object file of `source`; warnings are errors, but for those of cuda.h."""
    folders = [f"-I{folder}" for folder in include]
    run(compiler(), *FLAGS, "-isystem", cuda_include(), *folders, "-c", str(source), "-o", str(out))


def run(*command: str, **environment: str) -> str:
    """Run a command; what it printed, or a failure that shows it."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment or None)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@functools.cache
def _stub() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="kvgen_stub_cuda")
    compile_cpp(HERE / "stub.cpp", Path(folder.name) / "stub.o")
    return folder


def program(folder: Path, source: str, *include: Path) -> Path:
    """A program of this text and the stub of libcuda."""
    (folder / "main.cpp").write_text(source, encoding="utf-8")
    compile_cpp(folder / "main.cpp", folder / "main.o", *include)
    run(compiler(), str(folder / "main.o"), f"{_stub().name}/stub.o", "-o", str(folder / "main"))
    return folder / "main"


def write(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write texts below a folder."""
    for path, text in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
