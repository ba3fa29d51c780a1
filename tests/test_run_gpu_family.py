"""benchmarks/run_gpu.py over every way to store a cache: cases prepared, and rehearsed on the CPU machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import run_gpu
from benchmarks.gpu.cases import load
from benchmarks.gpu.correctness import failures, run
from benchmarks.gpu.packages import generated, use
from kvgen import Continuous
from kvgen.runtime.arrays import view
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.loader import load_folder
from kvgen.verify.memory import GpuArray, HostMemory
from tests.cli.conftest import Folder
from tests.support import rehearsal
from tests.support.family_sets import NAMES, RUN, write_project


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with the sets, and in cubins/ what --prepare writes for it."""
    folder = tmp_path_factory.mktemp("family")
    write_project(folder, RUN)
    Folder(folder).kvgen("build")
    with rehearsal.prepared(folder):
        yield folder


def kinds(kernels: KernelSet) -> set[tuple[str, object]]:
    """What of a set the tools tell apart."""
    cache = kernels.cache
    found: set[tuple[str, object]] = {("variant", type(cache)), ("layers", cache.layout.layers)}
    found.add(("table", "block" if isinstance(cache, Continuous) else cache.page_table.kind))
    found |= {("operation", op.kind) for op in kernels.ops} | {("tensor", t.name) for t in cache.storage.tensors}
    for quant in cache.quants.values():
        fields = ("dtype", "scale_dtype", "scale", "zero", "place", "order", "own_table", "residual")
        found |= {(name, getattr(quant, name, "not quantized")) for name in fields}
    return found


def test_every_kind_is_run(tmp_path: Path) -> None:
    """The sets that are run have between them what all of them have: tensors, codes, scales and their places, operations."""
    write_project(tmp_path)
    sets = {s.kernels.name: kinds(s.kernels) for s in load_folder(tmp_path / "specs", tmp_path)}
    assert set(sets) == set(NAMES)
    assert {value for found in sets.values() for key, value in found if key == "table"} == {
        *("dense", "csr", "per_kv", "indirect", "mapped", "ring", "block")
    }
    assert set().union(*sets.values()) == set().union(*(sets[name] for name in RUN))


def test_every_kernel_of_every_set(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVGEN_CUBINS", "KVGEN_NO_JIT"):  # the script sets them; put back what was there
        monkeypatch.setenv(name, "")
    out = tmp_path / "results.json"
    where = ["--project", str(prepared), "--cubins", str(prepared / "cubins"), "--golden", str(tmp_path)]
    status = run_gpu.main([*where, "--out", str(out), "--device", "cpu", "--section", "correctness"])
    entries = json.loads(out.read_text())["entries"]
    assert status == 0, [e for e in entries if e["status"] != "ok"]
    kernels = {(p.parent.name, p.stem) for p in (prepared / "generated").glob("*/*.cu")}
    assert {(e["set"], e["op"]) for e in entries} == kernels
    assert {s for s, _ in kernels} == set(RUN)
    for name, op in kernels:
        cases = {e["case"] for e in entries if (e["set"], e["op"]) == (name, op)}
        assert {"small", "hostile"} <= cases and len(cases) >= 5, (name, op, cases)


@pytest.mark.parametrize("name", ["kivi", "own", "groups", "latent_row"])
def test_every_wrong_byte_is_seen(name: str, prepared: Path) -> None:
    """A flipped bit in any memory, scales, tails, counts and tables among them, fails the case."""
    use(prepared)
    file, rng = load(prepared / "cubins" / "cases" / f"{name}.npz"), np.random.default_rng(0)
    seen = set()
    for case in file.cases:
        if case.name not in ("small", "hostile"):
            continue
        good = run(case, file.blobs, generated(name), HostMemory())
        assert failures(case, file.blobs, good) == []
        for memory, data in good.items():
            argument = next((a for a, v in case.arguments.items() if v.memory == memory), "")
            loose = argument in case.close or case.nan_rows.get(argument)
            bad = dict(good) | {memory: data.copy()}
            bad[memory][len(data) - 1 if loose else int(rng.integers(len(data)))] ^= 0x40
            assert failures(case, file.blobs, bad), (case.key, memory)
            seen.add(re.sub(r"\.\d$", "", memory))
    pools = {t.name for t in generated(name).Cache.TENSORS}
    assert pools < seen and (name != "kivi" or {"k_tail", "k_sealed", "k_scales", "v_scales"} <= seen)
    assert name != "own" or "table.scales_page_table" in seen


def test_fp8_arrays_of_a_gpu_are_bytes() -> None:
    """The CUDA array interface has no word for them, and caches take their codes as u8."""
    for kind in ("e4m3", "e5m2", "u8", "i8", "bf16"):
        found: Any = GpuArray(None, 256, (2, 3), kind)
        interface = found.__cuda_array_interface__
        assert interface["typestr"] == {"i8": "|i1", "bf16": "|V2"}.get(kind, "|u1")
    assert view(np.zeros(3, np.uint8), "x").dtype == "u8"
