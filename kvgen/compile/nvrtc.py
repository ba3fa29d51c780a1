"""The few NVRTC calls that compiling needs.

`cuda.core.Program` is not used here although it compiles cubins without a driver: it asks the driver before it makes
PTX, and gives status and log of a failed compile as one string of an exception. One path through `cuda.bindings`
serves both kinds with the same options and tells a wrong kernel from a broken installation.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvgen.errors import ToolError

PROGRAM_NAME = "kvgen.cu"  # what diagnostics of text before the first #line directive say; the same for every kernel

_INSTALL = "install it with `pip install 'kvgen[cu13]'` (cu12 for a driver older than 580)"


@dataclass(frozen=True)
class Outcome:
    """What NVRTC said: `output` is empty unless `ok`; `ptx` is there even when the assembler behind it refused it."""

    ok: bool
    log: str
    output: bytes
    ptx: str


@functools.cache
def _bindings() -> Any:
    """`cuda.bindings.nvrtc`, after one call that proves that its library loads."""
    try:
        # By name: cuda.bindings carries no types, and whether a checker minds depends on its version.
        module: Any = importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise ToolError(f"cuda.bindings: cannot be imported ({error}); compiling needs NVRTC; {_INSTALL}") from error
    try:
        module.nvrtcVersion()
    except RuntimeError as error:  # what cuda.pathfinder raises for a library it cannot find or load
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ToolError(f"NVRTC: its library cannot be loaded ({reason}); {_INSTALL}") from error
    return module


def _call(function: Callable[..., tuple[Any, ...]], *args: object) -> Any:
    """Call a binding that returns (status, value...); the value, or ToolError."""
    status, *values = function(*args)
    if int(status) != 0:
        raise ToolError(f"NVRTC: {function.__name__} failed with {status.name}")
    return values[0] if values else None


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the installed NVRTC; ToolError naming what to install when there is none."""
    status, major, minor = _bindings().nvrtcVersion()
    if int(status) != 0:
        raise ToolError(f"NVRTC: nvrtcVersion failed with {status.name}")
    return int(major), int(minor)


@functools.cache
def supported_numbers() -> frozenset[int]:
    """The compute capabilities (80, 90, ...) NVRTC knows, without their `a` and `f` variants."""
    return frozenset(int(number) for number in _call(_bindings().nvrtcGetSupportedArchs))


def _fetch(program: object, size: Callable[..., tuple[Any, ...]], read: Callable[..., tuple[Any, ...]]) -> bytes:
    buffer = bytearray(_call(size, program))
    if buffer:
        _call(read, program, buffer)
    return bytes(buffer)


def _fetch_text(program: object, size: Callable[..., tuple[Any, ...]], read: Callable[..., tuple[Any, ...]]) -> str:
    # The log is several C strings behind one another (compiler, assembler), their zeros included.
    return _fetch(program, size, read).replace(b"\0", b"").decode("utf-8", "replace")


def compile_text(text: str, options: Sequence[str], kind: Literal["cubin", "ptx"]) -> Outcome:
    """Compile one self-contained CUDA text.

    A refused text is an Outcome with `ok=False`; anything else that goes wrong (an option this NVRTC does not know,
    no memory, a missing builtins library) is a ToolError. Thread-safe; the GIL is released meanwhile.
    """
    nvrtc = _bindings()
    program = _call(nvrtc.nvrtcCreateProgram, text.encode(), PROGRAM_NAME.encode(), 0, [], [])
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _fetch_text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if status not in (nvrtc.nvrtcResult.NVRTC_SUCCESS, nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION):
            major, minor = nvrtc_version()
            raise ToolError(f"NVRTC {major}.{minor}: {status.name}: {log.strip() or 'no log'}")
        ptx = _fetch_text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        if int(status) != 0:
            return Outcome(False, log, b"", ptx)
        if kind == "ptx":
            return Outcome(True, log, ptx.rstrip("\n ").encode() + b"\n", ptx)
        return Outcome(True, log, _fetch(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
