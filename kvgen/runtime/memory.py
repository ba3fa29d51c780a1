"""Memory that kvgen allocates itself, given back when the last reference goes."""

from __future__ import annotations

from kvgen.errors import ArgumentError


def ordinal_of(device: str) -> int | None:
    """The ordinal of "cuda" or "cuda:<ordinal>", None for "cpu"; raises ArgumentError for anything else."""
    kind, colon, ordinal = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind == "cuda" and (ordinal.isdecimal() or not colon):
        return int(ordinal or 0)
    if device == "cpu":
        return None
    raise ArgumentError(f'device: got {device!r}; it must be "cpu" or "cuda:<ordinal>"; pass cache.device')


class DeviceMemory:
    """Bytes on a GPU, uninitialised."""

    def __init__(self, nbytes: int, device: int) -> None:
        from kvgen.runtime import cuda

        self._driver = cuda.driver()
        self._device = device
        self.pointer = self._driver.allocate(nbytes, device)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._driver.free(self.pointer, self._device)


class PinnedMemory:
    """Bytes of the host that a GPU writes by itself, uninitialised."""

    def __init__(self, nbytes: int, device: int) -> None:
        from kvgen.runtime import cuda

        self._driver = cuda.driver()
        self._device = device
        self.pointer = self._driver.allocate_pinned(nbytes, device)

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self._driver.free_pinned(self.pointer, self._device)
