"""Where a launcher's cubin comes from, and the ABI number."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgen.compile import Unit, compile_many, text_digest, write_folder
from kvgen.errors import ConfigError, DeviceError, KvgenError, ToolError
from kvgen.runtime import ABI, Module
from kvgen.runtime import module as module_of
from tests.support.launching import package

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cubins remembered, none named by the environment."""
    monkeypatch.delenv("KVGEN_CUBINS", raising=False)
    monkeypatch.delenv("KVGEN_NO_JIT", raising=False)
    module_of._cubin.cache_clear()
    yield
    module_of._cubin.cache_clear()


def blocks() -> Module:
    """The module of a set with one kernel."""
    return package("blocks").append.KERNEL.module  # type: ignore[no-any-return]


def cubin(capability: tuple[int, int] = HOPPER) -> bytes:
    return module_of.cubin(blocks(), "append.cu", "blocks_append", capability)


def unit() -> Unit:
    return blocks().unit("append.cu", "blocks_append")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `kvgen compile -o` makes of the set."""
    images = compile_many([(unit(), arch, "cubin") for arch in ("sm_80", "sm_90a")], cache=None)
    write_folder(tmp_path / "cubins", images, {"blocks/append": text_digest(unit().text)})
    return tmp_path / "cubins"


@pytest.mark.parametrize(("abi", "mend"), [(ABI - 1, "kvgen build"), (ABI + 1, "pip install --upgrade kvgen")])
def test_another_abi_is_refused_at_import(abi: int, mend: str) -> None:
    with pytest.raises(KvgenError) as caught:
        Module("somebodys", __file__, arch=("sm_80",), abi=abi)
    assert str(caught.value) == f"somebodys: generated for runtime ABI {abi}, this kvgen has {ABI}; run `{mend}`"


def test_generated_packages_carry_the_abi() -> None:
    text = (blocks().folder / "_table.py").read_text(encoding="utf-8")
    assert f"abi={ABI})" in text


def test_the_unit_is_one_text_with_the_files_it_came_from() -> None:
    found = unit()
    assert (found.name, found.entry) == ("blocks/append", "blocks_append")
    assert "#include" not in found.text
    lines = set(re.findall(r'#line 1 "([^"]+)"', found.text))
    parent = blocks().folder.parent.name
    assert {f"{parent}/blocks/append.cu", f"{parent}/blocks/cache.cuh", f"{parent}/device/base/types.cuh"} <= lines


def test_a_missing_kernel_says_how_to_make_it(tmp_path: Path) -> None:
    copied = shutil.copytree(blocks().folder.parent, tmp_path / "kernels")
    (copied / "blocks" / "cache.cuh").unlink()
    module = Module("blocks", str(copied / "blocks" / "__init__.py"), arch=("sm_80",), abi=ABI)
    with pytest.raises(DeviceError, match=r"^blocks: blocks/cache\.cuh is missing from .*/kernels; .*`kvgen build`"):
        module.unit("append.cu", "blocks_append")


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """The set in a folder of its own, as a wheel brings it: (its folder, a call of its kernel)."""
    copied = shutil.copytree(blocks().folder.parent, tmp_path / "site" / "kernels")
    name = f"installed_{tmp_path.name}"
    spec = importlib.util.spec_from_file_location(name, copied / "blocks" / "__init__.py")
    assert spec is not None and spec.loader is not None
    generated = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, generated)
    spec.loader.exec_module(generated)

    def call() -> None:
        tables = {"lengths": np.zeros(2, np.int32), "page_table": np.arange(2, dtype=np.int32)}
        cache = generated.Cache(np.zeros((2, 2, 1, 6, 1, 8), np.float16), **tables)
        rows = np.zeros((2, 1, 8), np.float16)
        generated.append(cache[0], rows, rows, np.array([0, 1, 2], np.int32))

    return copied, call


@pytest.mark.parametrize("lost", ["blocks/append.cu", "blocks/cache.cuh", "device/base/types.cuh"])
def test_a_wheel_without_its_cuda_says_so(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports; the first launch says which file is missing and the lines that have it packed."""
    copied, call = installed(tmp_path, monkeypatch)
    (copied / lost).unlink()
    for launch in (call, lambda: module_of.cubin(module_at(copied), "append.cu", "blocks_append", HOPPER)):
        with pytest.raises(DeviceError) as caught:
            launch()
        assert str(caught.value) == (
            f"blocks: {lost} is missing from {copied}; in a project, run `kvgen build`; in a wheel, have it packed, for "
            'setuptools by these lines of pyproject.toml: [tool.setuptools.package-data] "*" = '
            '["*.cu", "*.cuh", "*.cubin", "*.json"]; '
            "`kvgen check --wheel` looks"
        )


def module_at(folder: Path) -> Module:
    return Module("blocks", str(folder / "blocks" / "__init__.py"), arch=("sm_80", "sm_90a"), abi=ABI)


def test_a_kernels_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied, _ = installed(tmp_path, monkeypatch)
    path = copied / "blocks" / "append.cu"
    for make, said in (
        (os.mkfifo, "not a file but a FIFO"),
        (lambda p: p.write_bytes(b"\xff"), "no UTF-8 (byte 0); save it as UTF-8"),
    ):
        path.unlink()
        make(path)
        with pytest.raises(DeviceError) as caught:
            module_at(copied).unit("append.cu", "blocks_append")
        assert str(caught.value) == f"blocks: {path}: {said}; run `kvgen build`"


def test_a_file_that_no_package_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is called .cu beside a set's kernels is neither compiled nor in their way."""
    copied, call = installed(tmp_path, monkeypatch)
    (copied / "blocks" / "planted.cu").write_text("this does not compile\n", encoding="utf-8")
    call()


def test_cubins_are_compiled_where_that_is_allowed() -> None:
    found = cubin()
    assert found.startswith(b"\x7fELF") and b"blocks_append" in found


def test_no_jit_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    with pytest.raises(DeviceError) as caught:
        cubin()
    assert str(caught.value) == (
        "blocks/append.cu: KVGEN_NO_JIT is set and $KVGEN_CUBINS names no folder; run `kvgen compile -o DIR` and set "
        "KVGEN_CUBINS=DIR, or pack cubins/ beside the package with a cubin for sm_90a"
    )
    monkeypatch.setenv("KVGEN_NO_JIT", "yes")
    with pytest.raises(ConfigError, match=r"^KVGEN_NO_JIT: got 'yes'; it must be 0 or 1"):
        cubin()
    monkeypatch.setenv("KVGEN_NO_JIT", "0")
    assert cubin()


@pytest.mark.parametrize("no_jit", ["0", "1"])
def test_a_folder_of_cubins_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch, no_jit: str) -> None:
    """The bytes of the folder, for the architecture of the GPU, whether or not compiling is allowed."""
    monkeypatch.setenv("KVGEN_CUBINS", str(folder))
    monkeypatch.setenv("KVGEN_NO_JIT", no_jit)
    assert cubin() == (folder / "blocks/append.sm_90a.cubin").read_bytes()
    assert cubin((8, 6)) == (folder / "blocks/append.sm_80.cubin").read_bytes()


def test_a_folder_of_other_texts_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CUBINS", str(folder))
    images = compile_many([(unit(), "sm_90a", "cubin")], cache=None)
    write_folder(folder, images, {"blocks/append": text_digest("older text")})
    with pytest.raises(ToolError) as caught:
        cubin()
    message = str(caught.value)
    assert message.startswith(f"{folder}/blocks/append.sm_90a.cubin: was compiled from text with digest ")
    assert text_digest("older text")[:12] in message and text_digest(unit().text)[:12] in message


def test_a_damaged_cubin_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CUBINS", str(folder))
    path = folder / "blocks/append.sm_90a.cubin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ToolError, match="its bytes are not those that were compiled"):
        cubin()


def test_a_folder_without_the_kernel_or_without_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled instead: the folder was asked for."""
    monkeypatch.setenv("KVGEN_CUBINS", str(tmp_path / "none"))
    with pytest.raises(ToolError, match=r"none/manifest\.json: cannot be read"):
        cubin()
    write_folder(tmp_path / "empty", [], {})
    monkeypatch.setenv("KVGEN_CUBINS", str(tmp_path / "empty"))
    with pytest.raises(ToolError, match="has no cubin of blocks/append for sm_90a"):
        cubin()


@pytest.mark.parametrize(("capability", "wanted"), [((12, 0), "'sm_120f'"), ((10, 0), "'sm_100f'")])
def test_a_gpu_that_the_set_is_not_generated_for(capability: tuple[int, int], wanted: str) -> None:
    with pytest.raises(DeviceError) as caught:
        cubin(capability)
    assert str(caught.value).startswith(f"compute capability {capability[0]}.{capability[1]}: ")
    assert str(caught.value).endswith(f"add {wanted} to `arch` in the spec")


def test_the_cpu_machine_compiles_nothing_without_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.runtime.module import cpu_kernel

    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    module = Module("absent", __file__, arch=("sm_90a",), abi=ABI)
    with pytest.raises(DeviceError, match=r"absent: KVGEN_NO_JIT is set; the CPU machine compiles"):
        cpu_kernel(module, "append.cu", "absent_append", "sm_90a", "check")
