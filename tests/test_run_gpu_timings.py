"""The workloads that benchmarks/run_gpu.py times, at a small size and computed by the CPU machine."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.gpu import prepare, timings, workload
from benchmarks.gpu.apart import Apart, apart_of
from benchmarks.gpu.packages import ROOT, generated, project, use
from benchmarks.gpu.plan import BY_VALUE
from kvgen.compile import compile_unit, default_cache
from kvgen.emulator import build
from kvgen.runtime import gpu as backend
from kvgen.schema.loader import load_folder
from kvgen.verify import bandwidth
from kvgen.verify import timing as verify_timing
from tests import sets
from tests.cli.conftest import Folder
from tests.support import bench_sets, family_sets
from tests.support.emulated_gpu import EmulatedDriver, use_emulated
from tests.support.family_sets import write_project

# Checked-in sets -> what they are timed for. Every run has the kinds of table in the family's sets, slots in the fused ones,
# and here a decode with a planner; a campaign all.
FORMS = {
    "llama3_70b_tp8": "splits",
    "layout_flashinfer_hnd": "csr",
    "layout_tensorrt_llm": "per_kv",
    "layout_sglang": "indirect",
    "layout_vllm_mapped": "mapped",
    "layout_ring": "ring",
    "layout_vllm_packed": "slots",
    "gpt_oss_20b": "sinks",
    "qwen25_7b": "prompts",
}
ELSEWHERE = ("layout_flashinfer_hnd", "layout_vllm_packed", "qwen25_7b")  # of tests/sets
TIMED = tuple(FORMS) if "KVGEN_FAMILY" in os.environ else ("llama3_70b_tp8",)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a set for every way to store a cache, built."""
    folder = tmp_path_factory.mktemp("family")
    write_project(folder, family_sets.RUN)
    Folder(folder).kvgen("build")
    return folder


@pytest.mark.parametrize("name", family_sets.RUN)
def test_family(name: str, family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes, scales, tails and latent rows: what gather finds is what was appended, but for what quantization takes."""
    use(family)
    try:
        hold_timings(name, monkeypatch)
    finally:
        use(ROOT)


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with fused appends, built, and the kernels in their place."""
    folder = tmp_path_factory.mktemp("fused")
    bench_sets.write_project(folder, bench_sets.RUN)
    Folder(folder).kvgen("build")
    for loaded in load_folder(folder / "specs", folder):
        prepare.write_apart(folder, loaded.kernels)
    return folder


@pytest.mark.parametrize("name", ["qwen", "fp8", "mla_row", "mrope"])
def test_fused(name: str, fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V is what was appended, and q what separate kernels make of it."""
    use(fused)
    try:
        hold_timings(name, monkeypatch, fused)
    finally:
        use(ROOT)


@pytest.mark.parametrize("name", TIMED)
def test_timed_workloads_compute_the_right_thing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ELSEWHERE:
        sets.write_project(tmp_path)
        use(tmp_path)
    try:
        hold_timings(name, monkeypatch)
    finally:
        use(ROOT)


def timer_of(
    name: str, monkeypatch: pytest.MonkeyPatch, folder: Path | None = None
) -> tuple[timings.Timer, ModuleType]:
    """The timer of a set on a GPU that is the CPU machine, with the separate kernels of its append that `folder` has."""
    unit = bandwidth.bandwidth_unit()
    image = compile_unit(unit, "sm_90a", "ptx", cache=default_cache())
    package = generated(name)
    kernels = next(s.kernels for s in load_folder(project() / "specs", project()) if s.kernels.name == name)
    beside = apart_of(kernels)
    apart = Apart(folder, name, beside[0].name) if folder is not None and beside is not None else None
    packages = [package, *((apart.rows, apart.store) if apart is not None else ())]
    driver = EmulatedDriver(packages, build([image.data.decode()], mode="check"))
    gpu = use_emulated(monkeypatch, driver)
    fill, empty = bandwidth.filler(gpu, b""), workload.empty_node(gpu, b"")
    rates = {"read": 1.0, "copy": 1.0, "write": 1.0}
    return timings.Timer(gpu, kernels, package, fill, empty, rates, apart), package


def hold_timings(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
    """The timings' own checks (append against gather, decode against float64) pass for every form of table, and see
    a pool that holds something else."""
    timer, package = timer_of(name, monkeypatch, folder)
    facts, apart = timer.facts, timer.apart
    small(monkeypatch)
    ran = {}
    for case in timer.cases():
        ran[case.op, case.case] = case.run()
    timed = {op for op, kind in facts.ops if kind in ("append", "decode", "extend", "gather", "seal") and op != "raw"}
    assert {op for op, _ in ran} == timed
    if apart is not None:
        ops = (package.append.KERNEL, *(step.KERNEL for step in apart.steps))
        assert ran["append", "rows 5"]["kernels_apart"] == len(ops) and math.isfinite(
            ran["append", "rows 5"]["apart_us"]
        )
    assert all(math.isfinite(r["us"]) for r in ran.values())
    if FORMS.get(name) == "splits":
        assert ran["decode", "2x40"]["plan_us"] == 1.0

    changed = {op: set(facts.stores) <= set(facts.changed.get(op, "")) for op, _ in facts.ops}
    assert all(("tflop_s" in ran[op, "2x40"]) == (op in facts.sees) for op, kind in facts.ops if kind == "extend")
    checked = set(facts.sees) | {
        op for op, kind in facts.ops if kind == "seal" or (kind == "append" and not changed[op])
    }
    real = workload.Workload.gathered
    monkeypatch.setattr(workload.Workload, "gathered", lambda *a: [1 - x for x in real(*a)])
    for case in timer.cases():
        if case.case in ("rows 5", "2x40") and case.op in checked:
            with pytest.raises(timings.WrongResult):
                case.run()
    backend._function.cache_clear()


# Operations that kvgen.verify.timing times, and a step of all layers: a checked-in set, its timed cases at a small size.
OTHERS = {
    "deepseek_v3_fp8": (("mla_decode", "2x70"), ("mla_sparse", "2x24 of 70")),
    "deepseek_v32_indexer": (("indexer_scores", "2x70"),),
    "deepseek_v4_index_keys": (("pool_tokens", "3x40, 1 new"), ("pool_tokens", "1x20, 20 new")),
    "engine_deepseek_v3": (("convert", "2x40"),),
    "llama3_70b_tp8": (("step", "2x40"),),
}


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a CPU."""
    for name, value in (
        ("APPEND_ROWS", (1, 5, 68)),
        ("PROMPT", 68),
        ("CONTEXT", 33),
        ("SEALS", (5, 68)),
        ("GATHERS", ((2, 33),)),
        ("DECODES", ((2, 40),)),
        ("RAGGED", (4, 3, 300)),
        ("EXTENDS", {"2x40": ((40, 40), (40, 7))}),
        ("LAYERS_AT_MOST", 2),
        ("CALLS", (2, 3)),
        ("DENSE_MLA", {"many heads": (2, 70), "few heads": (2, 70)}),
        ("LISTED_MLA", {"one cache": (2, 70, 24), "several caches": (2, 70, 24)}),
        ("SCORED", (2, 70)),
        ("POOLED", ((3, 40, 1), (1, 20, 20))),
        ("CONVERTED", (2, 40)),
        ("PAGE_LISTS", (2, 40)),
        ("STEPS", ((2, 40),)),
        ("STEP_LAYERS", 2),
    ):
        monkeypatch.setattr(timings, name, value)
    monkeypatch.setattr(verify_timing, "COPIES_AT_MOST", 1)


@pytest.mark.parametrize("name", OTHERS)
def test_other_timed_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its workload; attention to latent rows is held to float64, and a step is a plan and two launches a layer."""
    timer, _ = timer_of(name, monkeypatch)
    small(monkeypatch)
    cases = {(t.op, t.case): t for t in (*timer.cases(), *timer.steps())}
    for key in OTHERS[name]:
        found = cases[key].run()
        assert math.isfinite(found["us"]) and ("gb_s" in found) == (key[0] != "pool_tokens"), found
        if key[0] == "step":
            assert found["launches"] == 5 and found["us"] == 5.0 and found["layers"] == 2
    if name == "deepseek_v3_fp8":
        real = timings.mla_decode

        def other(*given: Any, **how: Any) -> Any:
            return replace(real(*given, **how), out=real(*given, **how).out + 0.25)

        monkeypatch.setattr(timings, "mla_decode", other)
        with pytest.raises(timings.WrongResult, match=r"request [01]: off by"):
            cases["mla_decode", "2x70"].run()
    backend._function.cache_clear()


if "KVGEN_FAMILY" in os.environ:

    @pytest.mark.parametrize("name", BY_VALUE)
    def test_sets_by_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a campaign: every timed case of the sets whose timings come first."""
        timer, _ = timer_of(name, monkeypatch)
        small(monkeypatch)
        for case in timer.cases():
            assert math.isfinite(case.run()["us"]), (case.op, case.case)
        backend._function.cache_clear()
