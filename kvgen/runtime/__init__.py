"""What generated packages import: arrays, caches, launchers and their backends. Nothing heavy loads before first use."""

from typing import Any, Final

from kvgen.plan.params import Array, Count, Pool, PoolMap, Scalar, Size, TensorMap
from kvgen.plan.split_plan import SplitPlan
from kvgen.runtime.abi import ABI
from kvgen.runtime.arrays import ArrayLike
from kvgen.runtime.bound import Bound, at_once
from kvgen.runtime.error_word import ErrorWord
from kvgen.runtime.faults import Fault, FaultError, FaultReport, clear, describe
from kvgen.runtime.kernel import Kernel
from kvgen.runtime.kv_cache import BaseCache
from kvgen.runtime.launcher import Launcher, PlannedLauncher
from kvgen.runtime.layer_cache import LayerCache
from kvgen.runtime.mla_form import mla_form
from kvgen.runtime.module import Module
from kvgen.runtime.operand import TensorOperand
from kvgen.runtime.other_cache import OtherCache
from kvgen.runtime.page_pool import BasePages, PagePool
from kvgen.runtime.page_ranges import PageRange, RangePair, page_ranges, paired_ranges
from kvgen.runtime.params import ERRORS, NUM_ROWS, ROW_OFFSETS, SPLIT_SIZES, WORKSPACE
from kvgen.runtime.pool_cache import PoolCache
from kvgen.runtime.pool_tensors import Tensor
from kvgen.runtime.role_cache import RoleCache, TileMap
from kvgen.runtime.state_cache import BaseState
from kvgen.runtime.strides import KVParams, Role, RoleStrides, TensorLayout
from kvgen.runtime.workspace import Workspace

__all__ = [
    "ABI",
    "ERRORS",
    "NUM_ROWS",
    "ROW_OFFSETS",
    "SPLIT_SIZES",
    "WORKSPACE",
    "Array",
    "ArrayLike",
    "BaseCache",
    "BasePages",
    "BaseState",
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
    "OtherCache",
    "PagePool",
    "PageRange",
    "PlannedLauncher",
    "Pool",
    "PoolCache",
    "PoolMap",
    "RangePair",
    "Role",
    "RoleCache",
    "RoleStrides",
    "Scalar",
    "Size",
    "SplitPlan",
    "Tensor",
    "TensorLayout",
    "TensorMap",
    "TensorOperand",
    "TileMap",
    "Workspace",
    "at_once",
    "clear",
    "describe",
    "mla_form",
    "page_ranges",
    "paired_ranges",
]

# What packages of earlier ABIs import: their first statement behind the imports says to build them again.
_FORMER: Final = {"Number": "Scalar", "Places": "RoleStrides", "Source": "OtherCache", "Work": "SplitPlan"}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        return globals()[_FORMER[name]]
    raise AttributeError(f"module 'kvgen.runtime' has no attribute {name!r}")
