"""Sets of a folder of cubins by name and digest, in a process that has the runtime alone. Mistakes are tests/errors/load_*."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import kvgen
from kvgen import KernelSet, Latent, Paged, ops
from kvgen.compile import read_folder
from kvgen.errors import ToolError
from kvgen.runtime.module import _cubin, cubin
from tests.cli.conftest import invoke
from tests.custom.test_load import SPEC
from tests.docs.blocks import fences
from tests.test_packaging import WITHOUT

ROOT = Path(__file__).resolve().parents[2]
OTHER = KernelSet(q_heads=4, cache=Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=8), ops=SPEC.ops)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets: of a project, by the command, and of a spec in memory, by the function, with the shard of one of two GPUs."""
    root = tmp_path_factory.mktemp("shipped")
    assert invoke("new", str(root / "project")).exit_code == 0
    result = invoke("compile", "--project", str(root / "project"), "-o", str(root / "cubins"))
    assert result.exit_code == 0, result.stderr
    kvgen.compile_ahead(root / "cubins", SPEC, name="ahead", arch=["sm_90a"], tp=(1, 2))
    return root / "cubins"


RUNTIME = """
import json, sys
import numpy as np
import kvgen
from kvgen.runtime import cuda

loaded, launches = [], []

class Driver:
    def current_device(self): return 0
    def capability(self, device): return (9, 0)
    def multiprocessors(self, device): return 132
    def pointer_device(self, pointer): return 0
    def load(self, cubin, entry, device):
        loaded.append((entry, cubin[:4] == b"\\x7fELF", len(cubin)))
        return entry
    def set_max_dynamic_shared(self, handle, nbytes, device): pass
    def prepare(self, handle, device, grid, block, shared, params, pdl):
        return lambda stream: launches.append([handle, list(grid), stream])

class Array:
    def __init__(self, shape, typestr, pointer):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (pointer, False), "version": 3}

driver = Driver()
cuda.driver = lambda: driver
module = kvgen.load(sys.argv[1])
pool, rows = Array((5, 2, 1, 4, 2, 16), "<f2", 1 << 30), [Array((6, 2, 16), "<f2", n << 24) for n in (1, 2)]
lengths, table, offsets = Array((2,), "<i4", 3 << 24), Array((2, 3), "<i4", 4 << 24), Array((3,), "<i4", 5 << 24)
cache = module.Cache(pool, lengths=lengths, page_table=table)
module.append(cache[0], *rows, offsets, stream=7)
try:
    kvgen.load(3)
except ImportError as error:
    said = str(error)
absent = ("jinja2", "pydantic", "typer", "rich", "packaging", "kvgen.schema", "kvgen.lowering", "cuda.bindings.nvrtc")
print(json.dumps({
    "repr": repr(module.append), "loaded": loaded, "launches": launches, "said": said,
    "heavy": [name for name in absent if name in sys.modules],
}))
"""


def test_a_runtime_image_loads_by_name_and_by_digest(folder: Path, tmp_path: Path) -> None:
    """Without the extra `build`, without CUDA text, without a compiler: the same launchers, and the cubins of the folder."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    manifest = read_folder(folder)
    (ahead,) = (each for each in manifest.sets if each.set == "ahead")
    size = (folder / "ahead" / "append.sm_90a.cubin").stat().st_size
    environment = {**os.environ, "KVGEN_CUBINS": str(folder), "KVGEN_NO_JIT": "1"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    for wanted in ("ahead", ahead.digest, ahead.digest[:8]):
        done = subprocess.run(
            [sys.executable, "-c", RUNTIME, wanted], capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["repr"] == "ahead.append" and found["heavy"] == []
        assert found["loaded"] == [["ahead_append", True, size]]
        assert found["launches"] == [["ahead_append", [1, 1, 1], 7]]
        assert found["said"].startswith("kvgen.load of a spec needs kvgen's extra build: `pip install 'kvgen[build]'`")


HEADS = '''"""The heads of Llama 3.1 8B and of Qwen3 8B."""

from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads=32, cache=Paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=16), ops=[ops.Decode()], arch=["sm_90a"]
)
'''


def test_the_page_s_programs(tmp_path: Path) -> None:
    """docs/shipping.md: the command, then the programs without the extra `build`."""
    (tmp_path / "specs").mkdir()
    for name in ("llama3_8b", "qwen3_8b"):
        (tmp_path / "specs" / f"{name}.py").write_text(HEADS)
    (tmp_path / "pyproject.toml").write_text("[tool.kvgen]\n")
    folder = str(tmp_path / "cubins")
    for arguments in (("llama3_8b",), ("qwen3_8b", "--tp", "4")):
        made = invoke("compile", *arguments, "-o", folder, "--project", str(tmp_path))
        assert made.exit_code == 0, made.stderr
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    environment = {**os.environ, "KVGEN_CUBINS": folder, "KVGEN_NO_JIT": "1"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    programs = [text for language, text in fences(ROOT / "docs" / "shipping.md") if language == "python"]
    assert [text.splitlines()[0] for text in programs] == [f"# {file}" for file in ("worker.py", "serve.py")]
    for text in programs:
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)


def test_a_project_s_folder_has_its_launchers(folder: Path) -> None:
    """The text that `kvgen compile -o` writes is what `kvgen build` would, and every kernel of the set is in its digest."""
    module = kvgen.load("small", cubins=folder)
    assert repr(module.decode) == "small.decode" and module.append.KERNEL.module.arch == ("sm_80", "sm_90a")
    assert {f for f, _ in module._MODULE.kernels} == {f"{k}.cu" for k in ("append", "gather", "decode")}
    assert {each.set for each in read_folder(folder).sets} == {"small", "ahead", "ahead_tp2"}
    assert kvgen.load("small", cubins=str(folder)) is module
    assert kvgen.load("small", cubins=folder, arch=["sm_80"])._MODULE.arch == ("sm_80",)


def test_a_folder_serves_every_number_of_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and number of GPUs; and by the spec, as an engine's integration makes it of its shard's heads."""
    shards = {each.set: (each.whole, each.tp) for each in read_folder(folder).sets}
    assert shards == {"ahead": ("", 1), "ahead_tp2": ("ahead", 2), "small": ("", 1)}
    one, two = (kvgen.load("ahead", cubins=folder, tp=tp) for tp in (1, 2))
    assert one is kvgen.load("ahead", cubins=folder) and two is kvgen.load("ahead_tp2", cubins=folder)
    assert [module.Cache.HEADS for module in (one, two)] == [2, 1]
    monkeypatch.setenv("KVGEN_CUBINS", str(folder))
    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    built = KernelSet(q_heads=2, cache=SPEC.kv.model_copy(update={"kv_heads": 1}), ops=SPEC.ops, name="ahead_tp2")
    for module in (two, kvgen.load(SPEC, name="ahead", tp=2), kvgen.load(built)):
        code = cubin(module._MODULE, "append.cu", module.append.KERNEL.entry, (9, 0))
        assert code == (folder / "ahead_tp2" / "append.sm_90a.cubin").read_bytes()


def test_the_digest_is_of_launchers_and_texts(folder: Path, tmp_path: Path) -> None:
    """One spec gives the same digest wherever and for whatever it is compiled; another spec another one."""
    (ahead,) = (each for each in read_folder(folder).sets if each.set == "ahead")
    again = kvgen.compile_ahead(tmp_path / "a", SPEC, name="ahead", arch=["sm_90a"])
    other = kvgen.compile_ahead(tmp_path / "b", OTHER, name="ahead", arch=["sm_90a"])
    assert again.sets[0].digest == ahead.digest != other.sets[0].digest


def test_a_set_compiled_anew_replaces_its_launchers(tmp_path: Path) -> None:
    modules = []
    for spec in (SPEC, OTHER):
        kvgen.compile_ahead(tmp_path, spec, name="ahead", arch=["sm_90a"])
        modules.append(kvgen.load("ahead", cubins=tmp_path))
    (found,) = read_folder(tmp_path).sets
    assert [module.Cache.PAGE_SIZE for module in modules] == [4, 8]
    assert kvgen.load(found.digest, cubins=tmp_path) is modules[1]


@pytest.mark.campaign
def test_a_kernel_with_a_file_for_an_architecture(tmp_path: Path) -> None:
    """Each file is compiled for its own architectures, and a set is there for one where either file is."""
    cache = Latent(dtype="bf16", latent_dim=512, rope_dim=64, page_size=64)
    spec = KernelSet(q_heads=64, cache=cache, ops=[ops.MlaDecode(scale=0.1)])
    found = kvgen.compile_ahead(tmp_path, spec, name="two")
    assert [entry.file for entry in found.entries] == [
        "two/mla_decode.sm_80.cubin",
        "two/mla_decode_sm_90a.sm_90a.cubin",
    ]
    assert {entry.entry for entry in found.entries} == {"two_mla_decode"}
    (each,) = read_folder(tmp_path).sets
    assert each.by_arch == {"mla_decode": {"sm_90a": "mla_decode_sm_90a"}} and len(each.kernels) == 2
    module = kvgen.load("two", cubins=tmp_path)
    assert module._MODULE.arch == ("sm_80", "sm_90a")
    kernel = module.mla_decode.KERNEL
    for capability, arch in (((8, 6), "sm_80"), ((9, 0), "sm_90a")):
        code = cubin(module._MODULE, kernel.file_on(arch), kernel.entry, capability)
        stem = kernel.file_on(arch).removesuffix(".cu")
        assert code == (tmp_path / "two" / f"{stem}.{arch}.cubin").read_bytes()
    (tmp_path / "two" / "mla_decode_sm_90a.sm_90a.cubin").unlink()
    _cubin.cache_clear()
    with pytest.raises(ToolError, match=r"mla_decode_sm_90a\.sm_90a\.cubin: "):
        cubin(module._MODULE, "mla_decode_sm_90a.cu", "two_mla_decode", (9, 0))
    kvgen.compile_ahead(tmp_path, spec, name="two", arch=["sm_90a"])
    assert kvgen.load("two", cubins=tmp_path)._MODULE.arch == ("sm_90a",)


def test_threads_load_one_module(folder: Path) -> None:
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(kvgen.load("ahead", cubins=folder, arch=["sm_90a"])))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len({id(module) for module in found}) == 1
