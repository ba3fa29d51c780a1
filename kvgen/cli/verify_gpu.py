"""`kvgen verify --gpu`: every case in a child process, so that a kernel which hangs or destroys the context costs that case."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvgen.cases.operation import cases_of
from kvgen.cli.progress import progress
from kvgen.cli.verify_sets import Verified
from kvgen.compile import select_arch
from kvgen.errors import DeviceError
from kvgen.runtime import cuda
from kvgen.schema.kernel_set import Op
from kvgen.verify.bandwidth import Reading
from kvgen.verify.calibrate import Calibration
from kvgen.verify.memory import GpuMemory
from kvgen.verify.probe import Measured
from kvgen.verify.probes import PROBES
from kvgen.verify.results import CaseResult, KernelResult, SetResult, Timed
from kvgen.verify.run import Plan, Verifier
from kvgen.verify.supervisor import CASE_PATIENCE, TIMING_PATIENCE, Answer, Item, Supervisor
from kvgen.verify.timing import works

_WORKER: Final = "kvgen.cli.verify_worker"


@dataclass(frozen=True)
class How:
    """Which cases run, with which random numbers, and the seconds that a case and a timing may take."""

    quick: bool
    seed: int
    patience: int

    @property
    def timing_patience(self) -> float:
        return self.patience * TIMING_PATIENCE / CASE_PATIENCE


@dataclass
class OnGpu:
    """The GPU's facts, its measured figures, and the results of every set. `lost` says why no process can use the GPU any more:
    nothing runs after that, and all results before it stay."""

    facts: dict[str, Any]
    calibration: Calibration
    bandwidth: tuple[Reading, ...]
    sets: list[SetResult] = field(default_factory=list)
    lost: str = ""


@dataclass
class _Kernel:
    """One operation with its cases and workloads, and the result that answers are added to."""

    op: Op
    result: KernelResult
    plans: Sequence[Plan]
    timings: int


def verify_gpu(sets: Sequence[Verified], how: How, said: Callable[[dict[str, Any]], None]) -> OnGpu:
    """Measure the GPU, then run every kernel of the sets, and time those of the project. `said` is called with the GPU's facts
    before anything long begins.

    Raises DeviceError where no GPU can be used, with what to do.
    """
    specs = {its.name: its.spec for its in sets}
    setup = json.dumps({"sets": specs, **asdict(how), "timing_patience": how.timing_patience})
    with Supervisor([sys.executable, "-m", _WORKER, setup]) as children:
        try:
            cuda.driver()  # without a driver no child need start
            found = _measured(children, said)
        except DeviceError as error:
            raise DeviceError(
                f"--gpu: {error}; `kvgen doctor` shows what this machine has, and `kvgen verify --cpu` needs no GPU"
            ) from error
        with progress("verifying", sum(len(its.ops) for its in sets)) as done:
            for its in sets:
                found.sets.append(_set(its, children, found, how, done))
    return found


def _measured(children: Supervisor, said: Callable[[dict[str, Any]], None]) -> OnGpu:
    (device,) = children.run([Item(("device",), CASE_PATIENCE)])
    if device.wrong:
        raise DeviceError(device.wrong[0])
    said(dict(device.content))
    figures, wrong, seconds = list[Measured](), list[str](), 0.0
    for answer in children.run([Item(("calibrate", name), TIMING_PATIENCE) for name in PROBES]):
        name = answer.item.key[1]
        figures += [Measured(**f) for f in answer.content.get("figures", ())]
        wrong += [line if line.startswith(f"{name}: ") else f"{name}: {line}" for line in answer.wrong]
        seconds += answer.seconds
    (bandwidth,) = children.run([Item(("bandwidth",), TIMING_PATIENCE)])
    if bandwidth.wrong:
        raise DeviceError(f"bandwidth: {bandwidth.wrong[0]}")
    readings = tuple(Reading(**r) for r in bandwidth.content["readings"])
    return OnGpu(dict(device.content), Calibration(tuple(figures), tuple(wrong), round(seconds, 2)), readings)


def _set(its: Verified, children: Supervisor, gpu: OnGpu, how: How, done: Callable[[], None]) -> SetResult:
    """Every kernel of a set that was chosen: its cases, then its times."""
    kernels = its.kernels
    major, _, minor = gpu.facts["capability"].partition(".")
    try:
        arch = select_arch((int(major), int(minor)), kernels.arch)
    except DeviceError:
        arch = ""
    result = SetResult(its.name, arch or "-", *its.digest())
    ops = [op for op in kernels.ops if op.name in its.ops]
    if not arch:
        why = f"the set is generated for {', '.join(kernels.arch)}, none of which runs on this GPU"
        result.kernels += [KernelResult(op.name, op.kind, why=why) for op in ops]
    else:
        with its.package() as package:
            verifier = Verifier(kernels, package, GpuMemory(0), how.seed, how.quick)
            found = []
            for op in ops:
                plans = verifier.plans(op)
                timings = len(works(kernels, op)) if plans and its.spec is not None else 0
                kernel = KernelResult(op.name, op.kind, why=verifier.why_not(op) if not plans else cases_of(op).unheld)
                found.append(_Kernel(op, kernel, plans, min(timings, 1) if how.quick else timings))
        result.kernels += [_kernel(children, its.name, each, gpu, how) for each in found]
    for _ in ops:
        done()
    return result


def _kernel(children: Supervisor, name: str, kernel: _Kernel, gpu: OnGpu, how: How) -> KernelResult:
    """A kernel's cases, then its times. Where the GPU is lost, the first case that could not run is wrong."""
    result = kernel.result
    if gpu.lost:
        result.why = f"not run: the GPU was lost before ({gpu.lost})"
        return result
    try:
        _run_kernel(children, name, kernel, gpu, how)
    except DeviceError as error:
        gpu.lost = str(error)
        if len(result.cases) < len(kernel.plans):
            plan = kernel.plans[len(result.cases)]
            wrong = (f"no process can use the GPU any more: {error}",)
            result.cases.append(CaseResult(plan.workload.name, plan.fault, 0.0, 0.0, "", "", wrong, 0.0))
        else:
            result.why = f"not timed: {error}"
    return result


def _run_kernel(children: Supervisor, name: str, kernel: _Kernel, gpu: OnGpu, how: How) -> None:
    cases = [Item(("case", name, kernel.op.name, str(i)), how.patience) for i in range(len(kernel.plans))]
    for plan, answer in zip(kernel.plans, children.run(cases), strict=True):
        kernel.result.cases.append(_case(plan, answer))
    read = {"read_gb_s": max(r.gb_s for r in gpu.bandwidth)}
    patience = how.timing_patience
    times = [Item(("time", name, kernel.op.name, str(i)), patience, read) for i in range(kernel.timings)]
    for answer in children.run(times):
        if answer.wrong:
            kernel.result.why = f"not timed: {answer.wrong[0].removeprefix('DeviceError: ')}"
        else:
            kernel.result.timed.append(Timed(**answer.content))


def _case(plan: Plan, answer: Answer) -> CaseResult:
    """The child's result, or that it had none."""
    content: Mapping[str, Any] = answer.content
    if "batch" in content:
        return CaseResult(**{**content, "wrong": tuple(content["wrong"])})
    return CaseResult(plan.workload.name, plan.fault, 0.0, 0.0, "", "", answer.wrong, round(answer.seconds, 4))
