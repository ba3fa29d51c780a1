"""Python cost of a call against a stub driver: bound and checked, best of many (microseconds).

    python benchmarks/call_cost.py

Times are of this process alone, so that other jobs of the machine count little. The checks of alignment and overlap are timed
by themselves too, and the checked call without the latter: what they add to a call.

The stub takes every driver call and does nothing, so what is left is kvgen's own work. Device arrays are stand-ins with
`__cuda_array_interface__`, as CuPy and Numba have it.
"""

from __future__ import annotations

import time
import timeit
from typing import Any

import kvgen.runtime.cuda as cuda
import kvgen.runtime.gpu as gpu
import kvgen.runtime.launcher as launcher
from generated.llama3_8b import Cache, append
from kvgen.runtime.arrays import ITEMSIZE
from kvgen.runtime.overlap import Taken, hold_apart


class DeviceArray:
    """An array that claims to lie on a GPU."""

    def __init__(self, shape: tuple[int, ...], typestr: str, pointer: int, dtype: str = "") -> None:
        self.dtype = dtype
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }


class StubDriver:
    """Every call succeeds at once."""

    def current_device(self) -> int:
        return 0

    def capability(self, device: int) -> tuple[int, int]:
        return (9, 0)

    def pointer_device(self, pointer: int) -> int:
        return 0

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        return 1

    def set_max_dynamic_shared(self, handle: object, nbytes: int) -> None:
        pass

    def prepare(self, *_: Any) -> cuda.Launch:
        return lambda stream: None


def microseconds(action: Any, number: int = 2000, repeat: int = 25) -> float:
    """The best of `repeat` averages over `number` calls."""
    return min(timeit.repeat(action, number=number, repeat=repeat, timer=time.process_time)) / number * 1e6


def measure(arrays: list[Taken]) -> list[Taken]:
    """What the launcher does of every array for its alignment and its extent, by itself."""
    found = []
    for low, high, spec, array in arrays:
        pointer, align = array.pointer, spec.align
        size = ITEMSIZE[array.dtype]
        if align < size:
            align = size
        if not pointer or pointer % align:
            raise AssertionError(spec.name)
        before, behind = 0, high - low
        low, high = pointer - before, pointer + behind
        if low < high:
            found.append((low, high, spec, array))
    return found


def main() -> None:
    """Measure and print."""
    stub: Any = StubDriver()
    cuda.driver = lambda: stub  # type: ignore[assignment]
    gpu.cubin = lambda *_: b"stub"  # type: ignore[assignment]
    batch, tokens = 64, 64
    pool = DeviceArray((4096, 2, 32, 16, 8, 128), "|V2", 1 << 32, "bfloat16")
    cache = Cache(
        pool,
        lengths=DeviceArray((batch,), "<u4", 1 << 20),
        page_table=DeviceArray((batch, 256), "<u4", 1 << 21),
    )
    q, out = (DeviceArray((tokens, 32, 128), "|V2", n << 24, "bfloat16") for n in (1, 2))
    k, v = (DeviceArray((tokens, 8, 128), "|V2", n << 24, "bfloat16") for n in (3, 4))
    offsets = DeviceArray((batch + 1,), "<u4", 1 << 22)
    layer = cache[0]
    bound = append.bind(layer, q, k, v, out, offsets)

    def checked() -> None:
        append(layer, q, k, v, out, offsets)

    seen: list[tuple[Any, ...]] = []
    launcher.hold_apart = lambda *arguments: seen.append(arguments)
    checked()
    launcher.hold_apart = lambda *arguments: None
    unheld = microseconds(checked, 500)
    launcher.hold_apart = hold_apart
    aligned, apart = microseconds(lambda: measure(seen[0][0])), microseconds(lambda: hold_apart(*seen[0]))
    rows = [
        ("bound: step(stream)", microseconds(lambda: bound(0)), 4.0),
        (
            "checked: append(cache[layer], q, k, v, out, offsets)",
            microseconds(checked, 500),
            25.0,
        ),
        ("  the same, overlaps not looked for", unheld, None),
        ("  alignment and extents of its arrays, alone", aligned, None),
        ("  overlaps, alone", apart, None),
        ("  both", aligned + apart, 1.0),
        ("bind: append.bind(...)", microseconds(lambda: append.bind(layer, q, k, v, out, offsets), 500), None),
    ]
    for name, cost, limit in rows:
        print(f"{name:48} {cost:7.2f} us{f'   (target <= {limit:g})' if limit else ''}")


if __name__ == "__main__":
    main()
