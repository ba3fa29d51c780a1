"""The 128 bytes that a kernel takes as a tensor map, for the CPU machine or by the driver."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime import cuda

if TYPE_CHECKING:
    from kvgen.tensor_map import TensorMapPlan

_NAMES: Final = {
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "i32": "int32", "u64": "uint64", "i64": "int64", "f16": "float16",
    "f32": "float32", "bf16": "bfloat16",
}  # fmt: skip
_BYTES: Final = 128
_ALIGN: Final = 128  # of the driver's type
_SWIZZLES: Final = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_PROMOTIONS: Final = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}
_FILLS: Final = {"zero": "NONE", "nan": "NAN_REQUEST_ZERO_FMA"}


def encode(plan: TensorMapPlan, device: str) -> bytes:
    """The 128 bytes of `plan`, a kernel's "tensormap" parameter: on "cpu" for the CPU machine, on "cuda:<ordinal>" by the
    driver. They hold the address, so they are encoded anew where the memory moves. Raises DeviceError for what the driver
    refuses, and where there is none.
    """
    if device == "cpu":
        return _encode_cpu(plan)
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or not ordinal.isdecimal():
        raise ArgumentError(f"device: got {device!r}; it is 'cpu' or 'cuda:<ordinal>'")
    return _encode_cuda(plan, int(ordinal))


def _encode_cpu(plan: TensorMapPlan) -> bytes:
    from kvgen.emulator import EmulatorError, TensorMap

    fill: Literal["zero", "nan"] = plan.oob_fill
    try:
        return TensorMap(
            _NAMES[plan.dtype], plan.address, plan.dims, plan.strides, plan.box, plan.element_strides, plan.swizzle,
            l2_promotion=plan.l2_promotion, oob_fill=fill,
        ).encode()  # fmt: skip
    except EmulatorError as error:
        raise DeviceError(f"tensor map ({plan.form}) for the CPU machine: {error}") from error


def _encode_cuda(plan: TensorMapPlan, device: int) -> bytes:
    major, minor = cuda.driver().capability(device)  # initialises the driver, or says what is missing
    if major < 9:
        raise DeviceError(f"tensor map: got a device of compute capability {major}.{minor}; tensor copies need 9.0")
    return encode_tiled(
        device, _NAMES[plan.dtype], plan.address, plan.dims, plan.strides, plan.box, plan.element_strides,
        swizzle=plan.swizzle, l2_promotion=plan.l2_promotion, oob_fill=plan.oob_fill,
    )  # fmt: skip


def encode_tiled(
    device: int, element: str, address: int, dims: Sequence[int], strides: Sequence[int], box: Sequence[int],
    steps: Sequence[int] = (), *, swizzle: int = 0, l2_promotion: int = 0, oob_fill: str = "zero",
) -> bytes:  # fmt: skip
    """The driver's cuTensorMapEncodeTiled of an `element` ("float16", "uint8"), innermost dimension first; `steps` are
    the element strides, `strides` bytes of dimensions 1 and up. Raises DeviceError for what the driver refuses.

    By ctypes and not by cuda.bindings: the driver asks for memory at a multiple of 64, and cuda.h's type since CUDA 13 for 128,
    but the bindings' CUtensorMap lies where Python's allocator puts it. cuda.core's TensorMapDescriptor wants a tensor that
    owns its memory, with strides of whole elements, which a base moved back (ragged) or bytes seen as bf16 (rope) are not.
    """
    api: Any = importlib.import_module("cuda.bindings.driver")

    def numbers(kind: Any, values: Sequence[int]) -> Any:
        return (kind * max(len(values), 1))(*values)  # no null pointer where there are none

    def number(kind: str, name: str) -> ctypes.c_int:
        return ctypes.c_int(int(getattr(getattr(api, kind), name)))

    room = ctypes.create_string_buffer(_BYTES + _ALIGN)
    at = ctypes.addressof(room)
    at += -at % _ALIGN
    arguments = (
        ctypes.c_void_p(at),
        number("CUtensorMapDataType", f"CU_TENSOR_MAP_DATA_TYPE_{element.upper()}"),
        ctypes.c_uint32(len(dims)),
        ctypes.c_void_p(address),
        numbers(ctypes.c_uint64, dims),
        numbers(ctypes.c_uint64, strides),
        numbers(ctypes.c_uint32, box),
        numbers(ctypes.c_uint32, steps or (1,) * len(dims)),
        number("CUtensorMapInterleave", "CU_TENSOR_MAP_INTERLEAVE_NONE"),
        number("CUtensorMapSwizzle", f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[swizzle]}"),
        number("CUtensorMapL2promotion", f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTIONS[l2_promotion]}"),
        number("CUtensorMapFloatOOBfill", f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{_FILLS[oob_fill]}"),
    )
    cuda.driver().call_c("cuTensorMapEncodeTiled", arguments, device)
    return ctypes.string_at(at, _BYTES)
