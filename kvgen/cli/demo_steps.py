"""The demo's batch: prompts of unequal length, then steps of one new token each, beside the float64 oracle."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from kvgen.bench import Call, Scene, Workload, call_of, minimum_sectors
from kvgen.bench.measure import planned
from kvgen.bench.step import Step
from kvgen.bench.synthetic_batch import LAYER, aligned
from kvgen.bench.tolerance import Distance, compare_rows, take_row
from kvgen.cli.progress import progress
from kvgen.cli.project import Project, generated
from kvgen.ops import Decode
from kvgen.reference import Decoded, Rows, TableView, cache_rows, decode, gather, seal
from kvgen.reference.append import locate
from kvgen.runtime import describe
from kvgen.spec.kernel_set import Op

if TYPE_CHECKING:
    from kvgen.runtime.cpu import Launched

PROMPTS: Final = (37, 5, 64, 18)
STEPS: Final = 3
_ARCH: Final = "sm_90a"  # what the CPU machine runs, where the set has it
_SECTOR: Final = 32  # bytes: what a GPU's memory moves at least
_ORDER: Final = ("seal", "append", "decode", "gather")  # of a step
_MEMORY: Final = ("kv", "scales", "input", "output")  # what an operation is about; tables are how it gets there
_HALF_ULP: Final = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "e4m3": 2.0**-4}

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

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The oracle's K and V."""
        return cache_rows(self.scene.kv, {**self.scene.pools, **self.tables}, LAYER)

    @property
    def stored(self) -> tuple[Rows, ...]:
        """The kernels' K and V; on a GPU, a copy of them."""
        found = {**self.pools, **self.counts}
        get = self.memory.get
        arrays = {n: [get(a) for a in pool] if isinstance(pool, list) else get(pool) for n, pool in found.items()}
        return cache_rows(self.scene.kv, arrays, LAYER)

    def layer(self, tables: dict[str, Raw]) -> Any:
        """The generated cache's layer, over the tables of this step."""
        placed = {name: self.memory.copy(array) for name, array in tables.items()} | self.counts
        return self.scene.package.Cache(**self.pools, **placed)[LAYER]

    def same(self, outcome: Outcome) -> None:
        """Compare every tensor with the oracle's, byte for byte."""
        for name, mine in (*self.pools.items(), *self.counts.items()):
            right = self.tables[name] if name in self.tables else self.scene.pools[name]
            pairs = zip(mine, right, strict=True) if isinstance(mine, list) else [(mine, right)]
            for got, wanted in pairs:
                _compare_bytes(self.memory.get(got), np.asarray(wanted), outcome)


def run(project: Project, name: str, gpu: int | None) -> list[Outcome]:
    """The whole batch on a GPU (its ordinal) or the CPU machine (None); one Outcome a kernel.

    Any set of the cache family: prompts, then steps of one token, each sealed where the cache has a tail, appended and
    attended to; at the end everything is gathered.
    """
    from kvgen.runtime.cpu import machine

    where = "the CPU machine (the compiled PTX, every access checked)" if gpu is None else f"GPU {gpu}"
    prompts = ", ".join(map(str, PROMPTS))
    typer.echo(f"run       on {where}: prompts of {prompts} tokens, then {STEPS} steps of one token each")
    kernels = next(s.kernels for s in project.sets if s.kernels.name == name)
    ops = {kind: [op for op in kernels.ops if op.kind == kind and not _other_form(op)] for kind in _ORDER}
    outcomes = {op.name: Outcome(op.name) for kind in _ORDER for op in ops[kind]}
    arch = _ARCH if gpu is None and _ARCH in kernels.arch else None
    room = [prompt + STEPS for prompt in PROMPTS]
    with ExitStack() as stack:
        module = stack.enter_context(generated(project.config.out, name))
        log = stack.enter_context(machine(arch=arch, mode="check"))
        batch = _Batch(Scene(kernels, module, Workload("prompts", PROMPTS, PROMPTS), room), _Memory(gpu))
        stored = (*ops["seal"], *ops["append"])
        launches = (STEPS + 1) * len(stored) + STEPS * len(ops["decode"]) + len(ops["gather"])
        done = stack.enter_context(progress("running", launches))
        for step in range(STEPS + 1):
            new = PROMPTS if step == 0 else (1,) * len(PROMPTS)
            totals = tuple(prompt + step for prompt in PROMPTS)
            scene = batch.scene.at(Workload(f"step {step}", totals, new))
            for op in (*stored, *(ops["decode"] if step else ())):
                _one(batch, scene, op, outcomes[op.name])
                done()
        for op in ops["gather"]:
            _one(batch, scene, op, outcomes[op.name])
            done()
        if gpu is None:
            _count(log.launches, name, list(outcomes.values()))
    return list(outcomes.values())


def _other_form(op: Op) -> bool:
    """Whether it is another append, which would store the same rows again, or a gather of codes."""
    return getattr(op, "rows", "") == "slots" or bool(getattr(op, "raw", False))


def _one(batch: _Batch, scene: Scene, op: Op, outcome: Outcome) -> None:
    """One launch of an operation: random inputs, the kernel and the oracle on them, and what they differ in."""
    call, memory = call_of(scene, op), batch.memory
    tables = scene.tables(op.kind, call.rows_each)
    tables = {name: array for name, array in tables.items() if name not in batch.tables}
    arrays = {name: np.array(array) for name, array in call.arrays.items()}
    for name, array in arrays.items():
        if scene.group(name, call.launcher) in ("input", "weights"):
            array[...] = batch.values(name, array)
    arrays["errors"] = np.zeros(1, np.uint64)
    placed = {name: memory.copy(array) for name, array in arrays.items()}
    layer = batch.layer(tables)
    given = planned(call.launcher, layer, call.rows, placed) if hasattr(call.launcher, "workspace") else placed
    call.launcher(layer, **given)
    got = {name: memory.get(placed[name]) for name in arrays}
    outcome.launches += 1
    outcome.rows += call.rows
    least = minimum_sectors(scene, call)
    outcome.minimum += _SECTOR * sum(n for b, n in least.items() if scene.group(b, call.launcher) in _MEMORY)
    _hold(batch, scene, call, tables, arrays, got, outcome)
    outcome.right &= _quiet(got["errors"], outcome.kernel)


def _hold(
    batch: _Batch,
    scene: Scene,
    call: Call,
    tables: dict[str, Raw],
    given: dict[str, Raw],
    got: dict[str, Raw],
    outcome: Outcome,
) -> None:
    """Run the oracle on what the kernel was given; compare outputs and every tensor of the cache."""
    view = scene.view(tables)
    if call.kind == "seal":
        seal(view, batch.rows, [given["k"]], row_offsets=given["row_offsets"])
    elif call.kind == "append":
        _appended(batch, scene, call, tables, given, got, outcome)
    elif call.kind == "gather":
        outputs = {n: given[n] for n in ("k_out", "v_out") if n in given}
        wanted = gather(
            view, batch.rows, list(outputs.values()), row_offsets=given["row_offsets"], starts=given.get("starts")
        )
        for name, right in zip(outputs, wanted.outputs, strict=True):
            _compare_bytes(got[name], right, outcome)
    elif isinstance(call.op, Decode):
        _attended(scene, call.op, _oracle(batch, view, call, given), given["q"], got, outcome)
    batch.same(outcome)


def _appended(
    batch: _Batch,
    scene: Scene,
    call: Call,
    tables: dict[str, Raw],
    given: dict[str, Raw],
    got: dict[str, Raw],
    outcome: Outcome,
) -> None:
    """Store the rows in the oracle's memory: those that come as they are bit for bit, those that norms or RoPE have changed as
    the kernel stored them, once they are near enough."""
    step = Step.of(call.op, scene.kernels)
    assert step is not None
    places = {name: given[name] for name in ("row_offsets", "valid_lengths") if name in given}
    found, _ = locate(
        scene.view(tables),
        call.total,
        position_out_of_range=lambda row, at: step.position_out_of_range(given, row, at),
        stored=step.op.inputs != "q",
        **places,
    )
    change = step.changed(given, np.array([at.position or 0 for at in found], np.int64))
    rows, far = step.rows(given), list[Distance]()
    stored = dict(zip("kv", zip(batch.stored, batch.rows, strict=True), strict=False))
    for row, at in enumerate(found):
        for (role, (mine, oracle)), place in zip(stored.items(), at.places or (), strict=False):
            if step.changes(role):
                far.append(take_row(mine, oracle, place, at.token, change[role], row))
            elif at.position is not None:
                oracle.put(at.b, at.position, place, rows[role][row], at.after)
    if "q_out" in got:
        out = got["q_out"].reshape(call.total, *got["q_out"].shape[-2:])
        known = np.array([at.state == "known" for at in found])
        scale = float(given["q_scale"][0]) if "q_scale" in given else 1.0
        far.append(compare_rows(out, change["q"], known, scale))
    for distance in far:
        outcome.error = max(outcome.error, distance.error)
        outcome.share = max(outcome.share, distance.share)
        outcome.right &= distance.share <= 1


def _oracle(batch: _Batch, view: TableView, call: Call, given: dict[str, Raw]) -> Decoded:
    """What an operation's fields say of the kernel's inputs."""
    op = call.op
    assert isinstance(op, Decode)
    return decode(
        view,
        batch.rows,
        given["q"],
        scale=op.scale,
        rows=op.rows,
        mask=op.mask,
        score=op.score,
        sinks=given.get("sinks"),
        arguments=given,
        lse_base=op.lse_base,
        lse_empty=op.lse_empty,
        sinks_in_lse=op.sinks == "lse",
    )


def _attended(scene: Scene, op: Decode, wanted: Decoded, q: Raw, got: dict[str, Raw], outcome: Outcome) -> None:
    """Attention within float64's reach: what rounding of the result allows, float32 in scores and sums, and what operands of
    tensor cores lose: weights, and what scales are multiplied to before the product; f16 stands in for codes."""
    parts = scene.cache.storage.roles
    coded = any(s.quant is not None for role in parts.values() for s in role)
    ulp = _HALF_ULP["f16" if coded and scene.kv.dtype != "f32" else scene.kv.dtype]
    error, far = np.abs(got["out"].astype(np.float64) - wanted.out), np.abs(got["lse"] - wanted.lse)
    allowed = _HALF_ULP[op.out_dtype or scene.kv.dtype] * np.abs(wanted.out) + 2.0**-14
    lse_allowed = np.full(far.shape, 1e-4)
    scales = [s.scales for s in parts["k"] if s.scales is not None]
    scaled = any(s.array or s.zero or s.groups > 1 for s in scales)
    scale = op.scale or 1 / math.sqrt(scene.kv.head_dim)
    for row, seen in enumerate(wanted.seen):
        assert seen is not None
        heads = np.arange(q.shape[1]) // scene.kernels.group
        if scaled:
            products = np.einsum("hd,nhd->hn", np.abs(q[row].astype(np.float64)), np.abs(seen.k[:, heads]))
            lse_allowed[row] += 2 * ulp * scale * products.max(axis=1)
        # Weights sum up to 1, so values count by the largest.
        values = np.abs(seen.v[:, heads]).max(axis=(0, 2))
        allowed[row] += ((ulp + 2 * (lse_allowed[row] - 1e-4)) * values)[:, None]
    outcome.error = max(outcome.error, float(error.max()))
    outcome.share = max(outcome.share, float((error / allowed).max()))
    outcome.right &= bool((error <= allowed).all() and (far <= lse_allowed).all())


def _compare_bytes(got: Raw, wanted: Raw, outcome: Outcome) -> None:
    if got.tobytes() != wanted.tobytes():
        off = np.abs(np.nan_to_num(got.astype(np.float64)) - np.nan_to_num(wanted.astype(np.float64)))
        outcome.error, outcome.right = max(outcome.error, float(off.max())), False


def _quiet(word: Raw, kernel: str) -> bool:
    """Whether a kernel reported nothing; says what it did."""
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
