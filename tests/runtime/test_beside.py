"""Generated packages that bring their cubins: each finds its own, before KVGEN_CUBINS, and without a compiler."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvgen.compile import find, read_folder, text_digest
from kvgen.errors import DeviceError, ToolError
from kvgen.runtime.module import _cubin, cubin
from tests.cli.conftest import Folder

HOPPER = (9, 0)


def library(root: Path, name: str, head_dim: int) -> Folder:
    """A project whose package `name` has a set `tiny` and its cubins; both call it the same."""
    (root / name / "specs").mkdir(parents=True)
    (root / name / "pyproject.toml").write_text(f'[tool.kvgen]\nout = "src/{name}/kernels"\n', encoding="utf-8")
    folder = Folder(root / name)
    folder.spec("tiny", head_dim=head_dim)
    folder.kvgen("build")
    folder.kvgen("compile", "-o", f"src/{name}/kernels/cubins")
    return folder


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The set `tiny` of two libraries built on kvgen, in this process."""
    root = tmp_path_factory.mktemp("libraries")
    names = {"kvgen_lib_a": 64, "kvgen_lib_b": 128}
    with pytest.MonkeyPatch.context() as patch:
        for name, head_dim in names.items():
            patch.syspath_prepend(str(library(root, name, head_dim).root / "src"))
        first, second = (importlib.import_module(f"{name}.kernels.tiny") for name in names)
        yield first, second
    for name in [n for n in sys.modules if n.partition(".")[0] in names]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    _cubin.cache_clear()
    yield
    _cubin.cache_clear()


def own(package: ModuleType) -> bytes:
    """The cubin of append in the package's own folder."""
    module = package._MODULE
    digest = text_digest(module.unit("append.cu", "tiny_append").text)
    return find(read_folder(module.folder.parent / "cubins"), "tiny", "append", "sm_90a", digest)


def test_two_libraries_in_one_process(packages: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """KVGEN_CUBINS names the cubins of the other library, whose set has the same name: each takes its own."""
    first, second = packages
    monkeypatch.setenv("KVGEN_CUBINS", str(first._MODULE.folder.parent / "cubins"))
    found = [cubin(each._MODULE, "append.cu", "tiny_append", HOPPER) for each in (first, second)]
    assert found == [own(first), own(second)] and found[0] != found[1]


def test_what_the_folder_does_not_have(
    packages: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An architecture without a cubin beside the package is looked for in KVGEN_CUBINS; then nothing may compile it."""
    first, _ = packages
    beside = first._MODULE.folder.parent / "cubins"
    shutil.move(beside, tmp_path / "moved")
    try:
        Folder(first._MODULE.folder.parents[3]).kvgen("compile", "--arch", "sm_80", "-o", str(beside))
        with pytest.raises(
            DeviceError, match=r"set KVGEN_CUBINS=DIR, or pack cubins/ beside the package with a cubin for sm_90a"
        ):
            cubin(first._MODULE, "append.cu", "tiny_append", HOPPER)
        monkeypatch.setenv("KVGEN_CUBINS", str(tmp_path / "moved"))
        assert cubin(first._MODULE, "append.cu", "tiny_append", HOPPER)[:4] == b"\x7fELF"
        (beside / "manifest.json").write_text("{}", encoding="utf-8")
        with pytest.raises(
            ToolError, match=r"cubins/manifest.json: got schema null; this kvgen reads schema 1; `kvgen compile -o "
        ):
            cubin(first._MODULE, "append.cu", "tiny_append", (8, 0))
    finally:
        shutil.rmtree(beside)
        shutil.move(tmp_path / "moved", beside)


def test_cubins_of_another_text(packages: tuple[ModuleType, ModuleType]) -> None:
    first, _ = packages
    kernel = first._MODULE.folder / "append.cu"
    text = kernel.read_text(encoding="utf-8")
    kernel.write_text(text.replace("kThreads", "kMany"), encoding="utf-8")
    try:
        with pytest.raises(
            ToolError, match=r"append.sm_90a.cubin: was compiled from text with digest \w+, the launcher"
        ):
            cubin(first._MODULE, "append.cu", "tiny_append", HOPPER)
    finally:
        kernel.write_text(text, encoding="utf-8")
