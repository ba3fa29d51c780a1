"""Every axis, stride, type and address of every array of every launcher, changed one at a time: refused, or right.

What a launcher takes beside the plain call is what its docstring says: any stride along axes that "may be strided", any size
along an axis that no other array has, and then the kernel is told the size.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from ml_dtypes import bfloat16

from kvgen.cases.append import AppendCases
from kvgen.cases.contents import Case
from kvgen.cases.scene import LAYER
from kvgen.errors import ArgumentError
from kvgen.plan.params import Array, PoolMap, Size
from kvgen.runtime import Launcher, launcher
from kvgen.runtime.arrays import ITEMSIZE, ArrayView, view
from kvgen.runtime.pool_tensors import Tensor
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.loader import load_folder
from kvgen.verify import batches as batches_of_verify
from kvgen.verify import launch as launch_of_verify
from kvgen.verify.batches import batches, case_of
from kvgen.verify.launch import CANARY, GUARD
from kvgen.verify.memory import Bytes, HostMemory, Placed, View
from tests.verify.test_cases import EVERY, op_of, verifier

ROOT: Final = Path(__file__).resolve().parents[2]
FORM: Final = re.compile(r"[\w.\[\]]+: got .+; .+", re.S)


@cache
def sets() -> tuple[KernelSet, ...]:
    """The sets of specs/."""
    return tuple(loaded.kernels for loaded in load_folder(ROOT / "specs", ROOT))


def package_of(kernels: KernelSet) -> Any:
    return importlib.import_module(f"generated.{kernels.name}")


# Statically: what kernels are told -------------------------------------------------------------------------------------------


def names(shape: tuple[int | str, ...]) -> set[str]:
    """The dimensions of a shape, "B" for "B+1"."""
    return {axis.partition("+")[0] for axis in shape if isinstance(axis, str)}


def test_kernels_are_told_every_size_and_stride_that_is_free() -> None:
    """A dimension is the cache's or one of the kernel's numbers, and so is a stride that is not fixed."""
    seen = 0
    for kernels in sets():
        package = package_of(kernels)
        fields = package.Cache.FIELDS
        told = {word for f in fields if isinstance(f, Size) for word in f.value.split("*")}
        own = set().union(*(names(t.shape) for t in (*package.Cache.TENSORS, *package.Cache.TABLES)))
        for table in package.Cache.TABLES:
            assert not table.strided or f"{table.name}.stride" in told, (kernels.name, table.name)
        launchers = [each for each in vars(package).values() if isinstance(each, Launcher)]
        assert len(launchers) == len(kernels.ops)
        for each in launchers:
            for kernel in filter(None, (each.KERNEL, getattr(each, "PLAN", None))):
                words = {word for p in kernel.params if isinstance(p, Size) for word in p.value.split("*")}
                for p in kernel.arguments:
                    if not isinstance(p, Array) or p.name == "workspace":
                        continue
                    seen += 1
                    where = (kernels.name, kernel.entry, p.name)
                    assert names(p.shape) <= own | words | {"planned_rows"}, where
                    assert p.strided < 1 or f"{p.name}.stride" in words, where
                    assert p.strided < 2 or f"{p.name}.row_stride" in words, where
    assert seen > 1100


# One change at a time, bound and not run -------------------------------------------------------------------------------------

OTHER: Final = {
    "f32": "i32", "i32": "u32", "u32": "i32", "f16": "bf16", "bf16": "f16", "i8": "u8", "u8": "i8", "e4m3": "i8",
    "e5m2": "i8", "e8m0": "i8", "i64": "u64", "u64": "i64",
}  # fmt: skip
WIDER: Final = {1: "i32", 2: "f32", 4: "i64", 8: "i32"}


@dataclass(frozen=True)
class Given:
    """One array of a call: its specification, `group` of arrays with which it shares dimensions ("" those of the call)."""

    spec: Array | Tensor
    group: str
    written: bool
    layer: int | None = None

    def strides(self) -> tuple[int | None, ...]:
        """Element strides that are fixed; -1 where an axis is packed, None where it is free."""
        if isinstance(self.spec, Tensor):
            return self.spec.strides
        return tuple(None if axis < int(self.spec.strided) else -1 for axis in range(len(self.spec.shape)))


def given_of(case: Case) -> dict[str, Given]:
    """Every array of a case by the name that Contents.flat() has for it."""
    package, kernel = case.scene.package, case.call.launcher.KERNEL
    found: dict[str, Given] = {}

    def cache(
        prefix: str, group: str, cls: Any, pools: Mapping[str, Any], tables: Mapping[str, Any], writes: bool
    ) -> None:
        for tensor in cls.TENSORS:
            pool = pools.get(tensor.name)
            for name, layer in (
                [(f"{tensor.name}[{i}]", i) for i in range(len(pool))]
                if isinstance(pool, list)
                else [(tensor.name, None)]
            ):
                if pool is not None:
                    found[prefix + name] = Given(tensor, group, writes and tensor.writes, layer)
        for table in cls.TABLES:
            if table.name in tables:
                found[f"{prefix}{table.name} of the cache"] = Given(table, group, writes and table.access != "in")

    before = case.before
    cache("", "", package.Cache, before.pools, before.tables, kernel.writes)
    for name, memory in before.others.items():
        read = case.call.others.get(name)  # a cache; otherwise pages, which are written
        cls = package.Cache if read is None else read.scene.package.Cache
        cache(f"{name}.", name, cls, memory.pools, memory.tables, read is None)
    plan = getattr(case.call.launcher, "PLAN", None)
    for spec in (*(plan.arguments if plan is not None else ()), *kernel.arguments):
        if isinstance(spec, Array) and spec.name in before.arrays:
            found[spec.name] = Given(spec, "", spec.access != "in")
    assert set(found) == set(before.flat()), set(found) ^ set(before.flat())
    return found


def changes(v: ArrayView) -> Iterator[tuple[str, int, ArrayView]]:
    """A change, its axis (-1: none), and the array that comes of it; nobody reads its memory."""
    size = ITEMSIZE[v.dtype]

    def at(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    for axis, (n, step) in enumerate(zip(v.shape, v.strides, strict=True)):
        for label, other in (("shorter", n - 1), ("longer", n + 1), ("empty", 0), ("enormous", 2**33)):
            if other >= 0 and other != n:
                steps = at(v.strides, axis, 0) if label == "enormous" else v.strides
                yield label, axis, v._replace(shape=at(v.shape, axis, other), strides=steps)
        reversed_at = v.pointer + (n - 1) * step * size
        for label, pointer, other in (
            ("reversed", reversed_at, -step),
            ("still", v.pointer, 0),
            ("one more", v.pointer, step + 1),
            ("twice", v.pointer, 2 * step),
            ("half", v.pointer, step // 2),
            ("far", v.pointer, 2**40),
        ):
            if other != step:
                yield label, axis, v._replace(pointer=pointer, strides=at(v.strides, axis, other))
    for axis in range(len(v.shape) - 1):
        if min(v.shape[axis : axis + 2]) > 1:
            swapped = at(at(v.strides, axis, v.strides[axis + 1]), axis + 1, v.strides[axis])
            yield "transposed", axis, v._replace(strides=swapped)
    yield "rank", -1, v._replace(shape=(*v.shape, 1), strides=(*v.strides, 1))
    yield "rank", -1, v._replace(shape=v.shape[1:], strides=v.strides[1:])
    yield "dtype", -1, v._replace(dtype=OTHER[v.dtype])
    yield "dtype", -1, v._replace(dtype=WIDER[size])
    yield "address", -1, v._replace(pointer=v.pointer + size)
    if size > 1:
        yield "odd address", -1, v._replace(pointer=v.pointer + 1)
    yield "null", -1, v._replace(pointer=0)
    yield "read-only", -1, v._replace(readonly=True)
    yield "device", -1, v._replace(device="cuda:0")


class Allowed:
    """Why a changed array may be taken; what nothing here allows has to be refused."""

    def __init__(self, given: Mapping[str, Given], layers: bool) -> None:
        self.given, self.layers = given, layers
        self.uses: dict[tuple[str, str], set[str]] = {}  # a dimension of a group: the arrays that have it
        for name, one in given.items():
            for dim in names(one.spec.shape):
                self.uses.setdefault((one.group, dim), set()).add(name)

    def key(self, name: str, kernels: KernelSet) -> object:
        """Equal for arrays of which the same is checked, beside the same others; pools and tables are a set's own."""
        one = self.given[name]
        beside = tuple(frozenset(self.uses[one.group, dim]) for dim in sorted(names(one.spec.shape)))
        own = "" if name.isidentifier() and isinstance(one.spec, Array) else kernels.name
        return name, repr(one), beside, own

    def why(self, name: str, label: str, axis: int, was: ArrayView, now: ArrayView) -> str:
        """The reason; empty: there is none."""
        one = self.given[name]
        spec, align = one.spec, max(one.spec.align, ITEMSIZE[now.dtype])
        if 0 in was.shape and label in ("address", "odd address", "null"):
            return "no elements"
        if label in ("shorter", "longer", "empty"):
            return self._size(name, one, axis, label)
        if label in ("reversed", "still", "one more", "twice", "half", "far", "transposed"):
            return self._stride(one, align, now)
        if label == "dtype":
            return "one of its types" if not isinstance(spec.dtype, str) and now.dtype in spec.dtype else ""
        if label == "address":
            return "aligned" if now.pointer % align == 0 else ""
        if label == "read-only":
            return "" if one.written and (self.layers or one.layer in (None, LAYER)) else "only read"
        return ""

    def _size(self, name: str, one: Given, axis: int, label: str) -> str:
        dim = one.spec.shape[axis]
        if isinstance(dim, int):
            return ""
        others = self.uses[one.group, dim.partition("+")[0]] - {name}
        if one.layer is not None and dim in (
            "pages",
            "scale_pages",
            "tokens",
        ):  # tensors of layers are taken one by one
            others = {other for other in others if self.given[other].layer in (None, one.layer)}
        return "" if others else "nobody else has the dimension"

    def _stride(self, one: Given, align: int, now: ArrayView) -> str:
        if 0 in now.shape:
            return "no elements"
        dense, wrong = 1, []
        for axis in range(len(now.shape) - 1, -1, -1):
            n, step, fixed = now.shape[axis], now.strides[axis], one.strides()[axis]
            if n > 1:
                if fixed is not None:
                    wrong.append(step != (dense if fixed < 0 else fixed))
                else:
                    wrong.append(step * ITEMSIZE[now.dtype] % align != 0)
            dense *= n
        if any(wrong) or now.pointer % align:
            return ""
        written = one.spec.writes if isinstance(one.spec, Tensor) else one.written
        return "" if written and not apart(now) else "its strides are free"


def apart(v: ArrayView) -> bool:
    """True where no two elements lie in one place; of rows that lie one behind another the first elements are looked at."""
    places, dense = np.zeros(1, np.int64), 1
    for n, step in sorted(zip(v.shape, v.strides, strict=True), key=lambda pair: abs(pair[1])):
        if len(places) == 1 and step == dense:
            dense *= n
            continue
        places = np.add.outer(np.arange(n) * step, places).reshape(-1)
    places.sort()
    return bool((np.diff(places) >= dense).all())


def representatives() -> list[tuple[KernelSet, Op]]:
    """A launcher of every kind of signature, and one over every kind of cache: of few heads where there is a choice."""

    def pattern(shape: tuple[int | str, ...]) -> tuple[str, ...]:
        return tuple("number" if isinstance(axis, int) else axis for axis in shape)

    found: dict[object, tuple[KernelSet, Op]] = {}
    for kernels in sorted(sets(), key=lambda k: (k.q_heads if not k.cache.states else 0, k.name)):
        package = package_of(kernels)
        tensors = tuple((t.name, t.axes, tuple(s is None for s in t.strides), t.align) for t in package.Cache.TENSORS)
        cache_key = (tensors, tuple((t.name, t.shape, t.strided) for t in package.Cache.TABLES))
        for op in kernels.ops:
            if op.kind == "custom":
                continue
            params = [p for p in getattr(package, op.name).KERNEL.arguments if isinstance(p, Array)]
            key = (op.kind, tuple((p.name, pattern(p.shape), p.strided, p.access, p.optional) for p in params))
            for each in (key, cache_key):
                found.setdefault(each, (kernels, op))
    unique = {(kernels.name, op.name): (kernels, op) for kernels, op in found.values()}
    return list(unique.values())


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are checked and go nowhere; nothing is stored in their memory."""
    monkeypatch.setattr(launcher, "_launch", lambda checked, args: lambda stream: None)
    monkeypatch.setattr(batches_of_verify, "_store", lambda *_: None)
    monkeypatch.setattr(AppendCases, "settle", lambda *_: None)


@pytest.mark.usefixtures("unlaunched")
def test_each_change_is_refused_or_allowed() -> None:
    """Calls with every signature there is: each array once with each that it shares dimensions with."""
    refused, taken, wrong, seen = Counter[str](), Counter[str](), list[str](), set[object]()
    for kernels, op in representatives():
        case = case_of(kernels, op, package_of(kernels), batches(kernels, op, quick=True)[0], 0)
        flat = case.before.flat()
        allowed = Allowed(given_of(case), case.call.launcher.KERNEL.all_layers)
        launch_of_verify._call(case, case.before)  # right where nothing is changed
        for name, array in flat.items():
            key = allowed.key(name, kernels)
            if key in seen:
                continue
            seen.add(key)
            was = view(array, name)
            for label, axis, now in changes(was):
                where = f"{kernels.name}/{op.name}: {name}: {label} {axis}: {was[1:3]}"
                try:
                    launch_of_verify._call(case, case.before.over({**flat, name: now}))
                except ArgumentError as error:
                    refused[label] += 1
                    if not FORM.fullmatch(str(error)):
                        wrong.append(f"{where}: {error}")
                else:
                    taken[label] += 1
                    if not allowed.why(name, label, axis, was, now):
                        wrong.append(f"{where}: taken")
    assert not wrong, "\n".join(wrong)
    assert set(taken) == set(refused) - {"rank", "enormous", "device"} and min(refused.values()) > 100
    assert min(taken[label] for label in ("shorter", "longer", "reversed", "still", "twice", "address")) > 100


@pytest.mark.usefixtures("unlaunched")
def test_arrays_that_replace_bound_ones_are_like_them() -> None:
    """All that a bound launch takes in an array's place is another address, and what says nothing of its elements."""
    taken, count = Counter[str](), 0
    for kernels, op in representatives():
        case = case_of(kernels, op, package_of(kernels), batches(kernels, op, quick=True)[0], 0)
        if case.call.launcher.KERNEL.all_layers:
            continue
        binder = Binder(case.call.launcher)
        launch_of_verify._call(replace(case, call=replace(case.call, launcher=binder)), case.before)
        for name, one in given_of(case).items():
            if name not in case.before.arrays or name not in binder.KERNEL.places:
                continue
            was = view(case.before.arrays[name], name)
            binder.bound(**{name: was})
            for label, axis, now in changes(was):
                count += 1
                try:
                    binder.bound(**{name: now})
                except ArgumentError as error:
                    assert FORM.fullmatch(str(error)), error
                    continue
                taken[label] += 1
                nothing = 0 in was.shape or (now.shape == was.shape and axis >= 0 and was.shape[axis] == 1)
                aligned = now.pointer % max(one.spec.align, ITEMSIZE[now.dtype]) == 0
                fine = (label == "address" and aligned) or (label == "read-only" and not one.written)
                assert nothing or fine, (kernels.name, op.name, name, label, axis, was[1:3])
    assert count > 5000 and taken["address"] > 50 and taken["read-only"] > 50


class Binder:
    """A launcher whose call binds."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher
        self.bound: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launcher, name)

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.bound = self.launcher.bind(*arguments, **named)


@pytest.mark.usefixtures("unlaunched")
def test_memory_of_a_workspace() -> None:
    """The caller's: bytes of the device, one behind another, from a multiple of 16 on, at least as many as are asked for."""
    package = importlib.import_module("generated.llama3_8b")
    for launcher_ in (package.decode, package.extend):
        nbytes = launcher_.workspace_bytes(3)
        was = view(launcher_.workspace(3).view, "memory")
        assert was.shape == (nbytes,)
        layer = package.Cache.empty(layers=1, requests=2, pages=4)[0]
        refused = set()
        for label, _, now in (*changes(was), ("far on", -1, was._replace(pointer=was.pointer + 16))):
            try:
                launcher_.plan(layer, launcher_.workspace(3, memory=now))
            except ArgumentError as error:
                assert FORM.fullmatch(str(error)), error
                refused.add(label)
            else:
                assert label in ("longer", "far on"), label
        strides = {"reversed", "still", "one more", "twice", "half", "far"}
        assert refused == {
            "shorter",
            "empty",
            "enormous",
            "rank",
            "dtype",
            "address",
            "null",
            "read-only",
            "device",
            *strides,
        }


# Strides that are taken are right ----------------------------------------------------------------------------------------------


class Relaid(HostMemory):
    """Host memory in which every free axis is twice as long as in the case, and goes from the last element back; those of pools
    go forwards where tensor maps describe them, which have no other strides."""

    def __init__(self, given: Mapping[str, Given], mapped: bool) -> None:
        self.given, self.mapped = given, mapped
        self.moved: set[str] = set()

    def place(self, data: Bytes) -> Placed:
        return RelaidPlaced(data, self)


class RelaidPlaced:
    """An array among canaries, of which the case's memory is a copy."""

    def __init__(self, data: Bytes, owner: Relaid) -> None:
        self.data, self.owner = data.copy(), owner

    def array(self, place: View) -> object:
        source, one = place.of(self.data), self.owner.given.get(place.memory)
        steps = list(source.strides)
        for axis, fixed in enumerate(one.strides() if one is not None and source.size else ()):
            if one is not None and fixed is None:
                steps[axis] *= 2 if isinstance(one.spec, Tensor) and self.owner.mapped else -2
                self.owner.moved |= {place.memory} if source.shape[axis] > 1 else set()
        reach = [(n - 1) * step for n, step in zip(source.shape, steps, strict=True)] if source.size else []
        first = GUARD - sum(step for step in reach if step < 0)
        raw = np.full(GUARD * 3 + sum(map(abs, reach)) + source.itemsize, CANARY, np.uint8)
        self.memory = raw[-raw.ctypes.data % GUARD :]
        self.place = place
        self.own = np.ndarray((*source.shape, source.itemsize), np.uint8, self.memory.data, first, (*steps, 1))
        self.found = np.ndarray(source.shape, source.dtype, self.memory.data, first, steps)
        self.found[...] = source
        return self.found

    def read(self) -> Bytes:
        data = self.data.copy()
        self.place.of(data)[...] = self.found
        self.own[...] = CANARY
        if (self.memory != CANARY).any():
            data[0] ^= 1  # a byte beside the case's array, which launch() reports
        return data


# Operations that differ from others above them by what states are alone.
SAME: Final = ("copy_pages", "zero_pages", "swap_out", "swap_in", "compact", "reorder")
RUN: Final = [
    (name, op) for name, names in EVERY.items() for op in names if name != "state_qwen3_next" or op not in SAME
]


@pytest.mark.parametrize(("name", "op"), RUN)
def test_other_strides_are_right(name: str, op: str) -> None:
    """The good case of tests/verify/test_cases.py, for which its kernel is compiled anyway."""
    with verifier(name) as found:
        operation = op_of(found.kernels, op)
        plan = found.plans(operation)[0]
        case = case_of(found.kernels, operation, found.package, plan.workload, 0)
        params = case.call.launcher.KERNEL.params
        found.memory = memory = Relaid(given_of(case), any(isinstance(p, PoolMap) for p in params))
        result = found.case(operation, plan)
    assert result.wrong == () and result.reported == result.expected
    assert memory.moved


def test_strides_that_no_tensor_map_has_are_refused_by_name() -> None:
    package = importlib.import_module("generated.llama3_8b")
    tables = {"lengths": np.array([3], np.int32), "page_table": np.array([[1]], np.int32)}
    q = np.zeros((1, 32, 128), bfloat16)
    layer = package.Cache(np.zeros((2, 2, 1, 16, 8, 128), bfloat16)[::-1], **tables)[0]
    with pytest.raises(
        ArgumentError, match=r"^cache: got 2 pages of k, -65536 bytes apart, .*; pass a pool of at least"
    ):
        package.extend(layer, q, q.copy(), package.extend.workspace(1))
