"""`kvgen demo`: the main job on this machine, and that it notices kernels that are wrong."""

from __future__ import annotations

import re
from typing import Any

import pytest

from docpages.blocks import block_of
from docpages.readme import ROOT, without_times
from kvgen.cli.demo_steps import PROMPTS, STEPS, Outcome, run
from kvgen.cli.project import Project, open_project
from kvgen.errors import DeviceError
from kvgen.runtime import cuda
from kvgen.runtime.bound import AtOnce, Bound
from kvgen.runtime.launcher import Launcher
from tests.support import bench_sets
from tests.support.family_sets import RUN, write_project

from .conftest import Folder


def lose_appends(patch: pytest.MonkeyPatch) -> None:
    """From here on appends launch nothing."""
    prepare = Launcher.prepare

    def prepare_or_lose(self: Launcher, *arguments: Any) -> Bound:
        return AtOnce(arguments[1]) if self.KERNEL.entry.endswith("_append") else prepare(self, *arguments)

    patch.setattr(Launcher, "prepare", prepare_or_lose)


@pytest.mark.usefixtures("demo_from_cache")
def test_on_the_cpu(empty: Folder) -> None:
    said = empty.kvgen("demo", "--device", "cpu", "-o", "llama").stdout
    assert "every number is right" in said
    rows = {cells[0]: cells for cells in (line.split() for line in said.splitlines()) if len(cells) > 6}
    tokens = sum(PROMPTS) + STEPS * len(PROMPTS)
    assert rows["append"][1:3] == [str(STEPS + 1), str(tokens)]
    assert rows["append"][3:5] == ["0", "exact"] or float(rows["append"][3]) < 0.05
    assert rows["gather"][1:5] == ["1", str(tokens), "0", "exact"]
    assert rows["decode"][1:3] == [str(STEPS), str(STEPS * len(PROMPTS))]
    assert rows["extend"][1:3] == ["1", str(sum(PROMPTS))]
    assert 0 < float(rows["decode"][3]) < 0.05 and 0 < float(rows["extend"][3]) < 0.05
    ratios = [float(r) for r in re.findall(r"\(([\d.]+)x\)", said)]
    assert len(ratios) == 4
    assert all(1 <= ratio < 2.5 for ratio in ratios), ratios
    assert said.splitlines()[-1] == "next: cd llama && kvgen show llama3_8b/append --map"
    shown = without_times(block_of((ROOT / "README.md").read_text(encoding="utf-8"), "demo"))
    compilers = [next(w[w.index("NVRTC") + 1] for w in text if "NVRTC" in w) for text in (shown, without_times(said))]
    if compilers[0] == compilers[1]:  # another compiler takes other registers
        assert without_times(said) == shown, "`python -m docpages --run` writes the README's block"
    Folder(empty.root / "llama").kvgen("check")
    assert "not empty" in empty.kvgen("demo", "-o", "llama", code=2).stderr


@pytest.mark.usefixtures("demo_from_cache")
def test_wrong_kernels_are_noticed(empty: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One outcome among right ones; test_a_lost_append_is_noticed has kernels that make such outcomes."""

    def outcomes(project: Project, name: str, ordinal: int | None) -> list[Outcome]:
        (found,) = (s.kernels for s in project.sets if s.kernels.name == name)
        return [Outcome(op.name, 1, 1, 9.0, 3.0, op.name != "append", 64, 32) for op in found.ops]

    monkeypatch.setattr("kvgen.cli.demo_steps.run", outcomes)
    said = empty.kvgen("demo", "--device", "cpu", code=1).stdout
    assert "WRONG" in said
    assert "every number is right" not in said


def test_a_gpu_that_is_asked_for_must_be_there(empty: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> cuda.Driver:
        raise DeviceError("cuda: no GPU here")

    monkeypatch.setattr(cuda, "driver", none)
    assert empty.kvgen("demo", "--device", "gpu", code=2).stderr == "error: cuda: no GPU here\n"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("family")
    write_project(root, RUN)
    Folder(root).kvgen("build")
    return open_project(root)


@pytest.mark.parametrize("name", RUN)
def test_the_batch_on_every_way_to_store_a_cache(name: str, family: Project) -> None:
    """Prompts, steps and gather, every tensor byte for byte the oracle's: codes, scales, tails and counts."""
    outcomes = run(family, name, None)
    kernels = next(s.kernels for s in family.sets if s.kernels.name == name)
    assert {o.kernel for o in outcomes} == {op.name for op in kernels.ops}
    tokens = sum(PROMPTS) + STEPS * len(PROMPTS)
    for o in outcomes:
        # In a ring gather finds the newest tokens alone.
        assert o.right and o.rows in (STEPS * len(PROMPTS) if o.kernel == "decode" else tokens, 20 + 8 + 20 + 20), o
        assert (o.error > 0) == (o.kernel == "decode") and o.share <= 1, o
        assert o.moved is not None and o.moved >= o.minimum > 0, o


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Project:
    root = tmp_path_factory.mktemp("fused")
    bench_sets.write_project(root, bench_sets.RUN)
    Folder(root).kvgen("build")
    return open_project(root)


@pytest.mark.parametrize("name", bench_sets.RUN)
def test_rows_that_append_changes(name: str, fused: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, RoPE and biases within what rounding allows, of codes within half a step; what follows reads those rows."""
    outcomes = run(fused, name, None)
    tokens = sum(PROMPTS) + STEPS * len(PROMPTS)
    for o in outcomes:
        # In a ring gather finds the newest tokens alone.
        assert o.right and o.rows in (STEPS * len(PROMPTS) if o.kernel == "decode" else tokens, 20 + 8 + 20 + 20), o
        assert (o.error > 0) == (o.kernel != "gather") and o.share <= 1, o
        assert o.moved is not None and o.moved >= o.minimum > 0, o
    assert {"append", "gather"} <= {o.kernel for o in outcomes}
    lose_appends(monkeypatch)
    assert not any(o.right for o in run(fused, name, None) if o.kernel == "append")


@pytest.mark.parametrize("name", ["kivi", "own", "latent_row"])
def test_a_lost_append_is_noticed(name: str, family: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_appends(monkeypatch)
    assert not any(o.right for o in run(family, name, None) if o.kernel in ("append", "decode", "gather"))


@pytest.mark.gpu
def test_on_the_gpu(empty: Folder) -> None:
    assert "every number is right" in empty.kvgen("demo", "--device", "gpu").stdout
