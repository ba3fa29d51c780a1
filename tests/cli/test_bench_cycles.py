"""`kvgen bench --cycles`: trips of a set that is checked in, its launch, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvgen.bench.planned_chunks import planned_chunks
from kvgen.bench.tiles import tile_of
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from kvgen.cli.bench_cycles import mixed_batch
from kvgen.cli.project import generated
from kvgen.cycles.device import DEVICES
from kvgen.ops import Extend
from kvgen.schema.loader import load_file
from tests.compile.test_sass import needs_tool

from .conftest import invoke

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, code: int = 0) -> Any:
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        found = invoke("bench", "--cycles", *arguments)
    finally:
        os.chdir(before)
    assert found.exit_code == code, found.stderr
    return found


@needs_tool
def test_a_decode() -> None:
    (found,) = json.loads(bench("llama3_8b/decode", "--json").stdout)["kernels"]
    assert (found["kernel"], found["arch"], found["device"]) == ("llama3_8b/decode", "sm_90a", "H200")
    # 2 blocks of 2 warps, a tile of 32 tokens each: 4 x 32 x 512 bytes at 17.6 a cycle.
    assert found["budget"] == pytest.approx(65536 / 17.6, rel=0.01)
    assert found["trips"]["800"] < found["trips"]["1200"]
    assert 0 < found["reachable"][0] <= found["reachable"][1] <= 100
    recorded = json.loads((ROOT / "generated/llama3_8b/resources.json").read_text(encoding="utf-8"))
    facts = recorded["kernels"]["decode"]["sm_90a"]
    assert facts["trip_cycles"] == round(found["trips"]["800"])
    assert facts["trip_cycles_loaded"] == round(found["trips"]["1200"])
    assert facts["bytes_in_flight"] == found["in_flight"] and facts["trip_bytes"] == 65536
    assert {name: facts[name] for name in found["facts"]} == found["facts"]


@pytest.mark.campaign
@needs_tool
def test_a_launch() -> None:
    shown = bench("llama3_8b/decode", "--batch", "1", "--tokens", "512", "--device", "H100 SXM").stdout
    assert "H100 SXM" in shown and "one launch:" in shown and " % of reachable" in shown


@pytest.mark.campaign
def test_a_mixed_step() -> None:
    """A prompt beside requests that decode: shorter than one after the other, no shorter than the longer one alone."""
    loaded = next(iter(load_file(ROOT / "specs/llama3_8b.py", "specs/llama3_8b.py")))
    op = next(op for op in loaded.kernels.ops if isinstance(op, Extend))
    device = DEVICES["H100 SXM"]
    with generated(ROOT / "generated", "llama3_8b") as package:
        mixed = mixed_batch(loaded.kernels, package, op, Workload.mixed("1000,1x20", 1000), device, "sm_90a")
    cycles = {name: mixed.step(part, 2048, 1, device).cycles for name, part in mixed.parts.items()}
    alone = cycles["several"], cycles["one"]
    assert max(alone) <= cycles["all"] <= 0.9 * sum(alone)
    wide = replace(mixed, narrow_cols=0)
    assert wide.step(mixed.parts["all"], 2048, 1, device).cycles > cycles["all"]


@needs_tool
@pytest.mark.skipif("KVGEN_FAMILY" not in os.environ, reason="make campaign: seven replays")
def test_a_mixed_step_is_printed() -> None:
    shown = bench("llama3_8b/extend", "--rows", "1000,1x20", "--tokens", "1000", "--device", "H100 SXM").stdout
    assert "llama3_8b/extend_sm_90a, a step: " in shown and " of the longer part alone" in shown


def test_the_planners_chunks() -> None:
    """A plan of 3 x 1024 tokens for 132 multiprocessors: all tokens once, in the SM parts that the workspace has room for."""
    loaded = next(iter(load_file(ROOT / "specs/llama3_8b.py", "specs/llama3_8b.py")))
    op = next(op for op in loaded.kernels.ops if op.kind == "decode")
    with generated(ROOT / "generated", "llama3_8b") as package:
        found = planned_chunks(Scene(loaded.kernels, package, Workload.uniform(3, 1024, 1)), op, 132)
    assert found is not None and found.columns == 8
    assert len(found.parts) == 132 * 2 // 8 and sum(map(sum, found.parts)) == 3 * 1024
    assert found.pieces > 1


def test_rows_of_lists_in_turn() -> None:
    """Nothing is planned: two multiprocessors have every 66th row, whose lists name as many keys as the request has tokens."""
    loaded = next(iter(load_file(ROOT / "specs/deepseek_v3_fp8.py", "specs/deepseek_v3_fp8.py")))
    op = next(op for op in loaded.kernels.ops if op.name == "mla_sparse")
    with generated(ROOT / "generated", "deepseek_v3_fp8") as package:
        found = planned_chunks(Scene(loaded.kernels, package, Workload.uniform(70, 40, 1)), op, 132)
    assert found is not None and (found.columns, found.pieces) == (2, 1)
    assert found.parts == ((40, 40),) * 4 + ((40,),) * 62


def test_rows_of_lists_that_are_planned() -> None:
    """A plan of 3 rows whose lists name 640 keys each: all keys once, each row divided among SM parts."""
    path = "specs/deepseek_v4_flash.py"
    loaded = next(item for item in load_file(ROOT / path, path) if item.kernels.name == "deepseek_v4_flash_tp8")
    with generated(ROOT / "generated", "deepseek_v4_flash_tp8") as package:
        scene = Scene(loaded.kernels, package, Workload.uniform(3, 640, 1))
        found = planned_chunks(scene, loaded.kernels.ops[0], 132, "sm_90a")
    assert found is not None and found.columns == 1 and len(found.parts) == 132
    assert sum(map(sum, found.parts)) == 3 * 640 and found.pieces > 1


@pytest.mark.campaign
@needs_tool
def test_the_last_architecture_with_a_table() -> None:
    """sm_100f has none: its set is replayed for sm_90a, and asked for by name it is refused."""
    (found,) = json.loads(bench("qwen3_32b_nvfp4/decode", "--json").stdout)["kernels"]
    assert found["arch"] == "sm_90a"
    said = bench("qwen3_32b_nvfp4/decode", "--arch", "sm_100f", code=2).stderr
    assert said.startswith(
        "error: --cycles: none of these operations attends on an architecture with a table of figures ("
    )
    assert "sm_80, sm_90a" in said


def test_bytes_of_a_tile() -> None:
    """Values and scales of a page, of two kv heads: int4 of 128 dims with scale and zero point of f16 for 64 dims."""
    loaded = next(iter(load_file(ROOT / "specs/mistral_7b_int4.py", "specs/mistral_7b_int4.py")))
    op = next(op for op in loaded.kernels.ops if op.kind == "decode")
    tile = tile_of(op.plan(loaded.kernels)[0])
    assert tile is not None and tile.nbytes == tile.tokens * 2 * 2 * (128 / 2 + 2 * 2 * 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "B200"), "--device: got 'B200'; it must be one of H200, "),
        (("--new", "1"), "--cycles: got it beside --new; it takes --batch and --tokens; drop --new"),
        (("--workload", "step"), "--cycles: got it beside --workload"),
        (("--rows", "4,0"), "--rows: got '0'; it must be the new tokens of a request, as 4000, or of several, as 1x60"),
        (("--rows", "4", "--batch", "2"), "--rows: got '4' beside --batch; it has the requests; drop --batch"),
    ],
)
def test_what_it_refuses(arguments: tuple[str, ...], said: str) -> None:
    assert said in bench("llama3_8b", *arguments, code=2).stderr


@needs_tool
def test_a_calibration(tmp_path: Path) -> None:
    """A report's figures take the place of the table's; those that the table does not have are left out."""
    figures = [
        ("ldg", 9000, 8900, 9100),
        ("ldgsts", 9000, 8900, 9100),
        ("reachable", 2300, 2300, 2300),
        ("box_1024", 1, 1, 1),
    ]
    entries = [dict(zip(("name", "value", "low", "high"), x, strict=True)) for x in figures]
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"calibration": entries}), encoding="utf-8")
    (plain,) = json.loads(bench("llama3_8b/decode", "--device", "H200", "--json").stdout)["kernels"]
    (found,) = json.loads(bench("llama3_8b/decode", "--device", "H200", "--calibration", str(report), "--json").stdout)[
        "kernels"
    ]
    assert found["budget"] == pytest.approx(2 * plain["budget"])
    assert found["trips"] == plain["trips"]  # at latencies that are given
    assert found["reachable"][0] < 100


def test_reports_without_figures(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    said = "which has no figures; pass a report of `kvgen verify --gpu --json`"
    wrong = [{"name": "ldg", "value": 5, "low": 6, "high": 7}]
    for content in ({}, {"calibration": []}, {"calibration": [{"name": "ldg"}]}, {"calibration": wrong}):
        report.write_text(json.dumps(content), encoding="utf-8")
        assert said in bench("llama3_8b", "--device", "H200", "--calibration", str(report), code=2).stderr
    assert "got it without --device" in bench("llama3_8b", "--calibration", str(report), code=2).stderr


def test_a_device_without_cycles() -> None:
    found = invoke("bench", "llama3_8b", "--device", "H200")
    assert found.exit_code == 2 and "--device: got 'H200' without --cycles" in found.stderr
