"""Plain calls of a kernel of the user's own on host arrays: what a GPU could get wrong is an error, and the process lives on."""

from __future__ import annotations

import numpy as np
import pytest

import kvgen
from kvgen import Paged, ops
from kvgen.codegen.inline import CompiledKernel
from kvgen.errors import DeviceError

TEXT = """#include "cache.cuh"
extern "C" __global__ void spill(const __grid_constant__ Cache cache, uint32_t* out, uint32_t past, uint32_t early) {
  if (early) out[threadIdx.x] = 1;
  pdl_wait();
  out[threadIdx.x + past] = cache.length(0);
}
"""


@pytest.fixture(scope="module")
def spill() -> CompiledKernel:
    """Stores a request's length in 32 words, from number `past` on; with `early` also before the kernel before has ended."""
    return kvgen.compile_kernel(
        TEXT,
        cache=Paged(dtype="f16", kv_heads=1, head_dim=8, page_size=4),
        params=[ops.Array("out", "u32", (32,), "out"), ops.Scalar("past", "u32"), ops.Scalar("early", "u32")],
        grid=1,
        threads=32,
        arch=["sm_90a"],
    )


@pytest.mark.parametrize(
    ("past", "early", "kind", "said"),
    [
        (4, 0, "global_out_of_bounds", "'out' (128 bytes): the access starts 0 bytes past its end, at byte 128"),
        (2**30, 0, "global_out_of_bounds", "lies in no buffer"),  # pages that nobody may have mapped
        (0, 1, "before_grid_wait", "write of 'out' at byte 0 before griddepcontrol.wait"),
    ],
)
def test_a_fault_is_an_error(
    spill: CompiledKernel, monkeypatch: pytest.MonkeyPatch, past: int, early: int, kind: str, said: str
) -> None:
    """It names kernel, line, array and byte; nothing behind the array is written, and the next call is right."""
    monkeypatch.delenv("KVGEN_CPU_MODE", raising=False)
    tables = {"lengths": np.array([3], np.int32), "page_table": np.zeros((1, 1), np.int32)}
    layer = spill.Cache(np.zeros((1, 2, 1, 4, 1, 8), np.float16), **tables)[0]
    memory = np.full(128, 7, np.uint32)  # all that the first case could write
    with pytest.raises(DeviceError) as raised:
        spill(layer, memory[:32], past, early)
    message = str(raised.value)
    assert message.startswith(f"spill on the CPU machine: {kind}: ") and said in message, message
    assert f"<spill>:{3 if early else 5}" in message and "(spill, block (0, 0, 0), thread (" in message, message
    assert (memory[32:] == 7).all()
    spill(layer, memory[:32], 0, 0)
    assert memory.tolist() == [3] * 32 + [7] * 96
