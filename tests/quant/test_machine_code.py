"""What the conversions cost in machine instructions, and that hardware converts where it can."""

from __future__ import annotations

import re
from functools import cache

import pytest

from kvgen.compile import compile_unit, default_cache
from kvgen.compile.sass import count, histogram, sass
from tests.compile.test_sass import needs_tool
from tests.quant.kernels import TYPES, unit

_PROBES = """
extern "C" __global__ void pack_NAME_COUNT(Raw<T, COUNT>* out, const Vec<float, 4>* in) {
  float x[COUNT];
  in += threadIdx.x * (COUNT / 4);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const Vec<float, 4> v = in[i / 4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[i + j] = v.e[j];
  }
  Raw<T, COUNT> raw;
  pack<T>(raw, x);
  out[threadIdx.x] = raw;
}
extern "C" __global__ void unpack_NAME_COUNT(Vec<float, 4>* out, const Raw<T, COUNT>* in) {
  float x[COUNT];
  const Raw<T, COUNT> raw = in[threadIdx.x];
  unpack<T>(x, raw);
  out += threadIdx.x * (COUNT / 4);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) out[i / 4] = {x[i], x[i + 1], x[i + 2], x[i + 3]};
}
"""
_MEMORY = ("LDG", "STG", "NOP", "EXIT", "BRA")
_FUNCTION = re.compile(r"^\s*(?:\.text\.|Function : )(\w+):?\s*$", re.M)

# Instructions an element, between a vector of 8 and one of 16: the bit tricks, and hardware.
PACKED = {"e4m3": 7.5, "e5m2": 7.5, "e2m1": 8.25, "i8": 4.25, "u8": 3.75, "i4": 4.375, "u4": 3.875}
UNPACKED = {"e4m3": 3.75, "e5m2": 1.5, "e2m1": 2.875, "i8": 2.25, "u8": 2.0, "i4": 2.125, "u4": 2.125}
FP8 = ({**PACKED, "e4m3": 0.75, "e5m2": 0.75}, {**UNPACKED, "e4m3": 1.75})
FP8_FP4 = ({**FP8[0], "e2m1": 0.875}, {**FP8[1], "e2m1": 1.5})
COSTS = {"sm_80": (PACKED, UNPACKED), "sm_89": FP8, "sm_90a": FP8, "sm_100f": FP8_FP4, "sm_120f": FP8_FP4}


@cache
def opcodes(arch: str) -> dict[str, dict[str, int]]:
    """How often each instruction occurs in each probe."""
    text = ['#include "../device/quant/quantize.cuh"\n']
    for name, (device, _) in TYPES.items():
        for n in (8, 16):
            text.append(_PROBES.replace("<T", f"<{device}").replace("NAME", name).replace("COUNT", str(n)))
    image = compile_unit(unit("".join(text), "pack_e4m3_8"), arch, cache=default_cache())
    assert image.warnings == ()
    _, *parts = _FUNCTION.split(sass(image.data, cache=default_cache()))
    return {name: histogram(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def total(found: dict[str, int]) -> int:
    """Instructions but for loads, stores and what every kernel has."""
    return sum(n for name, n in found.items() if name.split(".")[0] not in _MEMORY)


@needs_tool
@pytest.mark.parametrize("arch", COSTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_instructions_of_an_element(dtype: str, arch: str) -> None:
    for kind, limits in zip(("pack", "unpack"), COSTS[arch], strict=True):
        more, fewer = (opcodes(arch)[f"{kind}_{dtype}_{n}"] for n in (16, 8))
        each = (total(more) - total(fewer)) / 8
        assert each <= limits[dtype] + 0.25, f"{kind}: {each} an element, not {limits[dtype]}"
        assert not count(more, "LDL") and not count(more, "STL")


@needs_tool
@pytest.mark.parametrize("arch", COSTS)
def test_hardware_converts(arch: str) -> None:
    hardware = {"e4m3": arch != "sm_80", "e5m2": arch != "sm_80", "e2m1": arch in ("sm_100f", "sm_120f")}
    for dtype, wanted in hardware.items():
        name, found = dtype.upper(), opcodes(arch)
        assert count(found[f"pack_{dtype}_8"], f"F2FP.SATFINITE.{name}") == 4 * wanted
        if dtype != "e5m2":  # the upper byte of an f16 anyway
            assert count(found[f"unpack_{dtype}_8"], f"F2FP.{name}.UNPACK_B") == 4 * wanted
