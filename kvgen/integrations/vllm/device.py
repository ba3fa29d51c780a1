"""vLLM's device as kvgen names it: the architecture to compile for, kernels for it, the device's name, its current stream."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import cast

import torch

from kvgen.architectures import ARCHS, DEFAULT_ARCHS, Arch
from kvgen.compile.arch import select_arch
from kvgen.errors import DeviceError
from kvgen.runtime.module import cubin

# Where there is no GPU to ask: the CPU machine runs kernels of either.


def runs_on(capability: tuple[int, int]) -> bool:
    """Whether kernels can be compiled for a GPU of this compute capability (major, minor)."""
    try:
        select_arch(capability, ARCHS)
    except DeviceError:
        return False
    return True


def archs_of(device: torch.device) -> Sequence[Arch]:
    """The architecture of the GPU; raises DeviceError for one that no kernel can be compiled for."""
    if device.type != "cuda":
        return DEFAULT_ARCHS
    return (cast(Arch, select_arch(torch.cuda.get_device_capability(device), ARCHS)),)


def compile_for(module: ModuleType, device: torch.device) -> None:
    """Compile all kernels of a set for the GPU, which else a first prompt would wait for; nothing on the CPU.

    Raises CompileError, and DeviceError where KVGEN_NO_JIT forbids it and KVGEN_CUBINS has no such set.
    """
    if device.type == "cuda":
        made, capability = module.Cache.MODULE, torch.cuda.get_device_capability(device)
        for file, entry in made.kernels:
            if made.runs(file, made.target(capability)):
                cubin(made, file, entry, capability)


def name_of(device: torch.device) -> str:
    """ "cpu", or "cuda:<ordinal>"."""
    if device.type == "cpu":
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def stream_of(device: torch.device) -> object:
    """The handle of the current stream; None on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
