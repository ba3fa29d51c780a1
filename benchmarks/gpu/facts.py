"""The first things to know on a machine with a GPU: versions, tensor maps, how many blocks of a kernel a multiprocessor runs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from types import ModuleType
from typing import Any, Final

from kvgen.errors import DeviceError
from kvgen.runtime import cuda
from kvgen.runtime.module import cubin
from kvgen.runtime.tensor_map import encode
from kvgen.tensor_map import TensorMapPlan
from kvgen.verify.device import Gpu
from kvgen.verify.memory import GpuBytes
from kvgen.verify.tensor_maps import encode_all
from kvgen.verify.worker import Done
from kvgen.version import __version__

_PACKAGES: Final = ("numpy", "ml_dtypes", "cuda-bindings", "cuda-core", "cuda-pathfinder", "pydantic", "torch")
_PROGRAMS: Final = ("nvidia-smi", "ncu", "compute-sanitizer", "nvcc")


def versions(gpu: Gpu | None) -> dict[str, Any]:
    """The machine, its packages and programs, and its GPU."""
    return {
        "kvgen": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "programs": {name: shutil.which(name) for name in _PROGRAMS},
        "device": {"name": "CPU machine"} if gpu is None else gpu.describe(),
        "nvidia_smi": _said("nvidia-smi"),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _said(program: str) -> str | None:
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program], capture_output=True, text=True, timeout=20)
    return done.stdout or done.stderr


def tensor_map(gpu: Gpu, how: str) -> dict[str, Any]:
    """The 128 bytes of one tensor map: as launchers make it, or ("bindings") in the memory that cuda.bindings has for one."""
    memory = GpuBytes(1 << 20, gpu.ordinal)
    plan = TensorMapPlan(
        "rows", "bf16", memory.pointer, (64, 8192), (128,), (64, 64), ("column", "row"),
        swizzle=128, gran=64, issue_rows=64, boxes=1,
    )  # fmt: skip
    try:
        made = encode(plan, f"cuda:{gpu.ordinal}") if how != "bindings" else _by_bindings(gpu, plan)
    except DeviceError as error:
        if how != "bindings":
            raise
        return {"refused": str(error)}
    # Runs are compared, and each has another address.
    return {"bytes": made.replace(memory.pointer.to_bytes(8, "little"), b"address ").hex()}


def _by_bindings(gpu: Gpu, plan: TensorMapPlan) -> bytes:
    api: Any = importlib.import_module("cuda.bindings.driver")
    wide, narrow = api.cuuint64_t, api.cuuint32_t
    made = gpu.call(
        "cuTensorMapEncodeTiled",
        api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        plan.rank,
        plan.address,
        [wide(n) for n in plan.dims],
        [wide(n) for n in plan.strides],
        [narrow(n) for n in plan.box],
        [narrow(n) for n in plan.element_strides],
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return b"".join(int(word).to_bytes(8, "little") for word in made.opaque)


def tensor_maps(gpu: Gpu, package: ModuleType) -> Done:
    """Every tensor map of a set's kernels and caches, encoded by the driver. Each refusal is wrong."""
    found = encode_all(package, f"cuda:{gpu.ordinal}")
    refused = [f"{e.of}: {e.refused}" for e in found if e.refused]
    out_of_order = sum(not e.in_order for e in found)
    return Done({"encoded": len(found) - len(refused), "strides_out_of_order": out_of_order}, refused)


def occupancy(gpu: Gpu, package: ModuleType, op: str) -> dict[str, Any]:
    """The blocks of a kernel that a multiprocessor runs at once."""
    kernel = getattr(package, op).KERNEL
    capability = gpu.driver.capability(gpu.ordinal)
    arch = kernel.module.target(capability)
    threads, shared = kernel.threads_on(arch), kernel.shared_on(arch)
    image = cubin(kernel.module, kernel.file_on(arch), kernel.entry, capability)
    blocks = cuda.function(image, kernel.entry, shared, device=gpu.ordinal).resident_blocks(threads)
    return {"blocks": blocks, "threads": threads, "dynamic_shared": shared, "arch": arch}
