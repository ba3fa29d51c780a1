"""The workloads that benchmarks/run_gpu.py times, at a small size and computed by the CPU machine."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from benchmarks.gpu import prepare, timings, workload
from benchmarks.gpu.apart import Apart
from benchmarks.gpu.packages import ROOT, generated, project, use
from kvgen.compile import compile_unit, default_cache
from kvgen.emulator import build
from kvgen.runtime import gpu as backend
from kvgen.spec.loader import load_folder
from kvgen.verify import bandwidth
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
def test_timed_workloads_compute_the_right_thing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_timings(name, monkeypatch)


def hold_timings(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
    """The timings' own checks (append against gather, decode against float64) pass for every form of table, and see
    a pool that holds something else."""
    unit = bandwidth.bandwidth_unit()
    image = compile_unit(unit, "sm_90a", "ptx", cache=default_cache())
    package = generated(name)
    kernels = next(s.kernels for s in load_folder(project() / "specs", project()) if s.kernels.name == name)
    facts = prepare.facts_of(kernels)
    apart = Apart(folder, name) if folder is not None and facts.apart else None
    packages = [package, *((apart.rows, apart.store) if apart is not None else ())]
    driver = EmulatedDriver(packages, build([image.data.decode()], mode="check"))
    gpu = use_emulated(monkeypatch, driver)
    monkeypatch.setattr(timings, "APPEND_ROWS", (1, 5, 68))
    monkeypatch.setattr(timings, "PROMPT", 68)
    monkeypatch.setattr(timings, "CONTEXT", 33)
    monkeypatch.setattr(timings, "SEALS", (5, 68))
    monkeypatch.setattr(timings, "GATHERS", ((2, 33),))
    monkeypatch.setattr(timings, "DECODES", ((2, 40),))
    monkeypatch.setattr(timings, "RAGGED", (4, 3, 300))
    monkeypatch.setattr(timings, "EXTENDS", {"2x40": ((40, 40), (40, 7))})
    monkeypatch.setattr(timings, "LAYERS_AT_MOST", 2)
    monkeypatch.setattr(timings, "CALLS", (2, 3))
    rates = {"read": 1.0, "copy": 1.0, "write": 1.0}
    fill, empty = bandwidth.filler(gpu, b""), workload.empty_node(gpu, b"")
    timer = timings.Timer(gpu, package, facts, fill, empty, rates, apart)
    ran = {}
    for case in timer.cases():
        ran[case.op, case.case] = case.run()
    timed = {
        op for op, kind, _ in facts.ops if kind in ("append", "decode", "extend", "gather", "seal") and op != "raw"
    }
    assert {op for op, _ in ran} == timed
    if apart is not None:
        ops = (package.append.KERNEL, *(step.KERNEL for step in apart.steps))
        assert ran["append", "rows 5"]["kernels_apart"] == len(ops) and math.isfinite(
            ran["append", "rows 5"]["apart_us"]
        )
    assert all(math.isfinite(r["us"]) for r in ran.values())
    if FORMS.get(name) == "splits":
        assert ran["decode", "2x40"]["plan_us"] == 1.0

    changed = {op: set(facts.stores) <= set(facts.changed.get(op, "")) for op, _, _ in facts.ops}
    assert all(("tflop_s" in ran[op, "2x40"]) == (op in facts.sees) for op, kind, _ in facts.ops if kind == "extend")
    checked = set(facts.sees) | {
        op for op, kind, _ in facts.ops if kind == "seal" or (kind == "append" and not changed[op])
    }
    real = workload.Workload.gathered
    monkeypatch.setattr(workload.Workload, "gathered", lambda *a: [1 - x for x in real(*a)])
    for case in timer.cases():
        if case.case in ("rows 5", "2x40") and case.op in checked:
            with pytest.raises(timings.WrongResult):
                case.run()
    backend._function.cache_clear()
