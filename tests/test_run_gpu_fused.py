"""benchmarks/run_gpu.py over fused appends and the operations beside them: cases whose expectation is the CPU machine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import run_gpu
from benchmarks.gpu.cases import load
from benchmarks.gpu.correctness import failures, run
from benchmarks.gpu.packages import generated, use
from kvgen import ops
from kvgen.spec.kernel_set import KernelSet
from kvgen.spec.loader import load_folder
from kvgen.verify.memory import HostMemory
from tests.cli.conftest import Folder
from tests.support import rehearsal
from tests.support.bench_sets import NAMES, RUN, write_project


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with the sets, and in cubins/ what --prepare writes for it."""
    folder = tmp_path_factory.mktemp("fused")
    write_project(folder, RUN)
    Folder(folder).kvgen("build")
    with rehearsal.prepared(folder):
        yield folder


def kinds(kernels: KernelSet) -> set[tuple[str, object]]:
    """What of a set the tools tell apart."""
    cache = kernels.cache
    found: set[tuple[str, object]] = {("layers", cache.layout.layers)}
    found |= {("quant", (q.dtype, q.scale_dtype, q.place)) for q in cache.quants.values() if q is not None}
    for op in kernels.ops:
        found.add(("operation", op.kind))
        if isinstance(op, ops.Append):
            found |= {(name, getattr(op, name)) for name in ("rows", "angles", "bias", "inputs", "positions", "q_out")}
            found |= {("rope", op.rope and op.rope.style), ("norms", bool(op.k_norm)), ("sections", bool(op.sections))}
    return found


def test_every_kind_is_run(tmp_path: Path) -> None:
    """The sets that are run have between them what all of them have: operations, kinds of rows, and what append does to them."""
    write_project(tmp_path)
    sets = {s.kernels.name: kinds(s.kernels) for s in load_folder(tmp_path / "specs", tmp_path)}
    assert set(sets) == set(NAMES)
    assert set().union(*sets.values()) == set().union(*(sets[name] for name in RUN))


def test_the_cpu_machine_repeats_itself(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVGEN_CUBINS", "KVGEN_NO_JIT"):  # the script sets them; put back what was there
        monkeypatch.setenv(name, "")
    out = tmp_path / "results.json"
    where = ["--project", str(prepared), "--cubins", str(prepared / "cubins"), "--golden", str(tmp_path)]
    status = run_gpu.main([*where, "--out", str(out), "--device", "cpu", "--section", "correctness"])
    entries = json.loads(out.read_text())["entries"]
    assert status == 0, [e for e in entries if e["status"] != "ok"]
    kernels = {(p.parent.name, p.stem) for p in (prepared / "generated").glob("*/*.cu")}
    assert {(e["set"], e["op"]) for e in entries} == kernels - {(s, "copy_pages_check") for s, _ in kernels}
    assert {s for s, _ in kernels} == set(RUN)
    for name, op in {(e["set"], e["op"]) for e in entries}:
        assert {"small", "hostile"} <= {e["case"] for e in entries if (e["set"], e["op"]) == (name, op)}


@pytest.mark.parametrize("name", ["llama", "qwen", "mla_row"])
def test_what_changed_is_seen(name: str, prepared: Path) -> None:
    """Something is written by every case; a byte that differs fails it, a number that is a neighbour does not."""
    use(prepared)
    file, rng = load(prepared / "cubins" / "cases" / f"{name}.npz"), np.random.default_rng(0)
    for case in (c for c in file.cases if c.name == "ragged"):
        good = run(case, file.blobs, generated(name), HostMemory())
        assert failures(case, file.blobs, good) == [] and case.after
        for memory, data in good.items():
            bad = dict(good) | {memory: data.copy()}
            bad[memory][0 if memory in case.near else int(rng.integers(len(data)))] ^= 0x40
            assert failures(case, file.blobs, bad), (case.key, memory)
            if memory in case.near and case.near[memory] == "bf16":
                view = case.arguments.get(memory) or next(
                    v for vs in case.pools.values() for v in vs if v.memory == memory
                )
                bad[memory][...] = data
                bad[memory][view.offset] ^= 1
                assert failures(case, file.blobs, bad) == [], (case.key, memory)
