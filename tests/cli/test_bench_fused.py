"""`kvgen bench` over appends that change their rows, and over what else it knows; minima worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvgen.bench import SIZES
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from kvgen.cli.project import generated
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import load_file
from tests.support.bench_sets import NAMES, RUN, write_project

from .conftest import Folder
from .test_bench import operations, traffic

PAGE = Workload("page", (8,), (8,))


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("fused")
    write_project(root)
    folder = Folder(root)
    folder.kvgen("build")
    return folder


@pytest.fixture(scope="module")
def scenes(fused: Folder) -> Callable[[str, Workload], tuple[Scene, KernelSet]]:
    sets = {s.kernels.name: s.kernels for s in load_file(fused.root / "specs" / "fused.py", "f")}
    packages: dict[str, Any] = {}

    def make(name: str, workload: Workload) -> tuple[Scene, KernelSet]:
        if name not in packages:
            packages[name] = generated(fused.out, name).__enter__()
        return Scene(sets[name], packages[name], workload), sets[name]

    return make


@pytest.mark.parametrize("name", RUN)
def test_every_operation_is_counted(name: str, fused: Folder) -> None:
    """None touches less than it must (kvgen bench would fail), nor several times as much of the cache."""
    for op in operations(fused, name, "--batch", "2", "--tokens", "29", "--new", "13"):
        moved = [row for row in traffic(op).values() if row[0] == "kv"]
        assert sum(row[3] for row in moved) < 3 * sum(row[4] or 0 for row in moved), (op["op"], moved)
        assert bool(op["separate"]) == (op["op"] in ("append", "store")), op["op"]


def least(scene: Scene, kernels: KernelSet, op: str) -> dict[str, int]:
    cases = cases_of(next(o for o in kernels.ops if o.name == op))
    return cases.minimum(cases.call(scene))


def test_rows_weights_and_angles(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    """By hand: 8 tokens, 2 heads of 32 bf16 values, 4 of q: 4 sectors of k, 8 of q a token."""
    scene, kernels = scenes("llama", PAGE)
    rows = {"q": 64, "q_out": 64, "k": 32, "v": 32, "pool": 64}
    assert least(scene, kernels, "append") == rows | {"lengths": 1, "page_table": 1, "row_offsets": 1}
    assert least(scene, kernels, "norm_cache") == {
        "pool": 2 * 32, "lengths": 1, "page_table": 1, "row_offsets": 1, "k_weight": 2
    }  # fmt: skip
    assert least(scene, kernels, "rotate_cache")["pool"] == 2 * 32
    assert (least(scene, kernels, "lora_add")["pool"], least(scene, kernels, "lora_add")["kv"]) == (2 * 64, 64)
    scene, kernels = scenes("qwen", PAGE)
    found = least(scene, kernels, "append")
    assert (found["q_weight"], found["k_weight"], found["cos_sin"]) == (2, 2, 8 * 32 * 4 // 32)
    assert (found["pool"], found["scales"]) == (2 * 16, 2 * 2)
    scene, kernels = scenes("mrope", Workload("later", (20,), (3,)))
    found = least(scene, kernels, "append")
    # Positions 17 to 19 of every section; 3 x 3 int64 lie in 3 sectors; all pairs of their rows of 128 bytes.
    assert (found["positions"], found["cos_sin"]) == (3, 3 * 4)
    scene, kernels = scenes("qkv", PAGE)
    assert (least(scene, kernels, "append")["qkv"], least(scene, kernels, "append")["bias"]) == (128, 16)
    scene, kernels = scenes("mla_row", PAGE)
    found = least(scene, kernels, "append")
    assert (found["k_latent"], found["k_rope"], found["q"]) == (8 * 4, 8, 8 * 4)


def test_padding_is_not_touched(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    scene, kernels = scenes("padded", Workload("two", (8, 20), (8, 3)))
    found = least(scene, kernels, "append")
    assert (found["k"], found["q"], found["q_out"], found["valid_lengths"]) == (11 * 4, 11 * 8, 11 * 8, 1)


def test_pages_and_slots(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    scene, kernels = scenes("llama", Workload("two", (40, 24), (1, 1)))
    # 8 pages of 2 layers of K and V of 8 tokens of 128 bytes; 4 pairs of int64.
    assert least(scene, kernels, "copy_pages") == {"pool": 8 * 2 * 2 * 32, "pairs": 2}
    assert least(scene, kernels, "zero_pages") == {"pool": 8 * 2 * 2 * 32, "page_ids": 2}
    found = least(scene, kernels, "gather_rows")
    assert (found["k_out"], found["v_out"], found["pool"]) == (2 * 24 * 4, 2 * 24 * 4, 2 * 2 * 24 * 4)
    found = least(scene, kernels, "convert")
    # One head of each: 32 bytes of codes and 4 of scales, of which neighbouring tokens share sectors; 64 bytes of values.
    assert (found["source.pool"], found["pool"]) == (64 * 2, 64 * 2 * 2)
    assert found["source.scales"] == 64 * 2 * 4 * 4 // 32
    scene, kernels = scenes("qwen", PAGE)
    raw, put = least(scene, kernels, "raw"), least(scene, kernels, "scatter")  # of two layers
    assert (raw["k_codes_out"], raw["k_scales_out"], raw["scales"], raw["pool"]) == (32, 4, 8, 64)
    assert (put["k_codes"], put["k_scales"], put["scales"], put["pool"], put["slots"]) == (32, 4, 8, 64, 2)
    assert all(cases_of(op).counted for name in NAMES for op in scenes(name, PAGE)[1].ops)


def replaced(scene: Scene, kernels: KernelSet) -> dict[str, int]:
    """The kernels in place of an append, and their sectors."""
    cases = cases_of(kernels.ops[0])
    call = cases.call(scene)
    return {p.title: p.sectors for p in cases.replaced(call, cases.minimum(call))}


def test_separate_kernels(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    """Each reads its operands and writes them: norm and RoPE q and k, quantize rows to codes and scales, store those."""
    scene, kernels = scenes("qwen", PAGE)
    passes = replaced(scene, kernels)
    assert passes == {
        "norm": 2 * (64 + 32) + 4,
        "RoPE": 2 * (64 + 32) + 32,
        "quantize": 64 + 36,
        "store": 36 + 36 + 3,
    }
    scene, kernels = scenes("mla", PAGE)
    passes = replaced(scene, kernels)
    assert list(passes) == ["norm", "RoPE", "store"]
    assert passes["norm"] == 2 * 8 * 4 + 4 and passes["RoPE"] == 2 * (8 * 4 + 8)


def test_sizes(fused: Folder) -> None:
    """An append by its name is counted at 1, 8, 128 and 4096 new tokens, and stands beside separate kernels."""
    assert [(w.name, sum(w.new)) for w in SIZES] == [(f"tokens{n}", n) for n in (1, 8, 128, 4096)]
    said = fused.kvgen("bench", "llama/append").stdout
    rows = [line.split() for line in said.splitlines()]
    for work in SIZES:
        new, requests = sum(work.new), len(work.totals)
        shown = [row for row in rows if row[:2] == ["llama/append", work.name] and row[2] == f"{new:,}"]
        assert shown[0][2:4] == [f"{new:,}", f"{requests:,}"], "totals"
        assert any("RoPE" in row and "store" in row for row in shown), "separate kernels"
    found = json.loads(fused.kvgen("bench", "--json", "qwen/append", "--workload", "tokens1,tokens8").stdout)
    assert found["workload"] is None and [w["name"] for w in found["workloads"]] == ["tokens1", "tokens8"]
    assert [(o["workload"], o["rows"]) for o in found["operations"]] == [("tokens1", 1), ("tokens8", 8)]
    assert [p["title"] for p in found["operations"][0]["separate"]] == ["norm", "RoPE", "quantize", "store"]


def test_an_operation_that_it_does_not_know(empty: Folder) -> None:
    empty.spec("counts", ops="ops.Append(), ops.Advance()")
    empty.kvgen("build")
    said = empty.kvgen("bench", "counts/advance", code=2).stderr
    assert "counts/advance: got advance, whose fewest bytes nobody knows; kvgen bench counts" in said.replace("\n", " ")
    assert json.loads(empty.kvgen("bench", "counts", "--batch", "1", "--tokens", "1", "--json").stdout)["operations"]


@pytest.mark.campaign
def test_a_prompt_is_moved_once(fused: Folder) -> None:
    """4096 consecutive tokens: sectors of everything that rows are, beside the fewest."""
    for name in ("llama", "qwen", "qkv"):
        (append,) = operations(fused, f"{name}/append", "--workload", "tokens4096")
        rows = [row for row in traffic(append).values() if row[0] in ("kv", "scales", "input", "output")]
        assert sum(row[3] for row in rows) <= 1.02 * sum(row[4] or 0 for row in rows), (name, traffic(append))
    # Codes and scales of all layers, by slots; one head's. Scales of a token's heads fill sectors with the next token's.
    for name in ("qwen/raw", "qwen/scatter", "llama/convert"):
        (found,) = operations(fused, name, "--workload", "tokens4096")
        rows = [row for row in traffic(found).values() if row[0] in ("kv", "scales", "input", "output")]
        assert rows and all(row[3] <= 1.02 * (row[4] or 0) for row in rows), (name, traffic(found))
