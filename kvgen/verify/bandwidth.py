"""What the memory of this GPU can do: kernels that read, write and copy, compiled and measured in the same run as the
kernels that are held against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvgen.compile import Unit, compile_unit, default_cache
from kvgen.runtime import cuda, packing
from kvgen.verify.device import Gpu
from kvgen.verify.memory import GpuBytes

Fill = Callable[[GpuBytes, str, int], None]
NAME: Final = "bandwidth"
ENTRIES: Final = ("bandwidth_read", "bandwidth_write", "bandwidth_copy", "bandwidth_fill", "bandwidth_empty")
THREADS: Final = 512
PIECE: Final = THREADS * 8 * 16  # bytes that a block takes at a time
BLOCKS: Final = (1, 2, 4, 16)  # a multiprocessor: the grids that are tried
L2_MULTIPLES: Final = (4, 16, 64)  # sizes of what is read
BYTES_AT_LEAST: Final = 64 << 20
BYTES_AT_MOST: Final = 8 << 30
# (bits that are random, bits that are set): numbers of either sign in [0.5, 1), and any integer code. Bytes may be codes,
# or rows and pages of several types: none of these patterns is NaN or infinity as any of them.
FILLS: Final = {
    "f32": (0x807FFFFF, 0x3F000000),
    "bf16": (0x807F807F, 0x3F003F00),
    "f16": (0x83FF83FF, 0x38003800),
    "e4m3": (0x87878787, 0x30303030),
    "e5m2": (0x83838383, 0x38383838),
    "i8": (0xFFFFFFFF, 0),
    "u8": (0x87878787, 0x30303030),
}
# Scales: positive numbers in [2^-6, 2^-5), for which no value below 1 is too large.
SCALES: Final = {
    "f32": (0x007FFFFF, 0x3C800000),
    "bf16": (0x007F007F, 0x3C803C80),
    "f16": (0x03FF03FF, 0x24002400),
    "e4m3": (0x07070707, 0x08080808),
    "e8m0": (0, 0x79797979),
    "u8": (0x07070707, 0x08080808),
}
SCALE: Final = "scale "


@dataclass(frozen=True)
class Reading:
    """The bandwidth of reading `nbytes` of device memory, in 10^9 bytes a second."""

    nbytes: int
    gb_s: float


def bandwidth_unit() -> Unit:
    """The measuring kernels, in one unit."""
    text = (Path(__file__).parent / "bandwidth.cu").read_text(encoding="utf-8")
    return Unit(f"{NAME}/{NAME}", ENTRIES[0], text)


def compiled(arch: str) -> bytes:
    """The cubin of the measuring kernels, by NVRTC. Raises CompileError and ToolError."""
    return compile_unit(bandwidth_unit(), arch, "cubin", cache=default_cache()).data


def filler(gpu: Gpu, cubin: bytes) -> Fill:
    """Fills device memory with numbers of either sign in [0.5, 1), or with what `kind` names in SCALES."""
    function = cuda.function(cubin, "bandwidth_fill", device=gpu.ordinal)

    def fill(memory: GpuBytes, kind: str, seed: int) -> None:
        keep, fixed = SCALES[kind.removeprefix(SCALE)] if kind.startswith(SCALE) else FILLS[kind]
        words = memory.nbytes // 4
        params = packing.PackedArgs(("ptr", "u64", "u32", "u32", "u32"), (memory.pointer, words, keep, fixed, seed))
        function.launch((gpu.multiprocessors * 8, 1, 1), (THREADS, 1, 1), params, gpu.stream)

    return fill


def measure(gpu: Gpu, cubin: bytes, nbytes: int) -> dict[str, float]:
    """GB/s of reading, writing and copying `nbytes` (a copy counts bytes read and bytes written), best grid of several."""
    nbytes -= nbytes % PIECE
    source, target = GpuBytes(nbytes, gpu.ordinal), GpuBytes(nbytes, gpu.ordinal)
    # The write is what fills the source with something.
    rates = {name: _rate(gpu, cubin, name, source, target) for name in ("write", "copy", "read")}
    return {name: (2 if name == "copy" else 1) * rate for name, rate in rates.items()}


def read_bandwidth(gpu: Gpu, cubin: bytes) -> tuple[Reading, ...]:
    """The bandwidth of reading 4, 16 and 64 times the L2 cache, as far as there is memory: of each size the best grid's median.

    Memory is filled with random numbers first; zeros are read faster.
    """
    fill, found = filler(gpu, cubin), list[Reading]()
    most = min(BYTES_AT_MOST, gpu.free_bytes() // 2)
    for multiple in L2_MULTIPLES:
        nbytes = min(max(multiple * gpu.l2_bytes, BYTES_AT_LEAST), most) // PIECE * PIECE
        if found and nbytes <= found[-1].nbytes:
            continue
        memory = GpuBytes(nbytes, gpu.ordinal)
        fill(memory, "f32", multiple)
        found.append(Reading(nbytes, _rate(gpu, cubin, "read", memory, memory)))
    return tuple(found)


def _rate(gpu: Gpu, cubin: bytes, name: str, source: GpuBytes, target: GpuBytes) -> float:
    """GB/s over all of `source`, by the median of several samples on the best grid."""
    function = cuda.function(cubin, f"bandwidth_{name}", device=gpu.ordinal)
    first = source if name == "write" else target
    params = packing.PackedArgs(("ptr", "ptr", "u64"), (source.pointer, first.pointer, source.nbytes // 16))
    launches = [function.bind((gpu.multiprocessors * n, 1, 1), (THREADS, 1, 1), params) for n in BLOCKS]
    return max(source.nbytes / gpu.time([launch], samples=7).median / 1e3 for launch in launches)
