"""The batches that kernels are held to the oracle with: lengths around the ends of pages, steps and prompts side by side,
NaN wherever no token lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.bench import Call, Scene, Workload
from kvgen.bench.calls import rows_each
from kvgen.bench.synthetic_batch import ATTENDING, LAYER, LAYERS, NEW_ROWS
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower
from kvgen.ops import Convert, MergeStates, SwapPages
from kvgen.reference import Rows, cache_rows, seal
from kvgen.runtime.faults import Fault
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.verify.memory import span
from kvgen.verify.other_calls import prepared

Raw = NDArray[Any]
Pools = dict[str, Raw | list[Raw]]
POISON: Final = 0xFF  # bytes: NaN in floats, and in no table
UNWRITTEN: Final = 0xEE  # what lies in outputs before a launch
OPEN_TOKENS: Final = 16  # a page of a cache that has none
_FEW_ROWS: Final = 8
_STATES: Final = ((1, 1), (1,) * 5)  # a state a request, whatever it has seen
_LONG: Final = 333  # tokens: more than the shortest piece that a decode is cut into
_LISTED: Final = 210  # entries of a long list: more tiles of 64 than shared memory holds at once
# (bits that are random, bits that are set) a byte: finite as a code of any type, and small.
_CODES: Final = (0x87, 0x30)


@dataclass
class Contents:
    """The memory of a launch by name: the cache's tensors, its tables, the call's arrays; those of a cache that is converted;
    the tensors of other caches that lists name rows of, by argument."""

    pools: Pools
    tables: dict[str, Raw]
    arrays: dict[str, Raw]
    source_pools: Pools = field(default_factory=dict)
    source_tables: dict[str, Raw] = field(default_factory=dict)
    keys: dict[str, Pools] = field(default_factory=dict)

    def flat(self) -> dict[str, Raw]:
        """Every array by a name of its own: tensors of one layer are `name[layer]`."""
        found: dict[str, Raw] = {}
        keys = ((f"{name}.", pools) for name, pools in self.keys.items())
        for prefix, pools in (("", self.pools), ("source.", self.source_pools), *keys):
            for name, pool in pools.items():
                if isinstance(pool, list):
                    found |= {f"{prefix}{name}[{i}]": array for i, array in enumerate(pool)}
                else:
                    found[f"{prefix}{name}"] = pool
        tables = {f"{name} of the cache": array for name, array in self.tables.items()}
        sources = {f"source.{name} of the cache": array for name, array in self.source_tables.items()}
        return found | tables | sources | self.arrays

    def over(self, flat: Mapping[str, Any]) -> Contents:
        """The same with other arrays, which `flat` has by its names."""

        def pools(prefix: str, like: Pools) -> Pools:
            return {
                name: [flat[f"{prefix}{name}[{i}]"] for i in range(len(pool))]
                if isinstance(pool, list)
                else flat[f"{prefix}{name}"]
                for name, pool in like.items()
            }

        return Contents(
            pools("", self.pools),
            {name: flat[f"{name} of the cache"] for name in self.tables},
            {name: flat[name] for name in self.arrays},
            pools("source.", self.source_pools),
            {name: flat[f"source.{name} of the cache"] for name in self.source_tables},
            {name: pools(f"{name}.", like) for name, like in self.keys.items()},
        )

    def copy(self) -> Contents:
        """The same with copies of all arrays."""
        return self.over({name: array.copy() for name, array in self.flat().items()})

    def rows(self, scene: Scene, layer: int = LAYER) -> tuple[Rows, ...]:
        """The oracle's K and V of a layer, by default that which operations work on."""
        return cache_rows(scene.kv, {**self.pools, **self.tables}, layer)


@dataclass
class Case:
    """One launch of one operation: its scene, the call, and the memory before it. `fault`: what is wrong with the data, ""
    for nothing."""

    batch: str
    fault: str
    scene: Scene
    call: Call
    before: Contents
    numbers: dict[str, int]
    """The call's arguments that are numbers."""


def batches(kernels: KernelSet, op: Op, *, quick: bool) -> list[Workload]:
    """The batches of an operation, the smallest first; with `quick` that one alone.

    A small one of two requests; one of five, some of which take a new prompt and some a token, with lengths of a page, of
    one token more and one less; for attention a request long enough to be cut in pieces, or lists of more tiles than wait in
    shared memory. States are two, and five.
    """
    if kernels.cache.states:
        found = [Workload(name, ones, ones) for name, ones in zip(("small", "mixed"), _STATES, strict=True)]
        return found[:1] if quick else found
    cache, least = kernels.kv, rows_each(op)
    lowered = lower(cache)
    page, rate = (cache.page_tokens or OPEN_TOKENS) * cache.entry_tokens, cache.entry_tokens
    most = cache.page_tokens if lowered.kind.one_page else None
    if lowered.kind.one_page:
        page = OPEN_TOKENS
    if cache.ragged:
        most = page = OPEN_TOKENS

    def totals(*wanted: int) -> tuple[int, ...]:
        return tuple(max(n, least) if most is None else min(max(n, least), most) for n in wanted)

    small = totals(3 * rate, page + 1)
    found = [Workload("small", small, tuple(min(n, new) for n, new in zip(small, (1, 2), strict=True)))]
    if quick or least > _FEW_ROWS:  # many query rows a request make a batch that is large enough
        return found
    window = lowered.table.window
    mixed = totals(page, 2 * page + 1, 3 * rate, 2 * window + page - 1 if window else 3 * page - 1, page + 2)
    new = tuple(min(n, wanted) for n, wanted in zip(mixed, (page, 3, 3, 1, 2), strict=True))
    found.append(Workload("mixed", mixed, new))
    if getattr(op, "sparse", False) and most is None:
        found.append(Workload("long", totals(_LONG * rate, _LISTED * rate), (1, 1), listed=_LISTED))
    elif op.kind in (*ATTENDING, *NEW_ROWS) and most is None:
        found.append(Workload("long", totals(_LONG, 40), (1, 1)))
    if op.kind in NEW_ROWS and most is None:
        found.append(Workload("prompt", totals(_LONG, 40, 17), (_LONG - 20, 40, 1)))
    return found


def hostile_batch(kernels: KernelSet, op: Op) -> Workload:
    """Five requests of some tokens each, or of a state each, for data that is wrong."""
    if kernels.cache.states:
        return Workload("hostile", _STATES[-1], _STATES[-1])
    page, rate = min(kernels.kv.page_tokens or OPEN_TOKENS, 64), kernels.kv.entry_tokens
    most = kernels.kv.page_tokens if lower(kernels.kv).kind.one_page else None
    if kernels.kv.ragged:
        most = page = OPEN_TOKENS
    least = max(rows_each(op), 4)
    if least > _FEW_ROWS:
        page = least
    totals = tuple(
        min(n, most) if most else n * rate
        for n in (max(page + 1, least), max(page + 1, least), least, least + 1, least)
    )
    return Workload("hostile", totals, tuple(min(n, new) for n, new in zip(totals, (2, 2, 2, 3, 2), strict=True)))


def case_of(
    kernels: KernelSet, op: Op, package: ModuleType, workload: Workload, seed: int, room: Workload | None = None
) -> Case:
    """An operation's call in a batch, with random numbers in it; nothing is wrong with the data yet. `room`: the batch that the
    pools have pages for, by default the same.

    Tokens that the operation finds stored are written by the oracle; all other bytes of the cache's tensors are NaN, pages
    included that tables name behind the end of a request. States are random bytes, those that are free as well.

    Raises ToolError where kvgen has no batch for the operation.
    """
    rng = np.random.default_rng([seed, len(workload.totals), *workload.totals])
    scene = Scene(kernels, package, room or workload, _room(kernels, room or workload)).at(workload)
    case = _called(scene, op, rng)
    _poison(scene)
    call, before, tables = case.call, case.before, case.before.tables
    totals = workload.totals
    if op.kind in ("append", "seal"):
        totals = tuple(n - new for n, new in zip(workload.totals, workload.new, strict=True))
    if isinstance(op, SwapPages):
        before.source_pools = _twin(scene, rng)
    if isinstance(op, Convert):
        totals = ()
        source = call.source
        assert source is not None
        _poison(source)
        before.source_pools, before.source_tables = source.pools, source.tables(op.kind)
        whole = Contents(source.pools, before.source_tables, {})
        _store(source, whole, source.tables("gather"), workload.totals, rng)
    for name, its in call.keys.items():
        _poison(its)
        before.keys[name] = its.pools
        _store(its, Contents(its.pools, its.tables("gather"), {}), its.tables("gather"), workload.totals, rng)
    if scene.cache.states:
        for pool in _arrays(scene):
            pool[...] = rng.integers(0, 256, pool.shape, np.uint8)
    else:
        for layer in range(LAYERS) if op.kind == "gather" and call.launcher.KERNEL.all_layers else (LAYER,):
            _store(scene, before, tables, totals, rng, layer)
    if op.kind == "append" and scene.cache.storage.residual:  # in a step seal comes first; its own cases check it
        arrays = before.arrays
        new = [arrays[name] for name in "kv" if name in arrays]
        seal(scene.view(tables), before.rows(scene), new, row_offsets=arrays["row_offsets"])
    return case


def next_case(case: Case, left: Contents, op: Op, workload: Workload, seed: int) -> Case:
    """An operation's call in a later batch of the same requests, over the tensors of `case` as its launch left them; other memory
    is new."""
    rng = np.random.default_rng([seed, 1, *workload.totals])
    for name, pool in case.before.pools.items():
        mine, found = (p if isinstance(p, list) else [p] for p in (pool, left.pools[name]))
        for to, array in zip(mine, found, strict=True):
            to.view(f"u{to.itemsize}")[...] = array.view(
                f"u{to.itemsize}"
            )  # every bit of a NaN, at the strides of the tensor
    return _called(case.scene.at(workload), op, rng)


def _called(scene: Scene, op: Op, rng: np.random.Generator) -> Case:
    """An operation's call with random numbers in its arrays; of the cache's tensors nothing is written."""
    call, tables = prepared(scene, op)
    arrays = {name: array.copy() for name, array in call.arrays.items()}
    for name, array in arrays.items():
        _fill(scene, call, name, array, rng)
    if call.sparse:
        _cut_lists(call, arrays, rng)
    if any(p.name == "errors" for p in call.launcher.KERNEL.arguments):
        arrays["errors"] = np.zeros(1, np.uint64)
    return Case(scene.workload.name, "", scene, call, Contents(scene.pools, tables, arrays), dict(call.numbers))


def _cut_lists(call: Call, arrays: dict[str, Raw], rng: np.random.Generator) -> None:
    """Lists of a sparse attention: a hole now and then; all but the first row's are counted to somewhere else, and have numbers
    behind that which are no entries of any pool."""
    for prefix in ("", *(name.removesuffix("cache") for name in call.keys)):
        lists, counts = arrays.get(f"{prefix}indices"), arrays.get(f"{prefix}topk_lengths")
        if lists is None:
            continue
        lists[rng.random(lists.shape) < 0.05] = -1
        if counts is None:
            continue
        for row in range(1, len(lists)):
            counts[row] = rng.integers(0, lists.shape[1] + 1)
            lists[row, int(counts[row]) :] = np.iinfo(lists.dtype).max


def _room(kernels: KernelSet, workload: Workload) -> Sequence[int] | None:
    """A page more than a request's tokens need, where a table can name one; as many free states as there are requests."""
    if kernels.cache.states:
        return [2 * n for n in workload.totals]
    lowered = lower(kernels.kv)
    if kernels.kv.ragged or lowered.table.wraps or lowered.kind.one_page:
        return None
    return [n + (kernels.kv.page_tokens or 1) * kernels.kv.entry_tokens for n in workload.totals]


def _poison(scene: Scene) -> None:
    """NaN in every tensor that operations write; the caller's scales are numbers."""
    written = {t.name for t in scene.package.Cache.TENSORS if t.writes}
    for name, pool in scene.pools.items():
        for array in (pool if isinstance(pool, list) else [pool]) if name in written else ():
            array.view(np.uint8)[...] = POISON


def _arrays(scene: Scene) -> list[Raw]:
    """The arrays of all tensors."""
    return [array for pool in scene.pools.values() for array in (pool if isinstance(pool, list) else [pool])]


def _twin(scene: Scene, rng: np.random.Generator) -> Pools:
    """Another pool of as many pages, full of random bytes."""
    paged = {t.name for t in scene.cache.storage.tensors if "page" in t.axes}

    def other(like: Raw) -> Raw:
        raw = rng.integers(0, 256, span(like), np.uint8)
        return np.ndarray(like.shape, like.dtype, raw.data, strides=like.strides)

    return {
        name: [other(a) for a in pool] if isinstance(pool, list) else other(pool)
        for name, pool in scene.pools.items()
        if name in paged
    }


def _store(
    scene: Scene,
    memory: Contents,
    tables: dict[str, Raw],
    counts: Sequence[int],
    rng: np.random.Generator,
    layer: int = LAYER,
) -> None:
    """Write the living ones of the first counts[b] tokens of every request through the oracle, in one layer."""
    view, pools = scene.view(tables), memory.rows(scene, layer)
    kind = dtype(scene.kv.dtype).numpy()
    for b, count in enumerate(scene.entries(n) for n in counts):
        first = view.first_token(count)
        group = scene.cache.storage.residual
        if group:
            _store_groups(scene, pools, view, b, count, rng)
            continue
        for page in range(first // scene.tokens, -(-count // scene.tokens)):
            places = view.places(b, page)
            assert not isinstance(places, Fault), (b, page, places)
            begin, end = max(first, page * scene.tokens), min(count, (page + 1) * scene.tokens)
            for pool, place in zip(pools, places, strict=False):
                values = rng.standard_normal((end - begin, pool.heads, pool.dim)).astype(kind)
                pool.write_run(place.page, begin % scene.tokens, values, place.scales)


def _store_groups(scene: Scene, pools: Sequence[Rows], view: Any, b: int, count: int, rng: np.random.Generator) -> None:
    """The tokens of a request in a residual cache: full groups in pages, the newest tokens in the tail."""
    kind, size = dtype(scene.kv.dtype).numpy(), scene.cache.storage.residual
    values = [rng.standard_normal((count, pool.heads, pool.dim)).astype(kind) for pool in pools]
    for which, (pool, rows) in enumerate(zip(pools, values, strict=True)):
        for position in range(count):
            place = view.places(b, position // scene.tokens)[which]
            if not pool.residual:
                pool.write(place.page, position % scene.tokens, rows[position], place.scales)
                continue
            if position % size == 0 and position + size <= count:
                pool.seal(b, position, place, rows[position : position + size], position)
            pool.put(b, position, place, rows[position], count)


def _fill(scene: Scene, call: Call, name: str, array: Raw, rng: np.random.Generator) -> None:
    """Random numbers in what a call brings besides indices, and bytes that no kernel leaves in what it takes back."""
    plan = call.launcher.PLAN.arguments if call.kind in ("compact", *NEW_ROWS) else ()
    spec = next(p for p in (*plan, *call.launcher.KERNEL.arguments) if p.name == name)
    if spec.access == "out":
        array.view(np.uint8)[...] = UNWRITTEN
    elif name == "q_scales" and array.dtype.name == "int32":  # four exponents around 127 a word
        array[...] = rng.integers(122, 127, (*array.shape, 4)) @ np.array([1, 1 << 8, 1 << 16, 1 << 24])
    elif scene.group(name, call.launcher) == "tables" or array.dtype.name in ("uint32", "int32", "int64", "uint64"):
        return
    elif array.dtype.kind in "iu":
        array.view(np.uint8)[...] = (
            rng.integers(0, 256, array.nbytes, np.uint8).reshape(array.shape) & _CODES[0] | _CODES[1]
        )
    elif name == "cos_sin":
        array[...] = np.cos(rng.standard_normal(array.shape)).astype(array.dtype)
    elif name == "q_scale":
        array[...] = 0.37
    elif name.endswith(("scale", "scales", "mean_square")):
        array[...] = (0.5 + rng.random(array.shape)).astype(array.dtype)
    elif name.endswith("_weight"):
        array[...] = (1 + 0.25 * rng.standard_normal(array.shape)).astype(array.dtype)
    else:
        array[...] = rng.standard_normal(array.shape).astype(array.dtype)
    if isinstance(call.op, MergeStates) and name.startswith("lse") and spec.access == "in":
        array[rng.random(array.shape) < 0.2] = float(call.op.lse_empty)  # states that saw nothing
