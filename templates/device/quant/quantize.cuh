// Quantization: the scale of a block, values to codes and back. docs/quantization.md has the rules.
//
// Nothing here is contracted or reordered (__fmul_rn and its like): a block written by one kernel must be the block
// that another one writes.
#pragma once

#include "elements.cuh"

// ---- Over a block: NaN where one element is.

template <uint32_t N>
__device__ __forceinline__ float amax_of(const float (&x)[N]) {
  float most = fabsf(x[0]);
#pragma unroll
  for (uint32_t i = 1; i < N; ++i) most = max_nan(most, fabsf(x[i]));
  return most;
}
template <uint32_t N>
__device__ __forceinline__ float min_of(const float (&x)[N]) {
  float least = x[0];
#pragma unroll
  for (uint32_t i = 1; i < N; ++i) least = min_nan(least, x[i]);
  return least;
}
template <uint32_t N>
__device__ __forceinline__ float max_of(const float (&x)[N]) {
  float most = x[0];
#pragma unroll
  for (uint32_t i = 1; i < N; ++i) most = max_nan(most, x[i]);
  return most;
}

// The sum of squares: in f64, so that its order shows in no bit of an f16 or f32 that it becomes.
template <uint32_t N>
__device__ __forceinline__ double squares_of(const float (&x)[N]) {
  double sum = 0.0;
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) sum = __fma_rn((double)x[i], (double)x[i], sum);
  return sum;
}
__device__ __forceinline__ float norm_of(double squares) { return __double2float_rn(__dsqrt_rn(squares)); }

// Over aligned groups of `Lanes` lanes (a power of two), of which `mask` must hold all or none; all lanes get the result.
template <uint32_t Lanes>
__device__ __forceinline__ float reduce_max(float x, uint32_t mask) {
  static_assert(Lanes <= 32 && (Lanes & (Lanes - 1)) == 0);
#pragma unroll
  for (uint32_t step = Lanes / 2; step > 0; step /= 2) x = max_nan(x, __shfl_xor_sync(mask, x, step));
  return x;
}
template <uint32_t Lanes>
__device__ __forceinline__ float reduce_min(float x, uint32_t mask) {
  static_assert(Lanes <= 32 && (Lanes & (Lanes - 1)) == 0);
#pragma unroll
  for (uint32_t step = Lanes / 2; step > 0; step /= 2) x = min_nan(x, __shfl_xor_sync(mask, x, step));
  return x;
}

template <uint32_t Lanes, typename T>
__device__ __forceinline__ T reduce_sum(T x, uint32_t mask) {
  static_assert(Lanes <= 32 && (Lanes & (Lanes - 1)) == 0);
#pragma unroll
  for (uint32_t step = Lanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(mask, x, step);
  return x;
}

// ---- Scales

// "amax": the largest magnitude becomes the largest code.
template <typename T, typename S>
__device__ __forceinline__ S amax_scale(float amax) {
  return from_f32<S>(__fdiv_rn(amax, kLargest<T>));
}

// "pow2": the power of two at or above that, at least 2^-126.
__device__ __forceinline__ float power_above(float scale) {
  const float above = __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0x7f800000u);
  return scale == scale ? fmaxf(above, 0x1p-126f) : scale;
}
template <typename T>
__device__ __forceinline__ float pow2_scale(float amax) {
  return power_above(__fdiv_rn(amax, kLargest<T>));
}

// The quotient under floors: the largest magnitude counts as `amax_min` at least, its quotient as `scale_min` at least.
template <typename T>
__device__ __forceinline__ float raised_quotient(float amax, float amax_min, float scale_min) {
  return max_nan(__fdiv_rn(max_nan(amax, amax_min), kLargest<T>), scale_min);
}

// "max": of 16 values of e2m1. (MAX also raises amax to 1e-12, which the smallest scale hides.)
__device__ __forceinline__ e4m3 nvfp4_max_scale(float amax) {
  const e4m3 scale = from_f32<e4m3>(min_nan(__fdiv_rn(amax, 6.0f), 448.0f));
  return scale.bits == 0 ? e4m3{1} : scale;  // 2^-9
}

// "global": of 16 values of e2m1 below a scale of the whole tensor; values are divided by product(scale, global).
__device__ __forceinline__ e4m3 nvfp4_global_scale(float amax, float global) {
  return from_f32<e4m3>(__fdiv_rn(amax, __fmul_rn(6.0f, global)));
}
__device__ __forceinline__ float product(e4m3 scale, float global) { return __fmul_rn(to_f32(scale), global); }

// The least scale of a block far from 0, as a share of its distance, so that its zero point is finite; 0: none is needed.
template <typename S>
constexpr float kZeroBound = 0.0f;
template <>
constexpr float kZeroBound<f16> = 0x1p-15f;

// Asymmetric "amax": code 0 stands for about `lo`, the largest code for about `hi`.
template <typename S>
struct ScaleZero {
  S scale, zero;
};
template <typename T, typename S>
__device__ __forceinline__ ScaleZero<S> asymmetric(float lo, float hi) {
  if (lo == hi) {  // one value: -1, 0 or 1 times its magnitude
    const float sign = lo > 0.0f ? 1.0f : lo < 0.0f ? -1.0f : 0.0f;
    return {from_f32<S>(lo == 0.0f ? 1.0f : fabsf(lo)), from_f32<S>(0.0f - sign)};
  }
  float wanted = __fdiv_rn(__fsub_rn(hi, lo), kLargest<T>);
  if constexpr (kZeroBound<S> > 0.0f) wanted = max_nan(wanted, __fmul_rn(fabsf(lo), kZeroBound<S>));
  const S scale = from_f32<S>(wanted);
  const float rounded = to_f32(scale);
  return {scale, from_f32<S>(rounded == 0.0f ? 0.0f : __fdiv_rn(0.0f - lo, rounded))};  // never -0 for a lo of 0
}

// "min": code 0 stands for the block's least value, which lies beside the scale; zero is +0.
template <typename T, typename S>
__device__ __forceinline__ ScaleZero<S> scale_from_least(float lo, float hi) {
  return {from_f32<S>(__fdiv_rn(__fsub_rn(hi, lo), kLargest<T>)), from_f32<S>(__fadd_rn(lo, 0.0f))};
}

// "unit": the norm of a block over the norm of what its codes stand for.
template <typename S>
__device__ __forceinline__ S unit_scale(float norm, float of_codes) {
  return from_f32<S>(of_codes == 0.0f ? 0.0f : __fdiv_rn(norm, of_codes));
}

// A norm that readers correct, of codes of a Book with kSquareBase, 2^23 units of squares, and kNormUnit, the root of a unit: the
// squares of values, each rounded to whole units. As integers they add up alike in any order; an f32 from 2^23 units on has them
// in its lowest bits.
template <typename Book, uint32_t N>
__device__ __forceinline__ uint32_t squares_in_units(const float (&values)[N]) {
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < N; ++i)
    sum += __float_as_uint(__fmaf_rn(values[i], values[i], Book::kSquareBase)) - __float_as_uint(Book::kSquareBase);
  return sum;
}
// A block's norm over that of what its codes stand for; where these are all 0, the norm.
template <typename Book>
__device__ __forceinline__ float corrected_norm(float norm, uint32_t squares) {
  const float of_codes = __fmul_rn(__fsqrt_rn(__uint2float_rn(squares)), Book::kNormUnit);
  return squares == 0 ? norm : __fdiv_rn(norm, of_codes);
}

// ---- Codes

// x / scale, rounded once; all zero where the scale is. M scales, each of N / M neighbours. (Quotients below 2^-28 may be off
// by their last bit, which no code can show.)
//
// Ordinary scales: one reciprocal for all, in two parts, gives quotients within one unit of the last place, and their
// remainders times the reciprocal round them correctly (Markstein). `above` is not negative, or the quotient of a -0
// would lose its sign; so is the remainder taken from the quotient's side.
template <uint32_t N, uint32_t M>
__device__ __forceinline__ void divide(float (&x)[N], const float (&scale)[M]) {
  constexpr uint32_t kEach = N / M;
  bool ordinary = amax_of(x) <= 0x1p64f;
#pragma unroll
  for (uint32_t m = 0; m < M; ++m) ordinary = ordinary && scale[m] >= 0x1p-50f && scale[m] <= 0x1p50f;
  if (ordinary) {
#pragma unroll
    for (uint32_t m = 0; m < M; ++m) {
      const float reciprocal = __frcp_rn(scale[m]);
      const bool over = __fmaf_rn(-scale[m], reciprocal, 1.0f) < 0.0f;
      const float below = __uint_as_float(__float_as_uint(reciprocal) - over);
      const float above = __fmul_rn(below, __fmaf_rn(-scale[m], below, 1.0f));
#pragma unroll
      for (uint32_t i = m * kEach; i < (m + 1) * kEach; ++i) {
        const float quotient = __fmaf_rn(x[i], below, __fmul_rn(x[i], above));
        x[i] = __fmaf_rn(__fmaf_rn(quotient, scale[m], -x[i]), -reciprocal, quotient);
      }
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) x[i] = scale[i / kEach] == 0.0f ? 0.0f : __fdiv_rn(x[i], scale[i / kEach]);
  }
}
template <uint32_t N>
__device__ __forceinline__ void divide(float (&x)[N], float scale) {
  const float one[1] = {scale};
  divide(x, one);
}

template <typename T, uint32_t N>
__device__ __forceinline__ void quantize(Raw<T, N>& raw, const float (&x)[N], float scale) {
  float codes[N];
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) codes[i] = x[i];
  divide(codes, scale);
  pack<T>(raw, codes);
}
template <typename T, uint32_t N>
__device__ __forceinline__ void quantize(Raw<T, N>& raw, const float (&x)[N], float scale, float zero) {
  float codes[N];
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) codes[i] = x[i];
  divide(codes, scale);
  const float shift = scale == 0.0f ? 0.0f : zero;
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) codes[i] = __fadd_rn(codes[i], shift);
  pack<T>(raw, codes);
}

// "min": of what values are above the least one.
template <typename T, uint32_t N>
__device__ __forceinline__ void quantize_from_least(Raw<T, N>& raw, const float (&x)[N], float scale, float least) {
  float above[N];
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) above[i] = __fsub_rn(x[i], least);
  quantize<T>(raw, above, scale);
}

// ---- Values: M scales (and zero points), each of N / M neighbours

template <typename T, uint32_t N, uint32_t M>
__device__ __forceinline__ void dequantize(float (&out)[N], const Raw<T, N>& raw, const float (&scale)[M]) {
  unpack<T>(out, raw);
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) out[i] = __fmul_rn(out[i], scale[i / (N / M)]);
}
template <typename T, uint32_t N, uint32_t M>
__device__ __forceinline__ void dequantize(float (&out)[N], const Raw<T, N>& raw, const float (&scale)[M], const float (&zero)[M]) {
  unpack<T>(out, raw);
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) out[i] = __fmul_rn(__fsub_rn(out[i], zero[i / (N / M)]), scale[i / (N / M)]);
}
template <typename T, uint32_t N, uint32_t M>
__device__ __forceinline__ void dequantize_from_least(float (&out)[N], const Raw<T, N>& raw, const float (&scale)[M], const float (&least)[M]) {
  dequantize<T>(out, raw, scale);
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) out[i] = __fadd_rn(out[i], least[i / (N / M)]);
}
// "max": through e4m3, as if that were what the cache held.
template <uint32_t N, uint32_t M>
__device__ __forceinline__ void dequantize_max(float (&out)[N], const Raw<e2m1x2, N>& raw, const float (&scale)[M]) {
  dequantize<e2m1x2>(out, raw, scale);
  Raw<e4m3, N> rounded;
  pack<e4m3>(rounded, out);
  unpack<e4m3>(out, rounded);
}
// "global": two products, of which the first one is exact.
template <uint32_t N, uint32_t M>
__device__ __forceinline__ void dequantize_global(float (&out)[N], const Raw<e2m1x2, N>& raw, const float (&scale)[M], float global) {
  dequantize<e2m1x2>(out, raw, scale);
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) out[i] = __fmul_rn(out[i], global);
}
