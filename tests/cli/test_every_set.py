"""Every verb that only reads or renders, over every set of this repository, and every kernel that attends in `bench --cycles`."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path

from kvgen.bench.tiles import tile_of
from kvgen.cli.attention_cycles import attends
from kvgen.cli.bench_cycles import _causal
from kvgen.cli.describe import plan_text
from kvgen.codegen.emit import kernel_files, set_plans
from kvgen.schema.loader import LoadedSet, load_folder
from tests import sets

from .conftest import invoke

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def every_set() -> tuple[LoadedSet, ...]:
    return tuple(load_folder(ROOT / "specs", ROOT))


def said(*arguments: str) -> str:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        found = invoke(*arguments)
    finally:
        os.chdir(before)
    assert found.exit_code == 0, f"{found.stderr}\n{found.exception!r}"
    return found.stdout


def test_list() -> None:
    listed = json.loads(said("list", "--json"))
    assert [row["set"] for row in listed] == [s.kernels.name for s in every_set()]
    assert said("list").count("\n") > len(listed)


def test_show_plan() -> None:
    """The plan of every operation has its kernels, as JSON and as text."""
    kernels = [(s, kernel, archs) for s in every_set() for kernel, archs in kernel_files(s)]
    described = json.loads(said("show", "*", "--plan", "--json"))
    shown = [(each["set"], k["entry"], tuple(k["archs"])) for each in described for k in each["kernels"]]
    assert shown == [(s.kernels.name, kernel.entry, archs) for s, kernel, archs in kernels]
    for each in described:
        text = plan_text(each)
        assert text.splitlines()[0].startswith(f"{each['set']}  (specs/")
        for k in each["kernels"]:
            assert f"\n  {k['name']}: {k['entry']} from " in text
    (rows,) = (line for line in said("show", "gemma_4_31b_full/extend", "--plan").splitlines() if line[5:9] == "rows")
    assert rows == "     rows     requests of up to 1 are decode's, others extend's: extend on CUDA cores costs more"


def test_show_map() -> None:
    """Every generated line but those of banners, and blank ones that a template ends with, has an origin."""
    shown = said("show", "*", "--map")
    for s in every_set():
        for kernel, _ in kernel_files(s):
            assert f"==> generated/{s.kernels.name}/{kernel.name}.cu <==" in shown
    lines = [line for line in shown.splitlines() if " | " in line]
    assert len(lines) > 50_000
    lost = [line for line in lines if line[0] == " " and line.partition(" | ")[0].split() not in (["1"], ["2"])]
    assert lost == []


def test_diff_and_export(tmp_path: Path) -> None:
    said("diff")
    said("export", "*", "-o", str(tmp_path))
    for s in every_set():
        header = (tmp_path / f"{s.kernels.name}.h").read_text(encoding="utf-8")
        for kernel, _ in kernel_files(s):
            assert (tmp_path / f"{s.kernels.name}/{kernel.name}.cu").is_file() and kernel.entry in header


def test_plans_of_bench_cycles() -> None:
    """`bench --cycles` takes two facts of a plan beside machine code: the tile, and the share of products that a mask allows."""
    found = 0
    for s in sets.every():
        plans = set_plans(s)
        for op in s.kernels.ops:
            for plan in filter(attends, plans[op.name]):
                tile, share = tile_of(plan), _causal(s.kernels, op, plan)
                assert tile is None or tile.nbytes > 0
                assert share is None or 0.5 < share <= 1
                found += 1
    assert found > 100


def test_launch_bounds() -> None:
    """A kernel asks for no more blocks an SM than it has threads for, 1536 on sm_89 and sm_120, whatever the set's architectures:
    ptxas warns, and takes no bound."""
    bounded = 0
    for s in every_set():
        for kernel, _ in kernel_files(s):
            text = (ROOT / f"generated/{s.kernels.name}/{kernel.name}.cu").read_text(encoding="utf-8")
            blocks = re.search(r"__launch_bounds__\([\w:* ]+, (\w+)\)", text)
            if blocks:
                number = re.search(rf"\b{blocks[1]} = (\w+)[,;]", text)
                asked = number[1] if number else blocks[1]
                assert asked == "kFullBlocks" or int(asked) * kernel.threads <= 1536, f"{s.kernels.name}/{kernel.name}"
                bounded += 1
    assert bounded > 100
