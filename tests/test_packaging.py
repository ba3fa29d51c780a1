"""kvgen as its users have it: a wheel, and a repository of their own elsewhere."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvgen.extras import BUILD as EXTRA_BUILD

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("build", "cu12", "cu13", "docs", "sass", "sweep", "test")

PROJECT = """
[tool.kvgen]
specs = "kernels/specs"
out = "src/engine/kernels"
"""

SPEC = '''
"""A small cache for the engine."""
from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads=4,
    cache=Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4),
    ops=[ops.Append(), ops.Gather(), ops.Decode()],
)
'''

USE = """
import sys
import numpy as np
from engine.kernels.small import Cache, append, decode, gather

pool = np.zeros((3, 2, 1, 4, 2, 16), np.float16)
cache = Cache(pool, lengths=np.array([3], np.int32), page_table=np.array([[2, 0]], np.int32))
k = np.arange(2 * 2 * 16, dtype=np.float16).reshape(2, 2, 16)
append(cache[0], k, k + 1, np.array([0, 2], np.int32))
assert (pool[2, 0, 0, 3] == k[0]).all() and (pool[0, 1, 0, 0] == k[1] + 1).all()
out_k, out_v = np.empty_like(k), np.empty_like(k)
gather(cache[0], np.array([0, 2], np.int32), out_k, out_v, starts=np.array([3], np.int32))
assert (out_k == k).all() and (out_v == k + 1).all()
print("used", pool.sum())
"""

# As if these were not installed: neither imported nor found.
WITHOUT = """
from importlib.machinery import PathFinder

ABSENT = {"jinja2", "packaging", "pydantic", "pydantic_core", "rich", "typer", "click"}
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in ABSENT else find(name, *rest)
"""

BUILD = "`pip install 'kvgen[build]'`; this environment has the runtime of generated kernels alone, without"


def run(*command: str, cwd: Path, path: str) -> str:
    """Run a command with `path` as PYTHONPATH; its output, or a failure that shows it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fails(*command: str, cwd: Path, path: str) -> str:
    """Run a command that ends with an error; what it says on stderr."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stderr


# Of the build backend itself: a line of JSON on stdin is one sdist or wheel to make, in this process.
BUILD_ALL = """
import json, os, sys
import hatchling.build
for kind, out, epoch in json.load(sys.stdin):
    os.environ.pop("SOURCE_DATE_EPOCH", None)
    if epoch is not None:
        os.environ["SOURCE_DATE_EPOCH"] = str(epoch)
    os.makedirs(out, exist_ok=True)
    print("made", getattr(hatchling.build, f"build_{kind}")(out))
"""


def built(source: Path, *jobs: tuple[str, Path, int | None]) -> list[Path]:
    """Sdists and wheels of `source`: (kind, folder, SOURCE_DATE_EPOCH)."""
    given = json.dumps([(kind, str(out), epoch) for kind, out, epoch in jobs])
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", BUILD_ALL]
    done = subprocess.run(command, cwd=source, env=environment, input=given, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    names = [line.removeprefix("made ") for line in done.stdout.splitlines() if line.startswith("made ")]
    return [out / name for (_, out, _), name in zip(jobs, names, strict=True)]


def build(kind: str, source: Path, out: Path, epoch: int | None = None) -> Path:
    """One sdist or wheel of `source`."""
    return built(source, (kind, out, epoch))[0]


def copied(folder: Path) -> Path:
    """The packed files, as another checkout has them: other times, other permissions, made in another order, modules compiled."""
    names = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore", "templates", "kvgen")
    files = [
        f for n in names for f in ([ROOT / n] if (ROOT / n).is_file() else sorted((ROOT / n).rglob("*"), reverse=True))
    ]
    for file in files:
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1, 1))
    cache = folder / "kvgen" / "__pycache__"
    cache.mkdir()
    (cache / "paths.cpython-311.pyc").write_bytes(b"compiled")
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.campaign
def test_two_checkouts_give_the_same_bytes(tmp_path: Path) -> None:
    """SOURCE_DATE_EPOCH is the only time in them; without it the build backend has one of its own."""
    jobs = [(kind, epoch) for kind in ("wheel", "sdist") for epoch in (None, 1_750_000_000)]
    mine, others = (
        built(source, *((kind, tmp_path / f"{name}{epoch}", epoch) for kind, epoch in jobs))
        for name, source in (("a", ROOT), ("b", copied(tmp_path / "other")))
    )
    for first, second in zip(mine, others, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes(), first.name
    for without, dated in (mine[:2], mine[2:]):
        assert without.name == dated.name
        assert without.read_bytes() != dated.read_bytes(), "the epoch is in it"


def test_sdist_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path)
    run("tar", "xzf", str(sdist), "-C", str(tmp_path), cwd=tmp_path, path="")
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)
    assert wheel.read_bytes() == again.read_bytes()


def test_wheel_holds_templates_sources_and_no_generated_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for wanted in (
        "kvgen/_templates/device/base/types.cuh",
        "kvgen/_templates/export/kvgen.h",
        "kvgen/py.typed",
        "kvgen/models/llama_3_1_8b.json",
    ):
        assert wanted in names
    assert any(n.startswith("kvgen/emulator/runtime/") for n in names)
    assert {"kvgen/verify/bandwidth.cu", "kvgen/verify/calibrate.cu"} <= set(names)
    assert not any(n.startswith(("generated/", "tests/", "templates/")) for n in names)


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel unpacked, and a project that it built."""
    folder = tmp_path_factory.mktemp("elsewhere")
    site, project = folder / "site", folder / "project"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    specs = project / "kernels" / "specs"
    specs.mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT)
    (specs / "small.py").write_text(SPEC)
    where = run(sys.executable, "-c", "import kvgen; print(kvgen.__file__)", cwd=project, path=str(site))
    assert str(site) in where
    shown = run(sys.executable, "-m", "kvgen", "build", cwd=project / "kernels", path=str(site))
    assert "from engine.kernels.small import" in shown
    return site, project


def test_a_project_elsewhere(elsewhere: tuple[Path, Path], tmp_path: Path) -> None:
    site, project = elsewhere
    run(sys.executable, "-m", "kvgen", "check", cwd=project, path=str(site))
    # Used from another folder, with the package renamed by where it lies.
    assert "used" in run(sys.executable, "-c", USE, cwd=tmp_path, path=f"{site}{os.pathsep}{project / 'src'}")


def test_a_generated_package_needs_the_runtime_alone(elsewhere: tuple[Path, Path], tmp_path: Path) -> None:
    """Without the extra `build`: a generated package runs, and what needs the extra says so, without a traceback."""
    folder, project = elsewhere
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    site = f"{tmp_path}{os.pathsep}{folder}"
    assert "used" in run(sys.executable, "-c", USE, cwd=tmp_path, path=f"{site}{os.pathsep}{project / 'src'}")
    assert run(sys.executable, "-m", "kvgen", "--version", cwd=tmp_path, path=str(site)) == "kvgen 0.2.0\n"
    for verb, extras in (("build", "build"), ("compile", "build and cu13"), ("--help", "build")):
        said = fails(sys.executable, "-m", "kvgen", verb, cwd=project, path=str(site))
        assert said.startswith(
            f"error: kvgen {verb if verb != '--help' else ''}".rstrip() + f" needs kvgen's extra {extras}: "
        )
        assert "Traceback" not in said and "without jinja2, packaging, pydantic, rich, typer" in said
    said = fails(sys.executable, "-c", "from kvgen import Paged", cwd=project, path=str(site))
    assert f"ImportError: kvgen.Paged needs kvgen's extra build: {BUILD}" in said
    run(
        sys.executable,
        "-c",
        "import kvgen.testing.plugin, kvgen.testing; kvgen.ErrorWord",
        cwd=tmp_path,
        path=str(site),
    )


def test_wheel_names_its_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    message = email.message_from_string(metadata)
    wanted = [Requirement(text) for text in message.get_all("Requires-Dist", [])]
    extras = {e: {r.name for r in wanted if str(r.marker or "").endswith(f'extra == "{e}"')} for e in EXTRAS}
    assert set(message.get_all("Provides-Extra", [])) == set(EXTRAS)
    assert {r.name.replace("-", "_") for r in wanted} - {n.replace("-", "_") for e in extras.values() for n in e} == {
        "cuda_core",
        "ml_dtypes",
        "numpy",
    }
    assert extras["build"] == set(EXTRA_BUILD)
