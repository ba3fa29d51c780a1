"""The 128 bytes of a plan: on the CPU machine, through cuda.bindings on a libcuda that writes them, and on a GPU."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvgen.emulator import TensorMap
from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime import cuda
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import PageView, RowView, gather4, ragged_tile, scale_tile, split_tile

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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
try:
    encode(TensorMapPlan("line", "u8", 4096, (64,), (), (64,), ("x",), 0, 64, 1, 1), "cuda:1")
except DeviceError as error:
    print(error)
print(hex(int(api.cuCtxGetCurrent()[1])))
"""


def test_the_driver_is_told_the_same(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("the fake libcuda needs Linux and a C compiler")
    pytest.importorskip("cuda.bindings.driver")
    source = str(HERE / "fake_tensor_map.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), source, "-ldl"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in lines[: len(PLANS)]:
        told, wanted, promotion = line.split()
        # the CPU machine's bytes end in zeros; the fake driver's in the L2 promotion
        assert told[:254] == wanted[:254]
        assert int(told[254:], 16) == {0: 0, 64: 1, 128: 2, 256: 3}[int(promotion)]
    assert lines[len(PLANS) :] == [
        "0x0",
        "encode in 101 interleave 0",
        "cuTensorMapEncodeTiled: got CUDA_ERROR_INVALID_VALUE; fake refusal",
        "0x0",
    ]


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
