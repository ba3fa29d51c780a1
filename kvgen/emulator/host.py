"""The host C++ compiler, and the cache of what it made."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from kvgen.emulator.errors import HostCompilerError
from kvgen.emulator.objects import locked, put, read_facts, scratch
from kvgen.emulator.parser import parse
from kvgen.emulator.writer import KernelFacts, translate

Mode = Literal["fast", "check"]

_RUNTIME = Path(__file__).parent / "runtime"
# Two units, compiled side by side: what executes, and what checks and counts. Whatever calls the other most is in one of them.
_RUNTIME_SOURCES = (
    (
        "fibers.cpp", "grid.cpp", "sync.cpp", "fragments.cpp", "wgmma.cpp", "registers.cpp", "mbarrier.cpp", "copies.cpp",
        "bulk.cpp", "tma.cpp", "cluster.cpp", "calls.cpp", "print.cpp", "numbers.cpp", "machine.cpp",
    ),
    (
        "faults.cpp", "counters.cpp", "checker.cpp", "shadow.cpp", "order.cpp", "dependents.cpp", "proxy.cpp", "flights.cpp",
        "padding.cpp", "wgmma_check.cpp",
    ),
)  # fmt: skip
_FLAGS = (
    "-std=c++17", "-fPIC", "-w", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-fno-math-errno",
    "-fno-exceptions", "-fno-rtti", "-fno-stack-protector", "-fcf-protection=none", "-fno-threadsafe-statics",
    "-fvisibility=hidden", "-pthread",
)  # fmt: skip


_UNIT_BYTES = 100_000  # of C++: another process of the compiler pays from about 0.1 s of work on


def cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _digest(*parts: str | bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


@functools.cache
def _digest_of(folder: Path, pattern: str) -> str:
    """Of a folder's files: a change in the translator or the runtime makes objects stale."""
    return _digest(*(f.read_bytes() for f in sorted(folder.glob(pattern))))


@functools.cache
def _cpu_flags() -> tuple[str, ...]:
    """Fused multiply-add as one instruction where the CPU has it; the results are the same."""
    if platform.machine() != "x86_64":
        return ()
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ()
    return ("-mavx2", "-mfma") if {"avx2", "fma"} <= words else ()


@functools.cache
def _compiler(name: str) -> tuple[str, str]:
    """The compiler's path and version line."""
    path = shutil.which(name)
    if path is None:
        raise HostCompilerError(
            f"the C++ compiler {name!r} is not installed: running kernels on the CPU needs g++ "
            "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set $CXX to another one"
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return path, version.partition("\n")[0]


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostCompilerError(f"{' '.join(command)} failed:\n{done.stderr[:4000]}")


def cache_directory(chosen: Path | None) -> Path:
    """The first writable of: `chosen`, $KVGEN_CACHE_DIR/emulator, the user's cache folder; else a temporary folder."""
    candidates = [chosen] if chosen is not None else []
    if (own := os.environ.get("KVGEN_CACHE_DIR")) is not None:
        candidates.append(Path(own) / "emulator")
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home directory
        candidates.append((Path(base) if base else Path.home() / ".cache") / "kvgen" / "emulator")
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError:
            continue
    return _temporary_directory()


@functools.cache
def _temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvgen-emulator-"))


def _compile(command: Sequence[str], scratch: Path, texts: Sequence[str], libraries: Sequence[str] = ()) -> Path:
    """Sources, each compiled by a process of its own, to one shared object in the folder `scratch`."""
    made, inputs = scratch / "made.so", []
    for i, text in enumerate(texts):
        source = scratch / f"source{i}.cpp"
        source.write_text(text)
        inputs.append(str(source))
    if len(inputs) > 1:
        with ThreadPoolExecutor(len(inputs)) as pool:
            list(pool.map(lambda source: _run([*command, "-c", source, "-o", f"{source}.o"]), inputs))
        inputs = [f"{source}.o" for source in inputs]
    _run([*command, "-shared", *inputs, *libraries, "-o", str(made)])
    return made


def _runtime(folder: Path, mode: Mode, command: Sequence[str], key: str, afresh: bool) -> Path:
    """The runtime, compiled once for all kernels."""
    target = folder / f"runtime-{mode}-{key[:32]}.so"
    if not afresh and read_facts(target) is not None:
        return target
    texts = ["".join(f'#include "{name}"\n' for name in unit) for unit in _RUNTIME_SOURCES]
    texts = texts if cores() > 1 else ["".join(texts)]
    with locked(folder / f"{target.stem}.lock"):  # it takes seconds: of several processes one compiles, the others wait
        if afresh or read_facts(target) is None:
            flags = ("-O2", "-frounding-math", f"-Wl,-soname,{target.name}")
            with scratch(folder) as own:
                put(_compile([*command, *flags], own, texts), b"", target)
    return target


@dataclass(frozen=True, slots=True)
class Built:
    """Shared objects of one build, and its kernels in the order of the object's table."""

    runtime: Path
    library: Path
    kernels: list[KernelFacts]


def build_object(ptx: Sequence[str], mode: Mode, cache_dir: Path | None, *, afresh: bool = False) -> Built:
    """Translate and compile, or find in the cache; `afresh` makes all of it anew."""
    compiler, version = _compiler(os.environ.get("CXX", "g++"))
    common = _digest(_digest_of(_RUNTIME, "*"), compiler, version, mode, *_FLAGS, *_cpu_flags())
    key = _digest(common, _digest_of(_RUNTIME.parent, "*.py"), *ptx)[:40]
    folder = cache_directory(cache_dir)
    command = [compiler, *_FLAGS, *_cpu_flags(), f"-DEMU_CHECK={int(mode == 'check')}", f"-I{_RUNTIME}"]
    library = folder / f"{key}.so"
    if not afresh and (known := read_facts(library)) is not None:
        facts = [_facts_from(row) for row in json.loads(known)]
        return Built(_runtime(folder, mode, command, common, False), library, facts)
    unit = translate([parse(text) for text in ptx])
    runtime = _runtime(folder, mode, command, common, afresh)
    with scratch(folder) as own:
        # The runtime brings the C library along: to look for it again is most of a small kernel's linking.
        flags = ("-Og", "-fno-plt", "-nostdlib", "-Wl,-rpath,$ORIGIN")
        made = _compile([*command, *flags], own, unit.texts(cores(), _UNIT_BYTES), [str(runtime), "-lgcc"])
        put(made, json.dumps([_row_of(k) for k in unit.kernels]).encode(), library)
    return Built(runtime, library, unit.kernels)


def _row_of(kernel: KernelFacts) -> dict[str, Any]:
    return {f.name: getattr(kernel, f.name) for f in fields(kernel)}  # asdict() would copy every line and block


def _facts_from(row: dict[str, Any]) -> KernelFacts:
    sizes, offsets, limit, cluster = row["param_sizes"], row["param_offsets"], row["max_threads"], row["cluster"]
    registers = row["registers"]
    lines, blocks = row["lines"], row["blocks"]
    return KernelFacts(
        name=str(row["name"]),
        param_sizes=tuple(int(n) for n in sizes),
        param_offsets=tuple(int(n) for n in offsets),
        param_bytes=int(str(row["param_bytes"])),
        static_shared=int(str(row["static_shared"])),
        max_threads=int(str(limit)) if limit is not None else None,
        registers=int(str(registers)) if registers is not None else None,
        cluster=(int(cluster[0]), int(cluster[1]), int(cluster[2])) if isinstance(cluster, list) else None,
        lines=tuple(str(line) for line in lines),
        blocks=tuple(tuple((int(w), int(c), int(n)) for w, c, n in block) for block in blocks),
    )
