"""Each architecture chooses its attention kernel for itself: whatever else a set lists, its plan and its workspace stay."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

import kvgen
from kvgen import KernelSet
from kvgen.architectures import ARCHITECTURES, ARCHS, Architecture
from kvgen.cli import slow_kernels
from kvgen.config import find_config
from kvgen.lowering.attention import choose
from kvgen.lowering.attention.problem import AttentionCall, Fit, WhyNot
from kvgen.lowering.attention.ring import Stages
from kvgen.ops import Decode, Extend, IndexerScores, MlaDecode, decode
from kvgen.plan.kernel import KernelPlan
from tests import sets

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGE: Final = Path(kvgen.__file__).parent
ATTENTION: Final = (Decode, Extend, MlaDecode, IndexerScores)
ALL: Final = {s.kernels.name: s.kernels for s in sets.every() if any(isinstance(op, ATTENTION) for op in s.kernels.ops)}


def with_archs(kernels: KernelSet, archs: tuple[str, ...]) -> KernelSet | None:
    """The set for other architectures; None where one of them has no kernel for it."""
    given = {name: getattr(kernels, name) for name in ("name", "q_heads", "cache", "model", "layers", "ops")}
    try:
        return KernelSet(**given, arch=archs)
    except ValueError:
        return None


def alone(value: Any, arch: str) -> Any:
    """A context as this architecture has it: rings of the tiles that it has room for."""
    if isinstance(value, Stages):
        kb = Stages.on(ARCHITECTURES[arch], 0).choices[0][0]
        return dict(value.choices)[kb]
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(alone(getattr(value, f.name), arch) for f in fields(value)))
    return tuple(alone(v, arch) for v in value) if isinstance(value, tuple) else value


def facts(plan: KernelPlan, arch: str) -> tuple[Any, ...]:
    """Everything about the kernel of an architecture but its file's name."""
    own = plan.on(arch)
    return (
        own.template,
        alone(own.context, arch),
        own.grid,
        own.threads,
        own.shared,
        own.most_blocks,
        own.division,
        own.split,
    )


@pytest.mark.parametrize("name", ALL)
def test_an_architecture_s_plan_does_not_depend_on_the_others(name: str) -> None:
    kernels = ALL[name]
    single = {arch: found for arch in ARCHS if (found := with_archs(kernels, (arch,)))}
    several = with_archs(kernels, tuple(single))
    assert several is not None
    for op in (op for op in several.ops if isinstance(op, ATTENTION)):
        plans = op.plan(several)
        for arch, alone_there in single.items():
            for plan, lone in zip(plans, op.plan(alone_there), strict=True):
                assert _without_params(facts(plan, arch)) == _without_params(facts(lone, arch)), (arch, plan.name)


def _without_params(value: Any) -> Any:
    """A call's parameters are those of all architectures of a set."""
    if isinstance(value, tuple) and value and value[0] is AttentionCall:
        names = [f.name for f in fields(AttentionCall)]
        return tuple(v for n, v in zip(names, value[1:], strict=True) if n not in ("params", "maps"))
    return tuple(_without_params(v) for v in value) if isinstance(value, tuple) else value


def test_a_plan_is_known_by_its_division() -> None:
    """A kernel takes the plans of its architecture's planner; where two architectures take each other's plans, workspaces, tiles,
    columns and chunks are the same in both."""
    apart = 0
    for kernels in ALL.values():
        for op in (op for op in kernels.ops if isinstance(op, ATTENTION) and len(op.kernel_names()) > 1):
            kernel, planner = op.plan(kernels)
            divided = defaultdict(set)
            for arch in kernels.arch:
                context: Any = planner.on(arch).context
                call: Any = kernel.on(arch).context
                assert call.d.plan_digest == context.digest != 0, (kernels.name, op.name, arch)
                unit = context.tile, getattr(context, "cols", 0), context.chunk_tokens
                divided[context.digest].add((kernel.on(arch).split, *unit))
            assert all(len(found) == 1 for found in divided.values()), (kernels.name, op.name)
            apart += len(divided) > 1
    assert apart


# A new architecture is two files and a line: its row of the table, a candidate's module and its template. ------------------


class DummySm99:
    """A candidate that only an invented architecture has."""

    NAME = "decode_sm99"

    @staticmethod
    def fit(problem: Any, arch: Architecture) -> Fit | WhyNot:
        if not arch.tcgen05 or arch.threads != 4096:
            return WhyNot("not invented here")
        found = decode.decode_mma.fit(problem, arch)
        return found if isinstance(found, WhyNot) else replace(found, how="invented")


def test_a_new_architecture_is_a_row_and_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row of the table and its candidate, the first in a list: it gets a file, and others keep theirs."""
    invented = replace(ARCHITECTURES["sm_100f"], name="sm_99", threads=4096)  # type: ignore[arg-type]
    monkeypatch.setattr(choose, "architecture", lambda n: invented if n == "sm_99" else ARCHITECTURES[n])
    kernels = ALL["llama3_8b"]
    (op,) = [op for op in kernels.ops if type(op) is Decode][:1]
    problem = op.problem(kernels)
    before = op.plan(kernels)
    choices = choose.choose((DummySm99, *decode.CANDIDATES), problem, (*kernels.arch, "sm_99"))
    assert {arch: c.name for arch, c in choices.items()} == {
        **dict.fromkeys(kernels.arch, "decode_mma"),
        "sm_99": "decode_sm99",
    }
    assert choices["sm_80"].why_not == (("decode_sm99", "not invented here"),)
    plan, *_ = choose.kernel_plans(problem, choices)
    assert [(k.name, archs) for k, archs in plan.files((*kernels.arch, "sm_99"))] == [
        (before[0].name, kernels.arch),
        (f"{before[0].name}_sm_99", ("sm_99",)),
    ]
    assert plan.on("sm_99").template == "ops/decode_sm99.cu.j2"
    assert facts(plan, "sm_90a") == facts(before[0], "sm_90a")


def test_a_first_candidate_on_cuda_cores_is_not_called_slow() -> None:
    """A kernel that comes before those on tensor cores is meant to be there; behind them it has the reason of the last."""
    kernels = ALL["layout_f32"]
    (op,) = [op for op in kernels.ops if type(op) is Decode][:1]
    problem = op.problem(kernels)
    alone = choose.choose((decode.decode_simt,), problem, ("sm_90a",))
    assert not alone["sm_90a"].why_not and slow_kernels._why_slow(alone) == ""
    assert slow_kernels._why_slow(choose.choose(decode.CANDIDATES, problem, ("sm_90a",))).startswith("f32 values")


# Nobody else asks which architecture it is. ---------------------------------------------------------------------------------


def test_one_table_of_architectures() -> None:
    """No module but the table has a string that is the name of one (the emulator knows PTX's), and no operation asks for one."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith("emulator/") or place == "architectures.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ARCHS:
                wrong.append(f"{place}:{node.lineno}: {node.value}")
    assert not wrong, "\n".join(wrong)
    for op in ("decode", "extend", "mla_decode", "indexer_scores"):
        text = (PACKAGE / "ops" / f"{op}.py").read_text(encoding="utf-8")
        for old in ("widened", "with_warpgroups", "with_widening", "others(", "hindrance", "as_stored", "in_pairs"):
            assert old not in text, f"ops/{op}.py: {old}"
    for path in (PACKAGE / "lowering").rglob("*.py"):
        assert "hindrance" not in path.read_text(encoding="utf-8"), path


# The chosen kernel is the fastest by the model. ------------------------------------------------------------------------------

MOST: Final = 1.03  # of another candidate's cycles


@pytest.mark.parametrize("name", ALL)
def test_no_other_candidate_takes_fewer_cycles(name: str) -> None:
    """A token and query column, by the trips that resources.json has of every kernel that fits, on sm_80 and sm_90a."""
    path = find_config(ROOT).out / name / "resources.json"
    checked_in = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    calls = checked_in.get("candidates", {})
    kernels = ALL[name]
    for op in (op for op in kernels.ops if isinstance(op, Decode | Extend | MlaDecode)):
        for arch in (arch for arch in kernels.arch if ARCHITECTURES[arch].reference):
            on_tensor_cores = [
                n for n, plan in op.candidates(kernels, arch).items() if plan.division and not plan.division.lanes
            ]
            own = sets.candidates().get(f"{name}/{op.name} {arch}", {})  # of a set of tests/sets
            recorded = calls.get(op.name, {}).get(arch, own)
            assert len(on_tensor_cores) < 2 or list(recorded) == on_tensor_cores, (
                f"{op.name} on {arch}: record the set anew"
            )
            if recorded:
                chosen, *others = recorded.values()
                assert chosen <= MOST * min(others), f"{op.name} on {arch}: {recorded}"
