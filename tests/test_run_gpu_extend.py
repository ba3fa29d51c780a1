"""benchmarks/run_gpu.py's cases of extend, on the CPU machine: the oracle's, of both kernels."""

from __future__ import annotations

import os
from typing import Final

import numpy as np
import pytest

from benchmarks.gpu.correctness import failures, run
from benchmarks.gpu.expected import cases_of
from benchmarks.gpu.machine import is_plain
from kvgen.verify.memory import HostMemory
from tests.ops import test_extend_wgmma
from tests.support import extend_sets
from tests.support.harness import package

SETS: Final = {
    "paged": extend_sets.SETS["paged"],
    "wgmma_llama": test_extend_wgmma.SETS["llama"],
}
if "KVGEN_FAMILY" in os.environ:
    SETS |= extend_sets.SETS | extend_sets.MORE
    SETS |= {f"wgmma_{name}": kernels for name, kernels in test_extend_wgmma.DRAWN.items()}


@pytest.mark.parametrize("name", SETS)
def test_cases(name: str) -> None:
    """The CPU machine passes all of them, and a wrong number in any output is seen."""
    kernels = SETS[name]
    cases, blobs = cases_of(kernels, package(kernels))
    plain = is_plain(kernels.ops[0])
    assert len(cases) >= (4 if plain else 3) and plain == any(case.golden for case in cases)
    for case in cases:
        got = run(case, blobs, package(kernels), HostMemory())
        assert failures(case, blobs, got) == [], case.name
    case = cases[-1 if plain else 0]
    for output in ("out", "lse"):
        broken = run(case, blobs, package(kernels), HostMemory())
        view = case.arguments[output]
        values = view.of(broken[view.memory])
        values[0] = values[0] + np.array(1, values.dtype)
        assert failures(case, blobs, broken), output
