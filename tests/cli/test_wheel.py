"""A wheel of a user's project: complete and the same, or what it lacks and the lines of pyproject.toml that bring it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.cli import wheel as wheel_module
from kvgen.cli.project import Project, open_project
from kvgen.cli.wheel import check_wheel
from kvgen.errors import ToolError

from .conftest import Folder

HEAD = '[project]\nname = "engine"\nversion = "1.0"\n[tool.kvgen]\nout = "src/engine/kernels"\n'
GENERATOR = {"setuptools": "setuptools (80.9.0)", "hatchling": "hatchling 1.33.0", "": "other"}


def packed(
    files: Mapping[str, bytes | str], generator: str = "setuptools", name: str = "engine-1.0.dist-info"
) -> bytes:
    """A wheel's bytes."""
    files = {**files, f"{name}/WHEEL": f"Wheel-Version: 1.0\nGenerator: {GENERATOR[generator]}\nTag: py3-none-any\n"}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in files.items():
            archive.writestr(file, data)
    return made.getvalue()


@pytest.fixture
def engine(project: Folder, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A project of two sets in src/engine/kernels, built; its folder is the working folder."""
    (project.root / "pyproject.toml").write_text(HEAD, encoding="utf-8")
    project.kvgen("build")
    (project.root / "src/engine/__init__.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(project.root)
    return project


def sources(folder: Folder) -> dict[str, bytes]:
    """What a wheel should have, by name."""
    root = folder.root / "src"
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def checked(folder: Folder, data: bytes, *arguments: str, code: int = 0) -> tuple[dict[str, str], str]:
    """(path -> state: note, the mend) of a wheel."""
    (folder.root / "x.whl").write_bytes(data)
    content = json.loads(folder.kvgen("check", "--json", "--wheel", "x.whl", *arguments, code=code).stdout)
    return {f["path"]: f"{f['state']}: {f['note']}" for f in content["findings"]}, content["mend"]


# Build backends -------------------------------------------------------------------------------------------------------


def setuptools_packs(folder: Folder) -> dict[str, bytes]:
    """What setuptools takes of the project: a wheel is this and its metadata."""
    out = folder.root / "build-out"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import setuptools; setuptools.setup()",
        "-q",
        "build_py",
        "-d",
        str(out),
    ]
    subprocess.run(command, cwd=folder.root, check=True, capture_output=True)
    return {p.relative_to(out).as_posix(): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def mended(folder: Folder, mend: str) -> None:
    """Add to pyproject.toml what `check --wheel` says, to the letter."""
    first, _, lines = mend.partition("\n")
    assert first == "in pyproject.toml:"
    with (folder.root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(f"{lines}\n")


def test_setuptools_leaves_the_cuda_out_until_it_is_told(engine: Folder) -> None:
    found, mend = checked(engine, packed(setuptools_packs(engine)), code=1)
    assert set(found.values()) == {"missing: the project has it, the wheel lacks it"}
    assert {
        "engine/kernels/tiny/append.cu",
        "engine/kernels/tiny/cache.cuh",
        "engine/kernels/device/base/types.cuh",
    } <= set(found)
    assert not [path for path in found if path.endswith(".py")]
    mended(engine, mend)
    assert checked(engine, packed(setuptools_packs(engine))) == ({}, None)


def test_setuptools_that_looks_for_no_namespaces(engine: Folder) -> None:
    """device/ has no __init__.py: it is no package then, and its data is no package's."""
    find = '[tool.setuptools.packages.find]\nwhere = ["src"]\nnamespaces = false\n'
    data = '[tool.setuptools.package-data]\n"*" = ["*.cu", "*.cuh", "*.cubin", "*.json"]\n'
    (engine.root / "src/engine/kernels/__init__.py").write_text("", encoding="utf-8")
    (engine.root / "pyproject.toml").write_text(HEAD + data + find, encoding="utf-8")
    found, mend = checked(engine, packed(setuptools_packs(engine)), code=1)
    assert found and all(path.startswith("engine/kernels/device/") for path in found)
    (engine.root / "pyproject.toml").write_text(HEAD + data, encoding="utf-8")
    mended(engine, mend)
    assert checked(engine, packed(setuptools_packs(engine))) == ({}, None)


def test_hatchling(engine: Folder) -> None:
    """It packs everything but what git ignores."""
    build = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    pick = '[tool.hatch.build]\nignore-vcs = false\n[tool.hatch.build.targets.wheel]\npackages = ["src/engine"]\n'
    (engine.root / "pyproject.toml").write_text(build + HEAD + pick, encoding="utf-8")
    code = "import hatchling.build as b; print(b.build_wheel('dist'))"

    def wheel() -> bytes:
        done = subprocess.run([sys.executable, "-c", code], cwd=engine.root, check=True, capture_output=True, text=True)
        return (engine.root / "dist" / done.stdout.split()[-1]).read_bytes()

    assert checked(engine, wheel()) == ({}, None)
    (engine.root / ".gitignore").write_text("*.cu\n", encoding="utf-8")
    found, mend = checked(engine, wheel(), code=1)
    assert {path.rpartition(".")[2] for path in found} == {"cu"}
    head, _, line = mend.rpartition("\n")
    assert head == "in pyproject.toml:\n[tool.hatch.build.targets.wheel]"
    with (engine.root / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    assert checked(engine, wheel()) == ({}, None)


# What a wheel can have ------------------------------------------------------------------------------------------------


def test_each_difference_is_named(engine: Folder) -> None:
    engine.kvgen("compile", "tiny", "--record")
    files = sources(engine)
    assert "engine/kernels/tiny/resources.json" in files
    assert checked(engine, packed(files)) == ({}, None)
    at = "engine/kernels"
    old = files[f"{at}/tiny/append.cu"].decode()
    engine.spec("wide", head_dim=128, page_size=32, ops="ops.Append(), ops.Gather()")
    bad: dict[str, bytes | str] = {
        **{path: data for path, data in files.items() if path != f"{at}/device/base/fault.cuh"},
        f"{at}/tiny/append.cu": old.replace("kThreads", "kMany"),
        f"{at}/tiny/gone.cu": old,
        f"{at}/tiny/__pycache__/__init__.cpython-311.pyc": b"",
        f"{at}/tiny/resources.json": "{}",
        f"{at}/other.txt": "not a set's",
    }
    found, mend = checked(engine, packed(bad), code=1)
    stale = "stale: intact, but the specs or templates now give something else"
    assert found == {
        f"{at}/device/base/fault.cuh": "missing: the project has it, the wheel lacks it",
        f"{at}/tiny/__pycache__/__init__.cpython-311.pyc": (
            "extra: bytecode, which Python may run instead of its source; leave it out of the wheel"
        ),
        f"{at}/tiny/append.cu": "edited: its text does not match the digest in its banner",
        f"{at}/tiny/gone.cu": "extra: not of this project; leave it out of the wheel",
        f"{at}/tiny/resources.json": "edited: it is not in the form that kvgen writes",
        f"{at}/wide/__init__.py": stale,
        f"{at}/wide/_table.py": stale,
        f"{at}/wide/cache.cuh": stale,
    }
    assert mend.startswith("in pyproject.toml:\n[tool.setuptools.packages.find]")
    engine.kvgen("build")
    assert "build the wheel from a clean folder" in checked(engine, packed(files), code=1)[1]


def test_cubins_in_a_wheel(engine: Folder) -> None:
    """A wheel says how many kernels have none; a manifest without its cubins, and cubins of another text, are findings."""
    plain = engine.kvgen("check", "--wheel", written(engine, sources(engine))).stdout
    none = "6 of 6 kernels, counted by architecture, have no cubin in it: NVRTC compiles them at the first launch"
    assert plain == f"2 set(s) in x.whl: complete; {none}\n"
    engine.kvgen("compile", "tiny", "-o", "src/engine/kernels/cubins")
    engine.kvgen("check")
    files = sources(engine)
    said = engine.kvgen("check", "--wheel", written(engine, files)).stdout
    assert "complete; 4 of 6 kernels" in said
    counts = json.loads(engine.kvgen("check", "--json", "--wheel", "x.whl").stdout)
    assert (counts["with_cubin"], counts["without_cubin"]) == (2, 4)
    at = "engine/kernels/cubins"
    without = {path: data for path, data in files.items() if not path.endswith(".cubin")}
    found, mend = checked(engine, packed(without), code=1)
    note = "missing: the manifest beside it names it, the wheel lacks it"
    assert found == {f"{at}/tiny/append.{arch}.cubin": note for arch in ("sm_80", "sm_90a")}
    assert mend == 'in pyproject.toml:\n[tool.setuptools.package-data]\n"*" = ["*.cu", "*.cuh", "*.cubin", "*.json"]'
    none_of_them = {path: data for path, data in files.items() if "/cubins/" not in path}
    assert set(checked(engine, packed(none_of_them), code=1)[0]) == {f"{at}/manifest.json"}
    broken = {**files, f"{at}/manifest.json": "{}"}
    (text,) = checked(engine, packed(broken), code=1)[0].values()
    assert text == f"edited: {at}/manifest.json: got schema null; this kvgen reads schema 1"
    engine.kvgen("compile", "-o", "src/engine/kernels/cubins")
    said = engine.kvgen("check", "--wheel", written(engine, sources(engine))).stdout
    assert said == "2 set(s) in x.whl: complete; 6 cubins, one a kernel and architecture\n"
    engine.spec("tiny", page_size=32)
    engine.kvgen("build")
    old = "tiny/append sm_80 and 1 more: compiled from another text"
    said = engine.kvgen("check", code=1).stdout
    assert f"stale    src/engine/kernels/cubins/manifest.json  {old}" in said
    assert said.splitlines()[-1] == "kvgen compile -o src/engine/kernels/cubins"
    stale, mend = checked(engine, packed(sources(engine)), code=1)
    refused = "stale: compiled from another text: launchers refuse it; compile anew, then build the wheel"
    assert stale == {f"{at}/tiny/append.{arch}.cubin": refused for arch in ("sm_80", "sm_90a")}
    assert mend == "kvgen compile -o src/engine/kernels/cubins, then build the wheel"
    (engine.root / "src/engine/kernels/cubins" / "manifest.json").write_text("{}", encoding="utf-8")
    assert "edited   src/engine/kernels/cubins/manifest.json" in engine.kvgen("check", code=1).stdout
    engine.kvgen("compile", "-o", "src/engine/kernels/cubins")
    engine.kvgen("check")


def written(folder: Folder, files: Mapping[str, bytes | str]) -> str:
    """The name of a wheel of these files, in the working folder."""
    (folder.root / "x.whl").write_bytes(packed(files))
    return "x.whl"


def test_which_sets_it_must_have(engine: Folder) -> None:
    files = {path: data for path, data in sources(engine).items() if "/wide/" not in path}
    assert checked(engine, packed(files)) == ({}, None), "a wheel of some of the sets"
    assert checked(engine, packed(files), "tiny") == ({}, None)
    found, _ = checked(engine, packed(files), "wide", code=1)
    assert found["engine/kernels/wide/__init__.py"].startswith("missing")
    none = {"engine/kernels/": "missing: no generated package of this project is in the wheel"}
    assert checked(engine, packed({"engine/__init__.py": ""}), code=1)[0] == none
    said = engine.kvgen("check", "--wheel", "x.whl", code=1).stdout
    assert "to mend it:\nin pyproject.toml:\n[tool.setuptools.package-data]\n" in said
    moved = {f"engine-1.0.data/purelib/{path}": data for path, data in files.items()}
    assert checked(engine, packed(moved)) == ({}, None), "where an installer puts the same"
    assert "pack all of src/engine/kernels" in checked(engine, packed({}, ""), code=1)[1]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project of one set."""
    folder = Folder(tmp_path_factory.mktemp("wheels"))
    (folder.root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    folder.spec("tiny")
    folder.kvgen("build")
    return open_project(folder.root)


def refused(path: Path, project: Project) -> str:
    with pytest.raises(ToolError) as caught:
        check_wheel(path, project, None)
    said = str(caught.value)
    assert said.startswith("--wheel: ") and said.isprintable()
    return said


def linked(path: Path) -> None:
    info = zipfile.ZipInfo("generated/tiny/append.cu")
    info.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.dist-info/WHEEL", "")
        archive.writestr("generated/tiny/__init__.py", Path("generated/tiny/__init__.py").read_bytes())
        archive.writestr(info, "/etc/passwd")


def test_what_is_no_wheel(opened: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.whl"
    assert "x.whl: cannot be read (No such file or directory)" in refused(path, opened)
    assert "not a file but a folder" in refused(tmp_path, opened)
    path.write_bytes(b"no zip")
    assert "cannot be read as a wheel (File is not a zip file); build it anew" in refused(path, opened)
    whole = packed({"generated/tiny/__init__.py": b"\0" * 5000})
    cases: list[tuple[bytes, str]] = [
        (packed({"/etc/x": ""}), "/etc/x would be installed outside"),
        (packed({"a/../../x": ""}), "a/../../x would be installed outside"),
        (packed({"a\x1b\\b": ""}), "a\\x1b\\\\b would be installed outside"),
        (packed({"b.dist-info/WHEEL": ""}), "it has 2 files *.dist-info/WHEEL, a wheel has one"),
        (whole.replace(b"/WHEEL", b"/WHEAL"), "it has 0 files *.dist-info/WHEEL, a wheel has one"),
        (whole[: len(whole) // 2], "File is not a zip file"),
    ]
    for data, said in cases:
        path.write_bytes(data)
        assert said in refused(path, opened)
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "1")
        archive.writestr("x", "2")
    assert "x is in it twice" in refused(path, opened)


def test_a_link_in_a_wheel(opened: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(opened.config.root)
    linked(tmp_path / "x.whl")
    found = {f.path: f.note for f in check_wheel(tmp_path / "x.whl", opened, None).findings}
    assert found["generated/tiny/append.cu"] == "a link is in its place"


def test_what_unpacks_to_more_than_is_read(opened: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros pack a thousandfold: a file is read up to the limit of one, all of them up to the limit of a wheel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(wheel_module, "LIMIT", 1 << 16)
    text = (opened.config.out / "tiny/__init__.py").read_bytes()
    bomb = packed({"generated/tiny/__init__.py": text, "generated/tiny/append.cu": b"\0" * (1 << 20)})
    assert len(bomb) < 1 << 16
    (tmp_path / "x.whl").write_bytes(bomb)
    found = {f.path: f.note for f in check_wheel(tmp_path / "x.whl", opened, None).findings}
    assert found["generated/tiny/append.cu"] == "it is no UTF-8"
    many = packed({f"g{n}/tiny/__init__.py": b"\0" * (1 << 15) for n in range(100)})
    (tmp_path / "x.whl").write_bytes(many)
    assert check_wheel(tmp_path / "x.whl", opened, None).findings
    monkeypatch.setattr(wheel_module, "_WHEEL_LIMIT", 1 << 20)
    assert "more than 1 MiB to read" in refused(tmp_path / "x.whl", opened)
    monkeypatch.setattr(wheel_module, "_NAMES_LIMIT", 50)
    assert "more than 50 files" in refused(tmp_path / "x.whl", opened)


@pytest.fixture(scope="module")
def small(opened: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of one file."""
    path = tmp_path_factory.mktemp("damaged") / "whole.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("e-1.dist-info/WHEEL", "Generator: setuptools\n")
        archive.writestr("generated/tiny/__init__.py", opened.files["tiny/__init__.py"].text)
    return path


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(
    at=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4), mask=st.integers(1, 255), cut=st.integers(0, 1 << 20)
)
def test_any_damage_is_one_line(opened: Project, small: Path, at: list[int], mask: int, cut: int) -> None:
    whole = bytearray(small.read_bytes())
    for place in at:  # half of them in the directory at the end, which is what a reader believes
        whole[-1 - place % 200 if place % 2 else place % len(whole)] ^= mask
    path = small.with_name("x.whl")
    path.write_bytes(whole[: cut % len(whole)] if cut % 4 == 0 else whole)
    try:
        check_wheel(path, opened, None)
    except ToolError as error:
        assert str(error).startswith("--wheel: ") and str(error).isprintable()
