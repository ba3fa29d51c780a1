"""Tests of kvgen in transformers, under the known versions that are not the locked one and under the newest of PyPI.

    python -m tests_torch.other_transformers

Each version is installed alone into build/transformers-VERSION, which comes first on the path: the packages it needs are those
of requirements.lock. A newest version that kvgen does not know is run as if it were the newest known one; the status is 1 then,
and the last line says whether its tests pass: it goes into KNOWN once somebody has read what changed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import transformers
from packaging.version import Version

from kvgen.integrations.transformers.versions import KNOWN

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = tuple(
    f"tests_torch/test_{name}.py" for name in ("masks", "transformers", "continuous_batching", "tensor_parallel")
)
# Read by tests_torch/conftest.py.
AS: Final = "KVGEN_TEST_TRANSFORMERS_AS"


def minor(version: str) -> str:
    """ "5.23.1" -> "5.23"."""
    return ".".join(str(number) for number in Version(version).release[:2])


def installed(requirement: str, name: str) -> tuple[Path, str]:
    """A folder with transformers as `requirement` has it, of the newest release that fits, and its version."""
    folder = ROOT / "build" / f"transformers-{name}"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade")
    subprocess.run([*pip, "--target", str(folder), requirement], check=True)
    newest = max(folder.glob("transformers-*.dist-info"), key=lambda found: found.stat().st_mtime_ns)
    return folder, newest.name.removesuffix(".dist-info").partition("-")[2]


def passes(folder: Path, version: str) -> bool:
    """Run the tests under this version; True where they pass."""
    print(f"transformers {version}", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("KVGEN_RECORD_ENGINES", None)  # the record is of the locked version
    if minor(version) not in KNOWN:
        environment[AS] = f"{KNOWN[-1]}.0"
    pytest = (sys.executable, "-m", "pytest", *TESTS, "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal")
    return subprocess.run(pytest, cwd=ROOT, env=environment).returncode == 0


def main() -> int:
    """Run all; 0 where every version is known and passes."""
    tried, failed = {minor(transformers.__version__)}, []
    wanted = [(f"transformers=={known}.*", known) for known in KNOWN if known not in tried]
    for requirement, name in (*wanted, ("transformers", "newest")):
        folder, version = installed(requirement, name)
        if minor(version) in tried:
            continue
        tried.add(minor(version))
        passed = passes(folder, version)
        if not passed:
            failed.append(f"transformers {version}: tests failed")
        if minor(version) not in KNOWN:
            failed.append(
                f"transformers {version} is the newest of PyPI and not in KNOWN of kvgen/integrations/transformers/versions.py; "
                f"its tests {'pass' if passed else 'fail'}"
            )
    print("\n".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
