"""Clocks, power and throttle reasons of a GPU, sampled each second by nvidia-smi into a file; nothing is ever set."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvgen.verify.supervisor import die_with_parent

_FIELDS: Final = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,pstate"
# Older drivers have the second name.
_REASONS: Final = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


@contextmanager
def sampled(path: Path, ordinal: int, seconds: float) -> Iterator[str]:
    """Sample while inside. The value of the context says why there are no samples; it is "" where there are some."""
    program = shutil.which("nvidia-smi")
    if program is None:
        yield "nvidia-smi is not on the PATH"
        return
    command = [program, f"--id={ordinal}", "--format=csv"]
    reasons = next((r for r in _REASONS if _answers([*command, f"--query-gpu={r}"])), None)
    fields = _FIELDS if reasons is None else f"{_FIELDS},{reasons}"
    if reasons is None and not _answers([*command, f"--query-gpu={fields}"]):
        yield "nvidia-smi does not answer"
        return
    try:
        file = path.open("ab")
    except OSError as error:
        yield f"{path}: {error.strerror}"
        return
    with file:
        process = subprocess.Popen(
            [*command, f"--query-gpu={fields}", f"--loop-ms={round(1000 * seconds)}"],
            stdout=file,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            yield ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
