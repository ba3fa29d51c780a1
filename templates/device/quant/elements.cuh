// What lies in memory: the element types, and vectors of them to and from f32. All targets give the same bits.
#pragma once

#include "../base/types.cuh"
#include "fp8.cuh"
#include "fp4.cuh"
#include "e8m0.cuh"
#include "integers.cuh"

// Logical elements in one T.
template <typename T>
constexpr uint32_t kPerElement = 1;
template <>
constexpr uint32_t kPerElement<e2m1x2> = 2;
template <>
constexpr uint32_t kPerElement<i4x2> = 2;
template <>
constexpr uint32_t kPerElement<u4x2> = 2;

// The largest code: what an amax is divided by. Integers without zero leave out their lowest code, so that none has no
// opposite.
template <typename T>
constexpr float kLargest = 0.0f;
template <>
constexpr float kLargest<e4m3> = 448.0f;
template <>
constexpr float kLargest<e5m2> = 57344.0f;
template <>
constexpr float kLargest<e2m1x2> = 6.0f;
template <>
constexpr float kLargest<int8_t> = 127.0f;
template <>
constexpr float kLargest<uint8_t> = 255.0f;
template <>
constexpr float kLargest<i4x2> = 7.0f;
template <>
constexpr float kLargest<u4x2> = 15.0f;

// N logical elements moved by one access.
template <typename T, uint32_t N>
using Raw = Vec<T, N / kPerElement<T>>;

// Elements of 16 bits and more are their own codes.
template <typename T>
constexpr bool kPlain = sizeof(T) > 1;

// Two f32 in one instruction, the first in the lower half; rounds as from_f32.
__device__ __forceinline__ void pack_pair(bf16* out, float a, float b) {
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(*(uint32_t*)out) : "f"(b), "f"(a));
}
__device__ __forceinline__ void pack_pair(f16* out, float a, float b) {
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(*(uint32_t*)out) : "f"(b), "f"(a));
}
__device__ __forceinline__ void pack_pair(float* out, float a, float b) {
  out[0] = a;
  out[1] = b;
}

// The elements nearest to `codes`, ties to even. Codes saturate (see encode of each type), plain elements do not.
template <typename T, uint32_t N>
__device__ __forceinline__ void pack(Raw<T, N>& raw, const float (&codes)[N]) {
  if constexpr (kPlain<T>) {
#pragma unroll
    for (uint32_t i = 0; i + 1 < N; i += 2) pack_pair(&raw.e[i], codes[i], codes[i + 1]);
    if constexpr (N % 2 != 0) raw.e[N - 1] = from_f32<T>(codes[N - 1]);
  } else {
    constexpr uint32_t kBytes = N / kPerElement<T>, kInWord = 4 * kPerElement<T>;
#pragma unroll
    for (uint32_t byte = 0; byte < kBytes; byte += 4) {
      float in[kInWord];
#pragma unroll
      for (uint32_t i = 0; i < kInWord; ++i) in[i] = byte * kPerElement<T> + i < N ? codes[byte * kPerElement<T> + i] : 0.0f;
      raw.words[byte / 4] = encode(T{}, in);
    }
  }
}

// The codes that the elements stand for, exactly. A NaN becomes some NaN.
template <typename T, uint32_t N>
__device__ __forceinline__ void unpack(float (&codes)[N], const Raw<T, N>& raw) {
  if constexpr (kPlain<T>) {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) codes[i] = to_f32(raw.e[i]);
  } else {
    constexpr uint32_t kBytes = N / kPerElement<T>, kInWord = 4 * kPerElement<T>;
#pragma unroll
    for (uint32_t byte = 0; byte < kBytes; byte += 4) {
      float out[kInWord];
      decode(T{}, out, raw.words[byte / 4]);
#pragma unroll
      for (uint32_t i = 0; i < kInWord; ++i) {
        if (byte * kPerElement<T> + i < N) codes[byte * kPerElement<T> + i] = out[i];
      }
    }
  }
}

// e4m3 scales: as any other scale type, but what is too large saturates.
__device__ __forceinline__ float to_f32(e4m3 x) {
  float out[4];
  decode(x, out, x.bits);
  return out[0];
}
template <>
__device__ __forceinline__ e4m3 from_f32<e4m3>(float x) {
  const float in[4] = {x, 0.0f, 0.0f, 0.0f};
  return {(uint8_t)encode(e4m3{}, in)};
}
