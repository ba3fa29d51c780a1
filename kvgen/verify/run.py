"""Every case of a kernel: launched, and all memory held to the oracle's, byte for byte where nothing is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Case
from kvgen.cases.drafts import louden, room
from kvgen.cases.operation import cases_of
from kvgen.cases.workload import Launch, Workload
from kvgen.emulator.errors import HostCompilerError
from kvgen.errors import ArgumentError, DeviceError, ToolError
from kvgen.runtime import Kernel, describe
from kvgen.runtime.cpu import cpu_archs
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.verify.batches import batches, case_of, hostile_batch, next_case
from kvgen.verify.hostile import damages
from kvgen.verify.launch import Left, kind_of, launch
from kvgen.verify.memory import Memory
from kvgen.verify.results import CaseResult, KernelResult

SOME: Final = 100  # numbers of a fused operation, one of which a GPU may round to a neighbour


@dataclass(frozen=True)
class Plan:
    """One case to run: a batch, and which of the kernel's damages it gets (None: none), by number and `fault`. `steps`: the
    launches of a case of several, the first one of which is in the batch."""

    workload: Workload
    damage: int | None
    fault: str = ""
    steps: tuple[Launch, ...] = ()

    @property
    def name(self) -> str:
        """The batch, or what is wrong with its data: a name that no other case of the operation has."""
        return self.fault or self.workload.name


@dataclass
class Verifier:
    """The cases of one set's kernels, on one memory.

    `lost` becomes what the driver says once the GPU's context is gone; nothing runs after that. `launching` is called with True
    before each launch, which may never return, and with False behind it. `last` is the case that ran last, and what its launch
    left.
    """

    kernels: KernelSet
    package: ModuleType
    memory: Memory
    seed: int = 0
    quick: bool = False
    lost: str = ""
    launching: Callable[[bool], None] = lambda _: None
    last: tuple[Case, Left] | None = None

    def why_not(self, op: Op) -> str:
        """Why an operation has no cases; "" where it has some."""
        try:
            case_of(self.kernels, op, self.package, hostile_batch(self.kernels, op), self.seed)
        except ToolError as error:
            return str(error)
        return ""

    def plans(self, op: Op) -> list[Plan]:
        """The cases of an operation; none where it has no oracle here."""
        if self.why_not(op):
            return []
        found = [Plan(work, None) for work in batches(self.kernels, op, quick=self.quick)]
        if not self.quick and (taken := cases_of(op).steps(self.kernels)):
            found.append(Plan(taken[0].workload, None, steps=taken))
        bad = hostile_batch(self.kernels, op)
        case = case_of(self.kernels, op, self.package, bad, self.seed)
        wrong = damages(case.call, case.before.arrays, case.before.tables, quick=self.quick)
        return found + [Plan(bad, i, damage.name) for i, damage in enumerate(wrong)]

    def other_archs(self, op: Op) -> list[str]:
        """Architectures whose code the CPU machine runs besides, for the operation has a file of its own there; one a file."""
        kernel: Kernel = getattr(self.package, op.name).KERNEL
        runs = cpu_archs(kernel.module) if self.memory.device == "cpu" else []
        found = {kernel.file_on(arch): arch for arch in runs}
        return [arch for arch in found.values() if arch != runs[-1]]

    def run(self, op: Op, done: Callable[[], None] = lambda: None, arch: str | None = None) -> KernelResult:
        """All cases of an operation; `done` is called after each. `arch`: on the CPU machine, whose code runs."""
        result = KernelResult(op.name, op.kind, why=self.why_not(op) or cases_of(op).unheld, arch=arch or "")
        for plan in self.plans(op):
            if self.lost:
                result.why = f"not run: the GPU's context was lost before ({self.lost})"
                break
            result.cases.append(self.case(op, plan, arch))
            done()
        return result

    def case(self, op: Op, plan: Plan, arch: str | None = None) -> CaseResult:
        """One case of an operation: its launch, or its launches, and all memory beside the oracle's."""
        begin = time.perf_counter()
        case = self.built(op, plan)
        found = self._launched(case, arch)
        for step in plan.steps[1:]:
            if found.wrong or self.last is None:
                break
            later = next_case(case, self.last[1].contents, step.op, step.workload, self.seed)
            found = found.with_later(step.op.name, self._launched(later, arch if step.op is op else None))
        return replace(found, seconds=round(time.perf_counter() - begin, 4))

    def _launched(self, case: Case, arch: str | None) -> CaseResult:
        """One launch beside its oracle; its time is still 0."""
        self.launching(True)
        try:
            left = launch(case, self.memory, arch)
        except (DeviceError, ArgumentError) as error:
            if isinstance(error.__cause__, HostCompilerError):  # nothing runs without one
                raise
            self._check_context()
            return CaseResult(case.batch, case.fault, 0.0, 0.0, "", "", (str(error),), 0.0)
        self.launching(False)
        self.last = case, left
        comparison = Comparison(case, case.before.copy(), left.contents)
        cases = cases_of(case.call.op)
        word = cases.compare(comparison)
        if "errors" in comparison.wanted.arrays:
            comparison.wanted.arrays["errors"][0] = word
        wrong = [f"{name}: written beside the array" for name in left.beside] + comparison.wrong
        wrong += differences(comparison, near=self.memory.device != "cpu" and cases.fused)
        return CaseResult(
            case.batch,
            case.fault,
            comparison.distance.error,
            comparison.distance.share,
            _said(int(left.contents.arrays["errors"][0]) if "errors" in left.contents.arrays else 0),
            _said(word),
            tuple(wrong),
            0.0,
        )

    def built(self, op: Op, plan: Plan) -> Case:
        """The memory and the call of a case, damaged as the plan says; of its first launch where it has several."""
        case = case_of(self.kernels, op, self.package, plan.workload, self.seed, room(plan.steps))
        if plan.steps:
            louden(case)
        if plan.damage is not None:
            damages(case.call, case.before.arrays, case.before.tables, quick=self.quick)[plan.damage].apply(case)
            case.fault = plan.fault
        return case

    def _check_context(self) -> None:
        """Note it where the GPU takes no more work."""
        if self.memory.device == "cpu":
            return
        try:
            self.memory.place(np.zeros(8, np.uint8)).read()
        except DeviceError as error:
            self.lost = str(error)


def differences(comparison: Comparison, *, near: bool = False) -> list[str]:
    """Where the memory that a launch left is not the one that it must leave; `near`: a neighbouring number in SOME is no
    difference."""
    found, wanted = [], comparison.wanted.flat()
    for name, got in comparison.got.flat().items():
        right = wanted[name]
        if name == "errors":
            if got[0] != right[0]:
                found.append(
                    f"errors: got {_said(int(got[0])) or 'no fault'}; it must be {_said(int(right[0])) or 'no fault'}"
                )
            continue
        mine, theirs = (np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (got, right))
        if np.array_equal(mine, theirs) or (near and _neighbours(got, right)):
            continue
        wrong = np.flatnonzero(mine != theirs)
        at = int(wrong[0])
        found.append(
            f"{name}: {len(wrong)} of {len(mine)} bytes differ, the first at {at}: got {mine[at]:#04x}, it must be "
            f"{theirs[at]:#04x}"
        )
    return found


def _neighbours(got: NDArray[Any], right: NDArray[Any]) -> bool:
    """True: two arrays hold the same numbers, but for one in SOME that is the next one up or down."""
    size = got.dtype.itemsize
    a, b = (np.ascontiguousarray(x).reshape(-1).view(f"i{size}").astype(np.int64) for x in (got, right))
    pairs = [(a, b)] if kind_of(got) != "u8" else [(a & 15, b & 15), (a >> 4, b >> 4)]
    distance = np.concatenate([np.abs(x - y) for x, y in pairs])
    return bool(distance.max(initial=0) <= 1 and (distance > 0).sum() * SOME <= max(len(distance), SOME))


def _said(word: int) -> str:
    """An error word as text, "" for no fault."""
    try:
        return str(describe(word) or "")
    except ArgumentError as error:
        return str(error)
