"""One launch in a process of its own: under compute-sanitizer, under ncu, or with the cubins of an older NVRTC."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.gpu import older
from benchmarks.gpu.packages import generated
from kvgen.verify.worker import Done

if TYPE_CHECKING:
    from benchmarks.gpu.setup import Setup

ROOT: Final = Path(__file__).resolve().parents[2]
LINES: Final = "lines"
_FOUND: Final = 9  # the exit status of a sanitizer that found something
_SAID: Final = 2000  # characters of its output in an answer; the log has all


def run(tool: str, setup: Setup, name: str, op: str, case: str) -> Done:
    """One tool on one case. A tool that is not installed is skipped, with the reason."""
    program = shutil.which("ncu" if tool == "ncu" else "compute-sanitizer")
    if program is None:
        return Done({"skipped": f"{'ncu' if tool == 'ncu' else 'compute-sanitizer'} is not on the PATH"})
    label = f"{tool}.{name}.{op}.{case}".replace(" ", "_").replace(",", "")
    launch = _launch(setup, name, op, case)
    report = Path(setup.parts) / f"{label}.ncu-rep"
    if tool == "ncu":
        entry = getattr(generated(name), op).KERNEL.entry
        command = [program, "--set", "full", "--clock-control", "none", "--force-overwrite", "--export", str(report)]
        command += ["--kernel-name", f"regex:^{entry}$", "--launch-count", "1", *launch, "--timed"]
    else:
        command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "20", *launch]
    # These cubins have line numbers, which reports name; their machine code is that of the others.
    done = _run(command, Path(setup.kernels) / LINES)
    (Path(setup.parts) / f"{label}.log").write_text(f"$ {' '.join(command)}\n{done.stdout}\n", encoding="utf-8")
    wrong = [] if done.returncode == 0 else [f"{tool}: exit status {done.returncode}"]
    if tool == "ncu" and not wrong and not report.is_file():
        wrong = ["ncu: no launch of the kernel was seen"]
    return Done({"said": done.stdout[-_SAID:]}, wrong)


def held(setup: Setup, name: str, op: str, case: str) -> Done:
    """A case of the correctness with the cubins of an older NVRTC."""
    done = _run([*_launch(setup, name, op, case), "--held"], Path(setup.kernels) / older.FOLDER)
    lines = done.stdout.strip().splitlines()
    return Done({"said": done.stdout[-_SAID:]}, (lines or ["no message"]) if done.returncode else ())


def _launch(setup: Setup, name: str, op: str, case: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu.launch_one", json.dumps(asdict(setup)), name, op, case]


def _run(command: list[str], cubins: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KVGEN_CUBINS": str(cubins)}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **both)
