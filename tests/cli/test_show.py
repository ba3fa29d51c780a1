"""`kvgen show`: every view of a set."""

from __future__ import annotations

import json
import re

import pytest

from kvgen.paths import templates_root

from .conftest import Folder


def test_the_generated_file_itself(built: Folder) -> None:
    assert built.kvgen("show", "tiny/append").stdout == (built.out / "tiny/append.cu").read_text(encoding="utf-8")


def test_a_set_shows_all_its_files(project: Folder) -> None:
    said = project.kvgen("show", "wide").stdout
    heads = re.findall(r"^==> (.*) <==$", said, re.M)
    assert heads == [f"generated/wide/{name}" for name in ("__init__.py", "append.cu", "cache.cuh", "gather.cu")]


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
    assert re.search(r"page_table +u32\[B, M\] +in, strided, untrusted\n", fields)
    assert "page_table" not in kernels
    found = json.loads(project.kvgen("show", "wide/gather", "--plan", "--json").stdout)
    assert [kernel["op"] for kernel in found[0]["kernels"]] == ["gather"]
    assert not found[0]["kernels"][0]["writes_pool"]
    assert [f["name"] for f in found[0]["cache"]["fields"]][:2] == ["k", "v"]
    assert found[0]["cache"]["roles"]["k"]["shape"] == ["pages", 2, "layers", 16, 2, 128]


@pytest.mark.parametrize(
    "arguments", [["--plan", "--map"], ["--arch", "sm_80"], ["--json"], ["--ptx", "--arch", "sm_70"]]
)
def test_contradictions(project: Folder, arguments: list[str]) -> None:
    assert project.kvgen("show", "tiny", *arguments, code=2).stderr.startswith("error: ")
