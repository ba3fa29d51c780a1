"""What generated packages import: arrays, caches, launchers and their backends. Nothing heavy loads before first use."""

from kvgen.runtime.abi import ABI
from kvgen.runtime.error_word import ErrorWord
from kvgen.runtime.faults import Fault, FaultError, FaultReport, clear, describe
from kvgen.runtime.kv_cache import BaseCache, LayerCache, Tensor
from kvgen.runtime.launcher import Bound, Kernel, Launcher
from kvgen.runtime.module import Module
from kvgen.runtime.operand import TensorOperand
from kvgen.runtime.page_pool import BasePages, PagePool
from kvgen.runtime.params import Array, Count, Number, Pool, Scalar, TensorMap
from kvgen.runtime.role_cache import RoleCache, TileMap
from kvgen.runtime.source import Source
from kvgen.runtime.strides import KVParams, Places, Role, TensorLayout
from kvgen.runtime.workspace import Work, Workspace

__all__ = [
    "ABI",
    "Array",
    "BaseCache",
    "BasePages",
    "Bound",
    "Count",
    "ErrorWord",
    "Fault",
    "FaultError",
    "FaultReport",
    "KVParams",
    "Kernel",
    "Launcher",
    "LayerCache",
    "Module",
    "Number",
    "PagePool",
    "Places",
    "Pool",
    "Role",
    "RoleCache",
    "Scalar",
    "Source",
    "Tensor",
    "TensorLayout",
    "TensorMap",
    "TensorOperand",
    "TileMap",
    "Work",
    "Workspace",
    "clear",
    "describe",
]
