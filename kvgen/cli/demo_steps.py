"""The demo's batch: prompts of unequal length, then steps of one new token each, beside the float64 oracle."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from kvgen.architectures import HOPPER
from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Case, Contents
from kvgen.cases.operation import cases_of
from kvgen.cases.scene import LAYER, Scene, aligned
from kvgen.cases.workload import Workload
from kvgen.cli.console import tell
from kvgen.cli.progress import progress
from kvgen.cli.project import Project, generated
from kvgen.runtime import describe
from kvgen.schema.kernel_set import Op
from kvgen.verify.run import differences

if TYPE_CHECKING:
    from kvgen.runtime.cpu import Launched

PROMPTS: Final = (37, 5, 64, 18)
STEPS: Final = 3
_SECTOR: Final = 32  # bytes: what a GPU's memory moves at least
_ORDER: Final = ("seal", "append", "extend", "decode", "gather")  # of a step
_MEMORY: Final = ("kv", "scales", "input", "output")  # what an operation is about; tables are how it gets there

Raw = NDArray[Any]


@dataclass
class Outcome:
    """One kernel over the whole run: its rows, the largest difference from the oracle, the largest share of what
    rounding allows, the bytes its accesses move (None on a GPU, which does not count them) and the fewest possible."""

    kernel: str
    launches: int = 0
    rows: int = 0
    error: float = 0.0
    share: float = 0.0
    right: bool = True
    moved: int | None = None
    minimum: int = 0


class DeviceArray:
    """An array in a GPU's memory, with the CUDA array interface; freed with its last reference."""

    def __init__(self, host: Raw, device: int) -> None:
        from kvgen.runtime import cuda

        self._driver, self._device = cuda.driver(), device
        self.shape, self.dtype = host.shape, host.dtype
        self.pointer = self._driver.allocate(max(host.nbytes, 1), device)
        self.store(host)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._driver.free(self.pointer, self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer, False), "version": 3}

    def store(self, host: Raw) -> None:
        """Copy a host array of this one's shape to the device."""
        self._driver.write(self.pointer, host.tobytes(), self._device)

    def load(self) -> Raw:
        """A host copy."""
        size = math.prod(self.shape) * self.dtype.itemsize
        data = self._driver.read(self.pointer, size, self._device)
        return np.frombuffer(data, self.dtype).reshape(self.shape)


class _Memory:
    """Where the arrays live: host arrays for the CPU machine as they are, device copies for a GPU."""

    def __init__(self, gpu: int | None) -> None:
        self.gpu = gpu

    def put(self, host: Raw) -> Any:
        return host if self.gpu is None else DeviceArray(host, self.gpu)

    def copy(self, host: Raw) -> Any:
        """A copy that begins where a GPU's allocation would: the sectors that kernels touch are the same in every run."""
        placed = aligned(host.shape, host.dtype)
        placed[...] = host
        return self.put(placed)

    def get(self, array: Any) -> Raw:
        return array.load() if isinstance(array, DeviceArray) else np.asarray(array)


class _Batch:
    """Requests, their pages, the tensors that the kernels write and those that the oracle writes."""

    def __init__(self, scene: Scene, memory: _Memory) -> None:
        self.scene, self.memory, self.random = scene, memory, np.random.default_rng(0)
        for array in (a for name, a in self._arrays(scene.pools) if self._written(name)):
            array.view(np.uint8)[...] = 0xFF  # NaN as a number, and no code that a kernel writes everywhere
        self.tables = {name: array for name, array in scene.tables("seal").items() if name.endswith("_sealed")}
        self.pools = self._placed(scene.pools)
        self.counts = {name: memory.copy(array) for name, array in self.tables.items()}

    def _arrays(self, pools: dict[str, Any]) -> list[tuple[str, Raw]]:
        return [(n, a) for n, pool in pools.items() for a in (pool if isinstance(pool, list) else [pool])]

    def _written(self, name: str) -> bool:
        return any(t.writes for t in self.scene.package.Cache.TENSORS if t.name == name)

    def _placed(self, pools: dict[str, Any]) -> dict[str, Any]:
        """The kernels' tensors: copies of the oracle's."""

        def put(array: Raw) -> Any:
            found = self.memory.put(aligned(array.shape, array.dtype))
            if isinstance(found, DeviceArray):
                found.store(array)
            else:
                found[...] = array
            return found

        return {n: [put(a) for a in pool] if isinstance(pool, list) else put(pool) for n, pool in pools.items()}

    def values(self, name: str, like: Raw) -> Raw:
        """Random values of an array's shape and type; of a table of angles cosines, and of a scale one below 1."""
        found = self.random.standard_normal(like.shape)
        found = {"cos_sin": np.cos(found), "q_scale": np.full(like.shape, 0.37)}.get(name, found)
        return found.astype(like.dtype)

    def cache(self, tables: dict[str, Raw]) -> Any:
        """The generated cache, over the tables of this step."""
        placed = {name: self.memory.copy(array) for name, array in tables.items()} | self.counts
        return self.scene.package.Cache(**self.pools, **placed)

    def left(self, tables: dict[str, Raw], arrays: dict[str, Raw]) -> Contents:
        """The memory after a launch with these tables and arrays, on the host."""
        get = self.memory.get
        pools = {n: [get(a) for a in p] if isinstance(p, list) else get(p) for n, p in self.pools.items()}
        return Contents(pools, tables | {name: get(array) for name, array in self.counts.items()}, arrays)

    def take(self, wanted: Contents) -> None:
        """Copy the oracle's tensors into the batch's, where the next launch finds them."""
        kept, found = self._arrays(self.scene.pools), self._arrays(wanted.pools)
        for (_, mine), (_, array) in zip(kept, found, strict=True):
            mine.view(np.uint8)[...] = array.view(np.uint8)
        self.tables = {name: wanted.tables[name] for name in self.tables}


def run(project: Project, name: str, gpu: int | None) -> list[Outcome]:
    """The whole batch on a GPU (its ordinal) or the CPU machine (None); one Outcome a kernel.

    Any set of the cache family: prompts, then steps of one token, each sealed where the cache has a tail, appended and
    attended to, prompts by extend and steps by decode; at the end everything is gathered.
    """
    from kvgen.runtime.cpu import machine

    where = "the CPU machine (the compiled PTX, every access checked)" if gpu is None else f"GPU {gpu}"
    prompts = ", ".join(map(str, PROMPTS))
    tell(f"run       on {where}: prompts of {prompts} tokens, then {STEPS} steps of one token each", indent=10)
    kernels = next(s.kernels for s in project.sets if s.kernels.name == name)
    ops = {kind: [op for op in kernels.ops if op.kind == kind and not _other_form(op)] for kind in _ORDER}
    outcomes = {op.name: Outcome(op.name) for kind in _ORDER for op in ops[kind]}
    arch = HOPPER if gpu is None and HOPPER in kernels.arch else None
    room = [prompt + STEPS for prompt in PROMPTS]
    with ExitStack() as stack:
        module = stack.enter_context(generated(project.config.out, name))
        log = stack.enter_context(machine(arch=arch, mode="check"))
        batch = _Batch(Scene(kernels, module, Workload("prompts", PROMPTS, PROMPTS), room), _Memory(gpu))
        stored = (*ops["seal"], *ops["append"])
        launches = (STEPS + 1) * len(stored) + len(ops["extend"]) + STEPS * len(ops["decode"]) + len(ops["gather"])
        done = stack.enter_context(progress("running", launches))
        for step in range(STEPS + 1):
            new = PROMPTS if step == 0 else (1,) * len(PROMPTS)
            totals = tuple(prompt + step for prompt in PROMPTS)
            scene = batch.scene.at(Workload(f"step {step}", totals, new))
            for op in (*stored, *ops["decode" if step else "extend"]):
                done.at(f"{name}/{op.name}")
                _one(batch, scene, op, outcomes[op.name])
                done()
        for op in ops["gather"]:
            done.at(f"{name}/{op.name}")
            _one(batch, scene, op, outcomes[op.name])
            done()
        if gpu is None:
            _count(log.launches, name, list(outcomes.values()))
    return list(outcomes.values())


def _other_form(op: Op) -> bool:
    """True: it is another append, which would store the same rows again, or a gather of codes."""
    return getattr(op, "rows", "") == "slots" or bool(getattr(op, "raw", False))


def _one(batch: _Batch, scene: Scene, op: Op, outcome: Outcome) -> None:
    """One launch of an operation: random inputs, the kernel and the oracle on them, and what they differ in."""
    cases, memory = cases_of(op), batch.memory
    call = cases.call(scene)
    tables = {name: array for name, array in call.tables.items() if name not in batch.tables}
    arrays = {name: np.array(array) for name, array in call.arrays.items()}
    for name, array in arrays.items():
        if scene.group(name, call.launcher) in ("input", "weights"):
            array[...] = batch.values(name, array)
    arrays["errors"] = np.zeros(1, np.uint64)
    before = Contents(batch.scene.pools, tables | batch.tables, arrays)
    placed = {name: memory.copy(array) for name, array in arrays.items()}
    cache = batch.cache(tables)
    call.launcher(cache[LAYER], **cases.planned(call, cache, placed))
    outcome.launches += 1
    outcome.rows += call.rows
    least = cases.minimum(call)
    outcome.minimum += _SECTOR * sum(n for b, n in least.items() if scene.group(b, call.launcher) in _MEMORY)
    left = {name: memory.get(array) for name, array in placed.items()}
    comparison = Comparison(Case("", "", call, before, dict(call.numbers)), before.copy(), batch.left(tables, left))
    comparison.wanted.arrays["errors"][0] = cases.compare(comparison)
    batch.take(comparison.wanted)
    outcome.error = max(outcome.error, comparison.distance.error)
    outcome.share = max(outcome.share, comparison.distance.share)
    outcome.right &= not (comparison.wrong or differences(comparison))
    outcome.right &= _quiet(left["errors"], outcome.kernel)


def _quiet(word: Raw, kernel: str) -> bool:
    """True: a kernel reported nothing. A report goes to stderr."""
    report = describe(word)
    if report is not None:
        typer.secho(f"{kernel} reported {report}", fg="red", err=True)
    return report is None


def _count(launches: list[Launched], name: str, outcomes: list[Outcome]) -> None:
    """Add up the 32-byte sectors that the kernels' accesses touched, as the CPU machine counted them."""
    for launched in launches:
        sectors = sum(
            b.load_sectors + b.store_sectors + b.atomic_sectors for b in launched.counters.per_buffer.values()
        )
        for outcome in outcomes:
            if launched.entry == f"{name}_{outcome.kernel}":
                outcome.moved = (outcome.moved or 0) + _SECTOR * sectors
