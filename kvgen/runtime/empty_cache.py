"""Memory for a cache from nothing: zeroed pools, and tables that name no page yet."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvgen.errors import ArgumentError
from kvgen.layout.dtypes import dtype as element
from kvgen.plan.params import Array
from kvgen.runtime.arrays import ArrayView, Viewed, contiguous_strides
from kvgen.runtime.memory import DeviceMemory, ordinal_of
from kvgen.runtime.pool_tensors import Tensor

_ALIGN: Final = 256  # as a GPU allocates
# Tables of page ids, which begin with no page: -1, or all bits set, is reported as PAGE_ID and never followed.
_PAGE_IDS: Final = ("page_table", "scales_page_table", "page_indices", "req_to_token", "state_ids")
# Tables of requests: request b has row b.
_REQUESTS: Final = ("request_ids", "idx_mapping")


class DeviceArray(Viewed):
    """An array in a GPU's memory that kvgen allocated, with the CUDA array interface.

    The interface has no type for bf16 and 8-bit floats: there they are unsigned integers of the same size.
    """

    def __init__(self, shape: Sequence[int], dtype: str, device: str) -> None:
        ordinal = ordinal_of(device)
        assert ordinal is not None
        kind = element(dtype)
        self._memory = DeviceMemory(max(1, math.prod(shape) * kind.bytes), ordinal)
        strides = contiguous_strides(tuple(shape))
        self.view = ArrayView(
            self._memory.pointer, tuple(shape), strides, dtype, f"cuda:{ordinal}", False, self._memory
        )

    def fill(self, values: bytes) -> None:
        """Write all elements; waits for the copy."""
        from kvgen.runtime import cuda

        cuda.driver().write(self.view.pointer, values, int(self.view.device.partition(":")[2]))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = element(self.view.dtype)
        letter = {"i": "i", "u": "u"}.get(self.view.dtype[0], "u")
        letter = "f" if self.view.dtype in ("f32", "f16") else letter
        return {
            "shape": self.view.shape,
            "typestr": f"<{letter}{kind.bytes}",
            "data": (self.view.pointer, False),
            "strides": tuple(step * kind.bytes for step in self.view.strides),
            "version": 3,
        }

    def __repr__(self) -> str:
        return f"DeviceArray({self.view.dtype}{list(self.view.shape)}, {self.view.device!r})"


def sizes_of(
    layers: int, requests: int, pages: int | None, tokens: int | None, pages_per_request: int | None
) -> dict[str, int]:
    """The sizes that shapes name; raises ArgumentError for counts that are none."""
    given = {
        "layers": layers,
        "requests": requests,
        "pages": pages,
        "tokens": tokens,
        "pages_per_request": pages_per_request,
    }
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ArgumentError(f"{name}: got {value!r}; it is a count; pass a whole number of at least 1")
    found = {"layers": layers, "B": requests, "B+1": requests + 1, "R": requests}
    if tokens is not None:
        found |= {"tokens": tokens, "rows": tokens}
    if pages is not None:
        each = pages_per_request or -(-pages // requests)
        found |= {"pages": pages, "scale_pages": pages, "I": pages, "M": each, "MS": each}
    return found


def empty_pools(tensors: Sequence[Tensor], sizes: Mapping[str, int], device: str) -> list[Any]:
    """Pools of zeros, one for each tensor, or a list of one a layer where layers have tensors of their own; scales that the
    caller gives are 1."""
    per_layer = not any("layer" in t.axes for t in tensors)
    found: list[Any] = []
    for tensor in tensors:
        kind = tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype[0]
        shape = _shape(tensor.name, tensor.shape, sizes)
        value = 0 if tensor.writes else 1
        strides = room_strides(tensor, shape)
        each = [_laid_out(shape, strides, kind, value, device) for _ in range(sizes["layers"] if per_layer else 1)]
        found.append(each if per_layer else each[0])
    return found


def empty_tables(tables: Sequence[Array], sizes: Mapping[str, int], device: str) -> list[Any]:
    """Tables of requests without tokens."""
    found = []
    for table in tables:
        shape = _shape(table.name, table.shape, sizes)
        value: Any = -1 if table.name in _PAGE_IDS else range(shape[0]) if table.name in _REQUESTS else 0
        found.append(_filled(shape, table.dtype, value, device))
    return found


def _shape(name: str, shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    unknown = [size for size in shape if isinstance(size, str) and size not in sizes]
    if unknown:
        argument = "tokens" if unknown[0] in ("tokens", "rows") else "pages"
        raise ArgumentError(f"{argument}: got None; {name} has an axis of so many; pass a whole number of at least 1")
    return tuple(size if isinstance(size, int) else sizes[size] for size in shape)


def room_strides(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The layout's own strides, which leave room for total_pages and total_layers; packed where it has none, but for pages
    that are aligned."""
    strides, packed = list(contiguous_strides(tuple(shape))), 1
    for i in reversed(range(len(shape))):
        fixed = tensor.strides[i]
        if tensor.axes[i] == "page" and tensor.page_align > 1:
            kind = element(tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype[0])
            unit = tensor.page_align // math.gcd(tensor.page_align, kind.bytes)
            packed = -(-packed // unit) * unit
        strides[i] = packed if fixed is None or shape[i] == 1 else fixed
        if strides[i] < packed:
            got = ", ".join(
                f"{n} {axis}s" for n, axis in zip(shape, tensor.axes, strict=True) if axis in ("page", "layer")
            )
            raise ArgumentError(
                f"{tensor.name}: got {got}; {tensor.axes[i]} lies outside of them, at a stride that leaves no room for so many; "
                "pass at most the spec's total_pages and total_layers"
            )
        packed = strides[i] * shape[i]
    return tuple(strides)


def _laid_out(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, value: int, device: str) -> Any:
    """An array of one value with these strides, in elements."""
    if strides == contiguous_strides(shape):
        return _filled(shape, dtype, value, device)
    whole = _filled((1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)),), dtype, value, device)
    if isinstance(whole, DeviceArray):
        whole.view = whole.view._replace(shape=shape, strides=strides)
        return whole
    if type(whole).__module__ == "torch":
        return whole.as_strided(shape, strides)
    import numpy as np

    steps = [step * whole.itemsize for step in strides]
    return np.ndarray(
        shape, whole.dtype, whole.view(np.uint8), strides=steps
    )  # NumPy's as_strided knows no 8-bit floats


def _torch_of_gpus() -> Any:
    """torch, where it is imported and was built for GPUs; None elsewhere."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.version.cuda is not None else None


def _filled(shape: tuple[int, ...], dtype: str, value: Any, device: str) -> Any:
    """An array of one value, or of the numbers of a range: of NumPy on the CPU, of torch on a GPU where torch is imported, else
    a DeviceArray."""
    import numpy as np

    kind = element(dtype)
    numpy_type = kind.numpy()
    ordinal, torch = ordinal_of(device), _torch_of_gpus()
    if ordinal is not None and torch is not None and not isinstance(value, range):
        found = torch.zeros(shape, dtype=getattr(torch, kind.numpy_name), device=f"cuda:{ordinal}")
        return (
            found.fill_(value)
            if value > 0
            else found.view(torch.uint8).fill_(255).view(found.dtype)
            if value
            else found
        )
    raw = np.zeros(math.prod(shape) * numpy_type.itemsize + _ALIGN, np.uint8)
    start = -int(raw.ctypes.data) % _ALIGN
    array = raw[start : start + math.prod(shape) * numpy_type.itemsize].view(numpy_type).reshape(shape)
    if isinstance(value, range):
        array[...] = np.arange(len(value))
    elif value < 0:
        array.view(np.uint8)[...] = 255
    else:
        array[...] = value
    if ordinal is None:
        return array
    if torch is not None:
        return torch.from_numpy(array.astype(np.int64)).to(
            device=f"cuda:{ordinal}", dtype=getattr(torch, kind.numpy_name)
        )
    held = DeviceArray(shape, dtype, device)
    held.fill(array.tobytes())
    return held
