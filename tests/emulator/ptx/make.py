"""Writes <version>/<name>.ptx: what one NVRTC makes of the sources beside this script and of one generated set.

It needs `cuda.bindings` and an NVRTC and nothing else; one virtual environment for each version:

    pip install 'cuda-bindings>=12.9,<12.10' 'nvidia-cuda-nvrtc-cu12==12.9.*'
    pip install 'cuda-bindings>=13.0,<13.1' 'nvidia-cuda-nvrtc==13.0.*'
    pip install 'cuda-bindings>=13.4,<14' 'nvidia-cuda-nvrtc==13.5.*'

    python tests/emulator/ptx/make.py        # writes into the folder of the NVRTC it finds

The generated set is as it was when this ran last: what is tested is NVRTC's PTX, and not the set.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))

from cuda.bindings import nvrtc  # noqa: E402

from kvgen.compile.flatten import flatten  # noqa: E402

SET = "llama3_8b"
OWN = {"scalars": "compute_80", "pipeline": "compute_80", "matmul": "compute_80", "hopper": "compute_90a"}


def sources() -> dict[str, tuple[str, str]]:
    """Name -> (architecture, text) of everything that is compiled."""
    found = {name: (arch, (HERE / f"{name}.cu").read_text(encoding="utf-8")) for name, arch in OWN.items()}
    for op in ("append", "gather", "decode"):
        text = flatten(f"generated/{SET}/{op}.cu", lambda path: (ROOT / path).read_text(encoding="utf-8"))
        found[op] = ("compute_80", text)
    return found


def compile_ptx(name: str, arch: str, text: str) -> str:
    """PTX with line information; SystemExit with NVRTC's log where it refuses."""
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], [])
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-lineinfo"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(f"{name}: {status.name}\n{log.decode()}")
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.rstrip(b"\0").decode()


def plain(ptx: str) -> str:
    """Without debug sections, banner and the folder this runs in: they say nothing that is executed."""
    ptx = ptx.replace(f'"{Path.cwd()}/', '"')
    ptx = re.sub(r"\n\t?\.section\s+\.debug_\w+\s*\{.*?\n\t?\}", "", ptx, flags=re.DOTALL)
    return re.sub(r"\A(//.*\n|\n)+", "", ptx).rstrip() + "\n"


def main() -> None:
    _, major, minor = nvrtc.nvrtcVersion()
    folder = HERE / f"{major}.{minor}"
    folder.mkdir(exist_ok=True)
    for name, (arch, text) in sources().items():
        (folder / f"{name}.ptx").write_text(plain(compile_ptx(name, arch, text)), encoding="utf-8")
        print(folder / f"{name}.ptx")


if __name__ == "__main__":
    main()
