"""Steps that one environment of `make versions` runs, each a line of JSON on stdout: its name, whether it passed, its seconds.

    python -m tests.versions.trial LOGS STEP...

The interpreter is that environment's; the output of a step goes to LOGS/<step>.log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
_KVGEN: Final = ("-P", "-m", "kvgen")
VERBS: Final = (
    "bench", "build", "check", "compile", "demo", "diff", "doctor", "export", "init", "list", "new", "show", "verify",
)  # fmt: skip
_PYTEST: Final = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# Messages are the same with every version of pydantic and typer, but for the answer to a misspelled word, which is typer's own.
_MESSAGES: Final = (*_PYTEST, "tests/errors", "-k", "not option_misspelled and not verb_misspelled")
_KERNELS: Final = (
    *_PYTEST, "tests/runtime/test_cuda.py", "tests/runtime/test_launch.py", "tests/ops/test_slot_mapping.py",
    "tests/ops/test_row_offsets.py", "tests/ops/test_rows_add.py",
)  # fmt: skip
# Step -> commands of this interpreter: in an empty folder where they begin with -P, else in the repository.
STEPS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "cli": (
        (*_KVGEN, "--version"),
        (*_KVGEN, "--help"),
        *((*_KVGEN, verb, "--help") for verb in VERBS),
        (*_KVGEN, "doctor"),
        (*_KVGEN, "new", "chat"),
        (*_KVGEN, "build", "--project", "chat"),
        (*_KVGEN, "check", "--project", "chat"),
        (*_KVGEN, "list", "--project", "chat"),
        (*_KVGEN, "show", "small/append", "--project", "chat"),
        (*_KVGEN, "compile", "--project", "chat"),
        ("-m", "tests.wheel_trial"),
    ),
    "demo": ((*_KVGEN, "demo"),),
    "messages": (_MESSAGES,),
    "kernels": (("-m", "tests.versions.kernels"), _KERNELS),
    "lint": (("-m", "ruff", "check", "."), ("-m", "ruff", "format", "--check", "."), ("-m", "mypy")),
    "package": ((*_PYTEST, "tests/test_packaging.py", "tests/custom/test_headers.py", "tests/export/test_export.py"),),
    "docs": (
        ("-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--builder", "html", "docs", "{folder}/site"),
    ),
}


def run(step: str, log: Path) -> bool:
    """Run a step's commands up to the first that fails; whether none did."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w", encoding="utf-8") as out, tempfile.TemporaryDirectory() as folder:
        for command in STEPS[step]:
            words = [word.replace("{folder}", folder) for word in command]
            where = folder if words[0] == "-P" else ROOT
            print(f"$ python {' '.join(words)}", file=out, flush=True)
            if subprocess.run((sys.executable, *words), cwd=where, env=environment, stdout=out, stderr=out).returncode:
                return False
    return True


def main() -> None:
    """Run the steps that are named; the exit status is for whoever runs this by hand."""
    logs, steps = Path(sys.argv[1]), sys.argv[2:]
    fine = True
    for step in steps:
        begin = time.monotonic()
        done = run(step, logs / f"{step}.log")
        fine = fine and done
        print(json.dumps({"step": step, "fine": done, "seconds": round(time.monotonic() - begin)}), flush=True)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
