"""Where probes run: the CPU machine, or a GPU through the driver. The same launch, argument for argument."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import numpy as np

from kvgen.runtime import cuda, packing
from kvgen.runtime.tensor_map import encode_tiled
from tests.golden_gpu.numbers import Array
from tests.golden_gpu.probe import Probe, TensorMap

if TYPE_CHECKING:
    from kvgen.emulator import Library

Schedule = Literal["ascending", "descending"] | int

_MAP_TYPES: Final = {
    "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64",
    "f16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "bf16": "BFLOAT16",
}  # fmt: skip


class Backend(Protocol):
    """Runs probes."""

    def run(self, probe: Probe, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Launch with copies of `arrays`; all of them as they are afterwards."""
        ...


def _packed(probe: Probe, addresses: Mapping[str, int], encode: Any) -> packing.PackedArgs:
    """The parameters: the head, pointers to the arrays, the tail."""
    kinds: list[packing.ParamKind] = []
    values: list[packing.Value] = []
    pointers = [address for name, address in addresses.items() if name not in probe.unpassed]
    for item in (*probe.head, *pointers, *probe.tail):
        if isinstance(item, int):
            kinds.append("ptr")
            values.append(item)
        elif isinstance(item, TensorMap):
            kinds.append(packing.TENSOR_MAP)
            values.append(encode(item, addresses[item.array] + item.offset))
        else:
            kinds.append("u32" if len(item) == 4 else "u64")
            values.append(int.from_bytes(item, "little"))
    return packing.PackedArgs(kinds, values)


class CpuBackend:
    """The CPU machine, in check mode; `ptx` by translation unit, each built when a probe of it first runs."""

    def __init__(self, ptx: Mapping[str, str], *, cache_dir: Path | None = None) -> None:
        self._ptx, self._cache_dir = ptx, cache_dir
        self._built: dict[str, Library] = {}
        self.schedule: Schedule = "ascending"

    def run(self, probe: Probe, arrays: Mapping[str, Array]) -> dict[str, Array]:
        from kvgen.emulator import Buffer, build

        if probe.unit not in self._built:
            self._built[probe.unit] = build([self._ptx[probe.unit]], mode="check", cache_dir=self._cache_dir)
        placed = {name: _aligned(array) for name, array in arrays.items()}
        args = _packed(probe, {name: a.ctypes.data for name, a in placed.items()}, self._encode)
        self._built[probe.unit].kernels[probe.kernel].launch(
            probe.grid,
            (probe.block, 1, 1),
            args.bytes_list(),
            dynamic_shared=probe.shared,
            buffers=[Buffer(name, a.ctypes.data, a.nbytes, True) for name, a in placed.items()],
            schedule=self.schedule,
        )
        return placed

    @staticmethod
    def _encode(wanted: TensorMap, address: int) -> bytes:
        from kvgen import emulator

        element = _MAP_TYPES[wanted.dtype].lower()
        fill: Any = "nan" if wanted.nan_fill else "zero"
        return emulator.TensorMap(
            element, address, wanted.dims, wanted.strides, wanted.box, swizzle=wanted.swizzle, oob_fill=fill
        ).encode()


def _aligned(array: Array) -> Array:
    """A copy at a multiple of 256, where a GPU allocates."""
    raw = np.zeros(array.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class GpuBackend:
    """One GPU; `cubins` by translation unit."""

    def __init__(self, cubins: Mapping[str, bytes], ordinal: int = 0) -> None:
        self._cubins, self._ordinal = cubins, ordinal
        self._driver = cuda.driver()
        self._api: Any = importlib.import_module("cuda.bindings.driver")
        self._driver.free(self._driver.allocate(256, ordinal), ordinal)  # a context, before anything can fail

    def name(self) -> str:
        """The device, as a file name: nvidia_h200."""
        result, text = self._api.cuDeviceGetName(128, self._api.cuDeviceGet(self._ordinal)[1])
        assert int(result) == 0, result
        return "_".join(bytes(text).split(b"\0")[0].decode().lower().split())

    def run(self, probe: Probe, arrays: Mapping[str, Array]) -> dict[str, Array]:
        driver, device = self._driver, self._ordinal
        pointers = {name: driver.allocate(max(a.nbytes, 16), device) for name, a in arrays.items()}
        try:
            for name, array in arrays.items():
                driver.write(pointers[name], array.tobytes(), device)
            args = _packed(probe, pointers, self._encode)
            function = cuda.function(self._cubins[probe.unit], probe.kernel, probe.shared, device=device)
            function.launch(probe.grid, (probe.block, 1, 1), args, 0)
            driver.synchronize(0, device)
            found = {name: driver.read(pointers[name], a.nbytes, device) for name, a in arrays.items()}
        finally:
            for pointer in pointers.values():
                driver.free(pointer, device)
        return {n: np.frombuffer(found[n], a.dtype).reshape(a.shape).copy() for n, a in arrays.items()}

    def _encode(self, wanted: TensorMap, pointer: int) -> bytes:
        return encode_tiled(
            self._ordinal, _MAP_TYPES[wanted.dtype], pointer, wanted.dims, wanted.strides, wanted.box,
            swizzle=wanted.swizzle, oob_fill="nan" if wanted.nan_fill else "zero",
        )  # fmt: skip
