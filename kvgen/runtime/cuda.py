"""The `cuda` backend: loading cubins and launching kernels through the driver.

It speaks to cuda.bindings and not to cuda.core, whose `launch` packs the arguments anew in each call and whose kernels
are loaded at their first launch, possibly inside a stream capture. Everything runs in the device's primary context, the
one that torch, JAX and CuPy use.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvgen.errors import DeviceError
from kvgen.runtime.packing import PackedArgs

Dim3 = tuple[int, int, int]
Launch = Callable[[int], None]

_STATIC_SHARED_LIMIT: Final = 48 * 1024  # above this a kernel must opt in
_ABI: Final = 12000  # CUDA 12.0, whose form of a driver function is asked for
_NOT_READY: Final = 600
_CAPTURE_IMPLICIT: Final = 906  # the legacy default stream, while a stream that waits for it captures

_HINTS: Final[dict[int, str]] = {
    1: "grid, block or shared memory exceed the device's limits, or an address is not the device's",
    2: "the device is out of memory",
    100: "no NVIDIA GPU is visible; host arrays run on the CPU machine",
    209: "the cubin was compiled for another architecture; add this GPU's to `arch` in the spec",
    218: "the cubin was compiled for another architecture or for a newer driver",
    400: "the stream belongs to another device than the arrays",
    700: "a kernel accessed memory outside its buffers; the context is lost until the process restarts",
    701: "the block needs more registers or shared memory than the device has",
    803: "the driver is older than the CUDA version it was asked for",
    900: "kernels must be bound or loaded before a stream capture begins",
    901: "the stream capture was broken by an earlier call; bind or load kernels before it begins",
}
_HINTS_OF: Final[dict[tuple[str, int], str]] = {  # where a call's own is better
    ("cuTensorMapEncodeTiled", 1): "a tensor copy cannot take this address, dimension, stride, box or swizzle",
}


class Driver(Protocol):
    """The few driver calls that launching takes. Every method raises DeviceError when the driver refuses."""

    def __hash__(self) -> int: ...

    def current_device(self) -> int:
        """The ordinal of the calling thread's device; 0 if it has none yet."""
        ...

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability, (9, 0) on an H200."""
        ...

    def pointer_device(self, pointer: int) -> int:
        """The ordinal of the device that holds `pointer`; the current device for a null pointer."""
        ...

    def mapped(self, pointer: int, device: int) -> int:
        """The address by which kernels of `device` reach pinned host memory at `pointer`."""
        ...

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        """The kernel `entry` of `cubin`, in the primary context of `device`; ready to launch, nothing left to load.

        Multiprocessors that run it divide their memory for as much shared memory as they can have.
        """
        ...

    def set_max_dynamic_shared(self, handle: object, nbytes: int, device: int) -> None:
        """Let a kernel ask for up to `nbytes` of dynamic shared memory; needed above 48 KB."""
        ...

    def resident_blocks(self, handle: object, threads: int, shared: int, device: int) -> int:
        """The most blocks of the kernel that a multiprocessor runs at once; `shared`: dynamic shared memory of each, in bytes."""
        ...

    def call_c(self, name: str, arguments: Sequence[Any], device: int) -> None:
        """The driver's function `name` with ctypes values, in the primary context of `device`: for results that must lie where
        the caller says."""
        ...

    def prepare(
        self, handle: object, device: int, grid: Dim3, block: Dim3, shared: int, params: PackedArgs, pdl: bool
    ) -> Launch:
        """A launch with everything but the stream decided. It keeps `params` alive and reads it anew each time.

        `pdl` lets the grid start before its predecessor in the stream has finished. One thread at a time may call it.
        """
        ...

    def multiprocessors(self, device: int) -> int:
        """How many multiprocessors the device has."""
        ...

    def allocate(self, nbytes: int, device: int) -> int:
        """Device memory, uninitialised, aligned to 256 bytes."""
        ...

    def free(self, pointer: int, device: int) -> None:
        """Give back what `allocate` returned."""
        ...

    def write(self, pointer: int, data: bytes, device: int) -> None:
        """Copy `data` to the device; returns when it is there."""
        ...

    def read(self, pointer: int, nbytes: int, device: int) -> bytes:
        """Copy from the device, behind all earlier work of the legacy default stream."""
        ...

    def synchronize(self, stream: int, device: int) -> None:
        """Wait for a stream; reports what its kernels did wrong."""
        ...

    def allocate_pinned(self, nbytes: int, device: int) -> int:
        """Host memory that the device copies to by itself, uninitialised."""
        ...

    def free_pinned(self, pointer: int, device: int) -> None:
        """Give back what `allocate_pinned` returned."""
        ...

    def read_later(self, target: int, pointer: int, nbytes: int, stream: int, device: int) -> None:
        """Copy from the device to pinned memory at `target`, behind the work of `stream`; does not wait."""
        ...

    def fill_later(self, pointer: int, byte: int, nbytes: int, stream: int, device: int) -> None:
        """Set device memory, behind the work of `stream`; does not wait."""
        ...

    def event(self, device: int) -> object:
        """An event without times."""
        ...

    def free_event(self, event: object, device: int) -> None:
        """Give back what `event` returned."""
        ...

    def record(self, event: object, stream: int, device: int) -> None:
        """Let `event` stand for the work that `stream` has so far."""
        ...

    def reached(self, event: object, device: int) -> bool:
        """Whether all work that a recorded event stands for is done; does not wait."""
        ...

    def capturing(self, stream: int, device: int) -> bool:
        """Whether work given to `stream` now would go into a graph, or break the capture of another stream."""
        ...


@dataclass(frozen=True, slots=True)
class Function:
    """A loaded kernel. `shared` is the dynamic shared memory of each launch, in bytes."""

    driver: Driver
    handle: object
    entry: str
    device: int
    shared: int

    def bind(self, grid: Dim3, block: Dim3, params: PackedArgs, *, pdl: bool = False) -> Launch:
        """A launch that takes only the stream handle; safe to capture, and safe to call from one thread at a time."""
        return self.driver.prepare(self.handle, self.device, grid, block, self.shared, params, pdl)

    def resident_blocks(self, threads: int) -> int:
        """The most blocks of so many threads that a multiprocessor runs at once; 0 where one block is too large for it."""
        return self.driver.resident_blocks(self.handle, threads, self.shared, self.device)

    def launch(self, grid: Dim3, block: Dim3, params: PackedArgs, stream: int, *, pdl: bool = False) -> None:
        """Launch once."""
        self.driver.prepare(self.handle, self.device, grid, block, self.shared, params, pdl)(stream)


def function(cubin: bytes, entry: str, shared: int = 0, *, device: int = 0, on: Driver | None = None) -> Function:
    """The kernel `entry` of `cubin` on `device`, loaded at most once per device and cubin content.

    Loading is forbidden while a stream of the process captures a graph: load or bind every kernel before capture, or
    the driver fails the capture (DeviceError). Raises DeviceError too if the cubin is for another architecture or
    `shared` bytes exceed what a block may have.
    """
    return _load(on or driver(), cubin, entry, shared, device)


@functools.lru_cache(maxsize=None)  # noqa: UP033 - bounded by the kernels a process launches; bytes cache their own hash
def _load(on: Driver, cubin: bytes, entry: str, shared: int, device: int) -> Function:
    handle = on.load(cubin, entry, device)
    if shared > _STATIC_SHARED_LIMIT:
        on.set_max_dynamic_shared(handle, shared, device)
    return Function(on, handle, entry, device, shared)


@functools.cache
def driver() -> Driver:
    """The process's CUDA driver, initialised on first use. Raises DeviceError where there is none, or no GPU."""
    return CudaDriver()


class CudaDriver:
    """Driver over cuda.bindings."""

    def __init__(self) -> None:
        try:
            api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DeviceError(
                f"cuda: {error}; device arrays need the cuda-bindings package; pip install cuda-python"
            ) from error
        self._api = api
        self._success: Any = api.CUresult.CUDA_SUCCESS
        self._contexts: dict[int, tuple[int, Any]] = {}
        self._capabilities: dict[int, tuple[int, int]] = {}
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # cuda.bindings, of a library that it cannot find or load
            raise DeviceError(
                "cuda: libcuda not found; device arrays need an NVIDIA GPU and its driver; host arrays run on the CPU "
                "machine"
            ) from error

    def current_device(self) -> int:
        result, device = self._api.cuCtxGetDevice()
        return int(device) if result == self._success else 0

    def capability(self, device: int) -> tuple[int, int]:
        found = self._capabilities.get(device)
        if found is None:
            names = self._api.CUdevice_attribute
            handle = self._call("cuDeviceGet", device)
            major = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
            minor = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
            found = self._capabilities[device] = (int(major), int(minor))
        return found

    def multiprocessors(self, device: int) -> int:
        name = self._api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(self._call("cuDeviceGetAttribute", name, self._call("cuDeviceGet", device)))

    def pointer_device(self, pointer: int) -> int:
        if not pointer:
            return self.current_device()
        ordinal = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(self._call("cuPointerGetAttribute", ordinal, pointer))

    def mapped(self, pointer: int, device: int) -> int:
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        return int(self._within(device, "cuPointerGetAttribute", attribute, pointer))

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        # A module and no library: cuModuleGetFunction loads the code now, cuLibraryLoadData would at the first launch.
        module = self._within(device, "cuModuleLoadData", cubin)
        handle = self._within(device, "cuModuleGetFunction", module, entry.encode())
        # The driver's own choice follows each kernel's shared memory, and a multiprocessor changes its division only when it is
        # empty: a small kernel before a large one would keep the large one's blocks from starting beside it. All kernels of a
        # step therefore ask for the same. L1 keeps what is left, 28 KB on sm_90; rows of caches are read once.
        names = self._api.CUfunction_attribute
        carveout, most = names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, self._api.CUshared_carveout
        self._within(device, "cuFuncSetAttribute", handle, carveout, int(most.CU_SHAREDMEM_CARVEOUT_MAX_SHARED))
        return handle

    def set_max_dynamic_shared(self, handle: object, nbytes: int, device: int) -> None:
        attribute = self._api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._within(device, "cuFuncSetAttribute", handle, attribute, nbytes)

    def resident_blocks(self, handle: object, threads: int, shared: int, device: int) -> int:
        return int(self._within(device, "cuOccupancyMaxActiveBlocksPerMultiprocessor", handle, threads, shared))

    def call_c(self, name: str, arguments: Sequence[Any], device: int) -> None:
        # Of the library that the bindings call, wherever they found it: a second look-up could find another one.
        pointer = self._call("cuGetProcAddress", name.encode(), _ABI, 0)
        if not pointer:
            raise DeviceError(f"{name}: not in this driver; update it to one of CUDA 12.0 or newer")
        function = ctypes.CFUNCTYPE(ctypes.c_int)(int(pointer))
        self._call("cuCtxPushCurrent", self._context(device)[1])
        try:
            result = self._api.CUresult(function(*arguments))
        finally:
            self._call("cuCtxPopCurrent")
        if result != self._success:
            raise self._error(name, result)

    def prepare(
        self, handle: object, device: int, grid: Dim3, block: Dim3, shared: int, params: PackedArgs, pdl: bool
    ) -> Launch:
        api = self._api
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared
        if pdl:
            config.attrs = [self._serialization]
            config.numAttrs = 1
        launch, get_current, success = api.cuLaunchKernelEx, api.cuCtxGetCurrent, self._success
        context, context_object = self._context(device)

        def step(stream: int) -> None:
            config.hStream = stream
            # The caller's context is the right one unless the process drives several GPUs.
            if int(get_current()[1]) == context:
                result = launch(config, handle, params.address, 0)[0]
            else:
                self._call("cuCtxPushCurrent", context_object)
                result = launch(config, handle, params.address, 0)[0]
                self._call("cuCtxPopCurrent")
            if result != success:
                raise self._error("cuLaunchKernelEx", result)

        return step

    def allocate(self, nbytes: int, device: int) -> int:
        return int(self._within(device, "cuMemAlloc", nbytes))

    def free(self, pointer: int, device: int) -> None:
        with self._beside_captures():  # the last reference may go at any time
            self._within(device, "cuMemFree", pointer)

    def write(self, pointer: int, data: bytes, device: int) -> None:
        self._within(device, "cuMemcpyHtoD", pointer, data, len(data))

    def read(self, pointer: int, nbytes: int, device: int) -> bytes:
        data = bytearray(nbytes)
        self._within(device, "cuMemcpyDtoH", data, pointer, nbytes)
        return bytes(data)

    def synchronize(self, stream: int, device: int) -> None:
        self._within(device, "cuStreamSynchronize", stream)

    def allocate_pinned(self, nbytes: int, device: int) -> int:
        return int(self._within(device, "cuMemHostAlloc", nbytes, 0))

    def free_pinned(self, pointer: int, device: int) -> None:
        with self._beside_captures():
            self._within(device, "cuMemFreeHost", pointer)

    def read_later(self, target: int, pointer: int, nbytes: int, stream: int, device: int) -> None:
        self._within(device, "cuMemcpyDtoHAsync", target, pointer, nbytes, stream)

    def fill_later(self, pointer: int, byte: int, nbytes: int, stream: int, device: int) -> None:
        self._within(device, "cuMemsetD8Async", pointer, byte, nbytes, stream)

    def event(self, device: int) -> object:
        untimed = self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING
        return self._within(device, "cuEventCreate", int(untimed))

    def free_event(self, event: object, device: int) -> None:
        with self._beside_captures():
            self._within(device, "cuEventDestroy", event)

    def record(self, event: object, stream: int, device: int) -> None:
        self._within(device, "cuEventRecord", event, stream)

    def reached(self, event: object, device: int) -> bool:
        with self._beside_captures():
            return self._query(device, _NOT_READY, "cuEventQuery", event) is not None

    def capturing(self, stream: int, device: int) -> bool:
        found = self._query(device, _CAPTURE_IMPLICIT, "cuStreamIsCapturing", stream)
        return found is None or found[0] != self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE

    @functools.cached_property
    def _serialization(self) -> Any:
        attribute = self._api.CUlaunchAttribute()
        attribute.id = self._api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        return attribute

    def _context(self, device: int) -> tuple[int, Any]:
        """The primary context of `device`, retained for good: as an address and as the driver's object."""
        found = self._contexts.get(device)
        if found is None:
            context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
            found = self._contexts[device] = (int(context), context)
        return found

    def _within(self, device: int, name: str, *arguments: object) -> Any:
        """A driver call in the primary context of `device`, the caller's context put back after it."""
        self._call("cuCtxPushCurrent", self._context(device)[1])
        try:
            return self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent")

    @contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Calls within break no capture, which most calls that may wait do to those of every thread."""
        relaxed = self._api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", mode)

    def _query(self, device: int, otherwise: int, name: str, *arguments: object) -> tuple[Any, ...] | None:
        """What a driver call gives in the primary context of `device`; None for the result `otherwise`, an answer too."""
        self._call("cuCtxPushCurrent", self._context(device)[1])
        try:
            result, *values = getattr(self._api, name)(*arguments)
        finally:
            self._call("cuCtxPopCurrent")
        if int(result) == otherwise:
            return None
        if result != self._success:
            raise self._error(name, result)
        return tuple(values)

    def _call(self, name: str, *arguments: object) -> Any:
        result, *values = getattr(self._api, name)(*arguments)
        if result != self._success:
            raise self._error(name, result)
        return values[0] if values else None

    def _error(self, name: str, result: Any) -> DeviceError:
        text = self._api.cuGetErrorString(result)[1]
        hint = _HINTS_OF.get((name, int(result)), _HINTS.get(int(result), ""))
        detail = f"{text.decode() if text else 'unknown error'}{'; ' + hint if hint else ''}"
        return DeviceError(f"{name}: got {getattr(result, 'name', result)}; {detail}")
