"""`kvgen bench`: exact traffic of one set, minima worked out by hand and by kvgen.layout.regions, the checked-in sets, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgen.bench import WORKLOADS, measure
from kvgen.cases.append import AppendCases
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import Scene
from kvgen.cases.workload import Workload
from kvgen.cli.project import generated
from kvgen.emulator.classes import CLASSES
from kvgen.errors import DeviceError, KvgenError, ToolError
from kvgen.runtime import ABI, cuda
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.loader import load_file

from .conftest import Folder

ROOT = Path(__file__).resolve().parents[2]
OPS = "ops.Append(), ops.Gather(), ops.Decode()"
SPEC = '''"""A cache for tests."""

from kvgen import CSR, Continuous, KernelSet, Latent, Layout, Paged, PerKV, Ring, ops

kernels = KernelSet(q_heads=4, cache={cache}, ops=[{ops}], arch=["sm_80"])
'''
CACHES = {
    "ring": (
        'Paged(dtype="bf16", kv_heads=1, head_dim=16, page_size=4, table=Ring(window=9), lengths="after")',
        "ops.Append(), ops.Gather(), ops.Append(name='store', rows='slots')",
    ),
    "thin": (
        'Continuous(dtype="f32", kv_heads=2, head_dim=3, layout=Layout(k="block token head dim", v="block token head dim", '
        'layers="pointers"))',
        "ops.Append(), ops.Decode()",
    ),
    "apart": (
        'Paged(dtype="f16", kv_heads=2, head_dim=64, page_size=8, table=PerKV(dtype="i32", id_multiplier=2), '
        'layout=Layout(kv="page layer head token dim", swizzle=(3, 3, 3)))',
        "ops.Append(), ops.Gather()",
    ),
    "parts": (
        'Paged(dtype="bf16", kv_heads=2, head_dim=32, page_size=16, table=CSR(last_page_len=True), lengths="after")',
        'ops.Decode(split="balanced")',
    ),
    "listed": (
        'Latent(dtype="bf16", latent_dim=64, rope_dim=16, page_size=4)',
        'ops.MlaDecode(scale=0.1, sparse=True, split="balanced")',
    ),
}


def operations(folder: Folder, *arguments: str) -> list[dict[str, Any]]:
    found = json.loads(folder.kvgen("bench", "--json", *arguments).stdout)
    assert found["schema"] == 1
    result: list[dict[str, Any]] = found["operations"]
    for op in result:
        for b in op["buffers"]:
            touched = sum(b[f"{k}_sectors"] for k in ("load", "store", "atomic"))
            assert b["ratio"] == (touched / b["minimum_sectors"] if b["minimum_sectors"] else None)
            assert touched >= (b["minimum_sectors"] or 0), (op["set"], op["op"], b)
            assert all(b[f"{k}_sectors"] >= b[f"{k}_ideal_sectors"] for k in ("load", "store", "atomic"))
    return result


def traffic(op: dict[str, Any]) -> dict[str, tuple[str, int, int, int, int | None]]:
    """By buffer: group, requests, bytes, sectors, minimum."""
    kinds = ("load", "store", "atomic")
    return {
        b["name"]: (
            b["group"],
            *(sum(b[f"{k}_{what}"] for k in kinds) for what in ("requests", "bytes", "sectors")),
            b["minimum_sectors"],
        )
        for b in op["buffers"]
    }


@pytest.fixture
def counted(empty: Folder) -> Folder:
    """One set, built: 2 requests' pages are 3 of 16 tokens, a token 2 x 2 heads of 64 bf16 values."""
    empty.spec("counted", q_heads=8, ops=OPS)
    empty.kvgen("build")
    return empty


def test_exact_traffic(counted: Folder) -> None:
    append, gather, decode = operations(counted, "--batch", "2", "--tokens", "40")
    assert [(o["op"], o["kernel"], o["arch"], o["rows"]) for o in (append, gather, decode)] == [
        ("append", "counted_append", "sm_90a", 80),
        ("gather", "counted_gather", "sm_90a", 80),
        ("decode", "counted_decode", "sm_90a", 2),
    ]
    # 80 tokens of K and V, 256 bytes each, are 1280 sectors; a warp moves 512 bytes a request.
    # Tables are read by every block of rows, row_offsets by halving; decode looks pages up tile by tile.
    moved = traffic(append)
    tables = {n: moved.pop(n) for n in ("lengths", "page_table", "row_offsets")}
    assert moved == {
        "pool": ("kv", 80, 40960, 1280, 1280),
        "k": ("input", 40, 20480, 640, 640),
        "v": ("input", 40, 20480, 640, 640),
    }
    assert all(row[4] == 1 and row[3] >= append["grid"][0] for row in tables.values())
    assert traffic(gather) == {
        "pool": ("kv", 80, 40960, 1280, 1280),
        "page_table": ("tables", 3, 320, 3, 1),
        "row_offsets": ("tables", 18, 1608, 18, 1),
        "k_out": ("output", 40, 20480, 640, 640),
        "v_out": ("output", 40, 20480, 640, 640),
    }
    moved = traffic(decode)
    tables = {n: moved.pop(n) for n in ("lengths", "page_table")}
    # A request takes a row of each of a tile's runs, which lie in pages of their own; the second tile has 8 rows of one.
    assert moved == {
        "pool": ("kv", 128, 40960, 1280, 1280),
        "q": ("input", 32, 2048, 128, 64),
        "lse": ("output", 8, 64, 8, 2),
        "out": ("output", 8, 2048, 64, 64),
    }
    assert all(row[4] == 1 and row[3] >= decode["grid"][0] for row in tables.values())


def test_the_rest_of_the_json(counted: Folder) -> None:
    (decode,) = operations(counted, "counted/decode", "--batch", "2", "--tokens", "40", "--arch", "sm_80")
    assert set(decode) == {
        "set", "op", "workload", "separate", "kernel", "arch", "grid", "rows", "warp_instructions", "thread_instructions",
        "classes", "thread_classes", "shared", "peak_in_flight", "buffers", "lines",
    }  # fmt: skip
    assert (decode["set"], decode["arch"], decode["grid"], decode["peak_in_flight"]) == (
        "counted",
        "sm_80",
        [4, 1, 1],
        40 * 2 * 128,  # all 40 tokens, of one head
    )
    assert tuple(decode["classes"]) == tuple(decode["thread_classes"]) == CLASSES
    assert sum(decode["classes"].values()) == decode["warp_instructions"]
    assert sum(decode["thread_classes"].values()) == decode["thread_instructions"]
    lines = decode["lines"]
    assert sum(line["warp_instructions"] for line in lines) == decode["warp_instructions"]
    for total, key in ((decode["shared"], "requests"), (decode["shared"], "wavefronts")):
        assert sum(line["shared"][key] for line in lines) == total[key] > 0
    pool = next(b for b in decode["buffers"] if b["name"] == "pool")
    assert sum(line["buffers"].get("pool", {}).get("load_sectors", 0) for line in lines) == pool["load_sectors"]
    assert all(line["source"].startswith("generated/") for line in lines)
    assert operations(counted, "counted/decode", "--batch", "2", "--tokens", "40", "--arch", "sm_80") == [decode]


def test_a_long_prompt_is_moved_once(counted: Folder) -> None:
    (append,) = operations(counted, "*/append", "--workload", "prompt")
    moved = traffic(append)
    assert append["rows"] == 4096
    assert moved["pool"][3:] == (2 * 4096 * 8, 2 * 4096 * 8)
    assert moved["k"][3:] == moved["v"][3:] == (4096 * 8, 4096 * 8)
    assert moved["page_table"][4] == 4096 // 16 * 4 // 32


def test_tables_for_people(counted: Folder) -> None:
    said = counted.kvgen(
        "bench", "counted/append", "--batch", "2", "--tokens", "40", "--new", "3", "--lines", "4"
    ).stdout
    assert said.startswith("2 x 40, 3 new: 2 request(s), 80 tokens, 6 of them new\n")
    rows = [line.split() for line in said.splitlines()]
    assert ["kv", "pool", "6", "3,072", "96", "96", "1.00"] in [row[-7:] for row in rows]
    assert ["counted/append", "sm_90a", "6"] in [row[:3] for row in rows]
    at = rows.index(["counted/append", "(counted_append),", "by", "executed", "warp", "instructions"])
    # A long source line goes on in a row of its own.
    counts = [
        int(row[1].replace(",", "")) for row in rows[at + 2 :] if len(row) > 1 and row[1].replace(",", "").isdigit()
    ]
    counts = counts[:4]
    assert counts == sorted(counts, reverse=True) and len(counts) == 4
    assert "no times" in said.splitlines()[-1]
    assert "kvgen verify --gpu" in said.splitlines()[-1]


def test_with_a_gpu_it_says_where_times_are(counted: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def last_line() -> str:
        said = counted.kvgen("bench", "counted/append", "--batch", "1", "--tokens", "1").stdout
        return str(said.splitlines()[-1])

    def none() -> None:
        raise DeviceError("cuda: no GPU here")

    monkeypatch.setattr(cuda, "driver", none)
    assert last_line().endswith("none is here")
    monkeypatch.setattr(cuda, "driver", lambda: SimpleNamespace(current_device=lambda: 0))
    assert "one is here" in last_line()


def test_less_than_the_minimum_is_a_finding(counted: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = AppendCases.minimum
    monkeypatch.setattr(AppendCases, "minimum", lambda *a: {n: 10 * m for n, m in real(*a).items()})
    result = counted.kvgen("bench", "counted/append", "--batch", "1", "--tokens", "16", code=1)
    assert "counted/append pool" in result.stderr and "fewer sectors" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope",), "no set or operation is called so"),
        (("counted/store",), "no set or operation is called so"),
        (("--batch", "0"), "--batch"),
        (("--tokens", "8", "--new", "9"), "--new: got 9 new tokens of --tokens 8"),
        (("--workload", "steps"), "--workload: got 'steps'; it must be one of prompt, step, tokens1"),
        (("--workload", "step", "--batch", "2"), "--workload: got 'step' beside --batch"),
        (("--arch", "sm_70"), "arch: got sm_70; counted is generated for sm_80, sm_90a"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str, counted: Folder) -> None:
    assert message in counted.kvgen("bench", *arguments, code=2).stderr


def test_what_is_missing(project: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "build it with `kvgen build`" in project.kvgen("bench", code=2).stderr
    project.kvgen("build")
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = project.kvgen("bench", "tiny", code=2).stderr
    assert said.startswith("error: CPU machine: the C++ compiler 'no-such-compiler' is not installed")


# ---------------------------------------------------------------- minima
@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Workload], tuple[Scene, KernelSet]]:
    """Sets of awkward caches, built once."""
    root = tmp_path_factory.mktemp("awkward")
    (root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    (root / "specs").mkdir()
    for name, (cache, ops) in CACHES.items():
        (root / "specs" / f"{name}.py").write_text(SPEC.format(cache=cache, ops=ops), encoding="utf-8")
    Folder(root).kvgen("build")
    packages: dict[str, Any] = {}

    def make(name: str, workload: Workload) -> tuple[Scene, KernelSet]:
        kernels = load_file(root / "specs" / f"{name}.py", f"specs/{name}.py")[0].kernels
        if name not in packages:
            packages[name] = generated(root / "generated", name).__enter__()
        return Scene(kernels, packages[name], workload), kernels

    return make


def least(scene: Scene, op: Op) -> dict[str, int]:
    cases = cases_of(op)
    return cases.minimum(cases.call(scene))


def test_a_ring_writes_only_what_stays(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    scene, kernels = scenes("ring", Workload.uniform(2, 21))
    append, gather, store = (least(scene, op) for op in kernels.ops)
    # 3 pages of 4 tokens hold positions 12 to 20, 9 of 21; K and V of a token are one sector each.
    assert append == {"pool": 2 * 2 * 9, "lengths": 1, "page_table": 1, "k": 2 * 9, "v": 2 * 9, "row_offsets": 1}
    assert gather == {
        "pool": 2 * 2 * 9, "lengths": 1, "page_table": 1, "k_out": 2 * 9, "v_out": 2 * 9, "row_offsets": 1, "starts": 1,
    }  # fmt: skip
    assert store == {"pool": 2 * 2 * 9, "k": 2 * 9, "v": 2 * 9, "slots": -(-42 * 8 // 32)}
    for op in kernels.ops:
        (measured,) = measure(scene, op, None)
        ratios = {t.name: t.ratio for t in measured.traffic}
        assert ratios["pool"] == 1, "only living rows are moved"
        assert all(r is not None and r >= 1 for r in ratios.values()), ratios


def test_rows_that_share_sectors(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    scene, kernels = scenes("thin", Workload("three", (5, 9, 1), (1, 4, 1)))
    append, decode = (least(scene, op) for op in kernels.ops)
    blocks = scene.ids
    # A token is 24 bytes of K and 24 of V, a block 9 tokens; append writes tokens 4, 5 to 8 and 0.
    spans = [(int(blocks[b][0, 0]) * 9 * 24, first, last) for b, first, last in ((0, 4, 4), (1, 5, 8), (2, 0, 0))]
    written = {byte // 32 for base, first, last in spans for byte in range(base + 24 * first, base + 24 * last + 24)}
    read = {byte // 32 for base, _, last in spans for byte in range(base, base + 24 * last + 24)}
    assert append["k_pool[1]"] == append["v_pool[1]"] == len(written)
    assert decode["k_pool[1]"] == decode["v_pool[1]"] == len(read)
    assert (append["k"], append["row_offsets"], append["page_table"]) == (-(-6 * 24 // 32), 1, 1)
    assert (decode["q"], decode["out"], decode["lse"]) == (-(-3 * 48 // 32), -(-3 * 48 // 32), 2)


def test_places_as_the_layout_has_them(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    """Against kvgen.layout.regions's expressions, which the minimum does not use: a swizzle, K and V in pages of their own."""
    scene, kernels = scenes("apart", Workload("two", (11, 3), (2, 3)))
    region = kernels.cache.storage.roles["k"][0].region
    element, strides = 2, scene.pools["pool"].strides  # type: ignore[union-attr]
    touched = set()
    for b, first, total in ((0, 9, 11), (1, 0, 3)):
        for position in range(first, total):
            for entry in scene.ids[b][position // 8]:
                index = np.indices((2, 64)).reshape(2, -1)
                for head, dim in index.T.tolist():
                    place = int(entry) * 2 * strides[0] + 1 * strides[1]  # an entry counts two pages; layer 1
                    values = {"token": position % 8, "head": head, "dim": dim}
                    touched.add((place + element * _evaluate(region.offset(), values)) // 32)
    append = least(scene, kernels.ops[0])
    assert append["pool"] == len(touched)
    for op in kernels.ops:
        (measured,) = measure(scene, op, None)
        assert next(t.ratio for t in measured.traffic if t.name == "pool") == 1


def _evaluate(offset: Any, values: dict[str, int]) -> int:
    from kvgen.expr.to_python import python

    return int(eval(python(offset), {}, values))


def test_a_planner_is_counted_apart(scenes: Callable[[str, Workload], tuple[Scene, KernelSet]]) -> None:
    scene, kernels = scenes("parts", Workload("two", (400, 20), (1, 1)))
    plan, decode = measure(scene, kernels.ops[0], None)
    assert (plan.entry, decode.entry) == ("parts_decode_plan", "parts_decode")
    planned, attended = ({t.name: t for t in m.traffic} for m in (plan, decode))
    assert set(planned) == {"last_page_len", "page_indptr", "workspace"}
    assert planned["workspace"].minimum is attended["workspace"].minimum is attended["workspace"].ratio is None
    assert attended["workspace"].group == "workspace"
    assert attended["workspace"].counted.atomic_requests > 0
    assert attended["pool"].counted.sectors == attended["pool"].minimum == 2 * 420 * 4
    assert all(t.ratio is None or t.ratio >= 1 for t in (*planned.values(), *attended.values()))


def test_workloads() -> None:
    assert all(len(w.totals) == len(w.new) and min(w.new) >= 1 for w in WORKLOADS.values())
    for sizes in ((0, 1, None), (1, 0, None), (1, 1, 0)):
        with pytest.raises(ToolError, match="must be at least 1"):
            Workload.uniform(*sizes)


def test_a_package_of_an_older_abi_gets_one_line(empty: Folder) -> None:
    """Its imports still resolve, so its first statement behind them says what to do; check names what is stale."""
    empty.spec("old")
    empty.kvgen("build")
    names = "Array BaseCache BasePages Bound Count KVParams Kernel Launcher LayerCache Module Number PagePool Places Pool Role "
    names += "RoleCache Scalar Source Tensor TensorLayout TensorMap TensorOperand TileMap Work Workspace"
    text = f"from kvgen.runtime import {', '.join(names.split())}\n\n"
    text += '_MODULE = Module("old", __file__, arch=("sm_80",), abi=4)\nraise AssertionError("goes on")\n'
    (empty.out / "old" / "__init__.py").write_text(text, encoding="utf-8")
    found = empty.kvgen("bench", code=2)
    line = f"old: generated for runtime ABI 4, this kvgen has {ABI}; run `kvgen build`"
    assert (found.stdout, found.stderr) == ("", f"error: {line}\n")
    with pytest.raises(KvgenError) as caught, generated(empty.out, "old"):
        pass
    assert str(caught.value) == line
    assert "kvgen build" in empty.kvgen("check", code=1).stdout


def test_requests_longer_than_a_block(empty: Folder) -> None:
    (empty.root / "specs").mkdir()
    cache = 'Continuous(dtype="bf16", kv_heads=1, head_dim=64, max_tokens=32)'
    (empty.root / "specs" / "blocks.py").write_text(SPEC.format(cache=cache, ops="ops.Append()"), encoding="utf-8")
    empty.kvgen("build")
    said = empty.kvgen("bench", "--tokens", "33", code=2).stderr
    assert "--tokens: got a request of 33 tokens; a block of blocks holds 32 (max_tokens)" in said


# ---------------------------------------------------------------- the repository's own
def test_checked_in_sets() -> None:
    """What their layouts cost: K in groups of 8 elements and V transposed against rows that lie together."""
    sets = ("layout_vllm_xpacked", "layout_sglang", "deepseek_v3")
    kernels = [f"{name}/{op}" for name in sets for op in ("append", "gather")]
    found = {
        (o["set"], o["op"]): traffic(o) for o in operations(Folder(ROOT), *kernels, "--batch", "1", "--tokens", "32")
    }
    assert [f"{name}/{op}" for name, op in found] == sorted(kernels)
    stored = found["layout_vllm_xpacked", "append"]
    assert all(stored[n][3] == stored[n][4] for n in ("k_pool[1]", "v_pool[1]")), (
        "tokens are staged and stored together"
    )
    packed = found["layout_vllm_xpacked", "gather"]
    assert packed["k_pool[1]"][3] == 2 * packed["k_pool[1]"][4], "16 of a sector's 32 bytes belong to one token"
    assert packed["v_pool[1]"][3] == 16 * packed["v_pool[1]"][4], "2 of a sector's 32 bytes belong to one token"
    for name in ("layout_sglang", "deepseek_v3"):
        for op in ("append", "gather"):
            pools = [row for buffer, row in found[name, op].items() if "pool" in buffer]
            assert pools and all(row[3] == row[4] for row in pools)


def test_a_planner_of_lists_reads_their_lengths_as_the_kernel_does(
    scenes: Callable[[str, Workload], tuple[Scene, KernelSet]],
) -> None:
    scene, kernels = scenes("listed", Workload("three", (40, 70, 20), (1, 1, 1)))
    plan, attended = ({t.name: t for t in m.traffic} for m in measure(scene, kernels.ops[0], None))
    assert set(plan) == {"topk_lengths", "workspace"} and plan["topk_lengths"].minimum == 1
    assert attended["topk_lengths"].minimum == 1 and attended["indices"].minimum == -(-3 * 20 * 4 // 32)
    assert all(t.ratio is None or t.ratio >= 1 for t in (*plan.values(), *attended.values()))
