"""Launches on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from kvgen.runtime import cuda
from kvgen.runtime.module import cubin

if TYPE_CHECKING:
    from kvgen.runtime.kernel import Grid, Kernel
    from kvgen.runtime.module import Module
    from kvgen.runtime.packing import PackedArgs


@lru_cache(maxsize=None)  # noqa: UP033 - one entry a kernel and device
def _function(module: Module, file: str, entry: str, shared: int, device: int) -> cuda.Function:
    image = cubin(module, file, entry, cuda.driver().capability(device))
    return cuda.function(image, entry, shared, device=device)


def launch_on(kernel: Kernel, device: str, args: PackedArgs, grid: Grid) -> Callable[[int], None]:
    """A launch of `args` on `device`, "cuda:<ordinal>", that takes a stream's handle; loads (and if need be compiles) the kernel
    now, so that a capture can follow. The arguments are read when it is called."""
    ordinal = int(device.partition(":")[2])
    pdl = cuda.driver().capability(ordinal) >= (9, 0)  # older kernels have no griddepcontrol.wait
    file, shared, threads = kernel.file, kernel.shared, kernel.threads
    if kernel.shared_by_arch or kernel.threads_by_arch or kernel.blocks_by_arch or kernel.files:
        arch = kernel.module.target(cuda.driver().capability(ordinal))
        file, shared, threads = kernel.file_on(arch), kernel.shared_on(arch), kernel.threads_on(arch)
        grid = kernel.grid_on(arch, cuda.driver().multiprocessors(ordinal), grid)
    function = _function(kernel.module, file, kernel.entry, shared, ordinal)
    return function.bind(grid, (threads, 1, 1), args, pdl=pdl)
