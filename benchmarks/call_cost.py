"""Python's cost of a call against a driver that does nothing: bound, with arrays replaced, checked; and of a step of 32 layers.

    python benchmarks/call_cost.py

The least and the median of many short averages, in microseconds of this process's CPU time, so that other jobs of the machine
count little. Device arrays
are stand-ins with `__cuda_array_interface__`, as CuPy and Numba have it; what is left is kvgen's own work.
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any, Final

from kvgen.runtime import cuda, gpu

LAYERS: Final = 32
BATCH: Final = 64
ROUND: Final = 1e-3  # seconds


class DeviceArray:
    """An array that claims to lie on a GPU."""

    def __init__(self, shape: tuple[int, ...], typestr: str, pointer: int, dtype: str = "") -> None:
        self.dtype = dtype
        self._interface = {
            "shape": shape,
            "typestr": typestr,
            "data": (pointer, False),
            "version": 3,
            "strides": None,
        }

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface


class StubDriver:
    """Every call succeeds at once."""

    def current_device(self) -> int:
        return 0

    def capability(self, device: int) -> tuple[int, int]:
        return (9, 0)

    def multiprocessors(self, device: int) -> int:
        return 132

    def pointer_device(self, pointer: int) -> int:
        return 0

    def allocate(self, nbytes: int, device: int) -> int:
        return 1 << 40

    def free(self, pointer: int, device: int) -> None:
        pass

    def load(self, cubin: bytes, entry: str, device: int) -> object:
        return 1

    def set_max_dynamic_shared(self, handle: object, nbytes: int, device: int) -> None:
        pass

    def prepare(self, *_: Any) -> cuda.Launch:
        return lambda stream: None


def microseconds(action: Callable[[], object], seconds: float) -> tuple[float, float]:
    """The least and the median of many short averages, of calls for `seconds` all together.

    Rounds are a millisecond: other jobs of the machine slow many of them down, and never all.
    """
    action()
    once = min(timeit.repeat(action, number=3, repeat=9, timer=time.process_time)) / 3
    number = max(1, int(ROUND / max(once, 1e-7)))
    rounds = sorted(timeit.repeat(action, number=number, repeat=max(25, int(seconds / ROUND)), timer=time.process_time))
    return rounds[0] / number * 1e6, statistics.median(rounds) / number * 1e6


def actions() -> list[tuple[str, Callable[[], object], float | None]]:
    """What is measured: a name, the call, and the most that it may cost, in microseconds."""
    from generated.llama3_8b import Cache, append, decode

    pool = DeviceArray((4096, 2, LAYERS, 16, 8, 128), "|V2", 1 << 32, "bfloat16")
    lengths, table = DeviceArray((BATCH,), "<i4", 1 << 20), DeviceArray((BATCH, 256), "<i4", 1 << 21)
    cache = Cache(pool, lengths=lengths, page_table=table)
    q, q_out, out = (DeviceArray((BATCH, 32, 128), "|V2", n << 24, "bfloat16") for n in (1, 2, 3))
    k, v = (DeviceArray((BATCH, 8, 128), "|V2", n << 24, "bfloat16") for n in (4, 5))
    offsets = DeviceArray((BATCH + 1,), "<i4", 1 << 22)
    workspace = decode.workspace(BATCH, device="cuda:0")
    rows = append.bind(cache[0], q, k, v, q_out, offsets)
    appends = [append.bind(layer, q, k, v, q_out, offsets) for layer in cache]
    decodes = [decode.bind(layer, q_out, out, workspace) for layer in cache]
    plan = decode.bind_plan(cache, workspace)

    def bound_step() -> None:
        plan(0)
        for store, attend in zip(appends, decodes, strict=True):
            store(0)
            attend(0)

    def replaced_step() -> None:
        plan(0)
        for store, attend in zip(appends, decodes, strict=True):
            store(0, q=q, k=k, v=v, q_out=q_out)
            attend(0, q=q_out, out=out)

    def checked_step() -> None:
        now = cache.step(lengths, table)
        decode.plan(now, workspace)
        for layer in now:
            append(layer, q, k, v, q_out, offsets)
            decode(layer, q_out, out, workspace)

    step = f"a step of {LAYERS} layers (append, decode, one plan)"
    return [
        ("bound: launch(stream)", lambda: rows(0), 0.3),
        ("bound, q and out replaced: launch(stream, q=q, out=out)", lambda: decodes[0](0, q=q_out, out=out), 2.0),
        ("bound, q, k, v and q_out replaced", lambda: rows(0, q=q, k=k, v=v, q_out=q_out), 2.0),
        ("bound, another layer: launch(stream, cache=layer)", lambda: rows(0, cache=cache[0]), 2.0),
        ("checked: append(layer, q, k, v, q_out, offsets)", lambda: append(cache[0], q, k, v, q_out, offsets), 10.0),
        ("checked: decode(layer, q, out, workspace)", lambda: decode(cache[0], q_out, out, workspace), 10.0),
        ("bind: append.bind(...)", lambda: append.bind(cache[0], q, k, v, q_out, offsets), None),
        ("Cache(pool, lengths=, page_table=)", lambda: Cache(pool, lengths=lengths, page_table=table), None),
        ("cache.step(lengths, page_table)", lambda: cache.step(lengths, table), None),
        (f"{step}: bound", bound_step, 150.0),
        (f"{step}: bound, rows replaced", replaced_step, 150.0),
        (f"{step}: checked, new tables", checked_step, None),
    ]


def main(seconds: float = 2.0) -> None:
    """Measure each for about so many seconds, and print."""
    stub: Any = StubDriver()
    cuda.driver = lambda: stub  # type: ignore[assignment]
    gpu.cubin = lambda *_: b"stub"  # type: ignore[assignment]
    for name, action, limit in actions():
        least, median = microseconds(action, seconds)
        print(f"{name:80} {least:8.2f} us, median {median:8.2f}{f'   (at most {limit:g})' if limit else ''}")


if __name__ == "__main__":
    main()
