"""`kvgen check`: each way of being out of step is found, named, and told from the others."""

from __future__ import annotations

import json
import py_compile
import sys
from typing import Any

import pytest

from kvgen.cli import attention_cycles, candidates
from kvgen.cli.resources_json import installed

from .conftest import Folder


def findings(folder: Folder, *selectors: str, code: int = 1) -> dict[str, str]:
    """Path -> state, as `check --json` reports them."""
    content: dict[str, Any] = json.loads(folder.kvgen("check", "--json", *selectors, code=code).stdout)
    assert content["ok"] == (not content["findings"])
    return {f["path"]: f["state"] for f in content["findings"]}


def test_in_step(built: Folder) -> None:
    said = built.kvgen("check").stdout
    assert "in step" in said
    assert findings(built, code=0) == {}


def test_before_the_first_build_everything_is_missing(project: Folder) -> None:
    assert set(findings(project).values()) == {"missing"}


@pytest.mark.parametrize("path", ["tiny/append.cu", "tiny/cache.cuh", "tiny/__init__.py", "device/base/types.cuh"])
def test_one_edited_byte(built: Folder, path: str) -> None:
    data = bytearray((built.out / path).read_bytes())
    data[len(data) // 2] ^= 1
    (built.out / path).write_bytes(bytes(data))
    assert findings(built) == {f"generated/{path}": "edited"}


def test_a_removed_banner_is_an_edit(built: Folder) -> None:
    path = built.out / "tiny/append.cu"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[2:]), encoding="utf-8")
    assert findings(built) == {"generated/tiny/append.cu": "edited"}


def test_other_line_ends_are_an_edit_with_its_remedy(built: Folder) -> None:
    path = built.out / "tiny/append.cu"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    result = built.kvgen("check", code=1)
    assert "edited" in result.stdout
    assert ".gitattributes" in result.stdout


def test_bytes_that_are_no_text(built: Folder) -> None:
    (built.out / "tiny/append.cu").write_bytes(b"\xff\xfe\x00")
    assert findings(built) == {"generated/tiny/append.cu": "edited"}


def test_a_deleted_file(built: Folder) -> None:
    (built.out / "wide/gather.cu").unlink()
    assert findings(built) == {"generated/wide/gather.cu": "missing"}


def test_an_added_file_with_our_banner(built: Folder) -> None:
    text = (built.out / "tiny/append.cu").read_text(encoding="utf-8")
    (built.out / "tiny/append2.cu").write_text(text, encoding="utf-8")
    assert findings(built) == {"generated/tiny/append2.cu": "extra"}
    built.kvgen("build")
    assert findings(built, code=0) == {}


def test_an_added_file_of_someone_else(built: Folder) -> None:
    (built.out / "tiny/mine.cu").write_text("// mine\n", encoding="utf-8")
    assert findings(built) == {"generated/tiny/mine.cu": "extra"}
    built.kvgen("build")
    assert (built.out / "tiny/mine.cu").is_file()


def test_what_makes_the_folder_a_package_is_no_finding(built: Folder) -> None:
    (built.out / "__init__.py").touch()
    (built.out / "py.typed").touch()
    (built.out / ".gitattributes").write_text("* text eol=lf\n", encoding="utf-8")
    for path in ("__init__.py", "tiny/__init__.py"):  # and Python's own, timestamped
        py_compile.compile(str(built.out / path), doraise=True)
    assert findings(built, code=0) == {}


def test_a_changed_spec(built: Folder) -> None:
    built.spec("tiny", page_size=32)
    found = findings(built)
    names = ("README.md", "tiny/__init__.py", "tiny/_table.py", "tiny/cache.cuh")
    paths = [f"generated/{name}" for name in names]
    assert found == dict.fromkeys(paths, "stale")


def test_a_removed_spec(built: Folder) -> None:
    (built.root / "specs/wide.py").unlink()
    found = findings(built)
    assert found.pop("generated/README.md") == "stale"
    assert set(found.values()) == {"extra"}
    own = {path for path in found if path.startswith("generated/wide/")}
    rest = found.keys() - own
    assert own and rest and all(path.startswith("generated/device/") for path in rest), "headers that it alone included"


def test_the_last_line_mends(built: Folder) -> None:
    (built.out / "tiny/append.cu").unlink()
    said = built.kvgen("check", code=1).stdout.splitlines()
    assert said[0].split()[:2] == ["missing", "generated/tiny/append.cu"]
    program, *arguments = said[-1].split()
    assert program == "kvgen"
    built.kvgen(*arguments)
    built.kvgen("check")


def test_a_selector_limits_the_check(built: Folder) -> None:
    (built.out / "wide/gather.cu").unlink()
    assert findings(built, "tiny", code=0) == {}
    assert findings(built, "w*") == {"generated/wide/gather.cu": "missing"}


def test_check_loads_no_cuda(built: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    built.kvgen("check")
    assert not [n for n in sys.modules if n.split(".")[0] == "cuda"]


def test_resources_are_stale_when_the_text_is_another(built: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "others", lambda *_: [])
    monkeypatch.setattr(attention_cycles, "replayed", lambda *_: None)
    built.kvgen("compile", "tiny", "--record")
    assert findings(built, code=0) == {}
    built.spec("tiny", page_size=32)
    built.kvgen("build")
    assert findings(built) == {"generated/tiny/resources.json": "stale"}
    assert built.kvgen("check", code=1).stdout.splitlines()[-1] == "kvgen compile --record"
    built.kvgen("compile", "--record")
    assert findings(built, code=0) == {}


def test_resources_are_stale_when_the_spec_has_other_architectures(built: Folder) -> None:
    built.kvgen("compile", "--record")
    built.change("specs/tiny.py", '"sm_80", ', "")
    built.kvgen("build")
    assert findings(built) == {"generated/tiny/resources.json": "stale"}


def test_resources_are_missing_where_a_project_pins_nvrtc(built: Folder) -> None:
    (built.root / "pyproject.toml").write_text(f'[tool.kvgen]\nnvrtc = "{installed()}"\n', encoding="utf-8")
    assert findings(built) == {
        "generated/tiny/resources.json": "missing",
        "generated/wide/resources.json": "missing",
    }
    built.kvgen("compile", "--record")
    assert findings(built, code=0) == {}
    (built.root / "pyproject.toml").write_text('[tool.kvgen]\nnvrtc = "12.9"\n', encoding="utf-8")
    assert set(findings(built).values()) == {"stale"}


@pytest.mark.parametrize("text", ["{", "[]", '{"kernels": {}}'])
def test_resources_edited_by_hand(built: Folder, text: str) -> None:
    (built.out / "tiny/resources.json").write_text(text, encoding="utf-8")
    assert findings(built) == {"generated/tiny/resources.json": "edited"}


def test_resources_of_a_removed_set_are_pruned(built: Folder) -> None:
    built.kvgen("compile", "--record")
    (built.root / "specs/wide.py").unlink()
    assert findings(built)["generated/wide/resources.json"] == "extra"
    built.kvgen("build")
    assert not (built.out / "wide").exists()
    assert findings(built, code=0) == {}
