"""Sets that `kvgen verify --drawn` draws, and the batches that no other set shows to matter: bugs that are planted in a template
are found there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

import kvgen
from kvgen import KernelSet
from kvgen.cases.operation import cases_of
from kvgen.verify.drawn import SUBJECTS, drawn_set, names
from kvgen.verify.memory import HostMemory
from kvgen.verify.results import CaseResult
from kvgen.verify.run import Verifier
from tests.support.planted import planted

CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
# Cases of every run; a campaign has all.
SETS: Final = names(6) if CAMPAIGN else ["drawn_drafts_0", "drawn_block_max_0"]


def only(name: str, arch: Any) -> KernelSet:
    """A drawn set for one architecture."""
    return drawn_set(name, 0).model_copy(update={"arch": (arch,)})


def cases(kernels: KernelSet, module: Any, op_name: str, *names: str) -> list[CaseResult]:
    """The cases of an operation that have these names."""
    verifier = Verifier(kernels, module, HostMemory())
    op = next(op for op in kernels.ops if op.name == op_name)
    return [verifier.case(op, plan) for plan in verifier.plans(op) if plan.name in names]


def test_names_and_seeds() -> None:
    """A name and a seed give one set, with what its subject is about."""
    assert names(2)[:2] == ["drawn_drafts_0", "drawn_drafts_1"] and len(names(3)) == 3 * len(SUBJECTS)
    for name in names(8):
        kernels = drawn_set(name, 3)
        assert kernels == drawn_set(name, 3) and kernels.name == name and len(kernels.arch) == 5
        subject, cache = name.split("_", 1)[1].rsplit("_", 1)[0], kernels.cache
        found: dict[str, Any] = {op.kind: op for op in kernels.ops}
        match subject:
            case "drafts":
                assert {"append", "gather", "decode"} <= set(found) and all(
                    q and q.computed for q in cache.quants.values()
                )
            case "rates":
                assert cache.entry_tokens > 1 and {"append", "gather", "decode"} <= set(found)
            case "ahead":
                assert all(op.mask.ahead for op in found.values()) and set(found) == {"decode", "extend"}
            case "zero_points":
                assert all(q and q.zero for q in cache.quants.values()) and "extend" in found
            case "block_max":
                assert found["indexer_scores"].block_max == 16 or not name.endswith("_0")
            case "lists":
                assert found["mla_decode"].sparse
            case _:
                raise AssertionError(subject)
    assert len({drawn_set("drawn_rates_0", seed).model_dump_json() for seed in range(4)}) > 1


@pytest.mark.parametrize("name", SETS)
def test_drawn_sets_are_right(name: str) -> None:
    """Every kernel of every drawn set, in all its batches."""
    kernels: Any = drawn_set(name, 0)
    module: Any = kvgen.load(kernels)
    verifier = Verifier(kernels, module, HostMemory())
    for op in kernels.ops:
        archs = verifier.other_archs(op) if CAMPAIGN else []
        for result in (*(verifier.run(op, arch=arch) for arch in archs), verifier.run(op)):
            assert result.status == "ok", (op.name, [(c.name, c.wrong) for c in result.cases])


def test_steps_of_drafts() -> None:
    """Some drafts lie behind the length that follows, others are overwritten; a reader has as many rows as it needs."""
    kernels = drawn_set("drawn_drafts_0", 0)
    first, second, *readers = cases_of(kernels.ops[0]).steps(kernels)
    left = [a - n for a, n in zip(first.workload.totals, first.workload.new, strict=True)]
    assert all(b - n >= kept for b, n, kept in zip(second.workload.totals, second.workload.new, left, strict=True))
    assert any(a > b for a, b in zip(first.workload.totals, second.workload.totals, strict=True))
    assert any(a < b for a, b in zip(first.workload.totals, second.workload.totals, strict=True))
    assert [step.op.kind for step in readers] == ["gather", "decode"]
    assert cases_of(kernels.ops[1]).steps(kernels) == ()


# Planted bugs: the set, the operation, an architecture; the file, a part of it and its replacement; the case that finds the bug.
PLANTED: Final[dict[str, tuple[str, str, str, str, str, str, str]]] = {
    "a scale is the largest that a place ever had": (
        "drawn_drafts_0", "append", "sm_80", "device/rows/write_rows.cuh",
        "Blocks::dim(block))[at % Blocks::kEach] = scales[row][at];",
        "Blocks::dim(block))[at % Blocks::kEach] = to_f32(scale_at<S>(cache, to.page, to.token, head0 + Blocks::head(block), "
        "Blocks::dim(block))[at % Blocks::kEach]) > to_f32(scales[row][at]) ? scale_at<S>(cache, to.page, to.token, head0 + "
        "Blocks::head(block), Blocks::dim(block))[at % Blocks::kEach] : scales[row][at];",
        "drafts",
    ),
    "entries that have only begun are seen": (
        "drawn_rates_0", "decode", "sm_80", "/decode.cu", "min(position + 1, tokens) / Cache::kRate",
        "(min(position + 1, tokens) + Cache::kRate - 1) / Cache::kRate", "small",
    ),
    "one token too few ahead": (
        "drawn_ahead_0", "decode", "sm_80", "/decode.cu", "? tokens : position + ", "? tokens : position - 1 + ", "mixed",
    ),
    "one token too few ahead of prompts": (
        "drawn_ahead_0", "extend", "sm_80", "/extend.cu", "? tokens : position + ", "? tokens : position - 1 + ", "prompt",
    ),
    "zero points are left out of prompts": (
        "drawn_zero_points_0", "extend", "sm_90a", "device/attention/extend/row_widen.cuh",
        "if constexpr (S::kZero) x[i] = add_halves(x[i], zero[g]);", "", "small",
    ),
    "zero points are rounded with their scales": (
        "drawn_zero_points_0", "extend", "sm_80", "device/attention/common/tile_scales.cuh",
        "multiply_halves(S::kZero ? add_halves(codes, pair.zero) : codes, pair.scale)",
        "S::kZero ? multiply_add_halves(codes, pair.scale, multiply_halves(pair.zero, pair.scale)) : multiply_halves(codes, "
        "pair.scale)",
        "prompt",
    ),
    "lanes of a block of 16": (
        "drawn_block_max_0", "indexer_scores", "sm_80", "device/attention/indexer/indexer_scores.cuh", "{4, 8, 16, 1}",
        "{4, 8, 16, 2}", "small",
    ),
    "lanes before the arrival that frees a tile": (
        "drawn_lists_0", "mla_decode", "sm_90a", "/mla_decode.cu",
        "__syncwarp();\n      if (lane == 0) mbarrier_arrive(&shared.empty[t % 2][group]);",
        "if (lane == 0) mbarrier_arrive(&shared.empty[t % 2][group]);", "long",
    ),
}  # fmt: skip
# Cases of the same operation that do not find them: why there are the others.
MISSED: Final = {
    "a scale is the largest that a place ever had": ("small", "mixed"),
    "lanes before the arrival that frees a tile": ("small", "mixed"),
}
SOME: Final = ("a scale is the largest that a place ever had", "lanes of a block of 16")


@pytest.mark.parametrize("bug", PLANTED if CAMPAIGN else SOME)
def test_planted_bugs_are_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, op, arch, suffix, old, new, found_by = PLANTED[bug]
    kernels = only(name, arch)
    module = planted(kernels, suffix, old, new, tmp_path, monkeypatch)
    (found,) = cases(kernels, module, op, found_by)
    assert found.wrong, found
    missed = MISSED.get(bug, ())
    assert [case.wrong for case in cases(kernels, module, op, *missed)] == [()] * len(missed)


def test_every_subject_has_a_planted_bug() -> None:
    assert {name for name, *_ in PLANTED.values()} == set(names(1))
