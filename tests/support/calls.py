"""Right calls of the launchers, and ways to spoil one argument of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgen.errors import ArgumentError
from kvgen.runtime.workspace import Workspace
from tests.support.launching import Raw, i32, package, zeros

Change = Callable[["Call"], None]


class Call:
    """Right arguments for an operation of a set, to be spoilt one at a time: two requests, two layers, five pages."""

    def __init__(self, name: str, op: str) -> None:
        self.name, self.op = name, op
        self.layer: Any = 1
        self.stream: Any = None
        self.set = package(name)
        self.pools: dict[str, Any]
        self.tables: dict[str, Any] = {"lengths": i32(3, 4), "page_table": np.zeros((2, 3), np.int32)}
        match name:
            case "paged":
                self.pools = {"pool": zeros(5, 2, 2, 4, 2, 16)}
            case "apart":
                shapes = {"k_pool": (5, 4, 2, 8), "v_pool": (5, 4, 2, 4)}
                self.pools = {n: [zeros(*s, dtype=np.float32) for _ in range(2)] for n, s in shapes.items()}
                self.tables["lengths"] = self.tables["lengths"].astype(np.int32)
            case "interleaved":
                self.pools = {"pool": zeros(2, 5, 4, 2, 2, 8, dtype=np.float32)}
            case "blocks":
                self.pools = {"pool": zeros(5, 2, 2, 6, 1, 8, dtype=np.float16)}
                self.tables["page_table"] = i32(0, 1)
        self.arguments = self._arguments()
        self.other_cache: Any = None

    def _arguments(self) -> dict[str, Any]:
        offsets = i32(0, 1, 2)
        if self.name == "apart":
            rows = {"k": zeros(2, 2, 8, dtype=np.float32), "v": zeros(2, 2, 4, dtype=np.float32)}
            if self.op == "append_slots":
                return rows | {"slots": np.array([0, -1])}
            if self.op == "append":
                return rows | {"row_offsets": offsets.astype(np.int32)}
            return {"q": zeros(2, 2, 8, dtype=np.float32), "out": zeros(2, 2, 4, dtype=np.float32)}
        if self.name == "interleaved":
            outs = {n: zeros(2, 2, 8, dtype=np.float32) for n in ("k_out", "v_out")}
            return {"row_offsets": offsets, **outs}
        if self.name == "blocks":
            return {n: zeros(2, 1, 8, dtype=np.float16) for n in "kv"} | {"row_offsets": offsets}
        match self.op:
            case "append":
                return {"k": zeros(2, 2, 16), "v": zeros(2, 2, 16), "row_offsets": offsets}
            case "gather":
                return {"row_offsets": offsets, "k_out": zeros(2, 2, 16), "v_out": zeros(2, 2, 16)}
        return {"q": zeros(2, 4, 16), "out": zeros(2, 4, 16), "workspace": self.workspace(2)}

    def workspace(self, rows: int) -> Workspace:
        """A workspace of the operation for steps of so many rows."""
        longest = 12 if self.op == "fixed" else None
        workspace: Workspace = getattr(self.set, self.op).workspace(rows, max_tokens=longest)
        return workspace

    def cache(self) -> Any:
        return self.set.Cache(*self.pools.values(), **self.tables)

    def bind(self) -> Any:
        """Check everything but the stream."""
        cache = self.other_cache if self.other_cache is not None else self.cache()[self.layer]
        return getattr(self.set, self.op).bind(cache, **self.arguments)

    def run(self) -> None:
        getattr(self.set, self.op)(self.cache()[self.layer], **self.arguments, stream=self.stream)


def pool(value: Callable[[Raw], Any], name: str = "pool") -> Change:
    """Replace a pool by something made of it."""

    def change(call: Call) -> None:
        call.pools[name] = value(call.pools[name])

    return change


def table(name: str, value: Any) -> Change:
    return lambda call: call.tables.update({name: value})


def argument(name: str, value: Any) -> Change:
    return lambda call: call.arguments.update({name: value(call) if callable(value) else value})


def frozen(array: Raw) -> Raw:
    view = array.view()
    view.flags.writeable = False
    return view


def inside(array: Raw, *shape: int) -> Raw:
    """A view with the strides of a larger array of this shape."""
    return zeros(*shape, dtype=array.dtype)[tuple(slice(n) for n in array.shape)]


def with_strides(*strides: int) -> Callable[[Raw], Raw]:
    """The same shape, with these strides in elements, over memory of its own."""

    def make(array: Raw) -> Raw:
        memory = zeros(8192, dtype=array.dtype)
        steps = [s * array.itemsize for s in strides]
        return np.ndarray(array.shape, array.dtype, memory, 0, steps)  # type: ignore[call-overload, no-any-return]

    return make


def shifted(array: Raw) -> Raw:
    """The same shape, one element past an aligned address."""
    return np.ndarray(array.shape, array.dtype, zeros(array.size + 1, dtype=array.dtype), array.itemsize)


def refused(action: Callable[[], Any], message: str) -> None:
    """The action raises ArgumentError with a message that begins so, in the form "argument: got; rule; what to do"."""
    with pytest.raises(ArgumentError) as caught:
        action()
    assert str(caught.value).startswith(message)
    assert str(caught.value).count("; ") >= 1
