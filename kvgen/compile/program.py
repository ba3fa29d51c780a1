"""Compile units: one kernel's text for one target, or many at once."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final, Literal

from kvgen.compile import nvrtc
from kvgen.compile.arch import check_arch, supported_archs
from kvgen.compile.cubin_cache import Cache
from kvgen.compile.cuda_headers import header_folder, header_key, included, missing
from kvgen.compile.diagnostics import (
    Origin,
    UnitError,
    describe,
    refused_ptx_lines,
    relative_file_table,
    source_files,
    warnings_of,
)
from kvgen.compile.resources import Resources, parse_resources, resources_from
from kvgen.compile.signature import read_signature
from kvgen.errors import ArgumentError, CompileError, ConfigError, ToolError
from kvgen.json_file import parse_object

ImageKind = Literal["cubin", "ptx"]
Job = tuple["Unit", str, ImageKind]

CPU_COMPILE: Final = "KVGEN_CPU_COMPILE"
_SCHEMA: Final = 1  # of a cache entry; raise it when the meaning of one changes


@dataclass(frozen=True)
class Unit:
    """One kernel to compile.

    `name` is "<set>/<kernel>", `entry` the extern "C" function, `text` self-contained CUDA whose #line directives name
    the generated files.
    """

    name: str
    entry: str
    text: str


@dataclass(frozen=True)
class Image:
    """A compiled unit.

    `data` is an ELF cubin, or PTX text ending in a newline. `resources` is None for PTX. `seconds` is what this call
    took, whether it compiled or (`cached`) read the cache; `log` is the compiler's either way.
    """

    unit_name: str
    entry: str
    arch: str
    kind: ImageKind
    data: bytes
    resources: Resources | None
    log: str
    seconds: float
    cached: bool

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings of compiler and assembler, one line each."""
        return warnings_of(self.log)


def jit_allowed() -> bool:
    """False when KVGEN_NO_JIT=1 forbids compiling at run time; ConfigError for a value other than 0 and 1."""
    value = os.environ.get("KVGEN_NO_JIT", "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"KVGEN_NO_JIT: got {value!r}; it must be 0 or 1")
    return value != "1"


def quick_on_cpu() -> bool:
    """True when KVGEN_CPU_COMPILE=quick asks for kernels of the CPU machine without the optimizations that take long.

    Raises ConfigError for a value other than full and quick.
    """
    value = os.environ.get(CPU_COMPILE, "")
    if value not in ("", "full", "quick"):
        raise ConfigError(
            f"{CPU_COMPILE}: got {value!r}; it says how kernels are compiled for the CPU machine: 'full' with all optimizations, "
            "as for a GPU, 'quick' without those that take long; give one of these"
        )
    return value == "quick"


def text_digest(text: str) -> str:
    """The hex SHA-256 by which a compiled kernel and the text it came from recognise each other."""
    return hashlib.sha256(text.encode()).hexdigest()


def _options(arch: str, kind: ImageKind, lineinfo: bool, quick: bool = False) -> list[str]:
    target = arch if kind == "cubin" else arch.replace("sm_", "compute_")
    # Without --no-source-include an #include left in the text would be looked for in the working folder.
    options = [f"--gpu-architecture={target}", "--std=c++17", "--no-source-include"]
    if lineinfo:
        options.append("--generate-line-info")
    if kind == "cubin":
        options.append("--ptxas-options=-v")
    version = nvrtc.nvrtc_version()
    if version < (13, 2):
        # Without it these versions take the bodies of generic lambdas for host functions. It also makes every template constant a
        # variable of the module, which no kernel reads: newer versions go without.
        options.append("--device-as-default-execution-space")
    if quick and version >= (13, 0):  # the first that has the option
        options.append("--Ofast-compile=mid")
    return options


def _include_path(text: str) -> list[str]:
    """The option for a text that includes headers of NVIDIA's; generated kernels include none. It is not in a cache's key."""
    folder = header_folder() if included(text) else None
    return [f"--include-path={folder}"] if folder else []


def _key(unit: Unit, options: Sequence[str], kind: ImageKind) -> bytes:
    # Nothing of this machine is in it: a cache folder may be copied or shared.
    parts = [_SCHEMA, nvrtc.nvrtc_version(), list(options), unit.entry, unit.text, kind]
    if names := included(unit.text):
        parts.append(header_key(names))
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def _pack(data: bytes, resources: Resources | None, log: str) -> bytes:
    head = {"resources": dataclasses.asdict(resources) if resources else None, "log": log}
    return json.dumps(head).encode() + b"\n" + data


def _unpack(payload: bytes) -> tuple[bytes, Resources | None, str] | None:
    """Data, resources and log of a payload that `_pack` made; None for others: who writes there can make a checksum."""
    head, _, data = payload.partition(b"\n")
    try:
        fields = parse_object(head, "a cache entry")
        counts, log = fields["resources"], fields["log"]
        if not isinstance(log, str):
            return None
        return data, None if counts is None else resources_from(counts), log
    except (ToolError, KeyError, TypeError):
        return None


def _refuse(unit: Unit, arch: str, kind: ImageKind, outcome: nvrtc.Outcome, origin: Origin | None) -> UnitError:
    if refused_ptx_lines(outcome.log) and ".loc" not in outcome.ptx:
        # Compile once more with line numbers, so that the refused PTX can be traced to a generated line.
        options = [*_options(arch, kind, lineinfo=True), *_include_path(unit.text)]
        outcome = nvrtc.compile_text(unit.text, options, kind)
    said = describe(outcome.log, unit.text, outcome.ptx, origin)
    if "could not open source file" in said and header_folder() is None:
        said += "\n" + missing(nvrtc.nvrtc_version()[0])
    return UnitError(unit.name, arch, said)


def _check_entry(unit: Unit, arch: str, ptx: str) -> None:
    entries = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if unit.entry not in entries:
        found = ", ".join(entries) or "none"
        rule = f'it must be an extern "C" __global__ function of the text; found: {found}'
        raise UnitError(unit.name, arch, f"entry: got {unit.entry!r}; {rule}")
    signature = read_signature(unit.text)
    problem = signature.mismatch(ptx) if signature else None
    if signature and problem:
        raise UnitError(unit.name, arch, f"{signature.source}: {problem}")


def _compile(unit: Unit, arch: str, kind: ImageKind, options: Sequence[str], origin: Origin | None) -> bytes:
    """Compile for certain; the packed result."""
    outcome = nvrtc.compile_text(unit.text, [*options, *_include_path(unit.text)], kind)
    if not outcome.ok:
        raise _refuse(unit, arch, kind, outcome, origin)
    _check_entry(unit, arch, outcome.ptx)
    if kind == "ptx":
        return _pack(relative_file_table(outcome.output.decode(), source_files(unit.text)).encode(), None, outcome.log)
    return _pack(outcome.output, parse_resources(outcome.log, unit.entry), outcome.log)


def _check_target(arch: str) -> None:
    check_arch(arch)
    supported = supported_archs()
    if arch not in supported:
        major, minor = nvrtc.nvrtc_version()
        raise ToolError(
            f"arch: got {arch}; NVRTC {major}.{minor} compiles for {', '.join(supported)}; "
            f"install a newer one (`pip install -U nvidia-cuda-nvrtc`)"
        )


def compile_unit(
    unit: Unit,
    arch: str,
    kind: ImageKind = "cubin",
    *,
    cache: Cache | None,
    lineinfo: bool = False,
    quick: bool = False,
    origin: Origin | None = None,
) -> Image:
    """Compile one unit for one of ARCHS, or take it from the cache (None: always compile).

    PTX always carries line information (`lineinfo` adds it to a cubin, for profilers). `quick` leaves out optimizations
    that take long (NVRTC 13 and later), but for kernels with wgmma: the accumulators of wgmma must be registers of the kernel,
    and a quick compile leaves calls. Raises UnitError, a CompileError with the generated line (and the template line, asked of
    `origin`), when NVRTC refuses the text, and ToolError when NVRTC is missing or too old for `arch`.
    """
    begin = time.perf_counter()
    _check_target(arch)
    options = _options(arch, kind, lineinfo or kind == "ptx", quick and "wgmma" not in unit.text)
    if lineinfo and kind == "cubin":
        cache = None  # such a cubin holds the absolute path of the working folder it was compiled in
    key = _key(unit, options, kind) if cache else b""
    found = _kept(cache, key)
    cached = found is not None
    with cache.alone(key) if cache and not cached else contextlib.nullcontext():
        if found is None:
            found = _kept(cache, key, again=True)  # by whoever was inside before
            cached = found is not None
        if found is None:
            payload = _compile(unit, arch, kind, options, origin)
            if cache:
                cache.put(key, payload)
            found = _unpack(payload)
    assert found is not None
    data, resources, log = found
    seconds = time.perf_counter() - begin
    return Image(unit.name, unit.entry, arch, kind, data, resources, log, seconds, cached)


def _kept(cache: Cache | None, key: bytes, *, again: bool = False) -> tuple[bytes, Resources | None, str] | None:
    payload = cache.get(key, again=again) if cache else None
    return None if payload is None else _unpack(payload)


def _default_workers() -> int:
    if hasattr(os, "sched_getaffinity"):  # the cores this process may use; absent on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class UnitsError(CompileError):
    """Some of several kernels were refused; `images` are those of the others, in the order of the jobs."""

    def __init__(self, message: str, images: list[Image]) -> None:
        super().__init__(message)
        self.images = images


def compile_many(
    jobs: Sequence[Job],
    *,
    cache: Cache | None,
    workers: int | None = None,
    progress: Callable[[Image], None] | None = None,
    lineinfo: bool = False,
    quick: bool = False,
    origin: Origin | None = None,
) -> list[Image]:
    """Compile (unit, arch, kind) jobs on `workers` threads (None: one a core); images in the order of the jobs.

    `progress` is called in the calling thread, as jobs finish. Every job is tried; the CompileError at the end holds all
    refusals, one text for a kernel refused for the same reason for several targets, and as a UnitsError also the images of
    the other jobs. A ToolError stops at once.
    """
    if workers is not None and workers < 1:
        raise ArgumentError(f"workers: got {workers}; it must be at least 1, or None for one a core")
    for arch in dict.fromkeys(arch for _, arch, _ in jobs):
        _check_target(arch)  # before the threads: one message, and NVRTC is loaded once
    images: dict[int, Image] = {}
    refusals: dict[int, UnitError] = {}
    with ThreadPoolExecutor(workers or _default_workers(), thread_name_prefix="kvgen-compile") as pool:
        futures = {
            pool.submit(
                compile_unit, unit, arch, kind, cache=cache, lineinfo=lineinfo, quick=quick, origin=origin
            ): index
            for index, (unit, arch, kind) in enumerate(jobs)
        }
        try:
            for future in as_completed(futures):
                try:
                    image = future.result()
                except UnitError as error:
                    refusals[futures[future]] = error
                    continue
                images[futures[future]] = image
                if progress:
                    progress(image)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if refusals:
        raise _join([refusals[index] for index in sorted(refusals)], [images[index] for index in sorted(images)])
    return [images[index] for index in range(len(jobs))]


def _join(refusals: list[UnitError], images: list[Image]) -> CompileError:
    jobs = len(refusals) + len(images)
    if jobs == 1:
        return refusals[0]
    archs: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        archs.setdefault((refusal.unit_name, refusal.body), []).append(refusal.arch)
    parts = [f"{name} for {', '.join(dict.fromkeys(a))}: does not compile\n{body}" for (name, body), a in archs.items()]
    return UnitsError(f"{len(refusals)} of {jobs} compiles failed\n\n" + "\n\n".join(parts), images)
