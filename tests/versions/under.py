"""A program under an NVRTC other than the environment's.

    python -m tests.versions.under 12.9.86 kvgen compile llama3_8b      # any module and its arguments

The library of a version comes from its wheel and lies in `.venv-nvrtc/<version>`; `python -m tests.versions.under --get 12.9.86`
puts it there, `--get-old` those of OLD, as `make test` does; `--old` prints these. Nothing is installed: cuda.bindings takes a
library that the process loaded before.
"""

from __future__ import annotations

import ctypes
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2] / ".venv-nvrtc"
# The oldest minor versions of cu12 and of cu13 (torch 2.11 pins it), at their last patches; `make versions` has the first ones.
OLD: Final = ("12.9.86", "13.0.88")


def libraries(version: str) -> list[Path]:
    """The libraries of a version, in the order in which they load; none where it was not put into FOLDER."""
    return sorted((FOLDER / version).glob("libnvrtc*.so.*"))  # libnvrtc-builtins before libnvrtc, which looks for it


def get(version: str) -> None:
    """Put the libraries of a version's wheel into FOLDER, where they are not yet; pip's error ends the process."""
    if libraries(version) or sys.platform == "darwin":  # for which there is no NVRTC
        return
    package = "nvidia-cuda-nvrtc-cu12" if version.startswith("12.") else "nvidia-cuda-nvrtc"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run((*pip, "--only-binary", ":all:", "--dest", folder, f"{package}=={version}"), check=True)
        (wheel,) = Path(folder).iterdir()
        made = FOLDER / f"{version}.part"
        made.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                last = name.rpartition("/")[2]
                if last.startswith("libnvrtc") and ".so." in last and ".alt." not in last:
                    (made / last).write_bytes(archive.read(name))
        made.rename(FOLDER / version)
    if len(libraries(version)) != 2:
        sys.exit(f"{package} {version}: has other libraries than libnvrtc and libnvrtc-builtins")


def load(version: str) -> None:
    """Load a version into this process; the process ends with a message where FOLDER does not have it."""
    found = libraries(version)
    if not found:
        sys.exit(f"NVRTC {version} is not in {FOLDER}: python -m tests.versions.under --get {version}")
    for library in found:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def main() -> None:
    """Run `VERSION MODULE [ARGUMENT]...`, or get versions, or print OLD."""
    if sys.argv[1:] == ["--old"]:
        print(*OLD)
    elif sys.argv[1:2] in (["--get"], ["--get-old"]):
        for version in sys.argv[2:] if sys.argv[1] == "--get" else OLD:
            get(version)
    elif len(sys.argv) < 3:
        sys.exit(__doc__)
    else:
        version, module = sys.argv[1:3]
        load(version)
        sys.argv = [module, *sys.argv[3:]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
