"""On a machine without a GPU: compile every kernel and name every case, so that the GPU's time is the GPU's alone.

The folder that travels has `plan.json`, `kernels.tar.xz`, and `wheels/` where a GPU machine lacks packages.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import lzma
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from benchmarks.gpu import older
from benchmarks.gpu.apart import FOLDER, apart_of
from benchmarks.gpu.packages import generated, package_in, project
from benchmarks.gpu.plan import COMPARED, FILE, OCCUPANCY, OLDER, PROFILED, SANITIZED, STEPPED, Plan, SetPlan
from benchmarks.gpu.timings import Timer
from kvgen import KernelSet
from kvgen.codegen.emit import render_all, write_file
from kvgen.compile import Image, Job, Unit, compile_many, default_cache, nvrtc_version, text_digest, write_folder
from kvgen.schema.loader import LoadedSet, load_folder
from kvgen.verify.bandwidth import bandwidth_unit
from kvgen.verify.calibrate import calibrate_unit
from kvgen.verify.memory import HostMemory
from kvgen.verify.run import Verifier

KERNELS: Final = "kernels.tar.xz"
WHEELS: Final = "wheels"
LINES: Final = "lines"  # the kernels that tools look at, with line numbers; the same machine code
PROBES: Final = "probes"
PROBE_ARCH: Final = "sm_90a"
# kvgen's own needs beside NumPy, ml_dtypes and cuda-bindings, and theirs: what a machine for PyTorch may lack.
NEEDED: Final = ("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection")
_PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")


def prepare(
    folder: Path,
    names: Sequence[str],
    archs: Sequence[str] | None,
    *,
    python: str = "",
    nvrtc: str = "",
    probes: str = "*",
) -> Plan:
    """Everything that a run of the sets `names` needs, in `folder`; returns its plan.

    `archs` replaces the architectures of the specs. `python` ("3.12"): the GPU machine's, for which wheels are downloaded; "":
    none. `nvrtc` ("13.0.88"): an older version, which compiles a few kernels besides; "": none. `probes` are those whose names
    match.
    """
    specs = {s.kernels.name: s for s in load_folder(project() / "specs", project())}
    unknown = [n for n in names if n not in specs]
    if unknown:
        raise SystemExit(f"--only: generated/ has {', '.join(unknown)}, specs/ does not; run `kvgen build`")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).unlink(missing_ok=True)  # a folder without a plan is no prepared one
    if python:
        download(folder / WHEELS, python)
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch)
        _stage_kernels(staged, [specs[n].kernels for n in names], archs)
        again = tuple(one for one in OLDER if one[0] in names) if nvrtc else ()
        if again:
            older.compile_older(staged / older.FOLDER, again, archs, nvrtc)
        found, units = _stage_probes(staged, probes) if archs is None or PROBE_ARCH in archs else ((), {})
        digest = _pack(staged, folder / KERNELS)
    plan = Plan(
        {n: set_plan(specs[n]) for n in names},
        found,
        units,
        sanitized=tuple(one for one in SANITIZED if one[0] in names),
        profiled=tuple(one for one in PROFILED if one[0] in names),
        occupancy=tuple(one for one in OCCUPANCY if one[0] in names),
        older=again,
        older_nvrtc=nvrtc,
        digest=digest,
        nvrtc=".".join(map(str, nvrtc_version())),
    )
    plan.save(folder)
    return plan


def set_plan(loaded: LoadedSet) -> SetPlan:
    """The cases and timings of a set, by name; nothing is compiled or launched."""
    kernels, package = loaded.kernels, generated(loaded.kernels.name)
    verifier = Verifier(kernels, package, HostMemory())
    cases = tuple((op.name, plan.name) for op in kernels.ops for plan in verifier.plans(op))
    return SetPlan(loaded.source, cases, timed_cases(kernels, package))


def timed_cases(kernels: KernelSet, package: ModuleType) -> tuple[tuple[str, str], ...]:
    """The (operation, case) that are timed of a set."""
    timer: Any = Timer(None, kernels, package, None, None, {})  # type: ignore[arg-type]
    steps = timer.steps() if kernels.name == STEPPED else ()
    return tuple((t.op, t.case) for t in (*timer.cases(), *steps))


# Kernels -------------------------------------------------------------------------------------------------------------


def _stage_kernels(staged: Path, sets: Sequence[KernelSet], archs: Sequence[str] | None) -> None:
    units: list[tuple[Unit, Sequence[str]]] = []
    for kernels in sets:
        module = generated(kernels.name).Cache.MODULE
        for file, entry in module.kernels:
            units.append((module.unit(file, entry), [a for a in archs or module.arch if module.runs(file, a)]))
    for kernels in (k for k in sets if k.name in COMPARED):
        units += [(unit, archs or kernels.arch) for unit in write_apart(staged, kernels)]
    used = archs or sorted({a for _, own in units for a in own})
    units += [(bandwidth_unit(), used), (calibrate_unit(), used)]
    _write(staged, units)
    names = {kernels.name for kernels in sets}
    looked_at = {unit for name, op, _ in (*SANITIZED, *PROFILED) if name in names for unit in _units_of(name, op)}
    _write(staged / LINES, [u for u in units if u[0].name in looked_at], lines=True)


def write_ops(folder: Path, ops: Sequence[tuple[str, str]], archs: Sequence[str] | None) -> None:
    """Compile the kernels of these operations (set, name) into a folder of their own."""
    wanted = {unit for name, op in ops for unit in _units_of(name, op)}
    found = []
    for name in dict.fromkeys(name for name, _ in ops):
        module = generated(name).Cache.MODULE
        for file, entry in module.kernels:
            if (unit := module.unit(file, entry)).name in wanted:
                found.append((unit, [a for a in archs or module.arch if module.runs(file, a)]))
    _write(folder, found)


def _units_of(name: str, op: str) -> list[str]:
    """The units of an operation and its planner, on every architecture."""
    launcher = getattr(generated(name), op)
    kernels = [k for k in (launcher.KERNEL, getattr(launcher, "PLAN", None)) if k is not None]
    return [f"{name}/{Path(file).stem}" for k in kernels for file in (k.file, *k.files.values())]


def _write(folder: Path, units: Sequence[tuple[Unit, Sequence[str]]], *, lines: bool = False) -> None:
    jobs: list[Job] = [(unit, arch, "cubin") for unit, own in units for arch in own]
    images: list[Image] = compile_many(jobs, cache=default_cache(), lineinfo=lines)
    write_folder(folder, images, {unit.name: text_digest(unit.text) for unit, _ in units})


def write_apart(folder: Path, kernels: KernelSet) -> list[Unit]:
    """Write the packages of the kernels in place of a fused append, and give their units."""
    found: list[Unit] = []
    apart = apart_of(kernels)
    for one in apart[1] if apart is not None else ():
        for file in render_all(
            [LoadedSet(one, f"{FOLDER}/{one.name}", f"{one.name}, timed beside a fused append.")]
        ).values():
            write_file(folder / FOLDER, file)
        module = package_in(folder / FOLDER, one.name).Cache.MODULE
        found += [module.unit(file, entry) for file, entry in module.kernels]
    return found


def _stage_probes(staged: Path, wanted: str) -> tuple[tuple[tuple[str, str], ...], dict[str, str]]:
    """The probes of tests/golden_gpu, compiled: each as (unit, name), and the digests of units."""
    from fnmatch import fnmatch

    from tests.golden_gpu.probes import probes, units
    from tests.golden_gpu.record import compiled, digest

    found = tuple((p.unit, p.name) for p in probes() if fnmatch(p.name, wanted))
    used = {name: text for name, text in units().items() if any(unit == name for unit, _ in found)}
    (staged / PROBES).mkdir()
    for name, text in used.items():
        (staged / PROBES / f"{name}.cubin").write_bytes(compiled(name, text, PROBE_ARCH))
    return found, {name: digest(text) for name, text in used.items()}


def _pack(staged: Path, target: Path) -> str:
    """One archive, the same for the same files; returns its SHA-256."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for path in sorted(p for p in staged.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            entry = tarfile.TarInfo(path.relative_to(staged).as_posix())
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(entry, file)
    data = lzma.compress(tar.getvalue(), preset=6)
    target.write_bytes(data)
    return hashlib.sha256(data).hexdigest()


# Packages ------------------------------------------------------------------------------------------------------------


def download(folder: Path, python: str) -> None:
    """Wheels for a Python of this version on Linux and x86-64, of the versions that are installed here."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--dest", str(folder)]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    try:
        subprocess.run([*command, *(f"{n}=={importlib.metadata.version(n)}" for n in NEEDED)], check=True)
    except subprocess.CalledProcessError as error:
        raise SystemExit(
            f"--python {python}: pip cannot download the wheels (exit status {error.returncode})"
        ) from error


def sizes(folder: Path) -> list[tuple[str, int]]:
    """The files that travel, with their bytes."""
    return [(p.relative_to(folder).as_posix(), p.stat().st_size) for p in sorted(folder.rglob("*")) if p.is_file()]
