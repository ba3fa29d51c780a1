"""The demo's batch: prompts of unequal length, then steps of one new token each, beside the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from kvgen.cli.project import Project, generated
from kvgen.dtypes import dtype
from kvgen.reference import TableView, append, cache_rows, decode, gather
from kvgen.runtime import clear, describe
from kvgen.spec.cache import Paged

if TYPE_CHECKING:
    from kvgen.runtime.cpu import Launched

PROMPTS: Final = (37, 5, 64, 18)
STEPS: Final = 3
LAYERS: Final = 2
LAYER: Final = 1
_SPARE_PAGES: Final = 5
_SECTOR: Final = 32  # bytes: what a GPU's memory moves at least

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

    def get(self, array: Any) -> Raw:
        return array.load() if isinstance(array, DeviceArray) else np.asarray(array)


class _Batch:
    """Requests, their pages, the pool the kernels write and the pool the oracle writes."""

    def __init__(self, project: Project, name: str, memory: _Memory) -> None:
        self.kernels = next(s.kernels for s in project.sets if s.kernels.name == name)
        cache = self.kernels.cache
        assert isinstance(cache, Paged)
        self.cache, self.memory, self.random = cache, memory, np.random.default_rng(0)
        self.kind = dtype(cache.dtype).numpy()
        requests, size = len(PROMPTS), cache.page_size
        columns = [-(-(prompt + STEPS) // size) for prompt in PROMPTS]
        self.pages = sum(columns) + _SPARE_PAGES
        ids = iter(self.random.permutation(self.pages))
        self.table = np.full((requests, max(columns)), 2**32 - 1, np.uint32)  # entries past a request's end are poison
        for row, count in zip(self.table, columns, strict=True):
            row[:count] = [next(ids) for _ in range(count)]
        self.lengths = np.zeros(requests, np.uint32)
        shape = (self.pages, 2, LAYERS, size, cache.kv_heads, cache.head_dim)
        self.expected = np.full(shape, np.nan, self.kind)
        self.pool = memory.put(self.expected.copy())

    def values(self, *shape: int) -> Raw:
        """Random values of the cache's type."""
        return self.random.standard_normal(shape).astype(self.kind)

    @property
    def view(self) -> TableView:
        """The oracle's page table, at this step."""
        tables = {"lengths": self.lengths, "page_table": self.table}
        return TableView(self.cache, tables, self.pages, self.cache.page_size)

    def layer(self, module: ModuleType) -> Any:
        """The generated cache's layer, over the lengths of this step."""
        put = self.memory.put
        cache = module.Cache(self.pool, lengths=put(self.lengths.copy()), page_table=put(self.table))
        return cache[LAYER]


def run(project: Project, name: str, gpu: int | None) -> list[Outcome]:
    """The whole batch on a GPU (its ordinal) or the CPU machine (None); one Outcome a kernel."""
    from kvgen.runtime.cpu import machine

    batch = _Batch(project, name, _Memory(gpu))
    where = "the CPU machine (the compiled PTX, every access checked)" if gpu is None else f"GPU {gpu}"
    prompts = ", ".join(map(str, PROMPTS))
    typer.echo(f"run       on {where}: prompts of {prompts} tokens, then {STEPS} steps of one token each")
    outcomes = [Outcome("append"), Outcome("decode"), Outcome("gather")]
    with (
        generated(project.config.out, name) as module,
        machine(arch=None if gpu is not None else "sm_90a", mode="check") as log,
    ):
        for step in range(STEPS + 1):
            counts = PROMPTS if step == 0 else (1,) * len(PROMPTS)
            layer = batch.layer(module)
            _append(batch, module, layer, counts, outcomes[0])
            if step:
                _decode(batch, module, layer, outcomes[1])
            batch.lengths += np.array(counts, np.uint32)
        _gather(batch, module, batch.layer(module), outcomes[2])
        if gpu is None:
            _count(log.launches, outcomes)
    return outcomes


def _append(batch: _Batch, module: ModuleType, layer: Any, counts: tuple[int, ...], outcome: Outcome) -> None:
    """Store the step's rows and compare the whole pool with the oracle's, byte for byte."""
    put, get, cache = batch.memory.put, batch.memory.get, batch.cache
    offsets = np.cumsum([0, *counts]).astype(np.uint32)
    rows = int(offsets[-1])
    k, v = (batch.values(rows, cache.kv_heads, cache.head_dim) for _ in range(2))
    word = _cleared()
    errors = put(word)
    module.append(layer, put(k), put(v), put(offsets), errors=errors)
    append(batch.view, cache_rows(cache, [batch.expected], LAYER), [k, v], row_offsets=offsets)
    got = get(batch.pool)
    outcome.launches += 1
    outcome.rows += rows
    outcome.minimum += 2 * (k.nbytes + v.nbytes)  # read from the rows, written to the pool
    _compare_bytes(got, batch.expected, outcome)
    outcome.right &= _quiet(get(errors), outcome.kernel)


def _decode(batch: _Batch, module: ModuleType, layer: Any, outcome: Outcome) -> None:
    """Attend with one query row a request; compare with float64, allowing for the rounding of the result."""
    put, get, cache = batch.memory.put, batch.memory.get, batch.cache
    requests, heads = len(PROMPTS), batch.kernels.q_heads
    q = batch.values(requests, heads, cache.head_dim)
    out, errors = put(np.zeros((requests, heads, cache.v_dim), batch.kind)), put(_cleared())
    lse = put(np.zeros((requests, heads), np.float32))
    module.decode(layer, put(q), out, lse=lse, errors=errors)
    wanted = decode(batch.view, cache_rows(cache, [batch.expected], LAYER), q)
    error = np.abs(get(out).astype(np.float64) - wanted.out)
    # Half a unit in bf16's last place for the result, and what float32 may lose in scores and sums of this size.
    allowed = 2.0**-8 * np.abs(wanted.out) + 2.0**-14
    outcome.launches += 1
    outcome.rows += requests
    tokens = int(batch.lengths.sum()) + requests
    row = cache.kv_heads * (cache.head_dim + cache.v_dim) * batch.kind.itemsize
    outcome.minimum += tokens * row + q.nbytes + wanted.out.size * batch.kind.itemsize + wanted.lse.size * 4
    outcome.error = max(outcome.error, float(error.max()))
    outcome.share = max(outcome.share, float((error / allowed).max()))
    outcome.right &= bool((error <= allowed).all()) and bool((np.abs(get(lse) - wanted.lse) <= 1e-4).all())
    outcome.right &= _quiet(get(errors), outcome.kernel)


def _gather(batch: _Batch, module: ModuleType, layer: Any, outcome: Outcome) -> None:
    """Read every token back in order and compare with the oracle's, byte for byte."""
    put, get, cache = batch.memory.put, batch.memory.get, batch.cache
    offsets = np.cumsum([0, *batch.lengths]).astype(np.uint32)
    rows = int(offsets[-1])
    blank = [np.zeros((rows, cache.kv_heads, cache.head_dim), batch.kind) for _ in range(2)]
    outputs, errors = [put(array.copy()) for array in blank], put(_cleared())
    module.gather(layer, put(offsets), *outputs, errors=errors)
    wanted = gather(batch.view, cache_rows(cache, [batch.expected], LAYER), blank, row_offsets=offsets)
    outcome.launches += 1
    outcome.rows += rows
    outcome.minimum += 2 * sum(array.nbytes for array in blank)
    for output, right in zip(outputs, wanted.outputs, strict=True):
        _compare_bytes(get(output), right, outcome)
    outcome.right &= _quiet(get(errors), outcome.kernel)


def _compare_bytes(got: Raw, wanted: Raw, outcome: Outcome) -> None:
    if got.tobytes() != wanted.tobytes():
        off = np.abs(np.nan_to_num(got.astype(np.float64)) - np.nan_to_num(wanted.astype(np.float64)))
        outcome.error, outcome.right = max(outcome.error, float(off.max())), False


def _cleared() -> Raw:
    word = np.zeros(1, np.uint64)
    clear(word)
    return word


def _quiet(word: Raw, kernel: str) -> bool:
    """Whether a kernel reported nothing; says what it did."""
    report = describe(word)
    if report is not None:
        typer.secho(f"{kernel} reported {report}", fg="red", err=True)
    return report is None


def _count(launches: list[Launched], outcomes: list[Outcome]) -> None:
    """Add up the 32-byte sectors that the kernels' accesses touched, as the CPU machine counted them."""
    for launched in launches:
        sectors = sum(
            b.load_sectors + b.store_sectors + b.atomic_sectors for b in launched.counters.per_buffer.values()
        )
        for outcome in outcomes:
            if launched.entry.endswith(f"_{outcome.kernel}"):
                outcome.moved = (outcome.moved or 0) + _SECTOR * sectors
