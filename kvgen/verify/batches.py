"""The batches that kernels are held to the oracle with: lengths around the ends of pages, steps and prompts side by side,
NaN wherever no token lies."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases.contents import Call, Case, Contents, arrays_of
from kvgen.cases.operation import OPEN_TOKENS, cases_of
from kvgen.cases.scene import LAYER, Scene
from kvgen.cases.workload import Workload
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower
from kvgen.plan.params import Array, Param
from kvgen.reference import Rows
from kvgen.runtime.faults import Fault
from kvgen.schema.kernel_set import KernelSet, Op

Raw = NDArray[Any]
POISON: Final = 0xFF  # bytes: NaN in floats, and in no table
UNWRITTEN: Final = 0xEE  # what lies in outputs before a launch
_FEW_ROWS: Final = 8
_STATES: Final = ((1, 1), (1,) * 5)  # a state a request, whatever it has seen
# (bits that are random, bits that are set) a byte: finite as a code of any type, and small.
_CODES: Final = (0x87, 0x30)


def batches(kernels: KernelSet, op: Op, *, quick: bool) -> list[Workload]:
    """The batches of an operation, the smallest first; with `quick` that one alone.

    A small one of two requests; one of five, some of which take a new prompt and some a token, with lengths of a page, of
    one token more and one less; for attention a request long enough to be cut in pieces, or lists of more tiles than wait in
    shared memory. States are two, and five.
    """
    if kernels.cache.states:
        found = [Workload(name, ones, ones) for name, ones in zip(("small", "mixed"), _STATES, strict=True)]
        return found[:1] if quick else found
    cases, cache = cases_of(op), kernels.kv
    least = cases.rows_each
    lowered = lower(cache)
    page, rate = (cache.page_tokens or OPEN_TOKENS) * cache.entry_tokens, cache.entry_tokens
    most = cache.page_tokens if lowered.allocation.one_page else None
    if lowered.allocation.one_page:
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
    return found + (cases.batches(kernels, totals) if most is None else [])


def hostile_batch(kernels: KernelSet, op: Op) -> Workload:
    """Five requests of some tokens each, or of a state each, for data that is wrong."""
    if kernels.cache.states:
        return Workload("hostile", _STATES[-1], _STATES[-1])
    page, rate = min(kernels.kv.page_tokens or OPEN_TOKENS, 64), kernels.kv.entry_tokens
    most = kernels.kv.page_tokens if lower(kernels.kv).allocation.one_page else None
    if kernels.kv.ragged:
        most = page = OPEN_TOKENS
    least = max(cases_of(op).rows_each, 4)
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
    cases, call, before = cases_of(op), case.call, case.before
    before.others = cases.memory(scene, rng)
    for name, other in call.others.items():
        its = other.scene
        _poison(its)
        before.others[name] = Contents(its.pools, dict(other.tables), {})
        _store(its, before.others[name], its.tables(), workload.totals, rng)
    if scene.cache.states:
        for pool in arrays_of(scene.pools):
            pool[...] = rng.integers(0, 256, pool.shape, np.uint8)
    else:
        for layer in cases.stored_layers(call):
            _store(scene, before, before.tables, cases.stored(scene), rng, layer)
    cases.settle(case)
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
    cases = cases_of(op)
    call = cases.call(scene)
    arrays = {name: array.copy() for name, array in call.arrays.items()}
    given = {p.name: p for p in cases.parameters(call.launcher)}
    for name, array in arrays.items():
        _fill(call, given[name], array, rng)
        cases.draw(given[name], array, rng)
    if cases.sparse:
        _cut_lists(call, arrays, rng)
    if any(p.name == "errors" for p in call.launcher.KERNEL.arguments):
        arrays["errors"] = np.zeros(1, np.uint64)
    return Case(scene.workload.name, "", call, Contents(scene.pools, call.tables, arrays), dict(call.numbers))


def _cut_lists(call: Call, arrays: dict[str, Raw], rng: np.random.Generator) -> None:
    """Lists of a sparse attention: a hole now and then; all but the first row's are counted to somewhere else, and have numbers
    behind that which are no entries of any pool."""
    for prefix in ("", *(name.removesuffix("cache") for name in call.others)):
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
    if kernels.kv.ragged or lowered.table.wraps or lowered.allocation.one_page:
        return None
    return [n + (kernels.kv.page_tokens or 1) * kernels.kv.entry_tokens for n in workload.totals]


def _poison(scene: Scene) -> None:
    """NaN in every tensor that operations write; the caller's scales are numbers."""
    written = {t.name for t in scene.package.Cache.TENSORS if t.writes}
    for name, pool in scene.pools.items():
        for array in (pool if isinstance(pool, list) else [pool]) if name in written else ():
            array.view(np.uint8)[...] = POISON


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


def _fill(call: Call, spec: Param, array: Raw, rng: np.random.Generator) -> None:
    """Random numbers in what a call brings besides indices, and bytes that no kernel leaves in what it takes back."""
    name = spec.name
    if isinstance(spec, Array) and spec.access == "out":
        array.view(np.uint8)[...] = UNWRITTEN
    elif name == "q_scales" and array.dtype.name == "int32":  # four exponents around 127 a word
        array[...] = rng.integers(122, 127, (*array.shape, 4)) @ np.array([1, 1 << 8, 1 << 16, 1 << 24])
    elif call.scene.group(name, call.launcher) == "tables" or array.dtype.name in (
        "uint32",
        "int32",
        "int64",
        "uint64",
    ):
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
