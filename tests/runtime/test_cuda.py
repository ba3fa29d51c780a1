"""Streams, packed arguments, and the CUDA backend: against a stub, against a libcuda that logs, and on a GPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime import cuda, packing
from kvgen.runtime.stream import stream_handle

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class ProtocolMethod:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0x55)


class ProtocolProperty:
    __cuda_stream__ = (0, 0x56)


class Future:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (1, 0x55)


@dataclass
class TorchStream:
    cuda_stream: int


@dataclass
class CupyStream:
    ptr: int


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, 0),
        (0, 0),
        (0x1234, 0x1234),
        (ProtocolMethod(), 0x55),
        (ProtocolProperty(), 0x56),
        (TorchStream(0), 0),
        (TorchStream(0x57), 0x57),
        (CupyStream(0x58), 0x58),
    ],
)
def test_stream_handles(stream: object, handle: int) -> None:
    assert stream_handle(stream) == handle


def test_streams_of_cuda_bindings() -> None:
    api: Any = pytest.importorskip("cuda.bindings.driver")
    assert stream_handle(api.CUstream(0x59)) == 0x59


@pytest.mark.parametrize(
    "stream", [True, -1, 1.5, "0", object(), Future(), TorchStream("x")], ids=lambda s: type(s).__name__
)
def test_what_is_no_stream(stream: object) -> None:
    with pytest.raises(ArgumentError, match=r"^stream: got "):
        stream_handle(stream)


KINDS: tuple[packing.ParamKind, ...] = (
    "ptr", "u32", "i32", "u64", "i64", "f32", packing.TENSOR_MAP, "u32", packing.Bytes(5, 16)
)  # fmt: skip
VALUES: tuple[packing.Value, ...] = (2**64 - 8, 2**32 - 1, -5, 2**63, -(2**63), 0.5, bytes(range(128)), 9, b"bytes")
RAW = [
    (2**64 - 8).to_bytes(8, "little"),
    b"\xff" * 4,
    (-5).to_bytes(4, "little", signed=True),
    (2**63).to_bytes(8, "little"),
    (-(2**63)).to_bytes(8, "little", signed=True),
    b"\x00\x00\x00\x3f",
    bytes(range(128)),
    (9).to_bytes(4, "little"),
    b"bytes",
]


def as_the_driver_reads(args: packing.PackedArgs) -> list[bytes]:
    addresses = (ctypes.c_uint64 * len(args.kinds)).from_address(args.address)
    return [ctypes.string_at(address, len(raw)) for address, raw in zip(addresses, args.bytes_list(), strict=True)]


def test_packed_arguments_are_what_the_driver_and_the_cpu_machine_read() -> None:
    args = packing.PackedArgs(KINDS, VALUES)
    assert args.bytes_list() == RAW
    assert as_the_driver_reads(args) == RAW


def test_packed_arguments_are_aligned() -> None:
    """A tensor map at a multiple of 64, wherever the memory of the arguments lies."""
    several = [packing.PackedArgs(("ptr",) * n + KINDS, (16,) * n + VALUES) for n in range(8)]
    for args in several:
        addresses = (ctypes.c_uint64 * len(args.kinds)).from_address(args.address)
        for address, kind, raw in zip(addresses, args.kinds, args.bytes_list(), strict=True):
            assert address % (kind.align if isinstance(kind, packing.Bytes) else len(raw)) == 0
    assert len({(args.address + 8 * len(args.kinds)) % 64 for args in several}) > 1, "they all lay well by chance"


def test_packed_arguments_change_in_place() -> None:
    args = packing.PackedArgs(("u32", "ptr", "u32"), (1, 2, 3))
    address = args.address
    args.set(1, 0x7000)
    args.update((4, 0x8000, 5))
    args.set(2, 6)
    assert args.address == address
    assert [int.from_bytes(raw, "little") for raw in as_the_driver_reads(args)] == [4, 0x8000, 6]


def test_a_kernel_without_parameters() -> None:
    assert packing.PackedArgs((), ()).bytes_list() == []


@pytest.mark.parametrize(
    ("kind", "value"), [("u32", 2**32), ("u32", -1), ("i32", 2**31), ("u64", -1), ("f32", 1e39), ("ptr", 1.5)]
)
def test_values_that_do_not_fit_are_named(kind: packing.ParamKind, value: float) -> None:
    with pytest.raises(ArgumentError, match=rf"^parameter 1: got .*; it must fit {kind}"):
        packing.PackedArgs(("ptr", kind), (0, value))
    with pytest.raises(ArgumentError, match=r"^parameters: got 1 values; the kernel takes 2"):
        packing.PackedArgs(("ptr", kind), (0,))


@pytest.mark.parametrize(("value", "got"), [(bytes(7), "7 bytes"), (bytes(9), "9 bytes"), (8, "8"), ("x" * 8, "'xxxx")])
def test_packed_bytes_have_the_right_size(value: Any, got: str) -> None:
    """Too few would reach the kernel with zeros behind them, too many would be cut."""
    kinds = ("u32", packing.Bytes(8, 8))
    with pytest.raises(ArgumentError, match=rf"^parameter 1: got {got}.*; it must be bytes, 8 of them; "):
        packing.PackedArgs(kinds, (0, value))
    with pytest.raises(ArgumentError, match=rf"^parameter 1: got {got}"):
        packing.PackedArgs(kinds, (0, bytes(8))).set(1, value)


@pytest.mark.parametrize(
    ("kinds", "types"),
    [
        (("ptr", "u32"), "PI"),
        (("u32", "ptr", "u32", "u32", "i64", "f32"), "IPIIqf"),
        (("u32", "i32", "f32"), "Iif"),
        (("u64", "i64", "u32"), "Qqi"),
    ],
)
def test_structs_are_laid_out_as_c_does(kinds: tuple[packing.ParamKind, ...], types: str) -> None:
    codes = {"P": ctypes.c_uint64, "I": ctypes.c_uint32, "i": ctypes.c_int32, "q": ctypes.c_int64, "Q": ctypes.c_uint64}
    fields = [(f"f{i}", codes.get(t, ctypes.c_float)) for i, t in enumerate(types)]
    native = type("Native", (ctypes.Structure,), {"_fields_": fields})
    values = range(1, len(kinds) + 1)
    found = packing.layout(kinds)
    assert found.kind == (ctypes.sizeof(native), ctypes.alignment(native))
    assert found.offsets == tuple(getattr(native, name).offset for name, _ in fields)
    assert found.pack(list(values)) == bytes(native(*values))


@dataclass(eq=False)
class StubDriver:
    """A driver that writes down what it is told."""

    calls: list[tuple[object, ...]] = field(default_factory=list)

    def current_device(self) -> int:
        return 0

    def capability(self, device: int) -> tuple[int, int]:
        return (9, 0)

    def pointer_device(self, pointer: int) -> int:
        return 0

    def mapped(self, pointer: int, device: int) -> int:
        raise NotImplementedError

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        self.calls.append(("load", cubin, entry, device))
        return len(self.calls)

    def set_max_dynamic_shared(self, handle: object, nbytes: int, device: int) -> None:
        self.calls.append(("shared", handle, nbytes, device))

    def prepare(
        self,
        handle: object,
        device: int,
        grid: cuda.Dim3,
        block: cuda.Dim3,
        shared: int,
        params: packing.PackedArgs,
        pdl: bool,
    ) -> cuda.Launch:
        def step(stream: int) -> None:
            self.calls.append(("launch", handle, device, grid, block, shared, tuple(params.bytes_list()), pdl, stream))

        return step

    def allocate(self, nbytes: int, device: int) -> int:
        raise NotImplementedError

    def free(self, pointer: int, device: int) -> None:
        raise NotImplementedError

    def write(self, pointer: int, data: bytes, device: int) -> None:
        raise NotImplementedError

    def read(self, pointer: int, nbytes: int, device: int) -> bytes:
        raise NotImplementedError

    def synchronize(self, stream: int, device: int) -> None:
        raise NotImplementedError


def test_a_kernel_is_loaded_once_per_device_and_content() -> None:
    stub = StubDriver()
    first = cuda.function(b"cubin a", "entry", on=stub)
    assert cuda.function(bytes(bytearray(b"cubin a")), "entry", on=stub) is first
    assert cuda.function(b"cubin a", "entry", device=1, on=stub) is not first
    assert cuda.function(b"cubin b", "entry", on=stub) is not first
    assert stub.calls == [
        ("load", b"cubin a", "entry", 0),
        ("load", b"cubin a", "entry", 1),
        ("load", b"cubin b", "entry", 0),
    ]
    assert cuda.function(b"cubin a", "entry", on=StubDriver()) is not first


def test_shared_memory_above_48_kb_is_asked_for_at_load() -> None:
    stub = StubDriver()
    cuda.function(b"cubin", "small", 48 * 1024, on=stub)
    cuda.function(b"cubin", "large", 48 * 1024 + 16, device=1, on=stub)
    assert [call for call in stub.calls if call[0] == "shared"] == [("shared", 2, 48 * 1024 + 16, 1)]


def test_a_bound_launch_takes_only_the_stream() -> None:
    stub = StubDriver()
    kernel = cuda.function(b"cubin", "entry", 1024, on=stub)
    args = packing.PackedArgs(("u32",), (1,))
    step = kernel.bind((3, 2, 1), (128, 1, 1), args, pdl=True)
    step(0x55)
    args.set(0, 2)
    step(0x56)
    kernel.launch((1, 1, 1), (32, 1, 1), args, 0)
    one, two = (1).to_bytes(4, "little"), (2).to_bytes(4, "little")
    assert stub.calls[1:] == [
        ("launch", 1, 0, (3, 2, 1), (128, 1, 1), 1024, (one,), True, 0x55),
        ("launch", 1, 0, (3, 2, 1), (128, 1, 1), 1024, (two,), True, 0x56),
        ("launch", 1, 0, (1, 1, 1), (32, 1, 1), 1024, (two,), False, 0),
    ]


def test_a_machine_without_the_driver_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DeviceError, match="pip install cuda-python"):
        cuda.CudaDriver()


def test_a_machine_without_libcuda_points_to_the_cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.bindings 13.0 raises a RuntimeError, newer versions cuda.pathfinder's class, which is one."""
    api: Any = pytest.importorskip("cuda.bindings.driver")
    pathfinder: Any = pytest.importorskip("cuda.pathfinder")
    for error in (RuntimeError("Failed to dlopen libcuda.so.1"), pathfinder.DynamicLibNotFoundError("no libcuda")):

        def absent(flags: int, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(api, "cuInit", absent)
        with pytest.raises(DeviceError, match=r"^cuda: libcuda not found; .*host arrays run on the CPU machine"):
            cuda.CudaDriver()


def test_the_driver_launches_in_the_devices_context_and_leaves_the_callers(in_fake_cuda: Callable[[str], str]) -> None:
    out = in_fake_cuda("""
api.cuCtxSetCurrent(api.CUcontext(0x100))
kernel = cuda.function(b"cubin", "entry", 100_000, device=1)
args = packing.PackedArgs(("ptr", "u32"), (0x7000, 7))
step = kernel.bind((4, 2, 1), (128, 1, 1), args, pdl=True)
step(0x55)
args.set(1, 8)
api.cuCtxSetCurrent(api.CUcontext(0x101))
step(0)
print(fake.fake_log().decode() + current())
""")
    assert out.splitlines() == [
        "load cubin in 101",
        "get entry in 101",
        "attribute 9 = 100 in 101",
        "attribute 8 = 100000 in 101",
        "launch 300 in 101 grid 4,2,1 block 128,1,1 shared 100000 stream 55 pdl 1 args 7000 7",
        "launch 300 in 101 grid 4,2,1 block 128,1,1 shared 100000 stream 0 pdl 1 args 7000 8",
        "0x101",
    ]


def test_a_kernel_is_set_up_in_a_thread_without_a_context(in_fake_cuda: Callable[[str], str]) -> None:
    """Preferred shared memory in percent (attribute 9) of small kernels as well, dynamic shared memory (8) above 48 KB."""
    out = in_fake_cuda("""
print(current())
small = cuda.function(b"cubin", "small", 1024)
large = cuda.function(b"cubin", "large", 100_000, device=1)
print(current())
print([line for line in fake.fake_log().decode().splitlines() if line.startswith("attribute")])
print(small.resident_blocks(256), large.resident_blocks(256), large.resident_blocks(1024), current())
""")
    assert out.splitlines() == [
        "0x0",
        "0x0",
        str(["attribute 9 = 100 in 100", "attribute 9 = 100 in 101", "attribute 8 = 100000 in 101"]),
        "8 2 2 0x0",
    ]


def test_a_launch_without_overlap_carries_no_attribute(in_fake_cuda: Callable[[str], str]) -> None:
    out = in_fake_cuda("""
kernel = cuda.function(b"cubin", "entry")
kernel.launch((1, 1, 1), (32, 1, 1), packing.PackedArgs(("ptr", "u32"), (16, 1)), 0)
print(fake.fake_log().decode() + current())
""")
    assert out.splitlines()[-2:] == [
        "launch 300 in 100 grid 1,1,1 block 32,1,1 shared 0 stream 0 pdl 0 args 10 1",
        "0x0",
    ]


def test_refusals_of_the_driver_become_device_errors(in_fake_cuda: Callable[[str], str]) -> None:
    out = in_fake_cuda("""
args = packing.PackedArgs(("ptr", "u32"), (16, 1))
kernel = cuda.function(b"cubin", "entry")
for attempt in (
    lambda: cuda.function(b"wrong", "entry"),
    lambda: cuda.function(b"cubin", "absent"),
    lambda: cuda.function(b"cubin", "entry", 300_000),
    lambda: cuda.function(b"cubin", "entry", device=7),
    lambda: kernel.launch((0, 1, 1), (32, 1, 1), args, 0),
):
    try:
        attempt()
    except DeviceError as error:
        print(error)
print(current())
""")
    lines = out.splitlines()
    assert lines[0].startswith(
        "cuModuleLoadData: got CUDA_ERROR_NO_BINARY_FOR_GPU; fake refusal; the cubin was compiled"
    )
    assert lines[1] == "cuModuleGetFunction: got CUDA_ERROR_NOT_FOUND; fake refusal"
    assert lines[2].startswith("cuFuncSetAttribute: got CUDA_ERROR_INVALID_VALUE; fake refusal; grid, block or shared")
    assert lines[3] == "cuDeviceGet: got CUDA_ERROR_INVALID_DEVICE; fake refusal"
    assert lines[4].startswith("cuLaunchKernelEx: got CUDA_ERROR_INVALID_VALUE")
    assert lines[5] == "0x0", "a refused call must not leave its context behind"


def test_memory_and_device_queries(in_fake_cuda: Callable[[str], str]) -> None:
    out = in_fake_cuda("""
pointer = driver.allocate(64, 0)
driver.write(pointer, b"hello", 0)
print(driver.read(pointer, 5, 0))
driver.free(pointer, 0)
driver.synchronize(0x55, 1)
print(driver.capability(0), driver.pointer_device(1 << 40), driver.pointer_device(0), driver.current_device())
api.cuCtxSetCurrent(api.CUcontext(0x101))
print(driver.pointer_device(0), driver.current_device())
print(fake.fake_log().decode())
""")
    assert out.split("\n")[:4] == ["b'hello'", "(9, 0) 1 0 0", "1 1", "wait 55"]


@pytest.mark.gpu
def test_the_real_driver_copies_and_knows_its_device() -> None:
    driver = cuda.driver()
    assert driver.capability(0) >= (8, 0)
    pointer = driver.allocate(1 << 16, 0)
    try:
        data = bytes(range(256)) * 256
        driver.write(pointer, data, 0)
        assert driver.read(pointer, len(data), 0) == data
        assert driver.pointer_device(pointer) == 0
        assert pointer % 256 == 0
    finally:
        driver.free(pointer, 0)


SCALE = r"""
extern "C" __global__ void scale(float* x, unsigned n, float by) {
    extern __shared__ float stage[];
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { stage[threadIdx.x] = x[i]; x[i] = stage[threadIdx.x] * by; }
}
"""


@pytest.mark.gpu
def test_the_real_driver_launches() -> None:
    from array import array

    from cuda.core import Program, ProgramOptions

    driver = cuda.driver()
    major, minor = driver.capability(0)
    cubin = Program(SCALE, "c++", ProgramOptions(arch=f"sm_{major}{minor}")).compile("cubin").code
    kernel = cuda.function(bytes(cubin), "scale", 64 * 1024)
    pointer = driver.allocate(4000, 0)
    try:
        driver.write(pointer, array("f", range(1000)).tobytes(), 0)
        args = packing.PackedArgs(("ptr", "u32", "f32"), (pointer, 1000, 2.0))
        step = kernel.bind((8, 1, 1), (128, 1, 1), args, pdl=True)
        step(0)
        args.set(2, 0.5)
        step(0)
        args.set(2, 3.0)
        step(0)
        driver.synchronize(0, 0)
        assert array("f", driver.read(pointer, 4000, 0)).tolist() == [3.0 * i for i in range(1000)]
        with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE"):
            kernel.launch((0, 1, 1), (128, 1, 1), args, 0)
    finally:
        driver.free(pointer, 0)
