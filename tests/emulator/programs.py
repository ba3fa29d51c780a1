"""CUDA and PTX text for the emulator's tests, and launches on NumPy arrays."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import nvrtc

from kvgen.compile import default_cache
from kvgen.emulator import Buffer, Counters, Library

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def nvrtc_ptx(source: str, arch: str = "compute_80", name: str = "kernel.cu", defines: tuple[str, ...] = ()) -> str:
    """PTX with line information; needs neither a driver nor headers. Kept in the compile cache, by the working folder too,
    which NVRTC writes into the names of files."""
    facts = [nvrtc.nvrtcVersion()[1:], os.getcwd(), source, arch, name, defines]
    key, cache = hashlib.sha256(json.dumps(facts).encode()).digest(), default_cache()
    if (kept := cache.get(key)) is not None:
        return kept.decode()
    text = _compiled(source, arch, name, defines)
    cache.put(key, text.encode())
    return text


def _compiled(source: str, arch: str, name: str, defines: tuple[str, ...]) -> str:
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-lineinfo", *(f"-D{d}" for d in defines)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * max(size, 2)  # NVRTC writes into it, and b" " alone is one object for all of Python
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.rstrip(b"\0").decode()


def entry(name: str, body: str, params: str = ".param .u64 p0") -> str:
    """One PTX entry with registers to spare and the first parameter in %rd0."""
    return f""".visible .entry {name}({params})
{{
  .reg .pred %p<8>; .reg .b16 %rs<16>; .reg .b32 %r<64>; .reg .f32 %f<32>; .reg .b64 %rd<32>; .reg .f64 %fd<8>;
  ld.param.u64 %rd0, [p0];
{body}
  ret;
}}
"""


def aligned(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Zeroed bytes at a multiple of 64, as a GPU allocation has."""
    raw = np.zeros(nbytes + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:nbytes]


def run(
    library: Library,
    name: str,
    *args: Any,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: int | tuple[int, int, int] = 128,
    read_only: tuple[int, ...] = (),
    memory: Sequence[np.ndarray] = (),
    **options: Any,
) -> Counters:
    """Arrays become pointers and buffers arg0, arg1, ...; ints and floats become 4 bytes, bytes stay. `memory` is more
    memory that may be touched: buffers memory0, memory1, ..."""
    raw, buffers = [], []
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray):
            raw.append(struct.pack("<Q", a.ctypes.data))
            buffers.append(Buffer(f"arg{i}", a.ctypes.data, a.nbytes, i not in read_only))
        else:
            raw.append(a if isinstance(a, bytes) else struct.pack("<f" if isinstance(a, float) else "<i", a))
    buffers += [Buffer(f"memory{i}", a.ctypes.data, a.nbytes, True) for i, a in enumerate(memory)]
    shape = block if isinstance(block, tuple) else (block, 1, 1)
    return library.kernels[name].launch(grid, shape, raw, buffers=buffers, **options)
