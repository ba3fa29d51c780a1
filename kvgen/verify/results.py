"""What a verification found, as plain data: by set, by kernel, by case."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Status = Literal["ok", "wrong", "not run"]


@dataclass(frozen=True)
class CaseResult:
    """One launch beside its oracle. `fault`: what was wrong with its data, "" for nothing. `error` is the largest difference in
    numbers that the kernel computes, `share` the largest share of its bound. `reported` is the error word as the kernel left
    it, `expected` as the oracle has it, both as text, "" for no fault. `wrong`: what contradicts the oracle."""

    batch: str
    fault: str
    error: float
    share: float
    reported: str
    expected: str
    wrong: tuple[str, ...]
    seconds: float

    def with_later(self, op: str, later: CaseResult) -> CaseResult:
        """This and a later launch over the same memory, of the operation called `op`, as one result."""
        return replace(
            self,
            error=max(self.error, later.error),
            share=max(self.share, later.share),
            reported=self.reported or later.reported,
            expected=self.expected or later.expected,
            wrong=(*self.wrong, *(f"then {op}: {line}" for line in later.wrong)),
        )

    @property
    def name(self) -> str:
        """The batch, or what was wrong with its data."""
        return f"wrong data: {self.fault}" if self.fault else f"batch {self.batch}"


def share_text(share: float) -> str:
    """A share of a bound, as people read it: "exact" where there is no difference at all."""
    if not share:
        return "exact"
    return f"{share:.0%}" if share < 100 else "past 100 times"


@dataclass(frozen=True)
class Timed:
    """The time of one launch in a workload, in microseconds: the median of several samples, and the least. `nbytes` are the
    fewest bytes that the operation must move, `percent` their rate beside the measured read bandwidth. `past_l2`: whether the
    launches of a sample move several times what the L2 cache holds."""

    workload: str
    us: float
    us_least: float
    nbytes: int
    gb_s: float
    percent: float
    launches: int
    past_l2: bool


@dataclass
class KernelResult:
    """One operation: its cases and times. `why`: why it was not run, or not timed. `arch`: whose code ran; "": the set's."""

    name: str
    kind: str
    cases: list[CaseResult] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)
    why: str = ""
    arch: str = ""

    @property
    def status(self) -> Status:
        """Whether everything that ran is right."""
        if any(case.wrong for case in self.cases):
            return "wrong"
        return "ok" if self.cases else "not run"

    @property
    def hostile(self) -> list[CaseResult]:
        """The cases whose data is wrong."""
        return [case for case in self.cases if case.fault]

    @property
    def error(self) -> float:
        """The largest difference."""
        return max((case.error for case in self.cases), default=0.0)

    @property
    def share(self) -> float:
        """The largest share of a bound."""
        return max((case.share for case in self.cases), default=0.0)


@dataclass
class SetResult:
    """One set: the architecture whose code ran, the SHA-256 of its generated files, whether they are what the spec gives."""

    name: str
    arch: str
    digest: str
    in_step: bool
    kernels: list[KernelResult] = field(default_factory=list)
