// Sine and cosine of an angle in f32, as RoPE needs them: no table, no local memory, no slow path, no conversions.
//
// Both within 0.85 ulp of f32 for every angle up to 2^24 (all of them were tried). A larger one counts as 0, so that what
// follows stays finite; an infinity or NaN gives NaN. A zero may come out with either sign.
//
// Cody and Waite: quarter turns are taken off, pi / 2 being the sum of three f32. How many is found in two steps, a multiple
// of 256 and then the nearest number, as one f32 product would miss it from 2^22 on. The first of the three
// leaves at most 24 bits, exactly; the rounding error of the others is kept in `low`, so that angles next to a multiple of
// pi / 2 keep their digits. Then minimax polynomials on [-pi / 4, pi / 4]. Nothing here may be contracted or reordered.
#pragma once

__device__ __forceinline__ void sincos_f32(float angle, float& s, float& c) {
  constexpr float kHigh = 0x1.921fb6p+0f, kMiddle = -0x1.777a5cp-25f, kLow = -0x1.ee59dap-50f;  // pi / 2
  constexpr float kTurns = 0x1.45f306p-1f;                                                      // 2 / pi
  constexpr float k256 = 3221225472.0f, kOne = 12582912.0f;  // 1.5 * 2^31 and 2^23: added, they round to such multiples

  // First of all, so that there is nothing left for a branch to skip. NaN where the angle is no number.
  angle = fabsf(angle) <= 16777216.0f ? angle : __fmul_rn(angle, 0.0f);
  const float many = __fsub_rn(__fmaf_rn(angle, kTurns, k256), k256);
  const float coarse = __fmaf_rn(-many, kHigh, angle);
  const float rounded = __fmaf_rn(__fmaf_rn(-many, kMiddle, coarse), kTurns, kOne);
  const float few = __fsub_rn(rounded, kOne), k = __fadd_rn(many, few);
  const uint32_t quarters = __float_as_uint(rounded);  // its lower bits, which 256 does not change

  const float exact = __fmaf_rn(-few, kHigh, coarse);
  const float off = __fmul_rn(k, kMiddle);
  const float sum = __fsub_rn(exact, off);  // and its error, whichever of the two is larger
  const float part = __fsub_rn(sum, exact);
  const float error = __fsub_rn(__fsub_rn(exact, __fsub_rn(sum, part)), __fadd_rn(off, part));
  const float rest = __fmaf_rn(-k, kLow, __fsub_rn(error, __fmaf_rn(k, kMiddle, -off)));
  const float x = __fadd_rn(sum, rest), low = __fadd_rn(__fsub_rn(sum, x), rest);

  const float square = __fmul_rn(x, x);
  float sine = 2.86567956e-6f;
  sine = __fmaf_rn(sine, square, -1.98559923e-4f);
  sine = __fmaf_rn(sine, square, 8.33338592e-3f);
  sine = __fmaf_rn(sine, square, -1.66666672e-1f);
  sine = __fadd_rn(x, __fmaf_rn(sine, __fmul_rn(x, square), low));
  float cosine = 2.44677067e-5f;
  cosine = __fmaf_rn(cosine, square, -1.38877297e-3f);
  cosine = __fmaf_rn(cosine, square, 4.16666567e-2f);
  const float most = __fmaf_rn(square, -0.5f, 1.0f);
  const float less = __fmaf_rn(square, -0.5f, __fsub_rn(1.0f, most));
  cosine = __fadd_rn(most, __fmaf_rn(cosine, __fmul_rn(square, square), __fmaf_rn(-x, low, less)));

  // Odd: the two change places. By bits, as a choice would become a branch.
  const uint32_t sine_bits = __float_as_uint(sine), cosine_bits = __float_as_uint(cosine);
  const uint32_t swap = (sine_bits ^ cosine_bits) & (0u - (quarters & 1u));
  const uint32_t turned = quarters << 30;  // its uppermost bit: half a turn
  s = __uint_as_float(sine_bits ^ swap ^ (turned & 0x80000000u));
  c = __uint_as_float(cosine_bits ^ swap ^ ((turned + 0x40000000u) & 0x80000000u));
}

// Cosine and sine of an angle in radians, both times `factor`.
__device__ __forceinline__ float2 cos_sin_of(float angle, float factor = 1.0f) {
  float2 found;
  sincos_f32(angle, found.y, found.x);
  return {found.x * factor, found.y * factor};
}

// Cosine and sine as a row of a table has them, at two places of it.
template <typename T>
__device__ __forceinline__ float2 cos_sin_in(const T* row, uint32_t cosine, uint32_t sine) {
  return {to_f32(row[cosine]), to_f32(row[sine])};
}
