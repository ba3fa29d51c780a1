"""kvgen.compile_kernel: without a project, from anywhere, with the same words for the same mistakes."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgen
from kvgen import Paged, ops
from kvgen.codegen import package
from kvgen.emulator.host import cache_directory
from kvgen.errors import ArgumentError, CompileError, DeviceError, SpecError
from tests.custom.conftest import KERNEL

CACHE = Paged(dtype="f16", kv_heads=1, head_dim=8, page_size=4)
PARAMS = (ops.Array("x", "f32", ("N",), "inout"), ops.Size("n", "N"), ops.Scalar("by", "f32"))
ROOT = Path(kvgen.__file__).resolve().parents[1]


def make(source: Any = KERNEL, **fields: Any) -> Any:
    return kvgen.compile_kernel(source, **({"cache": CACHE, "params": PARAMS, "grid": "ceil_div(N, 128)"} | fields))


def layer(kernel: Any) -> Any:
    tables = {"lengths": np.zeros(2, np.int32), "page_table": np.zeros((2, 1), np.int32)}
    return kernel.Cache(np.zeros((2, 2, 1, 4, 1, 8), np.float16), **tables)[0]


def test_it_runs() -> None:
    kernel = make()
    x = np.arange(300, dtype=np.float32)
    kernel(layer(kernel), x, by=2.0)
    kernel.bind(layer(kernel), x, 0.5)()
    kernel(layer(kernel), x, 3)
    assert (x == 3 * np.arange(300)).all()
    assert kernel.name == "fill" and (kernel.folder / "fill.cu").is_file()


def test_the_same_arguments_give_the_same_package() -> None:
    assert make().Cache is make().Cache
    assert make().Cache is not make(threads=64).Cache
    with pytest.raises(ArgumentError, match="cache: got a layer of a cache of fill"):
        make()(layer(make(threads=64)), np.zeros(3, np.float32), 1)


def test_a_path_and_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.cu").write_text(KERNEL + KERNEL.partition("\n\n")[2].replace("fill", "other"))
    with pytest.raises(SpecError, match="functions of the text are: fill, other; say which"):
        make(tmp_path / "own.cu")
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "own.cu", "own.cu", str(tmp_path / "own.cu")):
        assert make(source, name="other").name == "other"


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "own.cu"
    path.write_text(KERNEL.replace("by * x", "bye * x"))
    with pytest.raises(CompileError) as raised:
        make(path)
    assert f'{path}:7: error: identifier "bye" is undefined' in str(raised.value)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ("no_such.cu", {}, "no_such.cu: cannot be read (No such file or directory)"),
    (KERNEL.replace('extern "C"', ""), {}, "functions of the text are: none"),
    (KERNEL, {"name": "other"}, "text: <other> has no __global__ function called 'other' (it has fill)"),
    (KERNEL, {"grid": "M * z"}, "ops: fill: grid: got 'M * z'; 'z' is no name here; there are B, M, N"),
    (KERNEL, {"threads": 2000}, "Custom.threads: got 2000"),
    (KERNEL, {"arch": ("sm_70",)}, "KernelSet.arch.0: got 'sm_70'"),
    (KERNEL, {"q_heads": 0}, "KernelSet.q_heads: got 0"),
    (
        KERNEL.replace('"cache.cuh"', '"mine.cuh"'),
        {},
        '<fill>:2: #include "mine.cuh": no such file beside generated kernels',
    ),
    (KERNEL.replace("fill", "device"), {}, "name: got 'device'"),
]


@pytest.mark.parametrize(("source", "fields", "said"), WRONG)
def test_what_build_would_refuse(source: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as raised:
        make(source, **fields)
    assert said in str(raised.value)


def test_parameters_are_compared() -> None:
    """As they are written, before anything compiles; those of types of the user's own, as they are compiled."""
    with pytest.raises(
        SpecError, match=r"<fill>:4: parameter 4 \(by\): the kernel takes `double by`, the launcher passes f32"
    ):
        make(KERNEL.replace("float by", "double by"))
    with pytest.raises(CompileError, match=r"<fill>: parameter 4 \(by\): the kernel takes 8 bytes \(a float\)"):
        make(KERNEL.replace("float by", "Factor by").replace("// Multiplies x.", "using Factor = double;"))


def test_no_compiling_at_run_time_means_this_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    with pytest.raises(DeviceError, match="compile_kernel: KVGEN_NO_JIT is set"):
        make()


PROGRAM = """
import sys, numpy as np, kvgen
from kvgen import Paged, ops
kernel = kvgen.compile_kernel(
    sys.argv[1], cache=Paged(dtype="f16", kv_heads=1, head_dim=8, page_size=4),
    params=(ops.Array("x", "f32", ("N",), "inout"), ops.Size("n", "N"), ops.Scalar("by", "f32")), grid="ceil_div(N, 128)",
)
tables = dict(lengths=np.zeros(2, np.int32), page_table=np.zeros((2, 1), np.int32))
x = np.ones(3, np.float32)
kernel(kernel.Cache(np.zeros((2, 2, 1, 4, 1, 8), np.float16), **tables)[0], x, 7)
print(kernel.folder, x.sum())
"""


def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, with the CPU machine's runtime of all tests where that is compiled already: it takes seconds."""
    make()(layer(make()), np.ones(3, np.float32), 1)
    compiled = list(cache_directory(None).glob("runtime-check-*.so"))
    assert compiled
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(folder))
    for path in compiled:
        shutil.copy2(path, cache_directory(None))


def test_from_another_folder_and_over_a_package_that_was_tampered_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    (tmp_path / "elsewhere").mkdir()

    def run() -> Path:
        command = [sys.executable, "-c", PROGRAM, KERNEL]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        folder, total = done.stdout.split()
        assert total == "21.0"
        return Path(folder)

    folder = run()
    assert folder.is_relative_to(tmp_path / "cache") and not list((tmp_path / "elsewhere").iterdir())
    assert [p.name for p in (tmp_path / "cache" / "kernels").iterdir()] == [folder.parents[1].name]
    for name in ("__init__.py", "fill.cu"):
        (folder / name).write_text("raise SystemExit('not kvgen\\'s')\n")
    (folder / "cache.cuh").unlink()
    assert run() == folder


def test_only_what_was_verified_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may write to the cache's folder when they like: between the import and the launch, and beside the sources."""
    own_cache(tmp_path / "cache", monkeypatch)
    kernel = make(threads=96)
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit('not kvgen\\'s')\n")
    (kernel.folder / "fill.cu").write_text(KERNEL.replace("by * x[i]", "666 * x[i]"))
    (kernel.folder / "cache.cuh").unlink()
    (kernel.folder / "planted.cu").write_text("this does not compile\n")
    x = np.ones(3, np.float32)
    kernel(layer(kernel), x, 7)
    assert (x == 7).all()
    package.imported.cache_clear()  # as another process has it, with bytecode that Python would not compare
    source = kernel.folder / "__init__.py"
    path = importlib.util.cache_from_source(str(source))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(evil), cfile=path, doraise=True, invalidation_mode=mode)
    again = make(threads=96)
    again(layer(again), x, 3)
    assert again.Cache is not kernel.Cache and (x == 21).all()
    assert "666" not in (kernel.folder / "fill.cu").read_text()


def test_a_cache_folder_with_links_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "cache"))
    folder = make(threads=160).folder
    (tmp_path / "outside").mkdir()
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / "outside")
    package.imported.cache_clear()
    with pytest.raises(kvgen.errors.ToolError, match=r"fill: a link to .*/outside; nothing is written through a link"):
        make(threads=160)
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("source", ["fifo", ".", "a\0b", "x" * 300, "~nobody_of_that_name/x.cu", "odd\ud800"])
def test_a_source_that_is_no_file(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    for name in (None, "fill"):
        with pytest.raises(SpecError, match=r"^(Custom\.)?source: got ") as raised:
            make(source, name=name)
        assert str(raised.value).isprintable()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning), pytest.raises(kvgen.errors.ToolError, match="set KVGEN_CACHE_DIR"):
        make(threads=32)
