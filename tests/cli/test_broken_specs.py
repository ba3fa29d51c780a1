"""A selector runs only the specs it names, and a spec that does not load stops only what needs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvgen.compile import read_folder
from kvgen.schema.set_names import set_names

from .conftest import Folder

BROKEN = '"""Broken."""\n\nkernels = KernelSet(\n'
LOUD = "raise SystemExit('this spec ran')\n"
LOOP = '''"""Sets whose names have to be worked out."""

from kvgen import KernelSet, Paged, ops

kernels = [
    KernelSet(
        name=f"drawn_{n}", q_heads=2, cache=Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=n), ops=[ops.Append()]
    )
    for n in (16, 32)
]
'''


def write(folder: Folder, name: str, text: str) -> None:
    (folder.root / "specs" / f"{name}.py").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("kernels = KernelSet(q_heads=1)", ("x",)),
        ("kernels = kvgen.KernelSet(q_heads=1, name='one')", ("one",)),
        ("kernels = KernelSet(name='')", ("x",)),
        ("kernels: object = [KernelSet(name='a'), KernelSet(name='b')]", ("a", "b")),
        ("kernels = (KernelSet(name='a'),)", ("a",)),
        ("kernels = KernelSet(name='a' 'b')", ("ab",)),
        ("kernels = KernelSet(name=NAME)", None),
        ("kernels = KernelSet(name=f'{1}')", None),
        ("kernels = KernelSet(name=3)", None),
        ("kernels = KernelSet(**fields)", None),
        ("kernels = [KernelSet(name=n) for n in 'ab']", None),
        ("kernels = [KernelSet(name='a'), other]", None),
        ("kernels = [*sets]", None),
        ("kernels = []", None),
        ("kernels = made()", None),
        ("kernels = KernelSet(name='a')\nkernels = KernelSet(name='b')", None),
        ("kernels = [KernelSet(name='a')]\nkernels += [KernelSet(name='b')]", None),
        ("kernels = [KernelSet(name='a')]\nkernels.append(other)", None),
        ("kernels = KernelSet()\nfor kernels in []: pass", None),
        ("if True:\n    kernels = KernelSet()", None),
        ("a = kernels = KernelSet()", None),
        ("from other import kernels", None),
        ("from other import *\nkernels = KernelSet()", None),
        ("kernels: object", None),
        ("x = 1", None),
        ("kernels = KernelSet(", None),
        ("\0", None),
        ("(" * 5000, None),
    ],
)
def test_names_read_off_a_text(text: str, names: tuple[str, ...] | None) -> None:
    assert set_names(text, "x") == names


def test_a_selector_runs_the_specs_it_names_and_no_others(built: Folder) -> None:
    write(built, "loud", f"{LOUD}from kvgen import KernelSet\nkernels = KernelSet(q_heads=1)\n")
    for command in (
        ["show", "tiny"],
        ["show", "tiny/append", "--plan"],
        ["build", "tiny"],
        ["check", "tiny", "w*"],
        ["diff", "wide/gather"],
        ["compile", "tiny"],
        ["bench", "tiny/append", "--batch", "1", "--tokens", "16"],
    ):
        result = built.kvgen(*command)
        assert "loud" not in result.stdout + result.stderr, command
    assert "specs/loud.py:1: " in built.kvgen("show", "loud", code=2).stderr


def test_names_that_have_to_be_worked_out_are_found(project: Folder) -> None:
    write(project, "many", LOOP)
    assert "drawn_32_append" in project.kvgen("show", "drawn_32/append").stdout
    assert "drawn_16_append" in project.kvgen("show", "dr*_16/append").stdout
    assert "did you mean drawn_16" in project.kvgen("show", "drawn_15", code=2).stderr
    write(project, "renamed", LOOP.replace("drawn_{n}", "other_{n}").replace("kernels = [", "kernels = sets = ["))
    assert "other_16_append" in project.kvgen("show", "other_16/append").stdout


def test_a_set_under_another_name_than_its_text_promises(project: Folder) -> None:
    text = LOOP.partition("kernels = [")[0] + (
        "def KernelSet(*, make=KernelSet, **fields):\n    return make(name='found', **fields)\n\n"
        "kernels = KernelSet(q_heads=2, cache=Paged(dtype='bf16', kv_heads=2, head_dim=64, page_size=16), "
        "ops=[ops.Append()])\n"
    )
    write(project, "promised", text)
    assert "found_append" in project.kvgen("show", "found/append").stdout
    assert "did you mean" in project.kvgen("show", "fund", code=2).stderr
    assert "no set or operation is called so" in project.kvgen("show", "promised", code=2).stderr


def test_everything_is_built_but_the_broken(built: Folder) -> None:
    before = built.tree()
    write(built, "wide", BROKEN)
    built.spec("tiny", page_size=32)
    built.spec("fresh")
    result = built.kvgen("build", code=2)
    assert "changed  generated/tiny/cache.cuh" in result.stdout
    assert "new      generated/fresh/append.cu" in result.stdout
    assert "removed" not in result.stdout.replace("0 removed", "")
    assert result.stderr.startswith("specs/wide.py:3: '(' was never closed\n1 spec file does not load; ")
    after = built.tree()
    assert {p: d for p, d in before.items() if p.startswith("wide/")} == {
        p: d for p, d in after.items() if p.startswith("wide/")
    }
    built.spec("wide", head_dim=128, ops="ops.Append(), ops.Gather()")
    built.kvgen("check")


def test_while_a_spec_is_broken_no_folder_is_an_orphan(built: Folder) -> None:
    """A broken spec may be that of any folder: its set's name need not show in its text."""
    write(built, "wide", BROKEN)
    (built.root / "specs/wide.py").rename(built.root / "specs/renamed.py")
    (built.out / "tiny/gather.cu").write_bytes((built.out / "wide/gather.cu").read_bytes())
    result = built.kvgen("build", code=2)
    assert "removed  generated/tiny/gather.cu" in result.stdout, "a file of a set that loads"
    assert "generated/wide" not in result.stdout
    assert (built.out / "wide/append.cu").is_file()
    assert json.loads(built.kvgen("check", "--json", code=2).stdout)["findings"] == []
    (built.root / "specs/renamed.py").unlink()
    assert "removed  generated/wide/append.cu" in built.kvgen("build").stdout


def test_check_reports_every_broken_spec_and_checks_the_others(built: Folder) -> None:
    write(built, "b", BROKEN)
    write(built, "a", BROKEN.replace('Broken."""', 'Broken."""\n'))
    (built.out / "tiny/append.cu").unlink()
    result = built.kvgen("check", code=2)
    assert result.stdout.startswith("missing  generated/tiny/append.cu")
    assert result.stderr.splitlines()[:2] == [
        "specs/a.py:4: '(' was never closed",
        "specs/b.py:3: '(' was never closed",
    ]
    found = json.loads(built.kvgen("check", "--json", code=2).stdout)
    assert not found["ok"]
    assert [f["path"] for f in found["findings"]] == ["generated/tiny/append.cu"]
    assert [b["spec"] for b in found["broken"]] == ["specs/a.py", "specs/b.py"]
    assert built.kvgen("check", "wide").stderr == ""


@pytest.mark.parametrize("verb", ["build", "check", "diff", "compile", "show", "bench"])
def test_a_broken_set_that_is_named_is_an_error(built: Folder, verb: str) -> None:
    write(built, "tiny", BROKEN)
    before = built.tree()
    result = built.kvgen(verb, "tiny", code=2)
    assert (result.stdout, result.stderr) == ("", "specs/tiny.py:3: '(' was never closed\n")
    assert built.tree() == before


def test_diff_and_compile_go_on(built: Folder, tmp_path: Path) -> None:
    write(built, "wide", BROKEN)
    built.spec("tiny", page_size=32)
    result = built.kvgen("diff", code=2)
    assert "generated/tiny/cache.cuh" in result.stdout
    assert "generated/wide" not in result.stdout
    result = built.kvgen("compile", "-o", str(tmp_path / "cubins"), code=2)
    assert "tiny/append" in result.stdout and "wide/" not in result.stdout
    assert "specs/wide.py:3: " in result.stderr
    result = built.kvgen("bench", "--batch", "1", "--tokens", "16", code=2)
    assert "tiny/append" in result.stdout


def test_a_set_that_cannot_be_rendered_is_broken_alone(built: Folder) -> None:
    (built.root / "specs/own.cu").write_text('#include "nothing.cuh"\nextern "C" __global__ void x(Cache cache) {}\n')
    built.spec("own", ops='ops.Custom(name="x", source="own.cu", grid=1)')
    result = built.kvgen("build", code=2)
    assert "specs/own.cu:1: " in result.stderr
    assert "2 set(s)" in result.stdout
    assert not (built.out / "own").exists()
    assert "specs/own.cu:1: " in built.kvgen("show", "own", code=2).stderr


def test_two_sets_of_one_name_stop_no_other(built: Folder) -> None:
    for name in ("one", "two"):
        write(built, name, LOOP.replace('f"drawn_{n}"', '"same"').replace("(16, 32)", "(16,)"))
    result = built.kvgen("check", code=2)
    assert "2 set(s)" in result.stdout
    assert "specs/one.py: name: got 'same', which specs/two.py has too" in result.stderr


def test_a_pattern_warns_of_a_file_that_may_have_more(built: Folder) -> None:
    write(built, "many", f"{LOOP}\nraise ValueError('broken')\n")
    result = built.kvgen("check", "w*")
    assert result.stderr.startswith("warning: specs/many.py:12: ValueError: broken\n")
    assert built.kvgen("check", "wide").stderr == ""
    said = built.kvgen("check", "drawn_16", code=2).stderr
    assert said.startswith("error: selector: got 'drawn_16'; no set or operation is called so; there are tiny, wide\n")
    assert "specs/many.py:12: " in said


@pytest.mark.parametrize(
    "nested", ["-" * 20_000 + "1", "+".join(["1"] * 20_000), "a" + ".b" * 20_000, "lambda s: " * 3000 + "s"]
)
def test_nested_deeper_than_python_reads(empty: Folder, nested: str) -> None:
    """Python's parser ends in a bare MemoryError or RecursionError, or, by its version, takes it and the name is unknown."""
    empty.spec("tiny")
    write(empty, "deep", f"value = {nested}\n")
    said = empty.kvgen("list", code=2).stderr
    wanted = (
        "specs/deep.py: an expression is nested deeper, or has more terms in a row, than Python reads; make several"
    )
    assert wanted in said or "specs/deep.py:1: NameError" in said or "specs/deep.py: kernels: got NoneType" in said
    assert "MemoryError" not in said and "RecursionError" not in said


def test_more_memory_than_there_is(empty: Folder) -> None:
    empty.spec("tiny")
    write(empty, "large", "\nvalue = bytes(1 << 60)\n")
    wanted = "specs/large.py:2: MemoryError: this line asks for more memory than there is\n"
    assert wanted in empty.kvgen("list", code=2).stderr


def test_files_that_begin_with_a_byte_order_mark(empty: Folder) -> None:
    """As Notepad and PowerShell save them: specs, pyproject.toml and what kvgen writes as JSON."""
    empty.spec("tiny")
    empty.kvgen("build")
    empty.kvgen("compile", "-o", "cubins")
    for path in ("specs/tiny.py", "pyproject.toml", "cubins/manifest.json"):
        file = empty.root / path
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    empty.kvgen("check")
    assert [each.set for each in read_folder(empty.root / "cubins").sets] == ["tiny"]
    empty.change("specs/tiny.py", "q_heads=8", "q_head=8")
    assert "specs/tiny.py:6: KernelSet.q_head: unknown field" in empty.kvgen("check", code=2).stderr
