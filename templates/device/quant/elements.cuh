// Element types in memory, and vectors of them to and from f32. All targets give the same bits.
#pragma once

#include "../base/types.cuh"
#include "fp8.cuh"
#include "fp4.cuh"
#include "e8m0.cuh"
#include "integers.cuh"

// Logical elements in one T; of u3, of which eight lie in three, see units_of.
template <typename T>
constexpr uint32_t kPerElement = 1;
template <>
constexpr uint32_t kPerElement<e2m1x2> = 2;
template <>
constexpr uint32_t kPerElement<i4x2> = 2;
template <>
constexpr uint32_t kPerElement<u4x2> = 2;
template <>
constexpr uint32_t kPerElement<u2x4> = 4;

// Bits of a logical element, and the fewest elements that fill whole T.
template <typename T>
constexpr uint32_t kElementBits = 8 * sizeof(T) / kPerElement<T>;
template <>
constexpr uint32_t kElementBits<u3> = 3;
template <typename T>
constexpr uint32_t kTogether = kPerElement<T>;
template <>
constexpr uint32_t kTogether<u3> = 8;

// Units of an offset a T: elements, or bits of 3-bit codes.
template <typename T>
constexpr uint32_t kPlacesEach = kElementBits<T> == 3 ? 8 : kPerElement<T>;

// True if the elements of a T are no neighbours (strided.cuh).
template <typename T>
constexpr bool kStrided = false;

// How many T hold n elements, and the reverse.
template <typename T>
__host__ __device__ constexpr uint32_t units_of(uint32_t n) {
  return n / kTogether<T> * (kTogether<T> * kElementBits<T> / (8 * sizeof(T)));
}
template <typename T>
__host__ __device__ constexpr uint32_t elements_of(uint32_t units) {
  return units / units_of<T>(kTogether<T>) * kTogether<T>;
}

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
template <>
constexpr float kLargest<u2x4> = 3.0f;
template <>
constexpr float kLargest<u3> = 7.0f;

// N logical elements moved by one access (of u3 by three).
template <typename T, uint32_t N>
using Raw = Vec<T, units_of<T>(N)>;

// The type as which elements are copied: codes of a codebook are copied without it (codebook.cuh).
template <typename T>
struct CopiedAs {
  using Type = T;
};

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
    // As many codes as make up a word, or three bytes, are encoded at once.
    constexpr uint32_t kCodes = 32 / kElementBits<T> / kTogether<T> * kTogether<T>, kGroups = (N + kCodes - 1) / kCodes;
    uint32_t group[kGroups];
#pragma unroll
    for (uint32_t g = 0; g < kGroups; ++g) {
      float in[kCodes];
#pragma unroll
      for (uint32_t i = 0; i < kCodes; ++i) in[i] = g * kCodes + i < N ? codes[g * kCodes + i] : 0.0f;
      group[g] = encode(T{}, in);
    }
#pragma unroll
    for (uint32_t i = 0; i < sizeof(raw.words) / sizeof(raw.words[0]); ++i) {
      if constexpr (kCodes * kElementBits<T> == 32) {
        raw.words[i] = group[i];
      } else {
        raw.words[i] = joined_word<kCodes * kElementBits<T>, 8 * sizeof(raw.words[0])>(group, i);
      }
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
    constexpr uint32_t kCodes = 32 / kElementBits<T> / kTogether<T> * kTogether<T>;
#pragma unroll
    for (uint32_t first = 0; first < N; first += kCodes) {
      float out[kCodes];
      if constexpr (kCodes * kElementBits<T> == 32) {
        decode(T{}, out, raw.words[first / kCodes]);
      } else {
        decode(T{}, out, number_in<kCodes * kElementBits<T>>(raw.words, first / kCodes));
      }
#pragma unroll
      for (uint32_t i = 0; i < kCodes; ++i) {
        if (first + i < N) codes[first + i] = out[i];
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
