"""Machine instructions that it takes to widen codes to the tensor cores' operands."""

from __future__ import annotations

import re
from functools import cache

import pytest

from kvgen.compile import compile_unit, default_cache
from kvgen.compile.sass import count, histogram, sass
from tests.compile.test_sass import needs_tool
from tests.quant.kernels import TYPES, unit

_HEAD = """\
#include "../device/base/types.cuh"
#include "../device/attention/common/fragments.cuh"

template <typename E, bool Together, uint32_t N>
__device__ __forceinline__ void widened(Vec<uint32_t, 4>* out, const Vec<uint32_t, 4>* in) {
  constexpr uint32_t kParts = 2 * kPerElement<E>;
  in += threadIdx.x * (N / 4);
  out += threadIdx.x * (N * kParts / 4);
#pragma unroll
  for (uint32_t i = 0; i < N; i += 4) {
    const Vec<uint32_t, 4> words = in[i / 4];
    uint32_t parts[4][kParts];
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) widen<Together>(E{}, parts[k], words.e[k]);
    const uint32_t* const all = parts[0];
#pragma unroll
    for (uint32_t k = 0; k < 4 * kParts; k += 4) out[i * kParts / 4 + k / 4] = {all[k], all[k + 1], all[k + 2], all[k + 3]};
  }
}
"""
_PROBE = """
extern "C" __global__ void ROLE_NAME_COUNT(Vec<uint32_t, 4>* out, const Vec<uint32_t, 4>* in) {
  widened<E, TOGETHER, COUNT>(out, in);
}
"""
_MEMORY = ("LDG", "STG", "NOP", "EXIT", "BRA")
_FUNCTION = re.compile(r"^\s*(?:\.text\.|Function : )(\w+):?\s*$", re.M)
ROLES = ("keys", "values")
FEW, MORE = 4, 20  # words

# Instructions an element, of K and of V.
TRICKS = {
    "e4m3": (2.0, 2.0), "e5m2": (0.5, 0.5), "i8": (1.25, 1.25), "u8": (1.0, 1.0), "i4": (1.125, 1.125),
    "u4": (1.125, 1.125), "e2m1": (1.375, 1.375),
}  # fmt: skip
# Codes moved up to begin at zero, which are not converted.
MOVED = {"i8": 0.75, "u8": 0.5, "i4": 0.625, "u4": 0.625}
FP8 = {**TRICKS, "e4m3": (0.5, 0.75)}
COSTS = {"sm_80": TRICKS, "sm_89": FP8, "sm_90a": FP8, "sm_100f": {**FP8, "e2m1": (0.5, 1.0)}}


@cache
def opcodes(arch: str) -> dict[str, dict[str, int]]:
    """How often each instruction occurs in each probe."""
    text = [_HEAD]
    for name, (device, _) in TYPES.items():
        for role, together in zip(ROLES, (f"kNeighbours<{device}>", "false"), strict=True):
            for n in (FEW, MORE):
                probe = _PROBE.replace("ROLE", role).replace("NAME", name).replace("COUNT", str(n))
                text.append(probe.replace("<E,", f"<{device},").replace("TOGETHER", together))
    for name in MOVED:
        for n in (FEW, MORE):
            probe = _PROBE.replace("ROLE", "moved").replace("NAME", name).replace("COUNT", str(n))
            text.append(probe.replace("<E,", f"<FromZero<{TYPES[name][0]}>,").replace("TOGETHER", "false"))
    image = compile_unit(unit("".join(text), "keys_e4m3_4"), arch, cache=default_cache())
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
    for role, limit in zip(ROLES, COSTS[arch][dtype], strict=True):
        more, fewer = (opcodes(arch)[f"{role}_{dtype}_{n}"] for n in (MORE, FEW))
        each = (total(more) - total(fewer)) / ((MORE - FEW) * 4 * TYPES[dtype][1])
        assert each <= limit + 0.05, f"{role}: {each} an element, not {limit}"
        assert not count(more, "LDL") and not count(more, "STL")


@needs_tool
@pytest.mark.parametrize("arch", COSTS)
@pytest.mark.parametrize("dtype", MOVED)
def test_moved_codes_are_not_converted(dtype: str, arch: str) -> None:
    more, fewer = (opcodes(arch)[f"moved_{dtype}_{n}"] for n in (MORE, FEW))
    assert (total(more) - total(fewer)) / ((MORE - FEW) * 4 * TYPES[dtype][1]) <= MOVED[dtype] + 0.05
    assert not any(name.startswith(("HADD2", "HFMA2", "I2F")) for name in more)


@needs_tool
@pytest.mark.parametrize("arch", COSTS)
def test_hardware_converts(arch: str) -> None:
    hardware = {"e4m3": arch != "sm_80", "e2m1": arch == "sm_100f"}
    for dtype, wanted in hardware.items():
        for role in ROLES:
            found = count(opcodes(arch)[f"{role}_{dtype}_{MORE}"], f"F2FP.{dtype.upper()}.UNPACK_B")
            assert found == MORE * 2 * TYPES[dtype][1] * wanted
