"""Compiling exported headers with the host's compiler, and running them against the stub of libcuda.

A program is kept in kvgen's cache folder under the digest of its preprocessed text, the stub, the compiler and its options: a
text that was compiled before is preprocessed, not compiled again. Programs are run each time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from cuda.pathfinder import find_nvidia_header_directory

from kvgen.paths import cache_folder

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


@functools.cache
def _version() -> str:
    """What the compiler calls itself."""
    return run(compiler(), "--version")


def kept(source: Path, *options: str) -> Path:
    """Where the result of compiling `source` with FLAGS and `options` is kept; it fails on what the preprocessor warns of."""
    text = run(compiler(), *FLAGS, *options, "-isystem", cuda_include(), "-E", "-P", str(source))
    stub = (HERE / "stub.cpp").read_text(encoding="utf-8")
    flags = [o for o in options if not o.startswith("-I")]  # which files these find is in the text
    digest = hashlib.sha256(repr((_version(), FLAGS, flags, cuda_include(), stub, text)).encode()).hexdigest()
    return cache_folder() / "export-tests" / digest


def keep(made: Path, place: Path) -> None:
    """Put a copy of a file where `kept` says, whole or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        os.replace(shutil.copy(made, Path(folder) / "made"), place)


def program(folder: Path, source: str, *include: Path) -> Path:
    """A program of this text and the stub of libcuda; of a text that is known, the copy that is kept."""
    main, made = folder / "main.cpp", folder / "main"
    main.write_text(source, encoding="utf-8")
    place = kept(main, *(f"-I{folder}" for folder in include))
    if not place.is_file():
        compile_cpp(main, folder / "main.o", *include)
        run(compiler(), str(folder / "main.o"), f"{_stub().name}/stub.o", "-o", str(made))
        keep(made, place)
    return Path(shutil.copy(place, made))


def clean(source: Path, *options: str) -> None:
    """`source` compiles without a warning; `options` are the compiler's beside FLAGS. A text that was clean before is not
    compiled again."""
    place = kept(source, *options)
    if not place.is_file():
        run(compiler(), *FLAGS, *options, "-isystem", cuda_include(), "-fsyntax-only", str(source))
        with tempfile.NamedTemporaryFile() as nothing:
            keep(Path(nothing.name), place)


def write(folder: Path, files: Iterable[tuple[str, str]]) -> None:
    """Write texts below a folder."""
    for path, text in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
