"""The 128 bytes of a plan: on the CPU machine, through cuda.bindings on a libcuda that writes them, and on a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgen.emulator import TensorMap
from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime import cuda
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import PageView, RowView, gather4, ragged_tile, scale_tile, split_tile

ROOT = Path(__file__).parents[2]
Run = Callable[[str], "subprocess.CompletedProcess[str]"]
VIEW = RowView("bf16", 0x7F00_0000_0000, 1000, 4, 128, 1024, 128)


def test_cpu() -> None:
    plan = split_tile(VIEW, 64, 128, oob_fill="nan", l2_promotion=256)
    wanted = TensorMap(
        "bfloat16",
        VIEW.address,
        (128, 4, 1000),
        (256, 2048),
        (64, 1, 64),
        swizzle=128,
        oob_fill="nan",
        l2_promotion=256,
    )
    assert encode(plan, "cpu") == wanted.encode()
    assert len(encode(plan, "cpu")) == 128


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:-1", "gpu:0", "CPU", ""])
def test_devices(device: str) -> None:
    with pytest.raises(ArgumentError, match=r"^device: got '.*'; it is 'cpu' or 'cuda:<ordinal>'$"):
        encode(split_tile(VIEW, 64, 128), device)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_a_gpu_without_tensor_copies(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        def capability(self, device: int) -> tuple[int, int]:
            return capability

    monkeypatch.setattr(cuda, "driver", Older)
    with pytest.raises(DeviceError, match=r"compute capability 8\.\d; tensor copies need 9\.0"):
        encode(split_tile(VIEW, 64, 128), "cuda:0")


PLANS = [
    split_tile(VIEW, 64, 128),
    split_tile(PageView("e4m3", 4096, 5, 5008, 16, 64, 3, 1024, 64), 16, 64, swizzle=64, l2_promotion=0),
    split_tile(RowView("f32", 4096, 9, 2, 64, 128, 64), 8, 64, swizzle=32, oob_fill="nan", l2_promotion=64),
    gather4(VIEW, 16, 128),
    gather4(RowView("e4m3", 4096, 77, 1, 640, 640, 640), 64, 80, tma_dtype="i64", swizzle=0, l2_promotion=256),
    ragged_tile(RowView("f16", 1 << 30, 100, 8, 128, 1024, 128), 64, 128, group=4),
    ragged_tile(RowView("bf16", 1 << 30, 100, 8, 128, 1024, 128), 64, 128, group=2, swizzle=0, blocks=True),
    scale_tile("f32", 4096, 2**31 - 256, 128),
    *(scale_tile(kind, 4096, 64, 16) for kind in ("u8", "u16", "u32", "i32", "u64")),
]
PROGRAM = """
import ctypes
import cuda.bindings.driver as api
from kvgen.errors import DeviceError
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import TensorMapPlan
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_log.restype = ctypes.c_char_p
from tests.tma.test_encode import PLANS
for plan in PLANS:
    print(encode(plan, "cuda:1").hex(), encode(plan, "cpu").hex(), plan.l2_promotion)
print(hex(int(api.cuCtxGetCurrent()[1])))
print(fake.fake_log().decode().splitlines()[0])
line = TensorMapPlan("line", "u8", 4096, (2**32,), (), (64,), ("x",), 0, 64, 1, 1)
for device in ("cuda:1", "cuda:7"):
    try:
        encode(line, device)
    except DeviceError as error:
        print(error)
print(hex(int(api.cuCtxGetCurrent()[1])))
api.cuCtxSetCurrent(api.CUcontext(0x101))
wide, narrow = ctypes.c_uint64, ctypes.c_uint32
room = ctypes.create_string_buffer(512)
base = ctypes.addressof(room) + -ctypes.addressof(room) % 128
for offset in (0, 16, 48, 64, 128):
    print(fake.cuTensorMapEncodeTiled(ctypes.c_void_p(base + offset), 0, 1, ctypes.c_void_p(4096), (wide * 1)(64),
                                      (wide * 1)(), (narrow * 1)(64), (narrow * 1)(1), 0, 0, 0, 0))
"""


@pytest.fixture(scope="module")
def in_fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs Python in a process whose libcuda is the fake one."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the fake libcuda needs Linux and a C compiler")
    pytest.importorskip("cuda.bindings.driver")
    folder = tmp_path_factory.mktemp("libcuda")
    source = str(ROOT / "tests" / "runtime" / "fake_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), source, "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}

    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_the_driver_is_told_the_same(in_fake_cuda: Run) -> None:
    done = in_fake_cuda(PROGRAM)
    lines = done.stdout.splitlines()
    for line in lines[: len(PLANS)]:
        told, wanted, promotion = line.split()
        # the CPU machine's bytes end in zeros; the fake driver's in the L2 promotion
        assert told[:254] == wanted[:254]
        assert int(told[254:], 16) == {0: 0, 64: 1, 128: 2, 256: 3}[int(promotion)]
    assert lines[len(PLANS) :] == [
        "0x0",
        "encode in 101",
        "cuTensorMapEncodeTiled: got CUDA_ERROR_INVALID_VALUE; fake refusal; a tensor copy cannot take this address, dimension, "
        "stride, box or swizzle",
        "cuDeviceGet: got CUDA_ERROR_INVALID_DEVICE; fake refusal",
        "0x0",
        *("0", "1", "1", "1", "0"),  # the fake sees where the map lies
    ]
    assert "the map lies at a multiple of 128, got 48" in done.stderr


EVERY_SET = """
import ctypes, importlib, json
from pathlib import Path
from kvgen.runtime.tensor_map import encode
from kvgen.verify.tensor_maps import encode_all
found = {}
for folder in sorted(Path("generated").glob("*/cache.cuh")):
    name = folder.parent.name
    made = encode_all(importlib.import_module(f"generated.{name}"), "cuda:0")
    found[name] = [(m.of, m.in_order, m.refused, m.refused or m.map.data[:127] == encode(m.map.plan, "cpu")[:127]) for m in made]
print(json.dumps([found, ctypes.CDLL("libcuda.so.1").fake_strides_out_of_order()]))
"""


def test_the_driver_takes_every_map_of_every_set(in_fake_cuda: Run) -> None:
    """Under the rules of cuda.h, but for the order of strides: in these forms one is no multiple of the one before it."""
    found, out_of_order = json.loads(in_fake_cuda(EVERY_SET).stdout)
    every = [(name, *made) for name, maps in found.items() for made in maps]
    assert [(name, of, refused) for name, of, _, refused, _ in every if refused] == []
    assert [(name, of) for name, of, _, _, same in every if not same] == []
    kernels = {(name, of) for name, of, *_ in every if "_map" in of}
    text = {path.parent.name for path in (ROOT / "generated").glob("*/_table.py") if "PoolMap(" in path.read_text()}
    assert {name for name, _ in kernels} == text and len(kernels) > 30
    unordered = [of for _, of, in_order, _, _ in every if not in_order]
    assert len(unordered) == out_of_order
    assert {of.split(", ")[2] for of in unordered if "_map" not in of} == {"split", "folded", "row-major", "ragged"}
    assert any("extend, k_map" in of for of in unordered)


@pytest.mark.gpu
def test_the_driver_takes_every_plan() -> None:
    on: Any = cuda.driver()
    if on.capability(0) < (9, 0):
        pytest.skip("tensor maps need compute capability 9.0")
    memory = on.allocate(1 << 24, 0)
    try:
        for plan in PLANS:
            assert len(encode(dataclasses.replace(plan, address=memory), "cuda:0")) == 128
    finally:
        on.free(memory, 0)
