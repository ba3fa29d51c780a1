"""The time of a kernel on a GPU in batches as servers have them, beside the fewest bytes that it must move."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.bench import Scene, Workload, call_of, minimum_sectors
from kvgen.bench.calls import KNOWN, Call
from kvgen.bench.measure import planned
from kvgen.bench.synthetic_batch import LAYERS, STEP
from kvgen.bench.touched_bytes import SECTOR
from kvgen.errors import DeviceError
from kvgen.lowering.lowered import lower
from kvgen.ops import Convert
from kvgen.spec.kernel_set import KernelSet, Op
from kvgen.verify.bandwidth import FILLS, SCALE, SCALES, Fill
from kvgen.verify.device import Gpu
from kvgen.verify.launch import kind_of
from kvgen.verify.memory import GpuArray, GpuBytes
from kvgen.verify.results import Timed

L2_MULTIPLE: Final = 4  # the bytes that the launches of a sample move, beside what L2 holds
COPIES_AT_MOST: Final = 32
STEPS: Final = ((128, 1024, 1), (1, 4096, 4096))  # requests, tokens of each, new ones
READS: Final = (32, 2048)
_INDICES: Final = ("u32", "i32", "i64", "u64")


@dataclass
class Timer:
    """Times the kernels of one set; `read_gb_s` is the bandwidth that rates are compared with."""

    gpu: Gpu
    kernels: KernelSet
    package: ModuleType
    fill: Fill
    read_gb_s: float
    _seed: int = 0

    def works(self, op: Op) -> list[Workload]:
        """The workloads of an operation: a decode step and a prompt for what stores new tokens, else a batch that is read, or a
        batch of states. Empty where kvgen bench does not know the operation."""
        if op.kind not in KNOWN:
            return []
        if self.kernels.cache.states:
            ones = (1,) * READS[0]
            return [Workload(f"{len(ones)} states", ones, ones)]
        lowered = lower(self.kernels.kv)
        most = self.kernels.kv.page_tokens if lowered.kind.one_page else None
        if op.kind not in STEP:
            batch, tokens = READS
            fits = tokens if most is None else min(tokens, most)
            return [Workload(f"{batch} x {fits}", (fits,) * batch, (1,) * batch)]
        found = []
        for batch, tokens, new in STEPS:
            fits = tokens if most is None else min(tokens, most)
            found.append(Workload.uniform(batch, fits, min(new, fits)))
        return found

    def run(self, op: Op, work: Workload) -> Timed:
        """One launch of an operation in a workload: the median of samples, each a graph of launches that rotate over memory
        of several times the L2 cache. Raises DeviceError, also where the device has too little memory."""
        scene = Scene(self.kernels, self.package, work)
        call, least = call_of(scene, op), self.least(op, work)
        layers = 1 if call.launcher.KERNEL.all_layers else LAYERS
        each = sum(a.nbytes for a in _tensors(scene)) + layers * sum(a.nbytes for a in call.arrays.values())
        if call.source is not None:
            each += layers * sum(a.nbytes for a in _tensors(call.source))
        each += layers * sum(a.nbytes for its in call.keys.values() for a in _tensors(its))
        room = self.gpu.free_bytes() // 2 // max(each, 1)
        if room < 1:
            raise DeviceError(
                f"{self.kernels.name}/{op.name}: {work.name} takes {each} bytes; {self.gpu.free_bytes()} bytes of device "
                "memory are free, of which half may be taken"
            )
        wanted = -(-L2_MULTIPLE * self.gpu.l2_bytes // (max(least, 1) * layers))
        copies = max(1, min(wanted, COPIES_AT_MOST, room))
        kept: list[object] = []
        launches = [launch for _ in range(copies) for launch in self._bound(scene, call, kept)]
        timing = self.gpu.time(launches)
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
        one = Workload(work.name, work.totals[:1], work.new[:1])
        pair = op.kind == "copy_pages" and len(work.totals) > 1
        if pair:  # a copy needs two pages
            one = Workload(work.name, work.totals[:2], work.new[:2])
        scene = Scene(self.kernels, self.package, one)
        call = call_of(scene, op)
        groups: dict[bool, int] = {True: 0, False: 0}
        for name, sectors in minimum_sectors(scene, call).items():
            groups[scene.group(name, call.launcher) == "weights"] += SECTOR * sectors
        return groups[True] + groups[False] * len(work.totals) // len(one.totals)

    def _bound(self, scene: Scene, call: Call, kept: list[object]) -> list[Any]:
        """A launch a layer, or one of all layers, over memory of its own."""
        launcher = call.launcher
        cache = self._cache(scene, self.package.Cache, call.counted_as, call.rows_each)
        kept.append(cache)
        found = []
        for layer in range(1 if launcher.KERNEL.all_layers else LAYERS):
            given: dict[str, Any] = {name: self._argument(call, name, array) for name, array in call.arrays.items()}
            given |= call.numbers
            if isinstance(call.op, Convert) and call.source is not None:
                source = getattr(self.package, call.op.source_class)
                given["source"] = self._cache(call.source, source, call.kind, 1)[layer]
            for name, its in call.keys.items():
                given[name] = its.package.Cache(**self._pools(its))[layer]
            if hasattr(launcher, "workspace"):
                given = planned(launcher, cache[layer], call.rows, given)
            kept.append(given)
            found.append(launcher.bind(cache if launcher.KERNEL.all_layers else cache[layer], **given))
        return found

    def _pools(self, scene: Scene) -> dict[str, object]:
        pools: dict[str, object] = {}
        for name, pool in scene.pools.items():
            arrays = [self._random(name, a) for a in (pool if isinstance(pool, list) else [pool])]
            pools[name] = arrays if isinstance(pool, list) else arrays[0]
        return pools

    def _cache(self, scene: Scene, kind: Any, op: str, rows: int) -> Any:
        return kind(**self._pools(scene), **{name: self._upload(a) for name, a in scene.tables(op, rows).items()})

    def _argument(self, call: Call, name: str, array: NDArray[Any]) -> GpuArray:
        if kind_of(array) in _INDICES:
            return self._upload(array)
        spec = next(p for p in call.launcher.KERNEL.arguments if p.name == name)
        return self._random(name, array, typed=spec.access == "out")

    def _random(self, name: str, like: NDArray[Any], *, typed: bool = False) -> GpuArray:
        """Random numbers, of scales small positive ones."""
        kind = kind_of(like)
        if kind not in FILLS:
            return self._upload(like)
        memory = GpuBytes(-(-like.nbytes // 4) * 4, self.gpu.ordinal)  # the fill writes words of 4 bytes
        self._seed += 1
        scale = name.endswith(("scale", "scales")) and kind in SCALES
        self.fill(memory, f"{SCALE}{kind}" if scale else kind, self._seed)
        return GpuArray(memory, memory.pointer, like.shape, kind, typed=typed)

    def _upload(self, host: NDArray[Any]) -> GpuArray:
        memory = GpuBytes(host.nbytes, self.gpu.ordinal)
        memory.write(np.ascontiguousarray(host).tobytes())
        return GpuArray(memory, memory.pointer, host.shape, kind_of(host))


def _tensors(scene: Scene) -> list[NDArray[Any]]:
    """The arrays of all tensors."""
    return [a for pool in scene.pools.values() for a in (pool if isinstance(pool, list) else [pool])]
