"""Objects whose array protocols are broken: an ArgumentError that names the argument, whatever comes out of them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen.errors import ArgumentError, DeviceError
from kvgen.plan.params import Count
from kvgen.runtime import cuda
from kvgen.runtime.arrays import view
from kvgen.runtime.checks import Dims
from kvgen.runtime.params import Call, take
from tests.support.launching import DeviceArray, NotingDriver, on_device, package, zeros

pytestmark = pytest.mark.usefixtures("driver")

RIGHT: dict[str, Any] = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}


class Interface:
    """What says this of its `__cuda_array_interface__`."""

    def __init__(self, interface: object) -> None:
        self.__cuda_array_interface__ = interface


class Hostile:
    """Every attribute raises."""

    def __getattribute__(self, name: str) -> Any:
        raise OSError("no attributes here")


class Raising:
    """A property that raises what is no AttributeError, with a message that raises too."""

    @property
    def __cuda_array_interface__(self) -> Any:
        class Worse(Exception):
            def __str__(self) -> str:
                raise RecursionError

        raise Worse


class HostOnly:
    """NumPy's protocol alone."""

    __array_interface__: object = {"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3}


class Dlpack:
    """DLPack that returns these, or raises what is an exception."""

    def __init__(self, capsule: object, device: object = (1, 0)) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **options: Any) -> Any:
        return _out(self._capsule)

    def __dlpack_device__(self) -> Any:
        return _out(self._device)


def _out(value: object) -> object:
    if isinstance(value, BaseException):
        raise value
    return value


class Uncallable:
    __dlpack__ = 1
    __dlpack_device__ = 2


class Lying(np.ndarray[Any, Any]):
    """A subclass whose own interface is wrong: what NumPy itself says counts."""

    @property
    def __array_interface__(self) -> Any:
        raise OSError("not this one")


def _capsule(name: bytes, memory: object) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(memory), name, None)  # type: ignore[arg-type]


ZEROS = ctypes.create_string_buffer(256)  # a DLManagedTensor of no data, no dimensions and no type

INTERFACES: dict[str, Any] = {
    "no_dict": 7,
    "a_list": [("shape", (2,))],
    "empty": {},
    **{f"no_{key}": {k: v for k, v in RIGHT.items() if k != key} for key in ("shape", "typestr", "data", "version")},
    "version_99": RIGHT | {"version": 99},
    "version_text": RIGHT | {"version": "3"},
    "version_none": RIGHT | {"version": None},
    "shape_number": RIGHT | {"shape": 6},
    "shape_floats": RIGHT | {"shape": (2.0, 3.0)},
    "shape_text": RIGHT | {"shape": "23"},
    "shape_none": RIGHT | {"shape": None},
    "shape_negative": RIGHT | {"shape": (-2, -3)},
    "shape_huge": RIGHT | {"shape": (2**40, 2**40)},
    "strides_missing_one": RIGHT | {"strides": (4,)},
    "strides_between_elements": RIGHT | {"strides": (13, 4)},
    "strides_floats": RIGHT | {"strides": (12.0, 4.0)},
    "strides_text": RIGHT | {"strides": "ab"},
    "strides_below_zero": RIGHT | {"strides": (-(2**62), 4)},
    "typestr_none": RIGHT | {"typestr": None},
    "typestr_empty": RIGHT | {"typestr": ""},
    "typestr_number": RIGHT | {"typestr": 4},
    "typestr_other_order": RIGHT | {"typestr": ">f4"},
    "typestr_wider": RIGHT | {"typestr": "|V64"},
    "data_none": RIGHT | {"data": None},
    "data_number": RIGHT | {"data": 4096},
    "data_three": RIGHT | {"data": (4096, False, 1)},
    "pointer_none": RIGHT | {"data": (None, False)},
    "pointer_text": RIGHT | {"data": ("0x1000", False)},
    "pointer_float": RIGHT | {"data": (4096.0, False)},
    "pointer_negative": RIGHT | {"data": (-4096, False)},
    "pointer_past_64_bits": RIGHT | {"data": (2**64, False)},
    "end_past_64_bits": RIGHT | {"data": (2**64 - 16, False)},
    "mask": RIGHT | {"mask": object()},
}
BROKEN: dict[str, Any] = {
    **{f"interface_{label}": Interface(value) for label, value in INTERFACES.items()},
    "hostile": Hostile(),
    "raising": Raising(),
    "host_only": HostOnly(),
    "uncallable": Uncallable(),
    "dlpack_raises": Dlpack(OSError("gone")),
    "dlpack_raises_type_error": Dlpack(TypeError("no")),
    "dlpack_stops": Dlpack(StopIteration()),
    "dlpack_memory": Dlpack(MemoryError("no more")),
    "dlpack_none": Dlpack(None),
    "dlpack_text": Dlpack("dltensor"),
    "dlpack_other_capsule": Dlpack(_capsule(b"other", ZEROS)),
    "dlpack_used_capsule": Dlpack(_capsule(b"used_dltensor", ZEROS)),
    "device_raises": Dlpack(None, OSError("gone")),
    "device_none": Dlpack(None, None),
    "device_text": Dlpack(None, "cpu"),
    "device_one": Dlpack(None, (1,)),
    "device_three": Dlpack(None, (1, 0, 0)),
    "device_floats": Dlpack(None, (1.0, 0.0)),
    "device_of_others": Dlpack(None, (10, 0)),
    "none": None,
    "a_type": np.ndarray,
    "a_number": 7,
    "text": "array",
}


@pytest.mark.parametrize("label", BROKEN)
def test_broken(label: str) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)^q_rows: got .*; .*; pass "):
        view(BROKEN[label], "q_rows")


@pytest.mark.parametrize("label", [n for n in BROKEN if n != "none"])
def test_broken_arguments_of_a_launcher(label: str) -> None:
    """A pool, a table, a list of pools, a required array, an optional one."""
    module = package("paged")
    offsets = np.array([0, 1, 2], np.int32)
    tables = {"lengths": np.array([3, 4], np.int32), "page_table": np.zeros((2, 3), np.int32)}
    k, v, pool = zeros(2, 2, 16), zeros(2, 2, 16), zeros(5, 2, 2, 4, 2, 16)
    cache = module.Cache(pool, **tables)[0]
    for name, action in (
        ("pool", lambda x: module.Cache(x, **tables)),
        ("lengths", lambda x: module.Cache(pool, **tables | {"lengths": x})),
        ("k", lambda x: module.append.bind(cache, x, v, offsets)),
        ("errors", lambda x: module.append.bind(cache, k, v, offsets, errors=x)),
    ):
        with pytest.raises(ArgumentError, match=rf"(?s)^{name}: got "):
            action(BROKEN[label])
    apart = package("apart")
    with pytest.raises(ArgumentError, match=r"(?s)^k_pool\[0\]: got "):
        apart.Cache([BROKEN[label]], [pool], **tables)
    if label != "text":
        with pytest.raises(ArgumentError, match=r"(?s)^k_pool: got "):
            apart.Cache(BROKEN[label], [pool], **tables)


@pytest.mark.parametrize("label", BROKEN)
def test_broken_counts(label: str) -> None:
    """A count on the host is an int, or a host array of one, whatever library it is of."""
    call = Call(Dims({"T": 9}), "cpu", [])
    with pytest.raises(ArgumentError, match=r"(?s)^rows: got "):
        take(Count("rows"), BROKEN[label] if label != "a_number" else -7, call)
    assert take(Count("rows"), np.array([[7]], np.int32)[:, ::-1], call) == 7
    assert take(Count("rows"), np.array(2**63 - 1, np.uint64), call) == 2**63 - 1
    with pytest.raises(ArgumentError, match=r"^rows: got -7; it counts rows"):
        take(Count("rows"), np.array([-7]), call)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=300)
@given(key=st.sampled_from([*RIGHT, "mask"]), value=VALUES, data=st.data())
def test_any_interface(key: str, value: Any, data: Any) -> None:
    """A view that says what an array can be, or an ArgumentError."""
    interface = RIGHT | {key: value}
    if data.draw(st.booleans()):
        interface[data.draw(st.sampled_from(list(RIGHT)))] = data.draw(VALUES)
    try:
        found = view(Interface(interface), "x")
    except ArgumentError as error:
        assert str(error).startswith("x: got ")
        return
    assert type(found.pointer) in (int, bool) and all(isinstance(n, int) and n >= 0 for n in found.shape)
    assert len(found.strides) == len(found.shape) and found.dtype in (
        "f32",
        "f16",
        "i8",
        "u8",
        "i32",
        "u32",
        "i64",
        "u64",
    )


@settings(max_examples=100)
@given(capsule=VALUES, device=VALUES | st.just((1, 0)) | st.just((2, 0)))
def test_any_dlpack(capsule: Any, device: Any) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)^x: got .*; .*; pass "):
        view(Dlpack(capsule, device), "x")


def test_what_a_subclass_says_of_itself() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert view(array.view(Lying), "x")[:6] == view(array, "x")[:6]


def test_keyboard_interrupts_pass() -> None:
    with pytest.raises(KeyboardInterrupt):
        view(Dlpack(None, KeyboardInterrupt()), "x")


def test_an_address_that_the_driver_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument's fault where the driver says so; what an earlier kernel did stays a DeviceError."""

    class Refusing(NotingDriver):
        said = ""

        def pointer_device(self, pointer: int) -> int:
            raise DeviceError(self.said)

    refusing = Refusing()
    monkeypatch.setattr(cuda, "driver", lambda: refusing)
    array = DeviceArray((2,), np.float32, 4096)
    refusing.said = "cuPointerGetAttribute: got CUDA_ERROR_INVALID_VALUE; invalid argument"
    with pytest.raises(
        ArgumentError, match=r"^x: got address 0x1000, which the driver does not know .*; pass an array on"
    ):
        view(array, "x")
    refusing.said = "cuPointerGetAttribute: got CUDA_ERROR_ILLEGAL_ADDRESS; an illegal memory access was encountered"
    with pytest.raises(DeviceError, match=r"^cuPointerGetAttribute"):
        view(array, "x")


def test_right_ones_are_taken() -> None:
    """What the wrong ones above were made of."""
    found = view(Interface(RIGHT), "x")
    assert (found.pointer, found.shape, found.strides, found.dtype) == (4096, (2, 3), (3, 1), "f32")
    assert view(Interface(RIGHT | {"version": 2, "strides": (-12, 4), "data": (4108, True)}), "x").strides == (-3, 1)
    assert view(on_device(zeros(2, 2), 4096), "x").dtype == "bf16"
    assert view(Interface(RIGHT | {"shape": (0, 3), "data": (0, False)}), "x").shape == (0, 3)
