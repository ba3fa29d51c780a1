"""gather and scatter of all layers in one launch, and by slots, against the oracle layer by layer: every byte, of the pools and
beside the rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Layout, Paged, Quant, Ragged, ops, presets
from kvgen.errors import ArgumentError, SpecError
from kvgen.layout.dtypes import dtype
from kvgen.lowering.lowered import lower
from kvgen.lowering.row_runs import stored_runs
from kvgen.reference import Rows, cache_rows, gather, gather_raw, scatter, scatter_raw
from kvgen.reference.gather import Runs
from kvgen.runtime import Fault, describe
from kvgen.runtime.cpu import machine
from tests.support.batches import PLAIN, Batch, batches
from tests.support.cache_matrix import CHOSEN
from tests.support.harness import hold_memory, on_machine, package
from tests.support.memory import CANARY, aligned
from tests.support.scenes import LAYERS, Scene

ALL: Final[dict[str, Any]] = {"layers": "all"}
SLOTS: Final[dict[str, Any]] = {"rows": "slots"}
_SIZES: Final[dict[str, Any]] = {"kv_heads": 2, "head_dim": 32, "page_size": 4}
_APART: Final = Layout(k="page token head dim", v="page head token dim", layers="pointers")
GIVEN: Final = Quant(dtype="e4m3", scale_dtype="f32", scale="given", block=Block(token=None))
I8: Final = Quant(dtype="i8", scale_dtype="f32", own_table=True)


def _set(name: str, cache: Any, *found: Any) -> KernelSet:
    return KernelSet(name=f"layers_{name}", q_heads=2 * cache.kv_heads, cache=cache, ops=found, arch=("sm_90a",))


SETS: Final = {
    # A tensor a layer; as LMCache moves chunks: all layers by slots, values as they are.
    "slots": _set(
        "slots", Paged(dtype="bf16", layout=_APART, **_SIZES), ops.Gather(**ALL, **SLOTS), ops.Scatter(**ALL, **SLOTS)
    ),
    # Codes, and scales in pages of other ids; stored as they come, and quantized.
    "codes": _set(
        "codes",
        Paged(dtype="bf16", quant=I8, layout=_APART, **_SIZES),
        ops.Gather(raw=True, **ALL),
        ops.Scatter(**ALL),
        ops.Scatter(name="put", raw=True, **ALL),
    ),
    # Scales of the caller's, which differ by layer.
    "given": _set("given", Paged(dtype="f16", quant=GIVEN, **_SIZES), ops.Gather(**ALL)),
    # The newest tokens of each request lie in a tail, one a layer.
    "tail": _set("tail", CHOSEN["kivi"], ops.Gather(**ALL)),
    # Rows that wait in shared memory, of one layer.
    "waiting": _set(
        "waiting", presets.vllm_xpacked(dtype="bf16", kv_heads=2, head_dim=16, page_size=16), ops.Scatter(**SLOTS)
    ),
}  # fmt: skip


def _op(kernels: KernelSet, name: str) -> Any:
    return next(op for op in kernels.ops if op.name == name)


def _shapes(scene: Scene, op: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """What a row is, by the argument's name without `_out`."""
    if op.raw:
        return {r.name: (r.shape, r.array.name) for r in stored_runs(lower(scene.cache))}
    return {n: ((r.heads, r.dim), scene.cache.dtype) for n, r in zip("kv", scene.rows(), strict=False)}


class Arrays:
    """Rows of every layer by name, each in memory of canaries, layers and rows `gap` rows and bytes apart."""

    def __init__(self, scene: Scene, op: Any, rows: int) -> None:
        layers = LAYERS if op.layers == "all" else 1
        self.memory, self.found = dict[str, Any](), dict[str, Any]()
        for name, (shape, element) in _shapes(scene, op).items():
            kind = dtype(element).numpy()
            row = math.prod(shape) * kind.itemsize
            step = -(-row // 32) * 32 + (32 if scene.batch.strided else 0)
            step = step if scene.batch.strided or step == row else row
            apart = -(-(rows + 1) * step // 32) * 32
            memory = self.memory[name] = aligned(layers * apart + 64)
            memory[...] = CANARY
            inner = [int(s) for s in np.cumprod((kind.itemsize, *shape[:0:-1]))[::-1]]
            self.found[name] = np.ndarray((layers, rows, *shape), kind, memory.data, 32, (apart, step, *inner))

    def given(self, op: Any, suffix: str) -> dict[str, Any]:
        """As a call takes them."""
        return {n + suffix: a if op.layers == "all" else a[0] for n, a in self.found.items()}

    def hold_surroundings(self) -> None:
        """Nothing lies beside the rows."""
        for name, array in self.found.items():
            rest = self.memory[name].copy()
            inside = np.ndarray(array.shape, array.dtype, rest.data, 32, array.strides)
            inside[...] = np.full(array.itemsize, CANARY, np.uint8).view(array.dtype)[0]
            assert (rest == CANARY).all(), f"{name}: written beside the rows"


def _layers(scene: Scene, op: Any, memory: Any = None) -> list[tuple[Rows, ...]]:
    found = range(LAYERS) if op.layers == "all" else (scene.layer,)
    return [cache_rows(scene.cache, {**scene.arrays(memory)}, layer) for layer in found]


def fill_layers(scene: Scene, counts: Any) -> None:
    """Tokens in every layer."""
    mine = scene.layer
    for layer in range(LAYERS):
        scene.layer = layer
        scene.fill(counts)
    scene.layer = mine


def _call(scene: Scene, op: Any, arrays: dict[str, Any], where: dict[str, Any]) -> int:
    """One launch; the error word."""
    word, generated = np.zeros(1, np.uint64), package(scene.kernels)
    given = scene.arguments()
    if op.rows == "slots":  # which read no table
        given = {n: a for n, a in given.items() if n not in scene.tables}
    cache = generated.Cache(**given)
    if isinstance(runs := where.get("row_offsets"), Runs):
        where = {"row_begins": runs.begins, "row_counts": runs.counts, "starts": where["starts"]}
    with machine(arch=scene.batch.arch, mode="check", schedule=scene.batch.schedule) as log:
        launcher = getattr(generated, op.name)
        launcher(cache if op.layers == "all" else cache[scene.layer], **arrays, **where, errors=word)
    rows = next(iter(arrays.values())).shape[1 if op.layers == "all" else 0]
    assert len(log.launches) == (rows > 0)
    return int(word[0])


def _same(out: Any, right: Any) -> bool:
    bits = np.dtype(f"u{out.itemsize}")
    same = np.ascontiguousarray(out).view(bits) == np.ascontiguousarray(right).view(bits)
    if out.dtype.kind not in "iu":
        same |= np.isnan(out.astype(np.float32)) & np.isnan(right.astype(np.float32))
    return bool(same.all())


def check_gather(scene: Scene, op: Any, rows: int, where: dict[str, Any]) -> int:
    """Gather and compare with the oracle's rows of each layer; the error word."""
    arrays, pool = Arrays(scene, op, rows), scene.snapshot()
    before = {name: array.copy() for name, array in arrays.found.items()}
    word = _call(scene, op, arrays.given(op, "_out"), where)
    wanted = 0
    for layer, pools in enumerate(_layers(scene, op)):
        old = {name: array[layer] for name, array in before.items()}
        if op.raw:
            found, failed, wanted = gather_raw(scene.view, pools, old, **where)
        else:
            gathered = gather(scene.view, pools, list(old.values()), **where)
            found, failed, wanted = dict(zip(old, gathered.outputs, strict=True)), gathered.failed, gathered.errors
        for name, right in found.items():
            assert _same(arrays.found[name][layer], right), (name, layer)
            if right.dtype.kind not in "iu":
                assert np.isnan(arrays.found[name][layer][failed].astype(np.float32)).all()
    arrays.hold_surroundings()
    hold_memory(scene, pool)
    assert word == wanted, f"error word {describe(word)}, not {describe(wanted)}"
    return word


def check_scatter(scene: Scene, op: Any, rows: int, where: dict[str, Any]) -> int:
    """Scatter and compare all memory with the oracle's; the error word."""
    arrays, expected = Arrays(scene, op, rows), scene.snapshot()
    for array in arrays.found.values():
        if op.raw:
            bits = scene.rng.integers(0, 256, (*array.shape, array.itemsize), np.uint8)
            array[...] = bits.view(array.dtype)[..., 0]
        else:
            array[...] = scene.rng.standard_normal(array.shape).astype(array.dtype)
    wanted = 0
    for layer, pools in enumerate(_layers(scene, op, expected)):
        new = {name: array[layer] for name, array in arrays.found.items()}
        if op.raw:
            wanted = scatter_raw(scene.view, pools, new, **where)
        else:
            wanted = scatter(scene.view, pools, list(new.values()), **where)
    word = _call(scene, op, arrays.given(op, ""), where)
    hold_memory(scene, expected)
    assert word == wanted, f"error word {describe(word)}, not {describe(wanted)}"
    return word


def slots_of(scene: Scene, rows: int, *, wrong: bool, kind: str = "i64") -> Any:
    """Some of the pool's slots, each once, -1 among them; `wrong`: and some that are none."""
    found = _slots(scene, rows, wrong, np.iinfo(dtype(kind).numpy()))
    return found.astype(dtype(kind).numpy())


def _slots(scene: Scene, rows: int, wrong: bool, limits: Any) -> Any:
    room = scene.pages * scene.tokens
    found = scene.rng.permutation(room)[:rows].astype(np.int64)
    found = np.concatenate([found, np.full(rows - len(found), -1)])
    found[scene.rng.random(rows) < 0.2] = -1
    if wrong and rows:
        none = [room, room + 5, -2, limits.min, limits.max, 2**32 * scene.tokens]
        found[scene.rng.integers(rows)] = scene.rng.choice([n for n in none if limits.min <= n <= limits.max])
    return found


def _where(scene: Scene, op: Any, batch: Batch, data: Any) -> tuple[int, dict[str, Any]]:
    """Rows of a call, and which tokens they are."""
    if op.rows == "slots":
        rows = data.draw(st.integers(0, 40), label="rows")
        return rows, {"slots": slots_of(scene, rows, wrong=data.draw(st.booleans(), label="wrong"))}
    kind = dtype(scene.cache.lengths_dtype).numpy()
    starts = [data.draw(st.integers(0, n)) for n in batch.totals]
    counts = [n - s for s, n in zip(starts, batch.totals, strict=True)]
    offsets = np.cumsum([batch.leading, *counts]).astype(kind)
    return int(offsets[-1]) + batch.padding, {"row_offsets": offsets, "starts": np.array(starts, kind)}


@pytest.mark.parametrize(("name", "kind"), [(n, op.name) for n, k in SETS.items() for op in k.ops])
@settings(max_examples=4)
@given(data=st.data())
def test_layers(name: str, kind: str, data: Any) -> None:
    """Any tokens, rows any distance apart; requests share no page where they are written."""
    kernels = SETS[name]
    batch, op = data.draw(batches(kernels)), _op(kernels, kind)
    batch = replace(batch, arch=None, shared=batch.shared and op.kind == "gather")
    scene = Scene(kernels, batch, batch.totals)
    if op.kind == "gather":
        fill_layers(scene, batch.totals)
    rows, where = _where(scene, op, batch, data)
    (check_gather if op.kind == "gather" else check_scatter)(scene, op, rows, where)


@pytest.mark.parametrize("value", [-1, 2**31 - 1, None])
def test_bad_pages(value: int | None) -> None:
    """A request without a valid page: NaN in every layer, and stored in none; the error is the same of all."""
    for name, kind in (("given", "gather"), ("codes", "put")):
        scene = Scene(SETS[name], replace(PLAIN, totals=(3, 9, 2), new=(3, 9, 2), seed=9), (3, 9, 2))
        fill_layers(scene, (3, 9, 2))
        table = scene.tables["page_table"]
        table[1] = np.array(scene.pages if value is None else value, np.int64).astype(table.dtype)
        where = {"row_offsets": np.array([0, 3, 12, 14], dtype(scene.cache.lengths_dtype).numpy())}
        word = (check_gather if kind == "gather" else check_scatter)(scene, _op(SETS[name], kind), 14, where)
        report = describe(word)
        assert report is not None and (report.code, report.request) == (Fault.PAGE_ID, 1)


@pytest.mark.parametrize("tensor", ["k_pool", "v_scales"])
def test_a_layer_with_fewer_pages(tensor: str) -> None:
    """Ids of a page that some layer has not are bad in all layers."""
    scene = Scene(SETS["codes"], replace(PLAIN, totals=(3, 9, 2), new=(3, 9, 2), seed=9), (3, 9, 2))
    fill_layers(scene, (3, 9, 2))
    op, arguments = _op(SETS["codes"], "gather"), scene.arguments()
    table = scene.tables["scales_page_table" if tensor == "v_scales" else "page_table"]
    for name in (tensor, tensor.replace("v", "k") if tensor == "v_scales" else "v_pool"):
        arguments[name] = [arguments[name][0], arguments[name][1][: int(table[1, 0])]]
    arrays, word = Arrays(scene, op, 14), np.zeros(1, np.uint64)
    generated = package(scene.kernels)
    where = {"row_offsets": np.array([0, 3, 12, 14], dtype(scene.cache.lengths_dtype).numpy())}
    with on_machine(scene.batch):
        generated.gather(generated.Cache(**arguments), **arrays.given(op, "_out"), **where, errors=word)
    report = describe(word)
    assert report is not None and report.code is Fault.PAGE_ID
    assert all((array[:, 3:7] == 0xFF).all() for name, array in arrays.found.items() if name.endswith("_codes"))


@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)])
def test_k_and_v_in_one_buffer(axes: tuple[int, ...]) -> None:
    """`[2, layers, tokens, heads * head_dim]`, as LMCache has chunks, and `[layers, 2, ...]`: there and back."""
    kernels = SETS["slots"]
    scene = Scene(kernels, replace(PLAIN, totals=(7,), new=(0,), seed=4), (7,))
    fill_layers(scene, (7,))
    slots = np.array([scene.entries[0][t // 4][0] * 4 + t % 4 for t in range(7)], np.int64)
    chunk = (
        aligned(2 * LAYERS * 7 * 64 * 2)
        .view(dtype("bf16").numpy())
        .reshape([*np.take((2, LAYERS, 7), axes).tolist(), 64])
    )
    k, v = (chunk[i] if axes[0] == 0 else chunk[:, i] for i in range(2))
    arrays = {n: a.reshape(LAYERS, 7, 2, 32) for n, a in (("k", k), ("v", v))}
    assert all(np.shares_memory(a, chunk) for a in arrays.values())
    assert not _call(scene, _op(kernels, "gather"), {f"{n}_out": a for n, a in arrays.items()}, {"slots": slots})
    for layer, pools in enumerate(_layers(scene, _op(kernels, "gather"))):
        for array, pool in zip(arrays.values(), pools, strict=True):
            for t in range(7):
                np.testing.assert_array_equal(array[layer, t], pool.read(scene.entries[0][t // 4][0], t % 4))
    before = scene.snapshot()
    assert not _call(scene, _op(kernels, "scatter"), arrays, {"slots": slots})
    hold_memory(scene, before)


def test_wrong_calls() -> None:
    """A layer in place of the cache, arrays of other layers, rows that are not there."""
    scene = Scene(SETS["slots"], replace(PLAIN, totals=(3,), new=(0,)), (3,))
    generated = package(scene.kernels)
    cache = generated.Cache(**scene.arguments())
    kind = dtype("bf16").numpy()
    good, slots = np.zeros((LAYERS, 3, 2, 32), kind), np.zeros(3, np.int64)
    with on_machine(scene.batch):
        for given, said in (
            ((cache[0], good, good.copy()), "it must be this set's Cache, all of its layers"),
            ((cache, good[:1], good.copy()), "k_out: got shape"),
            ((cache, good, np.zeros((LAYERS, 4, 2, 32), kind)), "v_out: got shape"),
            ((cache, good, good[::-1]), "k_out: got memory that v_out lies in too"),
            ((cache, np.zeros((LAYERS, 3, 2, 64), kind)[..., ::2], good), "k_out: got stride 2 in dimension 3"),
        ):
            with pytest.raises(ArgumentError, match=said):
                generated.gather(given[0], slots=slots, k_out=given[1], v_out=given[2])


def test_refusals() -> None:
    """What a slot does not name, and layers that lie in one another."""
    for cache, words in (
        (CHOSEN["per_kv"], r"rows: got 'slots' for gather with table=PerKV\(\)"),
        (CHOSEN["int8_own_table"], "rows: got 'slots' for gather with own_table=True"),
        (CHOSEN["kivi"], "rows: got 'slots' for gather with residual"),
    ):
        with pytest.raises(SpecError, match=words):
            _set("x", cache, ops.Gather(**SLOTS))
    ragged = Ragged(dtype="bf16", kv_heads=2, head_dim=32)
    for options, words in ((SLOTS, "rows: got 'slots'"), (ALL, "layers: got 'all' for gather with a Ragged cache")):
        with pytest.raises(SpecError, match=words):
            _set("x", ragged, ops.Gather(**options))
    with pytest.raises(SpecError, match="max_layers: got 512"):
        _set("x", SETS["codes"].cache, ops.Gather(**ALL, max_layers=512))
    with pytest.raises(SpecError, match="index_dtype: got 'u32' with rows='slots'"):
        _set("x", SETS["slots"].cache, ops.Scatter(**SLOTS, index_dtype="u32"))
