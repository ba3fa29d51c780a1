"""How long the CPU machine takes: to make a kernel loadable, and to run it.

    python benchmarks/emulator_speed.py                       our own kernels
    python benchmarks/emulator_speed.py --prototype DIR       also the prototype's paged decode, on both machines
    python benchmarks/emulator_speed.py --repeat 9 --json times.json

With a prototype (a folder with paged_decode.cu, harness.py and buildemu.py) every measurement of it is taken in turn with
ours, in this process, so that a noisy machine is unfair to neither. Times are minimum and median of --repeat runs; the
runtimes of both are compiled beforehand. No GPU is needed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvgen import emulator
from kvgen.emulator import Buffer

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"4 x <= 300": None, "4 x 2048": [2048] * 4, "16 x 4096": [4096] * 16}
WARP_OPERATIONS = 20000
SMALL = ".version 8.6\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n"
# 128 threads that only shuffle: 4 warp operations a round, 31 switches between threads each.
SHUFFLES = """.version 8.6
.target sm_80
.address_size 64
.visible .entry shuffles(.param .u32 rounds) {
  .reg .pred %p; .reg .b32 %r<4>;
  ld.param.u32 %r0, [rounds]; mov.u32 %r1, %tid.x;
AGAIN: shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;
  sub.u32 %r0, %r0, 1; setp.ne.u32 %p, %r0, 0; @%p bra AGAIN;
  ret;
}
"""


@dataclass(frozen=True)
class Row:
    """Seconds of `runs` runs."""

    what: str
    machine: str
    runs: int
    minimum: float
    median: float


def timed(what: str, repeat: int, **machines: Callable[[], object]) -> list[Row]:
    """Each machine in turn, `repeat` times."""
    seconds: dict[str, list[float]] = {name: [] for name in machines}
    for _ in range(repeat):
        for name, go in machines.items():
            start = time.perf_counter()
            go()
            seconds[name].append(time.perf_counter() - start)
    rows = [Row(what, n.replace("_", " "), len(s), min(s), statistics.median(s)) for n, s in seconds.items()]
    for row in rows:
        print(f"{row.what:34} {row.machine:22} min {row.minimum:8.4f} s   median {row.median:8.4f} s", flush=True)
    return rows


def own(repeat: int) -> list[Row]:
    """What a warp operation costs, and making a checked-in decode loadable."""
    from kvgen.cli.project import generated
    from kvgen.compile import compile_many

    found = []
    for mode in ("fast", "check"):
        kernel = emulator.build([SHUFFLES], mode=mode).kernels["shuffles"]
        argument = struct.pack("<I", WARP_OPERATIONS // 4)
        found += timed(
            f"{WARP_OPERATIONS} shuffles, {mode}",
            repeat,
            kvgen=lambda kernel=kernel, argument=argument: kernel.launch((1, 1, 1), (128, 1, 1), [argument]),
        )
    with generated(ROOT / "generated", "llama3_8b") as package:
        module = package._MODULE
        jobs = [(module.unit(file, entry), "sm_90a", "ptx") for file, entry in module.kernels]
    for (unit, _, _), image in zip(jobs, compile_many(jobs, cache=None), strict=True):
        found += timed(f"compile {unit.entry}", repeat, kvgen=cold(image.data.decode()))
    return found


def cold(ptx: str, mode: emulator.host.Mode = "fast") -> Callable[[], object]:
    """A build that no cache knows, beside a runtime that is there."""
    folder = Path(tempfile.mkdtemp(prefix="kvgen-speed-"))
    emulator.build([SMALL], mode=mode, cache_dir=folder)
    count = iter(range(10**6))
    return lambda: emulator.build([f"{ptx}\n// {next(count)}"], mode=mode, cache_dir=folder)


def beside(folder: Path, repeat: int, includes: Sequence[str]) -> list[Row]:
    """The prototype's paged decode on both machines."""
    sys.path.insert(0, str(folder))
    os.environ.setdefault("PROTO_OUT", tempfile.mkdtemp(prefix="kvgen-prototype-"))
    os.environ["CPATH"] = os.pathsep.join(includes)  # its runtime includes CUDA headers
    harness, buildemu = importlib.import_module("harness"), importlib.import_module("buildemu")
    ptx = nvrtc_ptx(folder / "paged_decode.cu", [*includes, str(folder)])
    found = []
    names = ("q", "k", "v", "page_table", "seq_lens", "out")
    scale = float(1 / np.sqrt(harness.D) * np.log2(np.e))
    for mode in ("fast", "check"):
        check = mode == "check"
        theirs, _ = buildemu.build_ptx(ptx, "speed", check)  # its runtime too
        found += timed(
            f"compile paged_decode, {mode}",
            repeat,
            kvgen=cold(ptx, mode),
            prototype=lambda check=check: buildemu.build_ptx(ptx, "speed", check),
        )
        kernel = emulator.build([ptx], mode=mode).kernels["paged_decode"]
        for size, lengths in SIZES.items():
            buffers, width = harness.make(lens=lengths)
            memory = [buffers[n][1] for n in names]
            args = [struct.pack("<Q", a.ctypes.data) for a in memory] + [
                struct.pack("<i", width),
                struct.pack("<f", scale),
            ]
            known = [Buffer(n, a.ctypes.data, a.nbytes, n == "out") for n, a in zip(names, memory, strict=True)]
            grid = (len(buffers["seq_lens"][1]), harness.HKV, 1)

            def launch(
                workers: int | None, kernel: Any = kernel, grid: Any = grid, args: Any = args, known: Any = known
            ) -> None:
                kernel.launch(grid, (128, 1, 1), args, dynamic_shared=harness.SMEM, buffers=known, workers=workers)

            def prototype(theirs: Any = theirs, buffers: Any = buffers, width: Any = width) -> None:
                status, said, *_ = harness.launch(theirs, buffers, width)
                assert status == 0, said

            few = repeat if size.startswith("4") else max(2, repeat // 3)
            found += timed(
                f"paged_decode {size}, {mode}",
                few,
                kvgen=lambda launch=launch: launch(None),
                kvgen_on_1_core=lambda launch=launch: launch(1),
                prototype=prototype,
            )
    return found


def nvrtc_ptx(path: Path, includes: Sequence[str]) -> str:
    """PTX for sm_80 with line information."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(path.read_bytes(), path.name.encode(), 0, [], [])
    options = ["--gpu-architecture=compute_80", "--std=c++17", "-lineinfo", *(f"-I{i}" for i in includes)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    texts = {}
    for what in ("ProgramLog", "PTX"):
        _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        memory = bytes(size + 16)  # NVRTC writes into it, so it must not be one that Python shares (a single byte is)
        getattr(nvrtc, f"nvrtcGet{what}")(program, memory)
        texts[what] = memory[: memory.index(0)].decode()
    if int(status):
        raise SystemExit(texts["ProgramLog"])
    return texts["PTX"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prototype", type=Path, metavar="DIR", help="also measure the prototype in DIR")
    parser.add_argument("--include", action="append", default=[], metavar="DIR", help="CUDA headers of its kernel")
    parser.add_argument("--repeat", type=int, default=7, metavar="N", help="runs of each (default 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times as JSON")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat: got {options.repeat}; it is 1 or more")
    if options.prototype is not None and not (options.prototype / "paged_decode.cu").is_file():
        parser.error(f"--prototype: got {options.prototype}; there is no paged_decode.cu in it")
    rows = own(options.repeat)
    if options.prototype is not None:
        includes = options.include or ["/usr/local/cuda/include"]
        rows += beside(options.prototype.resolve(), options.repeat, includes)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
