"""A set whose attention has files for each code family, through the verbs: build, check, compile, diff, show, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvgen
from kvgen.cli import attention_cycles, candidates
from kvgen.cli.resource_changes import deltas_of
from kvgen.compile import read_folder

from .conftest import Folder

SPEC = '''"""Prompts of small heads for two code families."""

from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads=4,
    cache=Paged(dtype="bf16", kv_heads=1, head_dim=64, page_size=64),
    ops=[ops.Extend()],
    arch=["sm_80", "sm_90a"],
)
'''
LATENT = '''"""Latent rows for two code families."""

from kvgen import KernelSet, Latent, ops

kernels = KernelSet(
    q_heads=64,
    cache=Latent(dtype="bf16", latent_dim=512, rope_dim=64, page_size=64),
    ops=[ops.MlaDecode(scale=0.1, split="balanced")],
    arch=["sm_80", "sm_90a"],
)
'''
FILES = ["extend.cu", "extend_plan.cu", "extend_plan_sm_90a.cu", "extend_sm_90a.cu"]
PAIRS = [
    ("extend", "sm_80"),
    ("extend_sm_90a", "sm_90a"),
    ("extend_plan", "sm_80"),
    ("extend_plan_sm_90a", "sm_90a"),
]


@pytest.fixture
def small(empty: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """The set, built. Records leave out kernels that were not chosen (tests/test_choose.py has those), and cycles."""
    monkeypatch.setattr(candidates, "others", lambda *_: [])
    monkeypatch.setattr(attention_cycles, "replayed", lambda *_: None)
    (empty.root / "specs").mkdir()
    (empty.root / "specs" / "small.py").write_text(SPEC, encoding="utf-8")
    empty.kvgen("build")
    return empty


def compiled(folder: Folder, *arguments: str) -> list[tuple[str, str]]:
    found: Any = json.loads(folder.kvgen("compile", "--json", *arguments).stdout)
    return [(k["kernel"].removeprefix("small/"), k["arch"]) for k in found["kernels"]]


@pytest.mark.campaign
def test_files_and_records_come_and_go_with_architectures(small: Folder) -> None:
    """A file that is missing, one that no architecture has any more, and resources.json, which has each for its own."""
    assert sorted(p.name for p in (small.out / "small").glob("*.cu")) == FILES
    small.kvgen("compile", "--record")
    small.kvgen("check")
    recorded = json.loads((small.out / "small" / "resources.json").read_text(encoding="utf-8"))["kernels"]
    assert [(name, arch) for name in recorded for arch in recorded[name] if arch != "digest"] == sorted(PAIRS)
    assert recorded["extend_sm_90a"]["sm_90a"]["shared"] > recorded["extend"]["sm_80"]["shared"] > 70_000
    file = small.out / "small" / "extend_sm_90a.cu"
    text = file.read_text(encoding="utf-8")
    file.unlink()
    assert "missing  generated/small/extend_sm_90a.cu" in small.kvgen("check", code=1).stdout
    file.write_text(text, encoding="utf-8")
    small.change("specs/small.py", '"sm_80", "sm_90a"', '"sm_80"')
    said = small.kvgen("check", code=1).stdout
    assert "extra    generated/small/extend_sm_90a.cu" in said and "resources.json" in said
    before = small.tree()
    small.kvgen("build")
    small.kvgen("compile", "--record")
    assert not file.exists()
    two, one = ({path: data.decode() for path, data in tree.items()} for tree in (before, small.tree()))
    for old, new, state in ((two, one, "removed"), (one, two, "added")):
        states = {(d.kernel, d.arch): d.state for d in deltas_of(old, new, "generated")}
        assert states["small/extend_sm_90a", "sm_90a"] == states["small/extend_plan_sm_90a", "sm_90a"] == state
    small.change("specs/small.py", '"sm_80"', '"sm_80", "sm_90a"')
    small.kvgen("build", "small/extend")
    assert file.read_text(encoding="utf-8") == text


def test_each_target_compiles_the_file_that_it_takes(small: Folder, tmp_path: Path) -> None:
    assert compiled(small) == PAIRS
    assert compiled(small, "--arch", "sm_100f", "--arch", "sm_90a") == [
        ("extend", "sm_100f"),
        ("extend_sm_90a", "sm_90a"),
        ("extend_plan", "sm_100f"),
        ("extend_plan_sm_90a", "sm_90a"),
    ]
    folder = tmp_path / "cubins"
    small.kvgen("compile", "-o", str(folder))
    assert sorted((e.kernel, e.arch) for e in read_folder(folder).entries) == sorted(PAIRS)
    assert kvgen.load("small", cubins=folder)._MODULE.arch == ("sm_80", "sm_90a")
    small.kvgen("compile", "--arch", "sm_90a", "-o", str(folder))
    assert kvgen.load("small", cubins=folder)._MODULE.arch == ("sm_90a",)


def test_what_is_shown(empty: Folder) -> None:
    """Which file runs where and why; an operation's code is its files', machine code the target's."""
    (empty.root / "specs").mkdir()
    (empty.root / "specs" / "latent.py").write_text(LATENT, encoding="utf-8")
    empty.kvgen("build")
    said = empty.kvgen("show", "latent/mla_decode", "--plan").stdout
    assert "mla_decode: latent_mla_decode from templates/ops/mla_mma.cu.j2, on sm_80\n" in said
    assert "mla_decode_sm_90a: latent_mla_decode from templates/ops/mla_sm90.cu.j2, on sm_90a\n" in said
    assert "mla_sm90: rows widened by warps of their own, products of warpgroups; columns on M\n" in said
    assert (
        "not      mla_sm90: no wgmma\n" in said
        and "not      mla_sm90_few_heads: a request's table names its rows\n" in said
    )
    for file, arch in (("mla_decode_plan", "sm_80"), ("mla_decode_plan_sm_90a", "sm_90a")):
        assert f"{file}: latent_mla_decode_plan from templates/ops/decode_plan.cu.j2, on {arch}\n" in said
    found: Any = json.loads(empty.kvgen("show", "latent", "--plan", "--json").stdout)
    assert [(k["name"], k["archs"]) for k in found[0]["kernels"]] == [
        ("mla_decode", ["sm_80"]),
        ("mla_decode_sm_90a", ["sm_90a"]),
        ("mla_decode_plan", ["sm_80"]),
        ("mla_decode_plan_sm_90a", ["sm_90a"]),
    ]
    chosen = [k["attention"] and (k["attention"]["kernel"], list(k["attention"]["on"])) for k in found[0]["kernels"]]
    assert chosen == [("mla_mma", ["sm_80"]), ("mla_sm90", ["sm_90a"]), None, None]
    empty.change("specs/latent.py", '"sm_80", ', '"sm_80", "sm_89", ')
    said = empty.kvgen("show", "latent/mla_decode", "--plan").stdout
    assert "mla_decode_sm_90a: latent_mla_decode from templates/ops/mla_sm90.cu.j2, on sm_90a\n" in said
    assert "mla_decode_sm_89: latent_mla_decode from templates/ops/mla_mma.cu.j2, on sm_89\n" in said
    assert "a block has room for 32, 2 blocks share a kv head's columns, and each reads its tokens" in said
    ptx = empty.kvgen("show", "latent/mla_decode", "--ptx", "--arch", "sm_89").stdout
    assert "wgmma" not in ptx


def test_the_other_file_alone_is_shown_for_its_target(small: Folder) -> None:
    ptx = {a: small.kvgen("show", "small/extend", "--ptx", "--arch", a).stdout for a in ("sm_80", "sm_90a")}
    assert "wgmma.mma_async" in ptx["sm_90a"] and "==> small/extend_sm_90a <==" in ptx["sm_90a"]
    assert "wgmma.mma_async" not in ptx["sm_80"] and "==> small/extend <==" in ptx["sm_80"]
    flat = small.kvgen("show", "small/extend", "--flat").stdout
    assert all(f"==> small/{name.removesuffix('.cu')} <==" in flat for name in FILES)


def test_a_second_family_is_two_files_more_in_a_diff(small: Folder) -> None:
    small.change("specs/small.py", '"sm_80", "sm_90a"', '"sm_80", "sm_100f"')
    small.kvgen("build")
    small.change("specs/small.py", '"sm_80", "sm_100f"', '"sm_80", "sm_90a"')
    said = small.kvgen("diff", "small/extend").stdout
    for file in ("extend_sm_90a", "extend_plan_sm_90a"):
        assert f"--- /dev/null\n+++ generated/small/{file}.cu\n" in said


def test_an_export_has_both(small: Folder, tmp_path: Path) -> None:
    """Each target's cubins are made of its own files, and the header says which has a kernel."""
    small.kvgen("export", "small", "-o", str(tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out" / "small").iterdir()) == FILES
    cmake = (tmp_path / "out" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert "kvgen_cubins(small sm_80 extend extend_plan)\n" in cmake
    assert "kvgen_cubins(small sm_90a extend_sm_90a extend_plan_sm_90a)\n" in cmake
    header = (tmp_path / "out" / "small.h").read_text(encoding="utf-8")
    assert 'if (arch == Arch::sm_90a) return "extend_sm_90a";\n    return "extend";' in header
