"""Cases whose expectation is the CPU machine's: any operation that kvgen bench has arguments for, run where cases are made.

The operation tests hold the CPU machine to the oracle; these hold a GPU to the CPU machine, byte for byte. Where a kernel
computes (norms, RoPE, sums), the GPU's approximate instructions may end a number further: `near` says of what type.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import numpy as np

from benchmarks.gpu.cases import Blobs, Bytes, Case, View
from benchmarks.gpu.correctness import run
from kvgen import Continuous, KernelSet
from kvgen.bench import KNOWN, Scene, Workload, call_of
from kvgen.bench.synthetic_batch import LAYER
from kvgen.errors import ToolError
from kvgen.layout.dtypes import dtype
from kvgen.ops import Append, Convert, Extend, Gather, Scatter
from kvgen.spec.kernel_set import Op
from kvgen.spec.keys import class_of_keys
from kvgen.verify.memory import HostMemory

GUARD: Final = 256  # bytes of canaries on either side
CANARY: Final = 0xEE
COMPUTING: Final = ("append", "convert", "lora_add", "norm_cache", "rotate_cache")
_INDICES: Final = ("u32", "i32", "i64")
_KINDS: Final = ("f32", "f16", "bf16", "e4m3", "e5m2", "i8", "u8", "u32", "i32", "i64", "u64")
# (bits that are random, bits that are set) a byte: finite in every type, below 1 in those of 8 bits.
_BYTES: Final = (0x87, 0x30)
# Tables whose entries name pages or tokens; in the hostile case some are none.
_HOSTILE: Final = ("page_table", "page_indices", "req_to_token", "slots", "pairs")


def is_plain(op: Op) -> bool:
    """Whether the oracle's own cases cover it: appends and gathers that move rows as they are, extends with sinks at most."""
    if isinstance(op, Append):
        changes = op.takes_q or op.bias or op.rope is not None or op.k_norm is not None
        return not changes and op.inputs == "separate" and op.rows != "padded"
    if isinstance(op, Extend):
        score = op.score
        brings = score is not None and (score.alibi or score.bias or score.relative or score.tensors or score.scalars)
        return not (brings or op.mask.tree or op.mask.padding or op.cross or op.q_dtype)
    if isinstance(op, Gather | Scatter):
        return not op.raw and op.rows == "ragged" and op.layers == "one"
    return not getattr(op, "raw", False)


def machine_cases(kernels: KernelSet, op: Op, package: ModuleType, blobs: Blobs) -> list[Case]:
    """An operation's cases; none where kvgen bench does not know its kind."""
    if op.kind not in KNOWN:
        return []
    page = kernels.cache.page_tokens or 16
    most = kernels.cache.max_tokens or 64 if isinstance(kernels.cache, Continuous) else 3 * page + 40
    totals = [min(n, most) for n in (page + 1, 2 * page, 3, page + 2)]
    works = (
        Workload("small", tuple(totals[:2]), (1, 2)),
        Workload(
            "ragged", tuple(totals), tuple(min(n, new) for n, new in zip(totals, (page + 1, 3, 1, 2), strict=True))
        ),
    )
    found = []
    for name, work in (("small", works[0]), ("ragged", works[1]), ("hostile", works[1])):
        try:
            found.append(_case(kernels, op, package, blobs, name, work))
        except ToolError:  # a workload of one page has no two to copy
            continue
    return found


def _case(kernels: KernelSet, op: Op, package: ModuleType, blobs: Blobs, name: str, work: Workload) -> Case:
    scene = Scene(kernels, package, work)
    call = call_of(scene, op)
    case = _Placing(op.name, name, blobs)
    tables = scene.tables(call.counted_as)
    arrays = {n: a.copy() for n, a in call.arrays.items()}
    if name == "hostile":
        _spoil({**tables, **arrays})
    for argument, array in arrays.items():
        _fill(argument, array, case.rng)
    arrays["errors"] = np.zeros(1, np.uint64)
    pools = case.pools(scene, "")
    source_pools: dict[str, tuple[View, ...]] = {}
    source_tables: dict[str, View] = {}
    if call.source is not None:
        source_pools = case.pools(call.source, "source.")
        source_tables = {n: case.view(f"source.table.{n}", a) for n, a in call.source.tables(op.kind).items()}
    draft = Case(
        set=kernels.name,
        op=op.name,
        name=name,
        golden=False,
        layer=LAYER,
        memories=case.memories,
        after={},
        pools=pools,
        tables={n: case.view(f"table.{n}", a) for n, a in tables.items()},
        arguments={n: case.view(n, a) for n, a in arrays.items()},
        numbers=dict(call.numbers),
        source=op.source_class if isinstance(op, Convert) else "",
        source_pools=source_pools,
        source_tables=source_tables,
        keys={f"{keys.name}_cache": class_of_keys(op.name, keys.name) for keys in getattr(op, "sources", ())},
        keys_pools={name: case.pools(its, f"{name}.") for name, its in call.keys.items()},
    )
    got = run(draft, blobs, package, HostMemory())
    changed = {n: data for n, data in got.items() if not np.array_equal(data, blobs.get(case.memories[n]))}
    after = {n: blobs.add(f"{op.name}.{name}.{n}.after", data) for n, data in changed.items()}
    kinds = {v.memory: v.dtype for views in pools.values() for v in views} | {
        n: v.dtype for n, v in draft.arguments.items()
    }
    computes = op.kind in COMPUTING and not is_copy(op)
    return replace(draft, after=after, near={n: _loose(kernels, kinds[n]) for n in after if n != "errors" and computes})


def is_copy(op: Op) -> bool:
    """Whether an append stores what it gets without f32 in between."""
    return isinstance(op, Append) and not (op.bias or op.k_norm or op.q_norm or op.rope)


def _loose(kernels: KernelSet, kind: str) -> str:
    """How neighbours of a memory's numbers are told: packed codes by halves of a byte."""
    packed = any(q is not None and q.codes.packed for q in kernels.cache.quants.values())
    return "nibbles" if kind == "u8" and packed else kind


class _Placing:
    """Arrays of one case, each in a memory of its own between canaries."""

    def __init__(self, op: str, name: str, blobs: Blobs) -> None:
        self._key, self._blobs = f"{op}.{name}", blobs
        self.memories: dict[str, str] = {}
        self.rng = np.random.default_rng(len(op) + len(name))

    def view(self, memory: str, array: Any) -> View:
        """`array` as a view of the memory that is kept under this name."""
        guard = 0 if memory == "errors" else GUARD
        data = np.full(guard + array.nbytes + guard, CANARY, np.uint8)
        data[guard : guard + array.nbytes] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        self.memories[memory] = self._blobs.add(f"{self._key}.{memory}", data)
        packed = np.empty(array.shape, np.uint8).strides
        strides = tuple(s * array.itemsize for s in packed)
        kind = next(n for n in _KINDS if dtype(n).numpy() == array.dtype)
        return View(memory, guard, array.shape, strides, kind)

    def pools(self, scene: Scene, prefix: str) -> dict[str, tuple[View, ...]]:
        """The cache's tensors, full of numbers where the caller brings none."""
        found = {}
        writes = {t.name: t.writes for t in scene.package.Cache.TENSORS}
        for name, pool in scene.pools.items():
            layers = pool if isinstance(pool, list) else [pool]
            for layer in layers:
                if writes[name]:
                    layer.view(np.uint8)[...] = self._numbers(layer.shape, layer.dtype)
            found[name] = tuple(self.view(f"{prefix}{name}.{i}", layer) for i, layer in enumerate(layers))
        return found

    def _numbers(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> Bytes:
        """Bytes of finite numbers; of scales positive ones, since nothing else is one."""
        if kind.name in ("uint8", "int8") or kind.itemsize == 1:
            count = int(np.prod(shape))
            return (self.rng.integers(0, 256, count, np.uint8) & _BYTES[0] | _BYTES[1]).reshape(shape)
        values = (0.5 + self.rng.random(shape)).astype(kind)
        return values.view(np.uint8)


def _fill(name: str, array: Any, rng: np.random.Generator) -> None:
    """Numbers in what is no index; index arrays are the workload's already."""
    if name == "cos_sin":
        array[...] = np.cos(rng.standard_normal(array.shape)).astype(array.dtype)
    elif name == "q_scale":
        array[...] = 0.37
    elif array.dtype.name not in ("uint32", "int32", "int64", "uint64", "uint8"):
        values = (
            np.abs(rng.standard_normal(array.shape)) if name.endswith("_scales") else rng.standard_normal(array.shape)
        )
        array[...] = (np.round(8 * values) / 8 + 0.125).astype(array.dtype)
    elif array.dtype == np.uint8:
        array[...] = rng.integers(0, 256, array.shape, np.uint8) & _BYTES[0] | _BYTES[1]


def _spoil(arrays: dict[str, Any]) -> None:
    """Ids that name nothing: the first entry of each table is -1, its last one past every pool."""
    for name in _HOSTILE:
        if name in arrays and arrays[name].size > 1:
            flat = arrays[name].reshape(-1)
            flat[0] = np.array(-1, np.int64).astype(flat.dtype)
            flat[-1] = 2**31 - 2
