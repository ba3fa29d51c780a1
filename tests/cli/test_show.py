"""`kvgen show`: every view of a set."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvgen.paths import templates_root
from tests.support.family_sets import NAMES, write_project

from .conftest import Folder


def test_the_generated_file_itself(built: Folder) -> None:
    assert built.kvgen("show", "tiny/append").stdout == (built.out / "tiny/append.cu").read_text(encoding="utf-8")


def test_a_set_shows_all_its_files(project: Folder) -> None:
    said = project.kvgen("show", "wide").stdout
    heads = re.findall(r"^==> (.*) <==$", said, re.M)
    assert heads == [
        f"generated/wide/{name}" for name in ("__init__.py", "_table.py", "append.cu", "cache.cuh", "gather.cu")
    ]


def test_globs(project: Folder) -> None:
    said = project.kvgen("show", "*/append").stdout
    assert "==> generated/tiny/append.cu <==" in said
    assert "==> generated/wide/append.cu <==" in said


def test_map_names_the_template_line(project: Folder) -> None:
    said = project.kvgen("show", "tiny/append", "--map").stdout.splitlines()
    mapped = 0
    for line in said:
        match = re.fullmatch(r"templates/(\S+):(\d+) +\d+ \| (.*)", line)
        # Lines of pure text stand in the template as they are; the rest has substitutions in it.
        if match and match[3].strip():
            source = (templates_root() / match[1]).read_text(encoding="utf-8").splitlines()[int(match[2]) - 1]
            mapped += match[3].strip() in source
    assert mapped > 20
    assert len(said) == project.kvgen("show", "tiny/append").stdout.count("\n")


def test_flat_is_self_contained(project: Folder) -> None:
    said = project.kvgen("show", "tiny/append", "--flat").stdout
    assert "#include" not in said
    assert '#line 1 "generated/tiny/append.cu"' in said


def test_ptx_and_sass(project: Folder) -> None:
    assert ".target sm_90a" in project.kvgen("show", "tiny/append", "--ptx").stdout
    assert ".target sm_80" in project.kvgen("show", "tiny/append", "--ptx", "--arch", "sm_80").stdout
    assert "tiny_append" in project.kvgen("show", "tiny/append", "--sass").stdout


def test_plan(project: Folder) -> None:
    said = project.kvgen("show", "wide", "--plan").stdout
    assert "8 query over 2 kv, group 4, head dim 128" in said
    assert "token * 256 + head * 128 + dim" in said
    assert "wide_append from templates/ops/append.cu.j2" in said
    fields, kernels = said.split("\n  Cache: the struct that every kernel takes first\n")[1].split("\n\n", 1)
    assert re.search(r"page_table +i32\[B, M\] +in, strided, untrusted\n", fields)
    assert "page_table" not in kernels
    found = json.loads(project.kvgen("show", "wide/gather", "--plan", "--json").stdout)
    assert [kernel["op"] for kernel in found[0]["kernels"]] == ["gather"]
    assert not found[0]["kernels"][0]["writes_pool"]
    assert [f["name"] for f in found[0]["cache"]["fields"]][:2] == ["k", "v"]
    (keys,) = found[0]["cache"]["roles"]["k"]
    assert keys["shape"] == ["pages", 2, "layers", 16, 2, 128] and keys["quant"] is keys["scales"] is None


LAYERED = """from kvgen import Indexer, KernelSet, Kind, Model, Paged, Rope, ops

INDEX, OF_1 = Indexer(heads=8, dim=128, topk=32), Indexer(heads=8, dim=128, topk=32, source=1)
kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
    ops=[ops.Append(rope=None), ops.Gather()],
    model=Model(
        layers=9,
        kinds=[
            Kind(name="mamba", cache=False),
            Kind(name="full", q_heads=8, kv_heads=2, head_dim=64, rope=Rope(style="neox", theta=1e4), indexer=INDEX),
            Kind(name="shared", q_heads=8, kv_heads=2, head_dim=64, window=64, sinks=True, kv_source=1, indexer=OF_1),
        ],
        pattern=["mamba", "full", "shared"],
    ),
    layers={"full": ("append", "gather")},
)
"""


def test_plan_has_the_model_s_layers(empty: Folder) -> None:
    (empty.root / "specs").mkdir(exist_ok=True)
    (empty.root / "specs" / "layered.py").write_text(LAYERED, encoding="utf-8")
    said = empty.kvgen("show", "layered", "--plan").stdout.splitlines()
    assert [line for line in said if " layers   " in line or line.startswith("           ")][:3] == [
        "  layers   mamba: 0, 3, 6; no keys and values",
        "           full: 1, 4, 7; 8 query heads over 2 of 64; 32 tokens picked by an indexer; RoPE; append, gather",
        "           shared: 2, 5, 8; 8 query heads over 2 of 64; window 64; sinks; reads layer 1; "
        "32 tokens picked by layer 1's indexer; no RoPE",
    ]
    (found,) = json.loads(empty.kvgen("show", "layered", "--plan", "--json").stdout)
    assert [kind["kind"] for kind in found["layers"]] == ["mamba", "full", "shared"]
    assert found["layers"][0]["layers"] == [0, 3, 6]


FIELDS = """from kvgen import KernelSet, Mask, Model, Paged, Rope, ops

LOCAL = Mask(window=32)
kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
    ops=[ops.Append(rope="local"), ops.Decode(mask=LOCAL, split="balanced"), ops.Extend(mask=LOCAL, scale=0.25)],
    model=Model(scale=0.25, window=32, window_pattern=["local", "full"], rope=Rope(style="neox", theta=1e6, local_theta=1e4)),
)
"""


def test_plan_says_which_value_came_from_where(empty: Folder) -> None:
    (empty.root / "specs").mkdir(exist_ok=True)
    (empty.root / "specs" / "fields.py").write_text(FIELDS, encoding="utf-8")
    (found,) = json.loads(empty.kvgen("show", "fields", "--plan", "--json").stdout)
    said = {
        kernel["op"]: {f["field"]: (f["value"], f["from"]) for f in kernel["fields"]} for kernel in found["kernels"]
    }
    assert said["append"] == {"rope": ("Rope(style='neox', theta=1000000.0, local_theta=10000.0)", "model: rope")}
    mask = ("Mask(window=32)", "spec")
    none = {"score": ("none", "default"), "sinks": ("none", "default")}
    split = {"split": ("'balanced'", "spec")}
    assert said["decode"] == {"scale": ("0.25", "model: scale"), "mask": mask, **none, **split}
    assert said["extend"] == {"scale": ("0.25", "spec"), "mask": mask, **none}
    lines = empty.kvgen("show", "fields/decode", "--plan").stdout.splitlines()
    assert "     scale  0.25             model: scale" in lines


NARROW = """
from kvgen import KernelSet, ops, presets

sizes = {"dtype": "f16", "kv_heads": 2, "head_dim": 32, "page_size": 16}
kernels = [
    KernelSet(name="signs", q_heads=8, cache=presets.lmdeploy_turboquant(**sizes), ops=[ops.Gather()]),
    KernelSet(
        name="norms",
        q_heads=8,
        cache=presets.vllm_turboquant(**sizes, kv_cache_dtype="turboquant_3bit_nc"),
        ops=[ops.Gather()],
    ),
]
"""


def test_plan_has_what_codes_stand_for(empty: Folder) -> None:
    (empty.root / "specs").mkdir(exist_ok=True)
    (empty.root / "specs" / "narrow.py").write_text(NARROW, encoding="utf-8")
    signs, norms = (empty.kvgen("show", name, "--plan").stdout for name in ("signs", "norms"))
    assert "u4 codes in k_pool (page pointer k), at token * 64 + head * 32 + (dim % 16) * 2 + dim / 16\n" in signs
    assert (
        "value = (codebook[code % 8] +- left) * scale: one f16 scale and root mean square of what is left per" in signs
    )
    assert "value = codebook[code] * scale: one f16 scale per 1 token x 1 head x 32 dims, recipe norm\n" in signs
    assert "u3 codes in pool (page pointer bytes), at token * 480 + head * 240 + dim * 3\n" in norms
    assert "a page spans 7536, and places count bits\n" in norms
    assert "value = codebook[code] * scale / norm of the block's values: one f16 scale per" in norms
    assert "value = code * scale + least: one f16 scale and least value per" in norms


def test_which_kernel_attends(empty: Folder) -> None:
    """The plan says which kernel a decode has and why, how it is divided, and what is in flight."""
    ops = "ops.Append(), ops.Decode(), ops.Decode(name='cut', rows=2, split='invariant', chunk=256)"
    empty.spec("fast", q_heads=8, ops=ops)
    empty.spec("exact", q_heads=8, ops="ops.Decode()")
    empty.change("specs/exact.py", 'dtype="bf16"', 'dtype="f32"')
    said = empty.kvgen("show", "fast", "--plan").stdout
    assert "     tensor cores: " in said
    assert "columns  4: 1 row of 4 query heads; a block has room for 8, one block has them all\n" in said
    assert "columns  8: up to 2 rows of 4 query heads" in said
    assert re.search(r"\n +sm_90a: rings of \d tiles, 2 blocks a multiprocessor, \d+ KB in flight there\n", said)
    assert "split    none: a block for each request\n" in said
    assert "split    invariant: a planner cuts requests into chunks of 256 tokens\n" in said
    assert re.search(r"threads, dynamic shared memory: \d+ bytes on sm_80, \d+ bytes on sm_90a\n", said)
    assert "CUDA cores: f32 values would lose bits" in empty.kvgen("show", "exact", "--plan").stdout
    (found,) = json.loads(empty.kvgen("show", "fast", "--plan", "--json").stdout)
    append, decode, cut, planner = (kernel["attention"] for kernel in found["kernels"])
    assert append is planner is None
    assert (decode["walk"], decode["split"], cut["chunk"]) == ("tensor cores", "none", 256)
    large = decode["rings"]["sm_90a"]
    each = decode["teams"] * decode["tile_tokens"] * 2 * 64 * 2
    assert large["bytes_in_flight"] == large["blocks"] * (large["stages"] - 1) * each


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_store_a_cache(name: str, tmp_path: Path) -> None:
    """The plan names every tensor, and says of quantized dims what a code means and where its scale is."""
    write_project(tmp_path, (name,))  # a project of its own: a verb renders all sets of one
    family = Folder(tmp_path)
    said = family.kvgen("show", name, "--plan").stdout
    (found,) = json.loads(family.kvgen("show", name, "--plan", "--json").stdout)
    for tensor in found["cache"]["tensors"]:
        assert f"\n  {tensor['name']}: " in said and len(tensor["axes"].split()) == len(tensor["shape"])
    for parts in found["cache"]["roles"].values():
        for part in parts:
            assert part["tensor"] in {t["name"] for t in found["cache"]["tensors"]}
            assert (part["quant"] is None) <= (part["scales"] is None)
    assert said.count("value = ") == sum(
        part["quant"] is not None for parts in found["cache"]["roles"].values() for part in parts
    )


def test_what_codes_mean(tmp_path: Path) -> None:
    write_project(tmp_path, ("kivi", "latent_row", "given", "cast"))
    family = Folder(tmp_path)
    said = family.kvgen("show", "kivi/seal", "--plan").stdout
    assert (
        "K [0, 32): u4 codes in pool (page pointer k), at token * 32 + head * 16 + dim\n" not in said
    )  # dims, not bytes
    assert (
        "     value = (code - zero) * scale: one f16 scale and zero point per 8 tokens x 1 head x 1 dim, recipe amax\n"
        "     8 tokens are quantized together; until then they wait in k_tail\n"
        "     scales in k_scales, at token * 128 + head * 64 + dim, counting blocks\n"
    ) in said
    said = family.kvgen("show", "latent_row/append", "--plan").stdout
    assert "K [0, 64): e4m3 codes in pool (page pointer k), at token * 104 + dim\n" in said
    assert (
        "scales in pool (page pointer k), from byte 64 of the page or row, at token * 26 + dim, counting blocks\n"
        in said
    )
    assert "K [64, 80): bf16 in pool (page pointer k), from byte 72 of the page or row, at token * 52 + dim\n" in said
    assert "scales in v_scale, [1, 1] a layer\n" in family.kvgen("show", "given/append", "--plan").stdout
    assert "value = code, a cast that saturates\n" in family.kvgen("show", "cast/append", "--plan").stdout


def test_what_mma_sync_reaches_on_sm_100(empty: Folder) -> None:
    """One line of sets that have it, and says that it is assumed; others have none."""
    empty.spec("prompts", ops="ops.Extend()")
    assert "tcgen05" not in empty.kvgen("show", "prompts", "--plan").stdout
    empty.change("specs/prompts.py", '"sm_80"', '"sm_100f"')
    said = empty.kvgen("show", "prompts", "--plan").stdout
    assert said.count("sm_100f: by mma.sync at most 31 % of what tcgen05 can multiply (25 to 50; assumed: ") == 1
    kernels = json.loads(empty.kvgen("show", "prompts", "--plan", "--json").stdout)[0]["kernels"]
    found = [k["attention"]["mma_share"] for k in kernels if "mma_share" in (k["attention"] or {})]
    assert found == [{"value": 2048 / 6.5 / 1024, "low": 0.25, "high": 0.5}]


@pytest.mark.parametrize(
    "arguments", [["--plan", "--map"], ["--arch", "sm_80"], ["--json"], ["--ptx", "--arch", "sm_70"]]
)
def test_contradictions(project: Folder, arguments: list[str]) -> None:
    assert project.kvgen("show", "tiny", *arguments, code=2).stderr.startswith("error: ")
