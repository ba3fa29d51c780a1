"""A kernel of the user's own over a cache of states: where each request's state begins, and null where it has none."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvgen import KernelSet, State
from kvgen.cli.project import generated
from kvgen.ops import Array, Custom
from tests.custom.building import CHECK, build

FIRST = """#include "cache.cuh"
extern "C" __global__ void first(const __grid_constant__ Cache cache, float* to) {
  pdl_wait();
  const float* state = (const float*)cache.state_of(blockIdx.x);
  to[blockIdx.x] = state == nullptr ? -1.0f : state[0];
}
"""


def test_a_custom_kernel_over_states(tmp_path: Path) -> None:
    op = Custom(name="first", text=FIRST, params=[Array("to", "f32", ("B",), "out")], grid="B", threads=1)
    build(tmp_path, KernelSet(name="states", cache=State(bytes=48), ops=(op,)))
    pools = [np.arange(60, dtype=np.float32).reshape(5, 12) + 100 * layer for layer in range(2)]
    with generated(tmp_path, "states") as package:
        cache = package.Cache([p.view(np.uint8) for p in pools], state_ids=np.array([3, -1, 0, 77], np.int32))
        for layer in range(2):
            to = np.full(4, np.nan, np.float32)
            CHECK(package.first, cache[layer], to)
            np.testing.assert_array_equal(to, [36 + 100 * layer, -1, 100 * layer, -1])
