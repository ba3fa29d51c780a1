"""Arrays like one that was checked: a function that gives their addresses, made once for that one's class, type and sizes.

It looks at what may differ from call to call and at nothing else: the element type, the shape, the strides, the device, whether
the memory may be written to, and the address. An array that differs in any of it gives 0; the check in full then says what is
wrong. Nothing is remembered of an array: one whose memory has moved gives its new address.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from kvgen.runtime import cuda
from kvgen.runtime.arrays import ITEMSIZE, ArrayView, Viewed, view

LikeArray = Callable[[Any], int]


def like_array(array: Any, found: ArrayView, align: int, *, written: bool) -> LikeArray:
    """A function that gives the address of an array like `array`, whose view is `found`, and 0 for any other object.

    `align` in bytes is a power of two and holds for the address. `written`: read-only memory is refused. Never raises.
    """
    low = max(align, ITEMSIZE[found.dtype]) - 1
    torch = sys.modules.get("torch")
    if low & (low + 1):
        return _unlike
    if isinstance(array, Viewed):
        return _like_viewed(array, low)
    if torch is not None and isinstance(array, torch.Tensor):
        return _like_tensor(array, low, torch)
    if found.device != "cpu" and hasattr(array, "__cuda_array_interface__"):
        return _like_interface(array, found, low, written)
    return _like_view(type(array), found, low, written)


def _unlike(array: Any) -> int:
    """No array is like it: each is checked in full."""
    return 0


def _like_viewed(array: Viewed, low: int) -> LikeArray:
    """Memory of kvgen's own, which says of itself what a check looks at."""
    kind, read, layout = type(array), type(array).raw, array.raw()[1]

    def address_of(other: Any) -> int:
        if type(other) is kind:
            address, its = read(other)
            if its == layout and not address & low:
                return address
        return 0

    return address_of


def _like_tensor(tensor: Any, low: int, torch: Any) -> LikeArray:
    """A torch tensor: its own attributes, which are quicker than its protocols."""
    kind, dtype, shape, strides, device = type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
    tracks = torch.is_grad_enabled

    def address_of(other: Any) -> int:
        try:
            if (
                type(other) is kind
                and other.dtype is dtype
                and other.shape == shape
                and other.stride() == strides
                and other.device == device
                and not (other.requires_grad and tracks())  # which the check in full refuses
            ):
                address: int = other.data_ptr()
                return 0 if address & low else address
        except Exception:  # a stranger's code: the check in full says what is wrong with it
            return 0
        return 0

    return address_of


def _like_interface(array: Any, found: ArrayView, low: int, written: bool) -> LikeArray:
    """An array with the CUDA array interface."""
    try:
        interface = dict(array.__cuda_array_interface__)
        dtype = array.dtype if interface["typestr"][1] == "V" else None
        said = tuple((name, what) for name, what in interface.items() if name != "data")
        return _interface_reader(said, dtype, cuda.driver(), int(found.device.partition(":")[2]), low, written)
    except Exception:  # it has another protocol, through which it was read, or says what cannot be a key
        return _like_view(type(array), found, low, written)


@functools.lru_cache(maxsize=256)  # the launches of all layers read alike: one function stays in the processor's cache
def _interface_reader(
    said: tuple[tuple[str, object], ...], dtype: object, driver: cuda.Driver, ordinal: int, low: int, written: bool
) -> LikeArray:
    """All that an array's interface says besides its address is compared at once, whatever class the array is of.

    Types that NumPy has no letter for are `V` in it, and have a dtype beside it. `driver` says which GPU has the address.
    """
    device_of, expected = driver.pointer_device, dict(said)

    def address_of(other: Any) -> int:
        address: int
        try:
            interface = other.__cuda_array_interface__
            data = expected["data"] = interface["data"]
            if interface == expected and (dtype is None or other.dtype == dtype):
                address, readonly = data
                if not address & low and not (readonly and written) and device_of(address) == ordinal:
                    return address
        except Exception:  # a stranger's code, or an address that the driver does not know
            return 0
        return 0

    return address_of


def _like_view(kind: type, found: ArrayView, low: int, written: bool) -> LikeArray:
    """Any other array: read in full, and compared."""
    layout_of = attrgetter("shape", "strides", "dtype", "device")
    layout = layout_of(found)

    def address_of(other: Any) -> int:
        if type(other) is kind:
            try:
                its = view(other, "array")
            except Exception:  # the check in full says it with the argument's name
                return 0
            if layout_of(its) == layout and not its.pointer & low and not (its.readonly and written):
                return its.pointer
        return 0

    return address_of
