"""The child processes of `kvgen verify --gpu`: each has a GPU context, and does what `kvgen.cli.verify_gpu` sends it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from kvgen.cli.project import generated
from kvgen.codegen.load import load
from kvgen.compile import ARCHS, select_arch
from kvgen.errors import DeviceError
from kvgen.runtime import cuda
from kvgen.runtime.module import cubin
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.loader import load_file
from kvgen.verify.bandwidth import compiled, filler, read_bandwidth
from kvgen.verify.calibrate import calibrate_cubin, probed
from kvgen.verify.device import Gpu
from kvgen.verify.drawn import drawn_set
from kvgen.verify.memory import GpuMemory
from kvgen.verify.probe import GpuMachine, Sizes
from kvgen.verify.probes import Bench
from kvgen.verify.run import Plan, Verifier
from kvgen.verify.supervisor import HOST_PATIENCE, TIMING_PATIENCE
from kvgen.verify.timing import Timer, works
from kvgen.verify.worker import Clock, Done, serve


class VerifyWorker:
    """The work of one child process. `how` is kvgen.cli.verify_gpu.How, with `sets`: of each set's name, where its spec and its
    package lie, None of a set that is drawn."""

    def __init__(self, how: Mapping[str, Any], stack: ExitStack) -> None:
        self._how, self._stack = how, stack
        self._bench: Bench | None = None
        self._kernels: dict[str, KernelSet] = {}
        self._packages: dict[str, ModuleType] = {}
        self._plans: dict[tuple[str, str], list[Plan]] = {}

    def begin(self) -> None:
        """Raises DeviceError where there is no GPU, or none that kvgen generates code for."""
        self._gpu = Gpu(cuda.driver().current_device())
        self._capability = self._gpu.driver.capability(self._gpu.ordinal)
        self._arch = select_arch(self._capability, ARCHS)

    def do(self, key: Sequence[str], given: Mapping[str, Any], clock: Clock) -> Done:
        if key[0] == "device":
            return Done(self._gpu.describe())
        if key[0] == "calibrate":
            return self._calibrate(key[1], clock)
        if key[0] == "bandwidth":
            clock(HOST_PATIENCE)
            image = compiled(self._arch)
            clock(TIMING_PATIENCE)
            return Done({"readings": [asdict(r) for r in read_bandwidth(self._gpu, image)]})
        _, name, op, number = key
        if key[0] == "case":
            return self._case(name, op, int(number), clock)
        return self._time(name, op, int(number), given["read_gb_s"], clock)

    def alive(self) -> bool:
        try:
            self._gpu.wait()
        except DeviceError:
            return False
        return True

    def _calibrate(self, name: str, clock: Clock) -> Done:
        if self._bench is None:
            clock(HOST_PATIENCE)
            self._bench = Bench(GpuMachine(self._gpu, self._arch, calibrate_cubin(self._arch)), Sizes())
            clock(TIMING_PATIENCE)
        figures, wrong = probed(self._bench, name)
        return Done({"figures": [asdict(f) for f in figures]}, [wrong] if wrong else [])

    def _case(self, name: str, op_name: str, number: int, clock: Clock) -> Done:
        clock(HOST_PATIENCE)
        kernels, package = self._set(name)
        op = _op(kernels, op_name)

        def launching(launches: bool) -> None:
            clock(self._how["patience"] if launches else HOST_PATIENCE)

        quick, seed = self._how["quick"], self._how["seed"]
        verifier = Verifier(kernels, package, GpuMemory(self._gpu.ordinal), seed, quick, launching=launching)
        if (name, op_name) not in self._plans:
            self._plans[name, op_name] = verifier.plans(op)
        plan = self._plans[name, op_name][number]
        for each in (op, *(step.op for step in plan.steps)):
            self._load(package, each)
        result = verifier.case(op, plan)
        return Done(asdict(result), result.wrong)

    def _time(self, name: str, op_name: str, number: int, read_gb_s: float, clock: Clock) -> Done:
        clock(HOST_PATIENCE)
        kernels, package = self._set(name)
        op = _op(kernels, op_name)
        self._load(package, op)
        image = compiled(self._arch)
        clock(self._how["timing_patience"])
        timer = Timer(self._gpu, kernels, package, filler(self._gpu, image), read_gb_s)
        return Done(asdict(timer.run(op, works(kernels, op)[number])))

    def _set(self, name: str) -> tuple[KernelSet, ModuleType]:
        if name not in self._kernels:
            where = self._how["sets"][name]
            if where is None:
                self._kernels[name] = drawn_set(name, self._how["seed"])
                self._packages[name] = load(self._kernels[name])
            else:
                path, source, root, out = where
                loaded = load_file(Path(path), source, Path(root))
                self._kernels[name] = next(s.kernels for s in loaded if s.kernels.name == name)
                self._packages[name] = self._stack.enter_context(generated(Path(out), name))
        return self._kernels[name], self._packages[name]

    def _load(self, package: ModuleType, op: Op) -> None:
        """Compile the operation's kernels now, which may take longer than a launch may."""
        launcher = getattr(package, op.name)
        for kernel in (launcher.KERNEL, getattr(launcher, "PLAN", None)):
            if kernel is not None:
                file = kernel.file_on(kernel.module.target(self._capability))
                cubin(kernel.module, file, kernel.entry, self._capability)


def _op(kernels: KernelSet, name: str) -> Op:
    return next(op for op in kernels.ops if op.name == name)


def main() -> None:
    """Serve; the only argument is what VerifyWorker takes, as JSON."""
    with ExitStack() as stack:
        serve(VerifyWorker(json.loads(sys.argv[1]), stack))


if __name__ == "__main__":
    main()
