"""Kernels of the project's own: their arguments in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.bench import Call, Scene
from kvgen.bench.synthetic_batch import aligned
from kvgen.errors import ToolError
from kvgen.layout.dtypes import dtype
from kvgen.ops import Custom
from kvgen.plan.params import Array, Scalar, Size

if TYPE_CHECKING:
    pass

Raw = NDArray[Any]
_SIZES: Final = ((7, 5), (133, 70))  # of the first two names of shapes, then again
_SCALAR: Final = 0.37


def custom_call(scene: Scene, op: Custom) -> Call:
    """The call, with sizes as the spec has them, or that are no multiples of a block's threads.

    An integer array has 0 and 1, one that is `untrusted` any number; `row_offsets` are those of the batch's new tokens. Raises
    ToolError for a kernel that takes a tensor map.
    """
    launcher = getattr(scene.package, op.name)
    batch, new = len(scene.workload.totals), scene.workload.new
    offsets = np.cumsum([0, *new])
    drawn = cycle(_SIZES[batch > 2])
    sizes = {"B": batch, "M": scene.columns, "pages": scene.pages, "layers": 2, "rows": scene.pages}
    if any(p.name == "row_offsets" for p in op.params):
        sizes["T"] = int(offsets[-1])
    sizes |= dict(op.sizes)
    rng = np.random.default_rng([batch, *map(ord, op.name)])
    arrays, numbers = dict[str, Raw](), dict[str, int]()
    for spec in launcher.KERNEL.arguments:
        if spec.name == "errors":
            continue
        if isinstance(spec, Scalar):
            numbers[spec.name] = _SCALAR if spec.dtype == "f32" else 1  # type: ignore[assignment]
        elif isinstance(spec, Array):
            shape = tuple(_extent(axis, sizes, drawn) for axis in spec.shape)
            arrays[spec.name] = array = aligned(shape, dtype(spec.dtype).numpy())
            if array.dtype.kind in "iu" and spec.access != "out":
                limits = np.iinfo(array.dtype) if _untrusted(op, spec.name) else None
                low, high = (int(limits.min), int(limits.max)) if limits else (0, 1)
                array[...] = rng.integers(low, high, shape, array.dtype, endpoint=True)
            if spec.name == "row_offsets" and shape == offsets.shape:
                array[...] = offsets
        elif not isinstance(spec, Size):
            raise ToolError(f"{spec.name} is a tensor map, which kvgen verify cannot draw")
    return Call(op, launcher, arrays, int(offsets[-1]), int(offsets[-1]), numbers=numbers)


def _untrusted(op: Custom, name: str) -> bool:
    return any(p.name == name and getattr(p, "untrusted", False) for p in op.params)


def _extent(axis: int | str, sizes: dict[str, int], drawn: Iterator[int]) -> int:
    if isinstance(axis, int):
        return axis
    name, _, more = axis.partition("+")
    if name not in sizes:
        sizes[name] = next(drawn)
    return sizes[name] + int(more or 0)
