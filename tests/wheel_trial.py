"""An installed kvgen, tried as a user has it: a project in an empty folder, built, checked, exported, used on NumPy arrays.

    python -m tests.wheel_trial       # in an environment with kvgen[build,cu13] from a wheel, pytest and packaging

Its commands run outside of the repository, so that the installed package is what they import.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.test_packaging import PROJECT, SPEC, USE


def main() -> None:
    """Try it; raises CalledProcessError for the first command that fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    python = (sys.executable, "-P")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        specs = folder / "kernels" / "specs"
        specs.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
        (specs / "small.py").write_text(SPEC, encoding="utf-8")
        where = (*python, "-c", "import kvgen; print('kvgen', kvgen.__version__, 'of', kvgen.__file__)")
        subprocess.run(where, cwd=folder, env=environment, check=True)
        for command in (("build",), ("check",), ("export", "small", "-o", "cpp")):
            subprocess.run((*python, "-m", "kvgen", *command), cwd=folder, env=environment, check=True)
        environment["PYTHONPATH"] = str(folder / "src")
        subprocess.run((*python, "-W", "error", "-c", USE), cwd=folder, env=environment, check=True)
    print(f"tried on Python {sys.version.split()[0]}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
