"""Overlaps: every pair of arrays of every operation of the checked-in sets of which one is written, and views that interleave."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.plan.params import Array
from kvgen.runtime.arrays import ArrayView, extent, itemsize, view
from kvgen.runtime.overlap import Footprint, overlap, spans_of
from kvgen.runtime.page_pool import BasePages
from tests.support.call_tables import DEVICE, SETS, Call, calls, free_axes, where, with_pointer, with_stride
from tests.support.calls import Call as SmallCall
from tests.support.each_case import each_case
from tests.support.launching import zeros

pytestmark = pytest.mark.usefixtures("unlaunched")


def refused(call: Call, *names: str) -> str:
    """The call is refused; the error names both arrays, whichever first, and says what to do."""
    with pytest.raises(ArgumentError) as caught:
        call.bind()
    text = str(caught.value)
    first, _, rest = text.partition(": got memory that ")
    assert {first, rest.partition(" lies in too")[0]} == set(names), (text, names)
    assert "; pass " in text
    return text


def in_place(spec: Array, other: Array, given: ArrayView, held: ArrayView) -> list[ArrayView]:
    """`given` in the places of `held`, wherever the operation may have it: its rows, or those of each state in it."""
    axes = [i for i in range(len(other.shape)) if other.shape[:i] + other.shape[i + 1 :] == spec.shape]
    if axes:
        (axis,) = axes
        steps = held.strides[:axis] + held.strides[axis + 1 :]
        places = [held.pointer + i * held.strides[axis] * itemsize(held) for i in range(held.shape[axis])]
        return [given._replace(pointer=p, strides=steps) for p in places]
    return [given._replace(pointer=held.pointer, strides=(held.strides[0], *given.strides[1:]))]


@each_case("name", SETS)
def test_arguments(name: str) -> None:
    """One of the two written: refused, at the same address and one element further, unless it is declared to work in place."""
    for label, call in calls(name):
        for spec in [p for p in call.arrays if p.access != "in"]:
            given = call.arguments[spec.name]
            before = where(given)
            for other in [p for p in call.arrays if p is not spec]:
                held = where(call.arguments[other.name])
                low, high = extent(held)
                step = max(itemsize(before), spec.align)
                ends = {low, max(low, (high - 1) // step * step)}
                for pointer in ends if other.name not in spec.in_place else ends - {low}:
                    call.arguments[spec.name] = with_pointer(given, pointer)
                    refused(call, spec.name, other.name)
                if other.name in spec.in_place:
                    assert other.access == "in", label
                    for place in in_place(spec, other, before, held):
                        call.arguments[spec.name] = place
                        call.bind()
                        if before.shape[0] > 1:
                            unit = max(1, spec.align // itemsize(before)) if spec.strided else 0
                            call.arguments[spec.name] = place._replace(pointer=place.pointer + step)
                            refused(call, spec.name, other.name)
                            if unit:
                                steps = (place.strides[0] + unit, *place.strides[1:])
                                call.arguments[spec.name] = place._replace(strides=steps)
                                refused(call, spec.name, other.name)
                call.arguments[spec.name] = with_pointer(given, before.pointer)
        call.bind()


@each_case("name", SETS)
def test_the_caches_memory(name: str) -> None:
    """Arrays in pools, scales, tables and lengths: refused where either is written, taken where both are read."""
    for _, call in calls(name):
        memory = list(call.memory())
        for spec in call.arrays:
            given = call.arguments[spec.name]
            before = where(given)
            for which, held, written in memory:
                call.arguments[spec.name] = with_pointer(given, held.pointer)
                if which in spec.in_place:
                    call.bind()
                    call.arguments[spec.name] = with_pointer(given, held.pointer + itemsize(held))
                if spec.access != "in" or written:
                    refused(call, spec.name, which)
                else:
                    call.bind()
            call.arguments[spec.name] = with_pointer(given, before.pointer)


@each_case("name", SETS)
def test_memory_that_other_arguments_lead_to(name: str) -> None:
    """Another cache, or pages of another pool, in the cache's own memory; and the arrays of the call in those."""
    for _, call in calls(name):
        for key, other in call.arguments.items():
            if not isinstance(other, BasePages) and not hasattr(other, "footprint"):
                continue
            brought = other.memory if isinstance(other, BasePages) else [*other.memory]
            for which, held, _ in brought:
                for spec in call.arrays:
                    given = call.arguments[spec.name]
                    before = where(given).pointer
                    call.arguments[spec.name] = with_pointer(given, held.pointer)
                    if spec.access != "in" or getattr(call.kernel.params[0], "writes", False):
                        refused(call, spec.name, f"{key}.{which}")
                    else:
                        call.bind()
                    call.arguments[spec.name] = with_pointer(given, before)
            pools = call.pools
            first = next(iter(pools))
            _, held, _ = brought[0]
            spoilt = pools[first]
            call.pools = pools | {
                first: [*spoilt[:-1], spoilt[-1]._replace(pointer=held.pointer)]
                if isinstance(spoilt, list)
                else spoilt._replace(pointer=held.pointer)
            }
            if call.kernel.writes or isinstance(other, BasePages):
                with pytest.raises(ArgumentError, match=r"^[\w.\[\]]+: got memory that [\w.\[\]]+ lies in too; "):
                    call.bind()
            else:  # caches that are read alone may lie in one slab
                call.bind()
            call.pools = pools


@each_case("name", SETS)
def test_inside_a_cache(name: str) -> None:
    """Two of its own arrays in one place: an error in calls that write to one of them, and no other."""
    for label, call in calls(name):
        if not label.endswith(".KERNEL"):
            continue
        pools, tables = call.pools, call.tables
        writable = {t.name for t in call.set.Cache.TENSORS if t.writes}
        named = {n: a for n, a in (pools | tables).items() if not isinstance(a, list)}
        for first in named:
            for second in (n for n in named if n != first and n in pools):
                changed = named[first]._replace(pointer=named[second].pointer)
                call.pools = pools | ({first: changed} if first in pools else {})
                call.tables = tables | ({first: changed} if first in tables else {})
                if call.kernel.writes and {first, second} & writable:
                    refused(call, first, second)
                elif not any(p.access != "in" for p in call.set.Cache.TABLES):
                    call.bind()
        call.pools, call.tables = pools, tables
        call.bind()


@each_case("name", SETS)
def test_an_array_in_itself(name: str) -> None:
    """Rows that are written and share a place: zero strides, as of broadcast_to, and strides shorter than a row."""
    for _, call in calls(name):
        for spec in [p for p in call.arrays if p.access != "in" and p.strided]:
            given = call.arguments[spec.name]
            unit = max(1, spec.align // itemsize(given))
            for axis in free_axes(spec, given):
                row = given.strides[axis]
                for stride in (0, row - unit, -(row - unit)):
                    call.arguments[spec.name] = with_stride(given, axis, stride)
                    with pytest.raises(ArgumentError, match=rf"^{spec.name}: got stride {stride} .* must not overlap"):
                        call.bind()
            call.arguments[spec.name] = given
        for spec in [p for p in call.arrays if p.access != "in" and not p.strided and p.name != "workspace"]:
            given = call.arguments[spec.name]
            if given.shape[0] > 1:
                call.arguments[spec.name] = given._replace(strides=(0, *given.strides[1:]))
                with pytest.raises(ArgumentError, match=rf"^{spec.name}: got stride 0 in dimension 0 .*it must be \d+"):
                    call.bind()
                call.arguments[spec.name] = given


# --- Views that lie between each other, which nobody may refuse -----------------------------------------------------------

BIG = np.zeros((8, 2, 3, 4, 64), np.float32)
INTERLEAVED: dict[str, tuple[Any, Any, bool]] = {
    "k_and_v_of_one_row": (BIG.reshape(8, -1)[:, :64], BIG.reshape(8, -1)[:, 64:128], False),
    "rows_of_different_lengths": (BIG.reshape(8, -1)[:, :64], BIG.reshape(8, -1)[:3, 64:], False),
    "kv_of_a_pool": (BIG[:, 0], BIG[:, 1], False),
    "layers_of_a_pool": (BIG[:, :, 0], BIG[:, :, 2], False),
    "kv_and_a_layer": (BIG[:, 0], BIG[:, :, 2], True),
    "heads": (BIG[..., 0, :], BIG[..., 1:, :], False),
    "halves_of_heads": (BIG[..., :32], BIG[..., 32:], False),
    "even_and_odd": (BIG[..., ::2], BIG[..., 1::2], False),
    "every_third": (BIG.reshape(-1)[::3], BIG.reshape(-1)[1::3], False),
    "every_second_and_third": (BIG.reshape(-1)[::2], BIG.reshape(-1)[1::3], True),
    "backwards": (BIG[::-1, 0], BIG[:, 1], False),
    "backwards_and_forwards": (BIG[::-1, 0], BIG[1:2, 0], True),
    "one_after_another": (BIG[:4], BIG[4:], False),
    "one_row": (BIG[:5], BIG[4:], True),
    "transposed": (BIG[:, 0].swapaxes(1, 2), BIG[:, 1], False),
    "bytes_and_numbers": (BIG[..., :1].view(np.uint8), BIG[..., 1:], False),
    "the_last_byte": (BIG[..., :1].view(np.uint8)[..., 3:], BIG[..., :1], True),
    "nothing": (BIG[:0], BIG, False),
}


@pytest.mark.parametrize("label", INTERLEAVED)
def test_interleaved(label: str) -> None:
    a, b, shared = INTERLEAVED[label]
    for x, y in ((a, b), (b, a)):
        if 0 not in x.shape and 0 not in y.shape:
            assert overlap(view(x, "x"), view(y, "y")) == shared
        found = Footprint.of(spans_of([("x", view(x, "x"), True), ("y", view(y, "y"), False)]))
        assert bool(found.clash) == shared
        assert not Footprint.of(spans_of([("x", view(x, "x"), False), ("y", view(y, "y"), False)])).clash


@pytest.mark.parametrize("seed", range(40))
def test_any_views(seed: int) -> None:
    """Against a mark for every byte."""
    rng = np.random.default_rng(seed)
    for _ in range(20):
        found, marks = [], []
        for _ in range(2):
            size = int(rng.choice((1, 2, 4)))
            shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
            strides = tuple(int(n) for n in rng.integers(-20, 30, len(shape)))
            pointer = 4096 + int(rng.integers(0, 40)) * size
            found.append(ArrayView(pointer, shape, strides, {1: "u8", 2: "f16", 4: "f32"}[size], DEVICE, False, None))
            places = pointer + sum(np.indices(shape)[i] * strides[i] for i in range(len(shape))) * size
            marks.append({int(p) + b for p in np.ravel(places) for b in range(size)})
            low, high = extent(found[-1])
            assert (low, high) == (min(marks[-1]), max(marks[-1]) + 1)
        assert overlap(*found) == bool(marks[0] & marks[1])


def test_rows_of_one_buffer_are_taken() -> None:
    """q, k, v of one projection and q_out over its q: no copy is asked for."""
    call = dict(calls("engine_llama3_8b"))["append.KERNEL"]
    flat = call.arguments["q"]._replace(shape=(3, 6144), strides=(6144, 1))
    for name, heads, begin in (("q", 32, 0), ("k", 8, 4096), ("v", 8, 5120), ("q_out", 32, 0)):
        call.arguments[name] = flat._replace(
            pointer=flat.pointer + 2 * begin, shape=(3, heads, 128), strides=(6144, 128, 1)
        )
    call.bind()
    call.arguments["q_out"] = call.arguments["q_out"]._replace(pointer=flat.pointer + 2 * 2048)
    refused(call, "q_out", "q")
    call.arguments["q"] = flat._replace(pointer=flat.pointer + (1 << 24), shape=(3, 32, 128), strides=(4096, 128, 1))
    call.arguments["q_out"] = call.arguments["q_out"]._replace(pointer=flat.pointer + 2 * 1024)
    refused(call, "q_out", "k")


def test_layers_of_one_tensor_as_a_list() -> None:
    """Caches whose layers are views of one tensor, in front of and between each other; a layer twice is taken a layer."""
    call = SmallCall("apart", "append_slots")
    whole = {n: zeros(*a[0].shape[:1], 2, *a[0].shape[1:], dtype=np.float32) for n, a in call.pools.items()}
    call.pools = {n: [a[:, 0], a[:, 1]] for n, a in whole.items()}
    cache = call.cache()
    assert not cache.footprint.clash and not cache[0].footprint.clash
    call.bind()
    call.pools = {n: [a[:, 1], a[:, 1]] for n, a in whole.items()}
    cache = call.cache()
    assert re.match(r"^([kv])_pool\[[01]\]: got memory that \1_pool\[[01]\] lies in too", cache.footprint.clash)
    call.bind()
