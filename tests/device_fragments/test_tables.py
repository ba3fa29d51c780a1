"""Tables of MAX's nvfp4 with each way of converting: every code below every scale is e4m3(code * scale)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvgen.compile import Unit, compile_unit, default_cache
from kvgen.compile.flatten import flatten
from kvgen.emulator import build
from kvgen.reference import quant
from tests.emulator.programs import run
from tests.golden_gpu.fp4_probes import products
from tests.quant.kernels import TARGETS, memory

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "tests/golden_gpu/kernels/fp4_tables.cu"


@pytest.mark.parametrize("arch", TARGETS)
def test_every_code_below_every_scale(arch: str) -> None:
    text = flatten(SOURCE, lambda path: (ROOT / path).read_text(encoding="utf-8"))
    ptx = compile_unit(Unit("fp4_tables", "fp4_tables", text), arch, "ptx", cache=default_cache()).data.decode()
    scales = np.arange(256, dtype=np.uint8)
    source, out = memory(256, np.uint8, scales), memory(256 * 32, np.uint8)
    run(build([ptx], mode="check"), "fp4_tables", source, out, grid=(1, 1, 1), block=64, read_only=(0,))
    found = quant.values(out.reshape(256, 32)[:, :16], "e4m3")
    np.testing.assert_array_equal(found, quant.values(products(np.arange(16), scales), "e4m3"))
