"""The kernel of an attention call, for each architecture by itself: the first candidate that fits, and why no other one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from kvgen.architectures import architecture
from kvgen.expr.nodes import const
from kvgen.layout.dtypes import dtype
from kvgen.lowering.attention.problem import Candidate, Fit, Problem, WhyNot
from kvgen.lowering.attention.ring import Stages
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, PoolMap

P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Choice:
    """The kernel `name` takes a call by `fit`; `why_not` has why each candidate before it does not, by its name."""

    name: str
    fit: Fit
    why_not: tuple[tuple[str, str], ...]

    @property
    def template(self) -> str:
        """The template of the kernel."""
        return f"ops/{self.name}.cu.j2"


def choose(candidates: Sequence[Candidate[P]], problem: P, archs: Sequence[str]) -> dict[str, Choice]:
    """The first candidate that fits, for each architecture. Raises ValueError, which says why, where none does."""
    found: dict[str, Choice] = {}
    lacking: dict[str, str] = {}  # architectures without a kernel, and why the last candidate is none
    for arch in archs:
        why_not: list[tuple[str, str]] = []
        for candidate in candidates:
            fit = candidate.fit(problem, architecture(arch))
            if isinstance(fit, Fit):
                found[arch] = Choice(candidate.NAME, fit, tuple(why_not))
                break
            why_not.append((candidate.NAME, fit.text))
        else:
            lacking[arch] = why_not[-1][1]
    if lacking:
        names = ", ".join(lacking)
        raise ValueError(
            f"ops: {problem.name} has no kernel for {names}: {next(iter(lacking.values()))}, or leave out {names}"
        )
    return found


def fitting(candidates: Sequence[Candidate[P]], problem: P, arch: str) -> Iterator[Choice]:
    """Every candidate that fits on this architecture, the chosen one first."""
    for candidate in candidates:
        fit = candidate.fit(problem, architecture(arch))
        if not isinstance(fit, WhyNot):
            yield Choice(candidate.NAME, fit, ())


def kernel_plans(problem: Problem, choices: Mapping[str, Choice]) -> tuple[KernelPlan, ...]:
    """The kernel of a call, and behind it its planner where it has a workspace: one file for all architectures whose text is
    the same."""
    params = _params(problem, [choice.fit for choice in choices.values()])
    mapped = any(isinstance(p, PoolMap) for p in params)
    call = replace(problem.call, params=tuple(p.declaration for p in params), maps=mapped)
    kernels, planners = dict[str, KernelPlan](), dict[str, KernelPlan]()
    for arch, choice in choices.items():
        fit, division = choice.fit, choice.fit.division
        split = problem.split_plan(fit)
        own = replace(
            call,
            tiles=division.tiles,
            heads=division.heads,
            vec=fit.vec,
            factored=fit.factored,
            plan_digest=problem.digest(fit, split),
        )
        kernels[arch] = KernelPlan(
            problem.name,
            call.entry,
            choice.template,
            fit.context(own),
            params,
            (problem.grid(fit, own), const(1), const(1)),
            fit.threads,
            shared=fit.shared,
            reads_tables=problem.reads_tables,
            division=division,
            split=split,
        )
        if split is not None:
            planners[arch] = problem.planner(fit, own)
    return (joined(kernels), *((joined(planners),) if planners else ()))


def joined(plans: Mapping[str, KernelPlan]) -> KernelPlan:
    """One kernel by architecture: architectures whose text is the same share a file. The file of most of them has the
    operation's name, another one also its first architecture's."""
    texts: list[tuple[list[str], KernelPlan]] = []
    for arch, plan in plans.items():
        for n, (archs, text) in enumerate(texts):
            context = merged(text.context, plan.context) if text.template == plan.template else None
            if context is not None:
                texts[n] = ([*archs, arch], replace(text, context=context))
                break
        else:
            texts.append(([arch], plan))
    most = max(range(len(texts)), key=lambda n: len(texts[n][0]))
    names = [text.name if n == most else f"{text.name}_{archs[0]}" for n, (archs, text) in enumerate(texts)]
    found: dict[str, KernelPlan] = {}
    for (archs, text), name in zip(texts, names, strict=True):
        others = ", ".join(f"{n}.cu" for n in names if n != name)
        for arch in archs:
            found[arch] = replace(plans[arch], name=name, context=text.context, other_files=others)
    base = found[texts[most][0][0]]
    own = tuple((arch, found[arch]) for arch in plans)
    return base if all(plan == base for plan in found.values()) else replace(base, by_arch=own)


class _Differ(Exception):
    """Two contexts have other values in a place that one text cannot have both of."""


def merged(one: object, other: object) -> object | None:
    """A template's context for the architectures of both: equal but for tiles of rings; None where they differ otherwise."""
    try:
        found: object = _merged(one, other)
    except _Differ:
        return None
    return found


def _merged(one: Any, other: Any) -> Any:
    if one == other:
        return one
    if isinstance(one, Stages) and isinstance(other, Stages) and (both := one.merged(other)) is not None:
        return both
    if is_dataclass(one) and type(one) is type(other):
        names = (f.name for f in fields(one))
        return replace(one, **{n: _merged(getattr(one, n), getattr(other, n)) for n in names})  # type: ignore[type-var]
    raise _Differ


def _params(problem: Problem, fits: Sequence[Fit]) -> tuple[Param, ...]:
    """The call's parameters, q and out aligned as the widest access of any architecture's kernel, then all tensor maps."""
    align = {"q": max(f.q_align for f in fits), "out": max(f.out_align for f in fits)}
    given = tuple(
        replace(p, align=min(16, align[p.name] * dtype(p.dtype).bytes))
        if isinstance(p, Array) and p.name in align
        else p
        for p in problem.params
    )
    return (*given, *dict.fromkeys(m for f in fits for m in f.maps))
