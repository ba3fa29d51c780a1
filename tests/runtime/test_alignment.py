"""Every array of every operation of the checked-in sets, off its alignment: refused by name, before a kernel sees it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, itemsize
from tests.support.call_tables import SETS, Memory, calls, free_axes, module, where, with_pointer, with_stride
from tests.support.each_case import each_case

pytestmark = pytest.mark.usefixtures("unlaunched")


def refused(action: Callable[[], Any], name: str, by: int, least: int) -> None:
    """The error names the argument, how far past a multiple it lies, and the multiple, which is at least `least`."""
    with pytest.raises(ArgumentError) as caught:
        action()
    text = str(caught.value)
    found = re.match(r"^(.+?): got address 0x[0-9a-f]+, (\d+) past a multiple of (\d+) bytes; .*; pass ", text)
    assert found is not None, text
    assert (found[1], int(found[2])) == (name, by), text
    assert int(found[3]) >= least, text


@each_case("name", SETS)
def test_right_calls(name: str) -> None:
    """The calls that the other tests spoil are right ones, and there are arrays in them."""
    found = list(calls(name))
    for _, call in found:
        call.bind()
    assert found and all(call.arrays for _, call in found if call.kernel.params)


@each_case("name", SETS)
def test_arguments(name: str) -> None:
    """One byte, and half an access, past where they may begin; bytes may begin anywhere."""
    for label, call in calls(name):
        for spec in call.arrays:
            given = call.arguments[spec.name]
            pointer, size = where(given).pointer, itemsize(where(given))
            least = max(size, spec.align)
            assert spec.align <= 1 or spec.align % size == 0, label
            for by in {1, least // 2} - {0} if least > 1 else ():
                call.arguments[spec.name] = with_pointer(given, pointer + by)
                refused(call.bind, spec.name, by, least)
            call.arguments[spec.name] = with_pointer(given, pointer)
        call.bind()


@each_case("name", SETS)
def test_rows(name: str) -> None:
    """A row that begins where no access may: a stride of one element more."""
    for _, call in calls(name):
        for spec in call.arrays:
            given = call.arguments[spec.name]
            for axis in free_axes(spec, given) if spec.strided and spec.align > itemsize(given) else ():
                call.arguments[spec.name] = with_stride(given, axis, given.strides[axis] + 1)
                said = rf"^{spec.name}: got stride \d+ in dimension {axis} .*a multiple of \d+"
                with pytest.raises(ArgumentError, match=said):
                    call.bind()
            call.arguments[spec.name] = given


def _spoilt(arrays: dict[str, Any], of: Callable[[ArrayView], ArrayView]) -> list[tuple[str, dict[str, Any]]]:
    """One array at a time changed, with the name that errors have for it; of a list a layer, the last one."""
    found = []
    for name, given in arrays.items():
        if isinstance(given, list):
            found.append((f"{name}[{len(given) - 1}]", arrays | {name: [*given[:-1], of(given[-1])]}))
        else:
            found.append((name, arrays | {name: of(given)}))
    return found


@each_case("name", SETS)
def test_caches(name: str) -> None:
    """Pools, scales, tables and lengths of every cache of the set, and of pages without a table."""
    found = module(name)
    kinds = [k for n, k in vars(found).items() if n == "Pages" or n == "Cache" or n.endswith("Source")]
    for kind in [k for k in kinds if isinstance(k, type) and hasattr(k, "TENSORS")]:
        memory = Memory()
        arrays = memory.pools(kind) | (memory.tables(kind) if hasattr(kind, "TABLES") else {})
        kind(**arrays)
        least = {t.name: t.align for t in kind.TENSORS}
        seen = 0
        for which, spoilt in _spoilt(arrays, lambda a: a._replace(pointer=a.pointer + 1)):
            plain = which.partition("[")[0]
            given = arrays[plain][-1] if isinstance(arrays[plain], list) else arrays[plain]
            if max(itemsize(given), least.get(plain, 1)) > 1:
                refused(lambda k=kind, s=spoilt: k(**s), which, 1, itemsize(given))
                seen += 1
        assert seen >= len(kind.TENSORS)


def test_only_bytes_begin_anywhere() -> None:
    """Which arrays of the checked-in sets no shift of one byte can spoil."""
    free = {
        f"{name}.{label}.{spec.name}"
        for name in SETS
        for label, call in calls(name)
        for spec in call.arrays
        if max(spec.align, itemsize(where(call.arguments[spec.name]))) == 1
    }
    assert not {f for f in free if not f.endswith(".valid_tokens")}, free


def test_a_null_address() -> None:
    label, call = next(calls("llama3_8b"))
    call.arguments["row_offsets"] = call.arguments["row_offsets"]._replace(pointer=0)
    with pytest.raises(ArgumentError, match=r"^row_offsets: got a null address for 3 elements; .*; pass an array"):
        call.bind()
    assert label == "append.KERNEL"
