"""The lowest and the highest version of every range, installed and run: a table of what works.

    python -m tests.versions                      # every environment of every Python that is there
    python -m tests.versions '3.13-*' '*-docs'    # those of these names

An environment is made by venv and pip alone, from kvgen's wheel, in build/versions/<name>; it goes when all its steps passed, and
its logs stay. Exit status 0 where all passed, 1 otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Final

from tests.versions.bounds import BASE, BUILD_SYSTEM, ROOT, ranges

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
FOLDER: Final = ROOT / "build" / "versions"
_USED: Final = ("cli", "demo", "messages", "kernels")
_TOOLS: Final = ("hypothesis", "pytest")  # of the steps messages and kernels
_PIP: Final = ("-m", "pip", "--quiet", "--disable-pip-version-check")


@dataclass(frozen=True)
class Environment:
    """`lowest` are the groups of pyproject.toml whose packages are at their lowest version; those of others at their highest.
    `wheel`: kvgen itself is installed, with the extras of `groups`; else the packages of `groups` alone."""

    name: str
    version: str
    python: Path
    groups: tuple[str, ...]
    lowest: tuple[str, ...]
    steps: tuple[str, ...]
    wheel: bool = True


@dataclass(frozen=True)
class Result:
    """Of an environment: seconds that pip took, each step's name, whether it passed and its seconds, and what was installed.
    `problem`: why there is no environment."""

    name: str
    install: int = 0
    steps: tuple[tuple[str, bool, int], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    problem: str = ""

    @property
    def fine(self) -> bool:
        """It is there, and every step passed."""
        return not self.problem and all(passed for _, passed, _ in self.steps)


def python_of(version: str) -> Path | None:
    """An interpreter of this minor version: on PATH, or of pyenv; None where there is none."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for candidate in (shutil.which(f"python{version}"), *map(str, pyenv), sys.executable):
        if candidate is None:
            continue
        asked = (candidate, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])")
        done = subprocess.run(
            asked, capture_output=True, text=True
        )  # a shim of pyenv may name a version that is not installed
        if done.returncode == 0 and done.stdout.strip() == version:
            return Path(candidate)
    return None


def environments(version: str, python: Path) -> Iterator[Environment]:
    """Those of one Python; the tools of development are tried on the first one."""
    for cuda in ("cu13", "cu12"):
        groups = ("build", cuda, "sass")
        for pins, low in (("lowest", (BASE, *groups)), ("highest", ())):
            yield Environment(f"{version}-{pins}-{cuda}", version, python, groups, low, _USED)
    if version == PYTHONS[0]:
        low = ("test", BUILD_SYSTEM)
        yield Environment(
            f"{version}-lowest-test", version, python, ("build", "cu13", "sass", "test"), low, ("lint", "package")
        )
        for pins, low in (("lowest", ("docs",)), ("highest", ())):
            yield Environment(f"{version}-{pins}-docs", version, python, ("docs",), low, ("docs",), wheel=False)


@cache
def _wheel() -> Path:
    folder = FOLDER / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run((sys.executable, *_PIP, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)), check=True)
    (found,) = folder.glob("*.whl")
    return found


def _install(of: Environment, folder: Path) -> Path:
    """Make the environment; its interpreter. Raises CalledProcessError."""
    subprocess.run((str(of.python), "-m", "venv", str(folder / "venv")), check=True, capture_output=True, text=True)
    python = folder / "venv" / "bin" / "python"
    allowed = ranges(of.version)
    pins = [f"{each.name}=={each.least}" for each in allowed if each.where in of.lowest]
    (folder / "constraints.txt").write_text("".join(f"{pin}\n" for pin in dict.fromkeys(pins)), encoding="utf-8")
    if of.wheel:
        wanted = [f"{_wheel()}[{','.join(of.groups)}]", *_TOOLS]
    else:
        wanted = [f"{each.name}{each.allowed}" for each in allowed if each.where in of.groups]
    command = (
        str(python),
        *_PIP,
        "install",
        "--only-binary",
        ":all:",
        "--constraint",
        str(folder / "constraints.txt"),
        *wanted,
    )
    subprocess.run(command, check=True, capture_output=True, text=True)
    return python


def tried(of: Environment) -> Result:
    """Make an environment, run its steps, and remove it where they passed."""
    folder, begin = FOLDER / of.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        python = _install(of, folder)
    except subprocess.CalledProcessError as error:
        return Result(of.name, problem=str(error.stderr or error).strip())
    install = round(time.monotonic() - begin)
    listed = subprocess.run(
        (str(python), "-m", "pip", "list", "--format", "json"), capture_output=True, text=True, check=True
    )
    versions = tuple((each["name"].lower().replace("_", "-"), each["version"]) for each in json.loads(listed.stdout))
    trial = (str(python), "-m", "tests.versions.trial", str(folder), *of.steps)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(trial, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    steps = tuple((line["step"], line["fine"], line["seconds"]) for line in lines)
    result = Result(of.name, install, steps, versions, "" if len(steps) == len(of.steps) else "the trial ended early")
    if result.fine:
        shutil.rmtree(folder / "venv")
    return result


def _report(result: Result) -> str:
    if result.problem:
        return f"{result.name:20} FAILED: {result.problem}"
    cells = [f"install {result.install} s"]
    for step, passed, seconds in result.steps:
        log = (FOLDER / result.name / f"{step}.log").relative_to(ROOT)
        cells.append(f"{step} {seconds} s" if passed else f"{step} FAILED ({log})")
    return f"{result.name:20} {', '.join(cells)}"


def _versions(results: Sequence[Result]) -> Iterator[str]:
    """A line a package: its version in each environment that has it at an end of its range."""
    columns = [result for result in results if result.versions]
    width = max((len(result.name) for result in columns), default=0) + 1
    yield f"{'':26}" + "".join(f"{result.name:>{width}}" for result in columns)
    for name in dict.fromkeys(each.name for each in ranges(PYTHONS[0])):
        found = [dict(result.versions).get(name, "") for result in columns]
        if any(found):
            yield f"{name:26}" + "".join(f"{version:>{width}}" for version in found)


def main() -> int:
    """Try the environments whose names fit."""
    asked = sys.argv[1:] or ["*"]
    results: list[Result] = []
    for version in PYTHONS:
        python = python_of(version)
        if python is None:
            print(f"{version:20} not here", flush=True)
            continue
        for each in environments(version, python):
            if any(fnmatchcase(each.name, pattern) for pattern in asked):
                results.append(tried(each))
                print(_report(results[-1]), flush=True)
    if not results:
        print(f"no environment is called {', '.join(asked)}", file=sys.stderr)
        return 1
    print("\n".join(["", *_versions(results)]))
    return 0 if all(result.fine for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
