"""What generated packages import: arrays, caches, launchers and their backends. Nothing heavy loads before first use."""

from kvgen.runtime.abi import ABI
from kvgen.runtime.cache import BaseCache, LayerCache, Tensor
from kvgen.runtime.faults import Fault, FaultReport, clear, describe
from kvgen.runtime.launcher import Bound, Kernel, Launcher
from kvgen.runtime.module import Module
from kvgen.runtime.params import Array, Pool, Scalar
from kvgen.runtime.workspace import Workspace

__all__ = [
    "ABI",
    "Array",
    "BaseCache",
    "Bound",
    "Fault",
    "FaultReport",
    "Kernel",
    "Launcher",
    "LayerCache",
    "Module",
    "Pool",
    "Scalar",
    "Tensor",
    "Workspace",
    "clear",
    "describe",
]
