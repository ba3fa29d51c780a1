"""Small kernels around the device library, one module for each target, and launches of them on NumPy arrays."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from kvgen.compile import Unit, compile_unit, default_cache
from kvgen.compile.flatten import flatten
from kvgen.emulator import Buffer, Library, build
from kvgen.paths import templates_root
from tests.emulator.programs import aligned

# Element type of memory -> its name on the device, and how many share a byte.
TYPES = {
    "e4m3": ("e4m3", 1), "e5m2": ("e5m2", 1), "e2m1": ("e2m1x2", 2), "i8": ("int8_t", 1), "u8": ("uint8_t", 1),
    "i4": ("i4x2", 2), "u4": ("u4x2", 2),
}  # fmt: skip
SIGNED = ("e4m3", "e5m2", "e2m1", "i8", "i4")
SCALES: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": bfloat16, "e4m3": float8_e4m3fn}
SCALE_NAMES = {"f32": "float", "f16": "f16", "bf16": "bf16", "e4m3": "e4m3"}
PLAIN = ("f32", "f16", "bf16")
WIDTH = 8  # logical elements of a thread
LANES = (1, 2, 8, 32)
# The three ways of converting: none in hardware, fp8, fp8 and fp4.
TARGETS = ("sm_80", "sm_90a", "sm_100f")

_HEAD = """\
#include "../device/quant/quantize.cuh"

constexpr uint32_t kWidth = 8;

__device__ __forceinline__ uint64_t thread() { return (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; }
template <uint32_t N>
__device__ __forceinline__ void read(float (&x)[N], const float* p) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) x[i] = p[i];
}
template <uint32_t N>
__device__ __forceinline__ void write(float* p, const float (&x)[N]) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) p[i] = x[i];
}
"""
_OF_TYPE = """
extern "C" __global__ void pack_NAME(Raw<T, kWidth>* out, const float* in) {
  float x[kWidth];
  read(x, in + thread() * kWidth);
  pack<T>(out[thread()], x);
}
extern "C" __global__ void pack_few_NAME(Raw<T, FEW>* out, Raw<T, 2 * FEW>* out2, const float* in) {
  float one[FEW], two[2 * FEW];
  read(one, in + thread() * FEW);
  read(two, in + thread() * 2 * FEW);
  pack<T>(out[thread()], one);
  pack<T>(out2[thread()], two);
}
extern "C" __global__ void unpack_NAME(float* out, const Raw<T, kWidth>* in) {
  float x[kWidth];
  unpack<T>(x, in[thread()]);
  write(out + thread() * kWidth, x);
}
extern "C" __global__ void unpack_few_NAME(float* out, float* out2, const Raw<T, FEW>* in, const Raw<T, 2 * FEW>* in2) {
  float one[FEW], two[2 * FEW];
  unpack<T>(one, in[thread()]);
  unpack<T>(two, in2[thread()]);
  write(out + thread() * FEW, one);
  write(out2 + thread() * 2 * FEW, two);
}
"""
_OF_CODES = """
extern "C" __global__ void quantize_NAME(Raw<T, kWidth>* out, const float* in, const float* scale) {
  float x[kWidth];
  read(x, in + thread() * kWidth);
  quantize<T>(out[thread()], x, scale[thread()]);
}
extern "C" __global__ void dequantize_NAME(float* out, const Raw<T, kWidth>* in, const float* scale) {
  float x[kWidth];
  dequantize<T>(x, in[thread()], (const float (&)[1])scale[thread()]);
  write(out + thread() * kWidth, x);
}
extern "C" __global__ void scales_NAME(float* f32, f16* half, bf16* brain, e4m3* small, float* power, const float* amax) {
  const uint64_t i = thread();
  f32[i] = amax_scale<T, float>(amax[i]);
  half[i] = amax_scale<T, f16>(amax[i]);
  brain[i] = amax_scale<T, bf16>(amax[i]);
  small[i] = amax_scale<T, e4m3>(amax[i]);
  power[i] = pow2_scale<T>(amax[i]);
}
"""
_WITH_ZERO = """
extern "C" __global__ void quantize_NAME(Raw<T, kWidth>* out, const float* in, const float* scale, const float* zero) {
  float x[kWidth];
  read(x, in + thread() * kWidth);
  quantize<T>(out[thread()], x, scale[thread()], zero[thread()]);
}
extern "C" __global__ void dequantize_NAME(float* out, const Raw<T, kWidth>* in, const float* scale, const float* zero) {
  float x[kWidth];
  dequantize<T>(x, in[thread()], (const float (&)[1])scale[thread()], (const float (&)[1])zero[thread()]);
  write(out + thread() * kWidth, x);
}
extern "C" __global__ void scales_NAME(ScaleZero<float>* f32, ScaleZero<f16>* half, ScaleZero<bf16>* brain, const float* lo,
                                       const float* hi) {
  const uint64_t i = thread();
  f32[i] = asymmetric<T, float>(lo[i], hi[i]);
  half[i] = asymmetric<T, f16>(lo[i], hi[i]);
  brain[i] = asymmetric<T, bf16>(lo[i], hi[i]);
}
"""
_OTHERS = """
extern "C" __global__ void nvfp4_scales(e4m3* most, e4m3* two_level, float* divisor, const float* amax, float global) {
  const uint64_t i = thread();
  most[i] = nvfp4_max_scale(amax[i]);
  two_level[i] = nvfp4_global_scale(amax[i], global);
  divisor[i] = product(two_level[i], global);
}
extern "C" __global__ void nvfp4_values(float* most, float* two_level, const Raw<e2m1x2, kWidth>* in, const e4m3* scale,
                                        float global) {
  float x[kWidth];
  const float one[1] = {to_f32(scale[thread()])};
  dequantize_max(x, in[thread()], one);
  write(most + thread() * kWidth, x);
  dequantize_global(x, in[thread()], one, global);
  write(two_level + thread() * kWidth, x);
}
extern "C" __global__ void quotients(float* out, const float* in, const float* scale) {
  float x[kWidth];
  read(x, in + thread() * kWidth);
  divide(x, scale[thread()]);
  write(out + thread() * kWidth, x);
}
extern "C" __global__ void extremes(float* amax, float* lo, float* hi, const float* in) {
  float x[kWidth];
  read(x, in + thread() * kWidth);
  amax[thread()] = amax_of(x);
  lo[thread()] = min_of(x);
  hi[thread()] = max_of(x);
}
template <uint32_t Lanes>
__device__ __forceinline__ void reduced(float* lo, float* hi, float x, uint32_t mask) {
  lo[threadIdx.x] = reduce_min<Lanes>(x, mask);
  hi[threadIdx.x] = reduce_max<Lanes>(x, mask);
}
// The first `active` lanes of a warp alone.
extern "C" __global__ void reductions(float* lo, float* hi, const float* in, uint32_t lanes, uint32_t active) {
  if (threadIdx.x >= active) return;
  const uint32_t mask = active < 32 ? (1u << active) - 1 : 0xffffffffu;
  const float x = in[threadIdx.x];
  if (lanes == 1) reduced<1>(lo, hi, x, mask);
  if (lanes == 2) reduced<2>(lo, hi, x, mask);
  if (lanes == 8) reduced<8>(lo, hi, x, mask);
  if (lanes == 32) reduced<32>(lo, hi, x, mask);
}
"""


def _read(name: str) -> str:
    return (templates_root() / name).read_text(encoding="utf-8")


def unit(text: str, entry: str) -> Unit:
    """A kernel that includes the device library."""
    return Unit(
        f"quant/{entry}", entry, flatten("quant/kernel.cu", lambda n: text if n == "quant/kernel.cu" else _read(n))
    )


def _source() -> str:
    parts = [_HEAD]
    for name in (*TYPES, *PLAIN):
        device, each = TYPES.get(name, (SCALE_NAMES.get(name, name), 1))
        body = _OF_TYPE + ("" if name in PLAIN else _WITH_ZERO if name in ("u8", "u4") else _OF_CODES)
        few = str(each)
        parts.append(body.replace("NAME", name).replace("Raw<T", f"Raw<{device}").replace("<T>", f"<{device}>")
                     .replace("<T,", f"<{device},").replace("FEW", few))  # fmt: skip
    return "".join([*parts, _OTHERS])


@cache
def library(arch: str) -> Library:
    """The kernels, for the CPU machine."""
    ptx = compile_unit(unit(_source(), "quotients"), arch, "ptx", cache=default_cache()).data.decode()
    return build([ptx], mode="check")


def memory(count: int, dtype: Any, values: Any = 0) -> np.ndarray:
    """An array where a GPU allocation may lie."""
    out = aligned(count * np.dtype(dtype).itemsize).view(dtype)
    out[...] = values
    return out


def launch(arch: str, kernel: str, outs: list[Any], ins: list[Any], threads: int) -> None:
    """Run `threads` threads, a multiple of 128 or fewer than 128; arrays become pointers, ints and floats 4 bytes."""
    launched(library(arch), kernel, outs, ins, threads)


def launched(kernels: Library, kernel: str, outs: list[Any], ins: list[Any], threads: int) -> None:
    """The same of other kernels."""
    block = min(threads, 128)
    assert threads % block == 0
    args, buffers = [], []
    for i, a in enumerate((*outs, *ins)):
        if isinstance(a, np.ndarray):
            args.append(struct.pack("<Q", a.ctypes.data))
            buffers.append(Buffer(f"argument {i}", a.ctypes.data, a.nbytes, i < len(outs)))
        else:
            args.append(struct.pack("<f" if isinstance(a, float) else "<I", a))
    kernels.kernels[kernel].launch((threads // block, 1, 1), (block, 1, 1), args, buffers=buffers)
