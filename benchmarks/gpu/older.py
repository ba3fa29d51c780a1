"""The kernels of some operations, compiled by the NVRTC of this process: `tests.versions.under` starts it under an older one.

python -m tests.versions.under 13.0.88 benchmarks.gpu.older '{"folder": ..., "project": ..., "ops": ..., "archs": ...}'
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.packages import ROOT, project, use

FOLDER: Final = "older"


def compile_older(folder: Path, ops: Sequence[tuple[str, str]], archs: Sequence[str] | None, version: str) -> None:
    """Compile the operations (set, name) with this version of NVRTC into `folder`; its wheel is downloaded where it is not there.
    Raises SystemExit where that fails."""
    given = {"folder": str(folder), "project": str(project()), "ops": ops, "archs": archs}
    under = [sys.executable, "-m", "tests.versions.under"]
    for command in ([*under, "--get", version], [*under, version, "benchmarks.gpu.older", json.dumps(given)]):
        if status := subprocess.run(command, cwd=ROOT).returncode:
            raise SystemExit(f"--nvrtc {version}: `{' '.join(command[1:5])}` failed (exit status {status})")


def main() -> None:
    """Compile; the only argument is a JSON object."""
    from benchmarks.gpu.prepare import write_ops

    given = json.loads(sys.argv[1])
    use(Path(given["project"]))
    write_ops(Path(given["folder"]), given["ops"], given["archs"])


if __name__ == "__main__":
    main()
