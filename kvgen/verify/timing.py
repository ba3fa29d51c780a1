"""The time of a kernel on a GPU in batches as servers have them, beside the fewest bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Call, span
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import LAYERS, Scene
from kvgen.cases.touched_bytes import SECTOR
from kvgen.cases.workload import Workload
from kvgen.errors import DeviceError
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.verify.bandwidth import FILLS, SCALE, SCALES, Fill
from kvgen.verify.device import SAMPLES, Gpu
from kvgen.verify.launch import kind_of
from kvgen.verify.memory import GpuArray, GpuBytes
from kvgen.verify.results import Timed

L2_MULTIPLE: Final = 4  # the bytes that the launches of a sample move, beside what L2 holds
COPIES_AT_MOST: Final = 32
Arrays = dict[str, Any]  # on the device, by name: one, or one a layer
Check = Callable[[Scene, Arrays, Arrays], None]  # of a scene, the tensors of its cache and the arguments of a launch
_INDICES: Final = ("u32", "i32", "i64", "u64")


@dataclass
class Timer:
    """Times the kernels of one set by `samples` graph replays; `read_gb_s` is the bandwidth that rates are compared with."""

    gpu: Gpu
    kernels: KernelSet
    package: ModuleType
    fill: Fill
    read_gb_s: float
    samples: int = SAMPLES
    _seed: int = 0

    def run(self, op: Op, work: Workload, check: Check | None = None) -> Timed:
        """One launch of an operation in a workload: the median of samples, each a graph of launches that rotate over memory
        of several times the L2 cache. An operation whose bytes kvgen bench does not count has no rate (0). Raises DeviceError,
        also where the device has too little memory. `check` looks at the last layer's arrays afterwards."""
        scene = Scene(self.kernels, self.package, work)
        cases = cases_of(op)
        call = cases.call(scene)
        least = self.least(op, work) if cases.counted else 0
        layers = 1 if call.launcher.KERNEL.all_layers else LAYERS
        each = _nbytes(scene) + layers * sum(a.nbytes for a in call.arrays.values())
        each += layers * sum(_nbytes(other.scene) for other in call.others.values())
        room = self.gpu.free_bytes() // 2 // max(each, 1)
        if room < 1:
            raise DeviceError(
                f"{self.kernels.name}/{op.name}: {work.name} takes {each} bytes; {self.gpu.free_bytes()} bytes of device "
                "memory are free, of which half may be taken"
            )
        wanted = -(-L2_MULTIPLE * self.gpu.l2_bytes // (max(least, 1) * layers))
        copies = max(1, min(wanted, COPIES_AT_MOST, room))
        kept: list[tuple[Arrays, Arrays]] = []
        launches = [launch for _ in range(copies) for launch in self._bound(call, kept)]
        timing = self.gpu.time(launches, samples=self.samples)
        if check is not None:
            check(scene, *kept[-1])
        rate = least / timing.median / 1e3
        return Timed(
            work.name,
            timing.median,
            timing.least,
            least,
            rate,
            100 * rate / self.read_gb_s,
            timing.launches,
            least * len(launches) >= L2_MULTIPLE * self.gpu.l2_bytes,
        )

    def least(self, op: Op, work: Workload) -> int:
        """The fewest bytes that an operation must move in a workload of requests that are all alike: those of one request,
        weights apart, times the requests."""
        one = Workload(work.name, work.totals[:1], work.new[:1], work.listed)
        if cases_of(op).pairs and len(work.totals) > 1:  # which need two pages
            one = Workload(work.name, work.totals[:2], work.new[:2], work.listed)
        scene = Scene(self.kernels, self.package, one)
        call = cases_of(op).call(scene)
        groups: dict[bool, int] = {True: 0, False: 0}
        for name, sectors in cases_of(op).minimum(call).items():
            groups[scene.group(name, call.launcher) == "weights"] += SECTOR * sectors
        return groups[True] + groups[False] * len(work.totals) // len(one.totals)

    def _bound(self, call: Call, kept: list[tuple[Arrays, Arrays]]) -> list[Any]:
        """A launch a layer, or one of all layers, over memory of its own: the pools and the arguments that `kept` gets."""
        launcher, cases = call.launcher, cases_of(call.op)
        pools = self._pools(call.scene)
        cache = self._cache(pools, self.package.Cache, call.tables)
        found = []
        for layer in range(1 if launcher.KERNEL.all_layers else LAYERS):
            given: Arrays = {name: self._argument(name, array) for name, array in call.arrays.items()}
            given |= call.numbers
            for name, other in call.others.items():
                kind = other.scene.package.Cache
                given[name] = self._cache(self._pools(other.scene), kind, other.tables)[layer]
            given = cases.planned(call, cache, given)
            kept.append((pools, given))
            found.append(launcher.bind(cache if launcher.KERNEL.all_layers else cache[layer], **given))
        return found

    def _pools(self, scene: Scene) -> Arrays:
        pools: Arrays = {}
        for name, pool in scene.pools.items():
            arrays = [self._random(name, a) for a in (pool if isinstance(pool, list) else [pool])]
            pools[name] = arrays if isinstance(pool, list) else arrays[0]
        return pools

    def _cache(self, pools: Arrays, kind: Any, tables: Mapping[str, NDArray[Any]]) -> Any:
        return kind(**pools, **{name: self._upload(a) for name, a in tables.items()})

    def _argument(self, name: str, array: NDArray[Any]) -> GpuArray:
        if kind_of(array) in _INDICES:
            return self._upload(array)
        return self._random(name, array)

    def _random(self, name: str, like: NDArray[Any]) -> GpuArray:
        """Random numbers, of scales small positive ones."""
        kind = kind_of(like)
        if kind not in FILLS:
            return self._upload(like)
        memory = GpuBytes(-(-span(like) // 4) * 4, self.gpu.ordinal)  # the fill writes words of 4 bytes
        self._seed += 1
        scale = name.endswith(("scale", "scales")) and kind in SCALES
        self.fill(memory, f"{SCALE}{kind}" if scale else kind, self._seed)
        return GpuArray(memory, memory.pointer, like.shape, kind, _strides(like))

    def _upload(self, host: NDArray[Any]) -> GpuArray:
        data = np.zeros(span(host), np.uint8)
        np.ndarray(host.shape, host.dtype, data.data, strides=host.strides)[...] = host
        memory = GpuBytes(len(data), self.gpu.ordinal)
        memory.write(data.tobytes())
        return GpuArray(memory, memory.pointer, host.shape, kind_of(host), _strides(host))


def _strides(array: NDArray[Any]) -> tuple[int, ...] | None:
    """The strides of an array with gaps between its pages; None where it has none."""
    return None if array.flags.c_contiguous else array.strides


def works(kernels: KernelSet, op: Op) -> list[Workload]:
    """The workloads that an operation is timed in; none where nobody knows its fewest bytes."""
    return cases_of(op).timed(kernels)


def _nbytes(scene: Scene) -> int:
    """Bytes that the tensors of a scene take, with the gaps between their pages."""
    return sum(span(a) for pool in scene.pools.values() for a in (pool if isinstance(pool, list) else [pool]))
