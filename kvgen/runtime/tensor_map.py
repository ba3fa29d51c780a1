"""The 128 bytes that a kernel takes as a tensor map, for the CPU machine or by the driver."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Final, Literal

from kvgen.errors import ArgumentError, DeviceError
from kvgen.runtime import cuda

if TYPE_CHECKING:
    from kvgen.tensor_map import TensorMapPlan

_NAMES: Final = {
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "i32": "int32", "u64": "uint64", "i64": "int64", "f16": "float16",
    "f32": "float32", "bf16": "bfloat16",
}  # fmt: skip
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


@functools.cache
def _context(api: Any, device: int) -> Any:
    """The primary context, retained for good: the driver encodes in the context that the kernel runs in."""
    return _call(api, "cuDevicePrimaryCtxRetain", _call(api, "cuDeviceGet", device))


def _call(api: Any, name: str, *arguments: object) -> Any:
    result, *values = getattr(api, name)(*arguments)
    if result != api.CUresult.CUDA_SUCCESS:
        text = api.cuGetErrorString(result)[1]
        raise DeviceError(
            f"{name}: got {getattr(result, 'name', result)}; {text.decode() if text else 'unknown error'}"
        )
    return values[0] if values else None


def _encode_cuda(plan: TensorMapPlan, device: int) -> bytes:
    """By cuda.bindings and not by cuda.core's TensorMapDescriptor: that one is made of a StridedMemoryView, so of a DLPack
    or __cuda_array_interface__ object. It takes shape and strides from it and asks for strides of whole elements inside
    memory that the object owns, which a base moved back (ragged) or bytes seen as bf16 (rope) are not.
    """
    major, minor = cuda.driver().capability(device)  # initialises the driver, or says what is missing
    if major < 9:
        raise DeviceError(f"tensor map: got a device of compute capability {major}.{minor}; tensor copies need 9.0")
    api: Any = importlib.import_module("cuda.bindings.driver")
    wide, narrow = api.cuuint64_t, api.cuuint32_t
    arguments = (
        getattr(api.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_NAMES[plan.dtype].upper()}"),
        plan.rank,
        plan.address,
        [wide(n) for n in plan.dims],
        [wide(n) for n in plan.strides],
        [narrow(n) for n in plan.box],
        [narrow(n) for n in plan.element_strides],
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[plan.swizzle]}"),
        getattr(api.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTIONS[plan.l2_promotion]}"),
        getattr(api.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{_FILLS[plan.oob_fill]}"),
    )
    _call(api, "cuCtxPushCurrent", _context(api, device))
    try:
        made = _call(api, "cuTensorMapEncodeTiled", *arguments)
    finally:
        _call(api, "cuCtxPopCurrent")
    words = [int(word) for word in made.opaque]
    return b"".join(word.to_bytes(8, "little") for word in words)
