"""Arrays of any library become views, and only those the kernel was generated for pass."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgen.errors import ArgumentError, DeviceError
from kvgen.layout.dtypes import DTYPES
from kvgen.runtime import cuda
from kvgen.runtime.arrays import ArrayView, contiguous_strides, extent, itemsize, nbytes, view
from kvgen.runtime.checks import Dims, check

ROOT = Path(__file__).parents[2]
BYTE_DTYPES = [name for name, dtype in DTYPES.items() if dtype.bits % 8 == 0]


class OnlyDlpack:
    """A NumPy array of which only DLPack is left."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> object:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class DeviceProducer:
    """A DLPack exporter of memory that nobody reads: any element type, any device."""

    def __init__(self, pointer: int, shape: tuple[int, ...], *, code: int, bits: int, device: tuple[int, int]) -> None:
        self.device = device
        self.streams: list[object] = []
        self.sizes = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*contiguous_strides(shape))
        self.tensor = DLTensor(pointer, *device, len(shape), code, bits, 1, self.sizes, self.strides, 16, None, None)

    def __dlpack__(self, *, stream: object = None, **keywords: Any) -> object:
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class CudaInterface:
    def __init__(self, dtype: object = None, **interface: object) -> None:
        self.dtype = dtype
        self.__cuda_array_interface__ = {"version": 3, "data": (0x7000, False), "shape": (4, 3), **interface}


@pytest.fixture
def second_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that finds every pointer on device 1."""
    stub = types.SimpleNamespace(pointer_device=lambda pointer: 1)
    monkeypatch.setattr(cuda, "driver", lambda: stub)


@pytest.mark.parametrize("name", BYTE_DTYPES)
def test_numpy_arrays_of_every_type_are_read_in_place(name: str) -> None:
    array = np.zeros((3, 4, 5), DTYPES[name].numpy())
    found = view(array, "k")
    assert found.pointer == array.ctypes.data
    assert (found.shape, found.strides, found.dtype, found.device) == ((3, 4, 5), (20, 5, 1), name, "cpu")
    assert not found.readonly
    assert found.owner is array
    assert itemsize(found) == array.itemsize


def test_numpy_strides_count_elements_and_keep_their_sign() -> None:
    array = np.zeros((4, 6, 8), ml_dtypes.bfloat16)
    assert view(array[:, ::2], "k").strides == (48, 16, 1)
    assert view(array.transpose(2, 0, 1), "k").strides == (1, 48, 8)
    backwards = view(array[::-1], "k")
    assert backwards.strides == (-48, 8, 1)
    assert backwards.pointer == array.ctypes.data + 3 * 48 * 2
    assert view(np.broadcast_to(array[0], (9, 6, 8)), "k").strides == (0, 8, 1)


def test_a_readonly_array_says_so() -> None:
    array = np.zeros(3, np.float16)
    array.flags.writeable = False
    assert view(array, "k").readonly


def test_strides_between_elements_are_refused() -> None:
    record = np.zeros(4, np.dtype([("tag", "u1"), ("value", "<f4")]))
    with pytest.raises(ArgumentError, match=r"^scale: got strides of \(5,\) bytes; .*4-byte"):
        view(record["value"], "scale")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, np.float64),
        np.zeros(3, np.bool_),
        np.zeros(3, ">f4"),
        np.zeros(3, ml_dtypes.int4),
        np.zeros(3, ml_dtypes.float4_e2m1fn),
        np.zeros(3, ml_dtypes.float8_e4m3fnuz),
        np.zeros(3, np.complex64),
    ],
    ids=lambda array: str(array.dtype),
)
def test_types_without_a_kernel_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"^q: got dtype .*uint8"):
        view(array, "q")


@pytest.mark.parametrize(
    "thing", [None, 3, [1.0, 2.0], "k", np.float32(1), memoryview(b"abc")], ids=lambda x: type(x).__name__
)
def test_what_is_no_array_is_refused(thing: object) -> None:
    with pytest.raises(ArgumentError, match=r"^q: got .*(array|DLPack)"):
        view(thing, "q")


def test_a_view_is_its_own_view() -> None:
    found = view(np.zeros(3, np.float32), "q")
    assert view(found, "q") is found


def test_host_memory_over_dlpack() -> None:
    array = np.zeros((4, 6), np.float16)[:, ::2]
    found = view(OnlyDlpack(array), "k")
    assert (found.pointer, found.shape, found.strides) == (array.ctypes.data, (4, 3), (6, 2))
    assert (found.dtype, found.device, found.readonly) == ("f16", "cpu", False)


def test_readonly_survives_dlpack() -> None:
    array = np.zeros(4, np.int32)
    array.flags.writeable = False
    assert view(OnlyDlpack(array), "k").readonly


@pytest.mark.parametrize(
    ("code", "bits", "name"), [(4, 16, "bf16"), (2, 16, "f16"), (2, 32, "f32"), (0, 64, "i64"), (1, 8, "u8")]
)
def test_device_memory_over_dlpack(code: int, bits: int, name: str) -> None:
    producer = DeviceProducer(0x7000, (2, 3), code=code, bits=bits, device=(2, 1))
    found = view(producer, "k")
    assert (found.pointer, found.shape, found.strides) == (0x7010, (2, 3), (3, 1))
    assert (found.dtype, found.device) == (name, "cuda:1")
    assert producer.streams == [-1], "a view must not order streams"


def test_pinned_host_memory_is_the_cpus_and_managed_memory_the_gpus() -> None:
    assert view(DeviceProducer(0x7000, (2,), code=2, bits=32, device=(3, 0)), "k").device == "cpu"
    assert view(DeviceProducer(0x7000, (2,), code=2, bits=32, device=(13, 0)), "k").device == "cuda:0"


def test_other_devices_and_types_over_dlpack_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^k: got an array on DLPack device type 10"):
        view(DeviceProducer(0x7000, (2,), code=2, bits=32, device=(10, 0)), "k")
    with pytest.raises(ArgumentError, match=r"^k: .*cannot be read over DLPack .*8-bit floats"):
        view(DeviceProducer(0x7000, (2,), code=10, bits=8, device=(2, 0)), "k")
    with pytest.raises(ArgumentError, match=r"^k: got dtype float64"):
        view(DeviceProducer(0x7000, (2,), code=2, bits=64, device=(2, 0)), "k")


@pytest.mark.usefixtures("second_gpu")
def test_the_cuda_array_interface() -> None:
    found = view(CudaInterface(typestr="<f2", strides=None, stream=7), "k")
    assert found[:6] == (0x7000, (4, 3), (3, 1), "f16", "cuda:1", False)
    assert view(CudaInterface(typestr="<i8", strides=(64, -8)), "k").strides == (8, -1)
    assert view(CudaInterface(typestr="|u1", data=(0x7000, True)), "k").readonly
    assert view(CudaInterface(np.dtype(ml_dtypes.bfloat16), typestr="<V2"), "k").dtype == "bf16"
    assert view(CudaInterface(np.dtype(ml_dtypes.float8_e4m3fn), typestr="|V1", strides=(6, 2)), "k").strides == (6, 2)


@pytest.mark.usefixtures("second_gpu")
def test_the_cuda_array_interface_refuses_what_kernels_cannot_read() -> None:
    for typestr in (">f4", "<f8", "<V2", "<c8"):
        with pytest.raises(ArgumentError, match=r"^k: got dtype"):
            view(CudaInterface(typestr=typestr), "k")
    with pytest.raises(ArgumentError, match=r"^k: got a masked array"):
        view(CudaInterface(typestr="<f4", mask=object()), "k")
    with pytest.raises(ArgumentError, match=r"^k: got strides"):
        view(CudaInterface(typestr="<f4", strides=(10, 4)), "k")


def test_device_memory_needs_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> cuda.Driver:
        raise DeviceError("cuda: libcuda not found")

    monkeypatch.setattr(cuda, "driver", absent)
    with pytest.raises(DeviceError, match="libcuda not found"):
        view(CudaInterface(typestr="<f4"), "k")


@dataclass(frozen=True)
class TorchDevice:
    type: str
    index: int | None


@dataclass(frozen=True)
class TorchDtype:
    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@pytest.fixture
def tensor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes tensors of a torch that has just the attributes a view reads."""

    class Tensor:
        def __init__(self, dtype: str, device: TorchDevice, layout: str = "strided", grad: bool = False) -> None:
            self.dtype, self.device, self.layout, self.shape = TorchDtype(dtype), device, layout, (2, 3)
            self.requires_grad = grad

        def stride(self) -> tuple[int, ...]:
            return (4, 1)

        def data_ptr(self) -> int:
            return 0x9000

    torch: Any = types.ModuleType("torch")
    torch.Tensor, torch.strided, torch.is_grad_enabled = Tensor, "strided", lambda: True
    monkeypatch.setitem(sys.modules, "torch", torch)
    return Tensor


def test_torch_tensors(tensor: Callable[..., Any]) -> None:
    found = view(tensor("bfloat16", TorchDevice("cuda", 1)), "k")
    assert found[:6] == (0x9000, (2, 3), (4, 1), "bf16", "cuda:1", False)
    assert view(tensor("float8_e4m3fn", TorchDevice("cuda", 0)), "k").dtype == "e4m3", "DLPack readers refuse fp8"
    assert view(tensor("int64", TorchDevice("cpu", None)), "k").device == "cpu"


def test_torch_tensors_that_kernels_cannot_read(tensor: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match=r"^k: got dtype torch\.float4_e2m1fn_x2.*uint8"):
        view(tensor("float4_e2m1fn_x2", TorchDevice("cuda", 0)), "k")
    with pytest.raises(ArgumentError, match=r"^k: got a strided tensor on .*meta"):
        view(tensor("float32", TorchDevice("meta", None)), "k")
    with pytest.raises(ArgumentError, match=r"^k: got a sparse_coo tensor"):
        view(tensor("float32", TorchDevice("cuda", 0), "sparse_coo"), "k")


def test_torch_tensors_that_require_a_gradient(tensor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    learned = tensor("float32", TorchDevice("cpu", None), grad=True)
    with pytest.raises(ArgumentError, match=r"^q: got a tensor that requires a gradient; .*pass q\.detach\(\)"):
        view(learned, "q")
    monkeypatch.setattr(sys.modules["torch"], "is_grad_enabled", lambda: False)
    assert view(learned, "q").pointer == 0x9000, "under torch.no_grad() nothing is recorded"


@given(
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    steps=st.lists(st.sampled_from([-2, -1, 1, 3]), min_size=4, max_size=4),
)
def test_extent_is_what_numpy_says(shape: tuple[int, ...], steps: list[int]) -> None:
    index: Any = (..., *(slice(None, None, step) for step in steps[: len(shape)]))
    array = np.zeros(shape, np.int32)[index]
    found = view(array, "k")
    low, high = extent(found)
    assert nbytes(found) == high - low
    if array.size:
        assert (low, high) == np.lib.array_utils.byte_bounds(array)
    else:
        assert low == high == found.pointer


def test_contiguous_strides_are_numpys() -> None:
    for shape in ((), (3,), (2, 3, 4), (5, 1, 7)):
        array = np.zeros(shape, np.uint8)
        assert contiguous_strides(shape) == array.strides


def bf16(*shape: int) -> ArrayView:
    return view(np.zeros(shape, ml_dtypes.bfloat16), "k")


def test_a_matching_array_binds_its_names() -> None:
    dims = Dims({"L": 2})
    check(bf16(5, 8, 128), "k", dtype="bf16", shape=("T", 8, 128), dims=dims, align=1)
    check(view(np.zeros((2, 4), np.uint32), "o"), "o", dtype=("i32", "u32"), shape=("L", "B+1"), dims=dims)
    assert dict(dims) == {"L": 2, "T": 5, "B": 3, "B+1": 4}
    check(bf16(3, 5), "x", dtype="bf16", shape=("B", "T"), dims=dims)
    check(bf16(4, 9), "x", dtype="bf16", shape=("B+1", None), dims=dims)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"dtype": "f16", "field": "cache.dtype"}, "v: got dtype bf16; it must be f16, cache.dtype of the spec; pass"),
        ({"dtype": ("f16", "f32")}, "v: got dtype bf16; it must be f16 or f32; pass"),
        ({"shape": ("T", 128)}, "v: got shape (7, 8, 128); it must have 2 dimensions; pass shape (5, 128)"),
        (
            {"shape": ("T", 4, 64), "dims": Dims(), "fields": (None, "kv_heads", "head_dim")},
            "v: got shape (7, 8, 128); dimension 1 must be 4, kv_heads of the spec; pass shape (7, 4, 64)",
        ),
        (
            {"shape": (None, 8, 64), "field": "head_dim"},
            "v: got shape (7, 8, 128); dimension 2 must be 64, head_dim of the spec; pass shape (any, 8, 64)",
        ),
        ({}, "v: got shape (7, 8, 128); k has T = 5 but v has 7; pass shape (5, 8, 128)"),
        ({"shape": ("T+1", 8, 128)}, "v: got shape (7, 8, 128); k has T = 5 but v has 6; pass shape (6, 8, 128)"),
        ({"shape": ("N", "N", 128)}, "v: got shape (7, 8, 128); v has N = 7 but v has 8; pass shape (7, 7, 128)"),
        ({"shape": ("N+8", 8, 128)}, "v: got shape (7, 8, 128); dimension 0 must be N+8, which is at least 8; pass"),
        ({"shape": (7, 8, 128), "device": "cuda:0"}, "v: got an array on cpu; the call runs on cuda:0, where"),
    ],
)
def test_what_the_spec_does_not_allow(rules: dict[str, Any], message: str) -> None:
    dims = Dims()
    check(bf16(5, 8, 128), "k", dtype="bf16", shape=("T", 8, 128), dims=dims)
    wanted: dict[str, Any] = {"dtype": "bf16", "shape": ("T", 8, 128), "dims": dims, **rules}
    with pytest.raises(ArgumentError) as caught:
        check(bf16(7, 8, 128), "v", **wanted)
    assert str(caught.value).startswith(message)


def test_a_kernel_does_not_write_to_readonly_memory() -> None:
    frozen = bf16(4)._replace(readonly=True)
    check(frozen, "out", dtype="bf16", shape=(4,), dims=Dims())
    with pytest.raises(ArgumentError, match=r"^out: got a read-only array"):
        check(frozen, "out", dtype="bf16", shape=(4,), dims=Dims(), writable=True)


def strided(*strides: int, shape: tuple[int, ...] = (4, 6, 8), pointer: int = 0x1000) -> ArrayView:
    return ArrayView(pointer, shape, strides, "bf16", "cpu", False, None)


def accepts(array: ArrayView, **rules: Any) -> bool:
    try:
        check(array, "k", dtype="bf16", shape=(None,) * len(array.shape), dims=Dims(), **rules)
    except ArgumentError as error:
        assert "stride" in str(error) or "address" in str(error)
        return False
    return True


def test_packed_dimensions_are_contiguous() -> None:
    assert accepts(strided(48, 8, 1))
    assert not accepts(strided(56, 8, 1)), "all dimensions are packed unless told otherwise"
    assert accepts(strided(56, 8, 1), packed=2)
    assert not accepts(strided(96, 16, 1), packed=2)
    assert accepts(strided(96, 16, 1), packed=1)
    assert not accepts(strided(96, 16, 2), packed=1)
    assert accepts(strided(96, 16, 2), packed=0)
    assert not accepts(strided(-48, 8, 1))
    assert accepts(strided(-48, 8, 1), packed=2)


def test_exact_strides_are_the_layouts() -> None:
    assert accepts(strided(999, 8, 1), strides=(None, 8, 1))
    assert not accepts(strided(999, 16, 1), strides=(None, 8, 1))
    assert not accepts(strided(999, 8, 2), strides=(None, 8, None), packed=1)


def test_strides_that_no_index_reaches_mean_nothing() -> None:
    assert accepts(strided(7, 5, 1, shape=(1, 1, 8)))
    assert accepts(strided(48, 77, 1, shape=(4, 1, 48)))
    assert accepts(strided(7, 5, 3, shape=(4, 0, 8), pointer=0), align=16)


def test_alignment_holds_for_the_address_and_for_every_row() -> None:
    assert accepts(strided(48, 8, 1), align=16)
    assert not accepts(strided(48, 8, 1, pointer=0x1002), align=16)
    assert not accepts(strided(48, 8, 1, pointer=0))
    assert not accepts(strided(52, 8, 1), packed=2, align=16)
    assert accepts(strided(56, 8, 1), packed=2, align=16)
    assert accepts(strided(52, 8, 1), packed=2, align=2)
    assert not accepts(strided(52, 8, 1), strides=(None, 8, 1), align=16)


def test_written_rows_do_not_share_memory() -> None:
    assert accepts(strided(0, 8, 1), packed=2)
    assert not accepts(strided(0, 8, 1), packed=2, writable=True)
    assert accepts(strided(0, 8, 1, shape=(1, 6, 8)), packed=2, writable=True)


@pytest.mark.gpu
def test_a_view_of_device_memory_finds_its_device() -> None:
    driver = cuda.driver()
    pointer = driver.allocate(64, 0)
    try:
        assert view(CudaInterface(typestr="<f2", data=(pointer, False)), "k").device == "cuda:0"
    finally:
        driver.free(pointer, 0)


def test_views_import_no_array_library() -> None:
    code = (
        "import sys; import kvgen.runtime.arrays, kvgen.runtime.cuda, kvgen.runtime.stream; "
        "print(sorted({name.split('.')[0] for name in sys.modules} "
        "& {'numpy', 'torch', 'cuda', 'pydantic', 'jinja2', 'ml_dtypes'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "[]\n"
