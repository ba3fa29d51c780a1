"""The architecture whose kernels a device runs."""

from __future__ import annotations

from kvgen.runtime.memory import ordinal_of
from kvgen.runtime.module import Module


def arch_on(module: Module, device: str) -> str:
    """The set's architecture for `device`, "cpu" or "cuda:<ordinal>": on the CPU the one of the machine in force.

    Raises DeviceError where the device runs none of the set's.
    """
    ordinal = ordinal_of(device)
    if ordinal is None:
        from kvgen.runtime.cpu import arch_in_force

        return arch_in_force(module)
    from kvgen.runtime import cuda

    return module.target(cuda.driver().capability(ordinal))
