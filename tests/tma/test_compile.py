"""Every helper passes the assembler on every architecture that has it, and costs nothing where it does not."""

from __future__ import annotations

import pytest

from kvgen.compile import default_cache
from kvgen.compile.flatten import flatten
from kvgen.compile.program import Unit, compile_unit
from kvgen.paths import templates_root
from tests.tma.kernels import GATHERS, LOADS, STORES, Kernel, text

FORMS: dict[str, Kernel] = {}
for kernel in (*LOADS, *STORES, *GATHERS):
    FORMS.setdefault(kernel.form, kernel)
HEADERS = ("base/types", "memory/mbarrier", "tma/tma", "tma/tma_tile", "memory/cp_async")


def unit(entry: str, source: str) -> Unit:
    return Unit(f"tma/{entry}", entry, source)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f", "sm_120f"])
def test_every_form_assembles(arch: str) -> None:
    newer = arch != "sm_90a"
    kernels = [k for k in FORMS.values() if newer or k.form != "gather4"]
    image = compile_unit(unit(kernels[0].name, text(kernels)), arch, cache=default_cache())
    assert image.data.startswith(b"\x7fELF")
    assert not image.warnings
    ptx = compile_unit(unit(kernels[0].name, text(kernels)), arch, "ptx", cache=default_cache()).data.decode()
    assert (".tile::gather4" in ptx) == newer
    assert "cp.async.bulk.tensor.5d.shared::cluster.global" in ptx


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100f", "sm_120f"])
def test_headers_alone_make_no_code(arch: str) -> None:
    lines = [f'#include "device/{name}.cuh"' for name in HEADERS]
    lines.append('extern "C" __global__ void nothing(int* out) { *out = 1; }')
    source = flatten("n.cu", lambda path: "\n".join(lines) if path == "n.cu" else (templates_root() / path).read_text())
    ptx = compile_unit(unit("nothing", source), arch, "ptx", cache=default_cache()).data.decode()
    assert "cp.async" not in ptx and "mbarrier" not in ptx
    compile_unit(unit("nothing", source), arch, cache=default_cache())


def test_every_wrapper_assembles() -> None:
    """What the tiles above leave out: multicast of each rank, the wide fence, barriers in all states."""
    loads = [f"tma_load_multicast(tile, &map, &bar, CacheHint::evict_last, 3{', 1' * rank});" for rank in range(1, 6)]
    body = "\n  ".join(
        (
            "extern __shared__ __align__(1024) unsigned char tile[];",
            "__shared__ alignas(8) uint64_t bar;",
            "mbarrier_init(&bar, 2);",
            "fence_mbarrier_init();",
            "fence_async();",
            "mbarrier_arrive_expect_tx(&bar, 5 * 128);",
            "mbarrier_arrive(&bar);",
            *loads,
            "while (!mbarrier_try_wait(&bar, 0)) {}",
            "mbarrier_invalidate(&bar);",
        )
    )
    lines = [f'#include "device/{name}.cuh"' for name in HEADERS]
    lines.append(f'extern "C" __global__ void all(const __grid_constant__ TensorMap map) {{\n  {body}\n}}')
    source = flatten("n.cu", lambda path: "\n".join(lines) if path == "n.cu" else (templates_root() / path).read_text())
    for arch in ("sm_90a", "sm_100f", "sm_120f"):
        assert not compile_unit(unit("all", source), arch, cache=default_cache()).warnings
