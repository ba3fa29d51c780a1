"""`kvgen.load`: a spec in memory as a module of typed launchers, compiled once, and ahead of time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgen
from kvgen import KernelSet, Paged, ops
from kvgen.compile import read_folder
from kvgen.errors import DeviceError, SpecError, ToolError

SPEC = KernelSet(
    q_heads=4,
    cache=Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4),
    ops=[ops.Append(), ops.Gather()],
)
HERE = Path(__file__).resolve().parents[2]


def run(module: Any) -> None:
    """Two new tokens go to their page and come back."""
    cache = module.Cache.empty(layers=1, requests=1, pages=3)
    cache.lookup_table[:] = [[2, 0, 1]]
    rows = np.arange(2 * 2 * 16, dtype=np.float16).reshape(2, 2, 16)
    offsets = np.array([0, 2], cache.cache_lengths.dtype)
    module.append(cache[0], rows, rows + 1, offsets)
    found = module.gather(cache[0], offsets, np.empty_like(rows), np.empty_like(rows))
    assert (found.k_out == rows).all() and (found.v_out == rows + 1).all()
    assert (cache.blocks[0][2, 0, 0, :2] == rows).all()


def test_a_spec_is_a_module_in_memory() -> None:
    module = kvgen.load(SPEC)
    run(module)
    assert kvgen.load(SPEC) is module and kvgen.load(SPEC.model_copy()) is module
    assert repr(module.append).startswith("set_") and repr(module.append).endswith(".append")
    other = kvgen.load(SPEC, name="mine", arch=["sm_80"])
    assert other._MODULE.arch == ("sm_80",) and repr(other.append) == "mine.append"
    run(other)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kernels": 3}, "kernels: got int; load takes a spec, or the name"),
        ({"kernels": SPEC, "name": "device"}, "name: got 'device'"),
        ({"kernels": SPEC, "name": "no name"}, "name: got 'no name'"),
        ({"kernels": SPEC, "arch": ["sm_70"]}, "KernelSet.arch.0: got 'sm_70'"),
    ],
)
def test_what_is_no_spec(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        kvgen.load(**given)
    assert str(caught.value).startswith(message)


AHEAD = """
import kvgen, sys
from tests.custom.test_load import SPEC
from kvgen.errors import KvgenError
from kvgen.runtime.module import cubin
module = kvgen.load(SPEC, name=sys.argv[1])
try:
    print(len(cubin(module._MODULE, "append.cu", module.append.KERNEL.entry, (9, 0))))
except KvgenError as error:
    print(error)
"""


def test_cubins_ahead_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = kvgen.compile_ahead(tmp_path, SPEC, name="ahead", arch=["sm_90a"])
    assert {(e.set, e.kernel, e.arch) for e in manifest.entries} == {
        ("ahead", k, "sm_90a") for k in ("append", "gather")
    }
    assert read_folder(tmp_path) == manifest
    monkeypatch.setenv("KVGEN_CUBINS", str(tmp_path))
    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    monkeypatch.setenv("PYTHONPATH", str(HERE))

    def said(name: str) -> str:
        done = subprocess.run([sys.executable, "-c", AHEAD, name], capture_output=True, text=True, cwd=HERE)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    # The default architectures are in the text's launcher, not in the kernel's text.
    assert int(said("ahead")) > 1000
    assert "has no cubin of other/append for sm_90a" in said("other"), "the set that is missing"
    with pytest.raises(SpecError, match=r"^name: got 'x' for 2 sets"):
        kvgen.compile_ahead(tmp_path, SPEC, SPEC, name="x")


def test_threads_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvgen.compile import program

    monkeypatch.setenv("KVGEN_CACHE_DIR", str(tmp_path))
    compiled: list[str] = []
    compile_text = program._compile

    def counted(unit: Any, *rest: Any) -> bytes:
        compiled.append(unit.name)
        return compile_text(unit, *rest)

    monkeypatch.setattr(program, "_compile", counted)
    unit = kvgen.load(SPEC, name="threads")._MODULE.unit("append.cu", "threads_append")
    images: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: images.append(program.compile_unit(unit, "sm_90a", cache=kvgen_cache()).data))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == ["threads/append"] and len(set(images)) == 1 and len(images) == 6


def kvgen_cache() -> Any:
    from kvgen.compile import default_cache

    return default_cache()


def test_without_compiling_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    with pytest.raises((DeviceError, ToolError), match=r"^no_jit: KVGEN_NO_JIT is set"):
        run(kvgen.load(SPEC, name="no_jit"))
