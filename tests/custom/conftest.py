"""A project with a kernel of its own, not built yet."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli.conftest import Folder, empty  # noqa: F401 - a fixture

SPEC = '''"""A cache for tests."""

from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16),
    ops=[
        ops.Append(),
        ops.Custom(
            name="fill",
            source="{source}",
            params=[{params}],
            grid={grid},{more}
        ),
    ],
)
'''
PARAMS = 'ops.Array("x", "f32", ("N",), "inout"), ops.Size("n", "N"), ops.Scalar("by", "f32")'
KERNEL = """// Multiplies x.
#include "cache.cuh"

extern "C" __global__ void fill(const __grid_constant__ Cache cache, float* x, uint32_t n, float by) {
  pdl_wait();
  const uint32_t i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) x[i] = by * x[i];
}
"""

Write = Callable[..., Folder]


@pytest.fixture
def write(empty: Folder) -> Write:  # noqa: F811
    """Writes the spec and its kernel."""

    def write(
        kernel: str | None = KERNEL,
        *,
        params: str = PARAMS,
        grid: str = '"ceil_div(N, 128)"',
        source: str = "kernels/fill.cu",
        more: str = "",
    ) -> Folder:
        (empty.root / "specs" / "kernels").mkdir(parents=True, exist_ok=True)
        text = SPEC.format(source=source, params=params, grid=grid, more=more)
        (empty.root / "specs" / "own.py").write_text(text, encoding="utf-8")
        if kernel is not None:
            (empty.root / "specs" / "kernels" / "fill.cu").write_bytes(kernel.encode())
        return empty

    return write
