"""`kvgen compile`: the table, the folder, resources.json, and errors traced to the template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgen import paths
from kvgen.cli.resources_json import installed
from kvgen.codegen import render
from kvgen.compile import code_digest, find, read_folder, text_digest
from kvgen.compile.sass import CLASSES

from .conftest import Folder


def test_table(project: Folder) -> None:
    said = project.kvgen("compile").stdout
    rows = [line.split() for line in said.splitlines()]
    names = [(row[0], row[1]) for row in rows if len(row) > 1 and "/" in row[0]]
    kernels = ("tiny/append", "wide/append", "wide/gather")
    assert names == [(kernel, arch) for kernel in kernels for arch in ("sm_80", "sm_90a")]
    assert f"6 cubins, NVRTC {installed()}" in said


def test_arch_and_selector(project: Folder) -> None:
    found = json.loads(project.kvgen("compile", "wide/g*", "--arch", "sm_89", "--arch", "sm_1*", "--json").stdout)
    assert {k["kernel"] for k in found["kernels"]} == {"wide/gather"}
    assert sorted(k["arch"] for k in found["kernels"]) == ["sm_100f", "sm_120f", "sm_89"]
    assert all(k["registers"] > 0 and k["spill_stores"] == 0 for k in found["kernels"])


def test_folder(project: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "cubins"
    found = json.loads(project.kvgen("compile", "-o", str(folder), "--json").stdout)
    manifest = read_folder(folder)
    assert len(manifest.entries) == 6
    flat = project.kvgen("show", "tiny/append", "--flat").stdout
    cubin = find(manifest, "tiny", "append", "sm_90a", text_digest(flat))
    assert cubin[:4] == b"\x7fELF"
    assert found["kernels"][0]["digest"] == text_digest(flat)


def test_shards(project: Folder, tmp_path: Path) -> None:
    """A set a number of GPUs in one folder; its launchers have the shard's heads and say so."""
    arguments = ("compile", "tiny", "--tp", "1,2,8", "--arch", "sm_90a", "-o", str(tmp_path / "cubins"))
    found = json.loads(project.kvgen(*arguments, "--json").stdout)
    assert [(k["kernel"], k["tp"]) for k in found["kernels"]] == [
        ("tiny/append", 1),
        ("tiny_tp2/append", 2),
        ("tiny_tp8/append", 8),
    ]
    sets = read_folder(tmp_path / "cubins").sets
    assert [(each.set, each.whole, each.tp) for each in sets] == [
        ("tiny", "", 1),
        ("tiny_tp2", "tiny", 2),
        ("tiny_tp8", "tiny", 8),
    ]
    texts = [(tmp_path / "cubins" / each.file).read_text() for each in sets]
    tables = [(tmp_path / "cubins" / each.table).read_text() for each in sets]
    for text, heads in zip(tables, (2, 1, 1), strict=True):
        assert f"    HEADS = {heads}\n" in text
    assert "One of 8 GPUs: q_heads=1, kv_heads=1." in texts[2]
    assert not (project.root / "generated").exists()


def test_the_second_time_comes_from_the_cache(project: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "own-cache"))
    states = [
        {k["cached"] for k in json.loads(project.kvgen("compile", "tiny", "--json").stdout)["kernels"]}
        for _ in range(2)
    ]
    assert states == [{False}, {True}]


def test_record_is_deterministic_and_says_what_it_should(built: Folder) -> None:
    built.kvgen("compile", "--record")
    path = built.out / "tiny/resources.json"
    first = path.read_bytes()
    content = json.loads(first)
    assert content["nvrtc"] == installed()
    entry = content["kernels"]["append"]
    assert entry["digest"] == code_digest(built.kvgen("show", "tiny/append", "--flat").stdout)
    counts = entry["sm_90a"]
    assert list(counts) == ["registers", "spills", "shared", "blocks", "instructions", *CLASSES, "machine_code"]
    assert counts["registers"] > 0 and counts["spills"] == counts["tensor_cores"] == 0
    assert counts["instructions"] > counts["global_loads"] > 0 and counts["global_stores"] > 0
    assert [json.loads(line.split(": ", 1)[1]) for line in first.decode().splitlines() if '"sm_90a"' in line] == [
        counts
    ]
    built.kvgen("compile", "--record")
    assert path.read_bytes() == first


def test_record_takes_whole_sets(built: Folder) -> None:
    assert "--record" in built.kvgen("compile", "wide/gather", "--record", code=2).stderr
    assert not (built.out / "wide/resources.json").exists()


def test_record_refuses_another_nvrtc(built: Folder) -> None:
    (built.root / "pyproject.toml").write_text('[tool.kvgen]\nnvrtc = "12.0"\n', encoding="utf-8")
    assert "12.0" in built.kvgen("compile", "--record", code=2).stderr
    assert not (built.out / "tiny/resources.json").exists()
    built.kvgen("compile", "tiny")


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the templates that a test may break."""
    copy = tmp_path / "templates"
    shutil.copytree(paths.templates_root(), copy)
    for module in (paths, render):
        monkeypatch.setattr(module, "templates_root", lambda: copy)
    render.environment.cache_clear()
    yield copy
    render.environment.cache_clear()


def break_template(path: Path, text: str) -> None:
    """Write a template; the environment is made anew, for it never looks at a file twice."""
    path.write_text(text, encoding="utf-8")
    render.environment.cache_clear()


def test_a_refusal_names_the_generated_and_the_template_line(project: Folder, templates: Path) -> None:
    path = templates / "ops/append.cu.j2"
    lines = path.read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(lines, start=1) if line.strip() == "pdl_wait();")
    lines[number - 1] = "  pdl_wayt();"
    break_template(path, "\n".join(lines) + "\n")
    said = project.kvgen("compile", "tiny", code=1).stderr
    text = project.kvgen("show", "tiny/append").stdout.splitlines()
    assert f"generated/tiny/append.cu:{text.index('  pdl_wayt();') + 1}: error: " in said
    assert f"from templates/ops/append.cu.j2:{number}" in said
    assert "Traceback" not in said


def test_strict(project: Folder, templates: Path) -> None:
    project.kvgen("compile", "tiny", "--strict")
    path = templates / "ops/append.cu.j2"
    text = path.read_text(encoding="utf-8")
    # 256 threads of which 8 blocks must fit leave 32 registers a thread; 64 live values then spill.
    text = text.replace("__launch_bounds__(kThreads)", "__launch_bounds__(kThreads, 8)")
    spill = (
        "  float held[64];\n"
        "  for (int i = 0; i < 64; ++i) held[i] = ((volatile float*)errors)[i + threadIdx.x];\n"
        "  for (int i = 63; i >= 0; --i) ((volatile float*)errors)[i] = held[i];\n"
    )
    break_template(path, text.replace("  pdl_wait();\n", "  pdl_wait();\n#pragma unroll\n" + spill, 1))
    project.kvgen("compile", "tiny")
    assert "spill" in project.kvgen("compile", "tiny", "--strict", code=1).stderr
