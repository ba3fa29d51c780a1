"""One named case of one operation in a process of its own, for sanitizers, profilers and cubins of another folder.

    python -m benchmarks.gpu.launch_one SETUP SET OPERATION CASE            a case of its correctness, three times
    python -m benchmarks.gpu.launch_one SETUP SET OPERATION CASE --timed    a timed case, one launch
    python -m benchmarks.gpu.launch_one SETUP SET OPERATION CASE --held     a case of its correctness, held to the oracle

The last one prints a line for each thing that is wrong, and ends with exit status 1 then.
SETUP is the JSON that children of run_gpu.py get.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.gpu.setup import Setup
from benchmarks.gpu.worker import GpuWorker, start

TIMES: Final = 3
PLANNED: Final = ("decode", "extend")


class Launched(Exception):
    """The launch that was asked for has been made."""


def main(arguments: list[str] | None = None) -> int:
    """Parse and launch; the exit status."""
    parser = argparse.ArgumentParser(prog="launch_one", description=(__doc__ or "").splitlines()[0])
    for name in ("setup", "set", "operation", "case"):
        parser.add_argument(name)
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--held", action="store_true")
    options = parser.parse_args(arguments)
    worker = start(Setup(**json.loads(options.setup)))
    worker.begin()
    if options.timed:
        timed(worker, options.set, options.operation, options.case)
    elif options.held:
        return held(worker, options.set, options.operation, options.case)
    else:
        checked(worker, options.set, options.operation, options.case)
    return 0


def checked(worker: GpuWorker, name: str, op_name: str, case: str) -> None:
    """Launch a case of the correctness; its results are not compared."""
    from kvgen.verify.launch import launch

    op, verifier = worker.op(name, op_name), worker.verifier(name)
    plan = next(p for p in worker.plans(name, op_name) if p.name == case)
    for _ in range(TIMES):
        launch(verifier.built(op, plan), worker.memory)


def held(worker: GpuWorker, name: str, op_name: str, case: str) -> int:
    """Hold a case of the correctness to its oracle; the exit status."""
    plan = next(p for p in worker.plans(name, op_name) if p.name == case)
    wrong = worker.verifier(name).case(worker.op(name, op_name), plan).wrong
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def timed(worker: GpuWorker, name: str, op: str, case: str) -> None:
    """Make the first launch of a timed case, in place of its timing."""
    from kvgen.verify.device import Timing

    gpu, timer = worker.on_gpu, worker.timer(name, {"read": 1.0, "write": 1.0, "copy": 1.0})
    kind = next(kind for known, kind in timer.facts.ops if known == op)
    # A decode or extend with a plan times its planner before itself.
    before = (
        [Timing(1.0, 1.0, 1)] if kind in PLANNED and hasattr(getattr(worker.package(name), op), "workspace") else []
    )

    def once(launches: Sequence[Callable[[int], None]], **_: Any) -> Timing:
        launches[0](gpu.stream)
        gpu.wait()
        if before:
            return before.pop()
        raise Launched

    gpu.time = once  # type: ignore[method-assign, assignment]
    try:
        next(t for t in timer.cases() if (t.op, t.case) == (op, case)).run()
    except Launched:
        return


if __name__ == "__main__":
    sys.exit(main())
