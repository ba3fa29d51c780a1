// quantize.cuh: extremes, scales, quotients, and blocks through every recipe from end to end.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/quant/codebook.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/cache/segment.cuh"

__device__ __forceinline__ uint32_t thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ void read(float (&x)[8], const float* p) {
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) x[i] = p[8 * thread() + i];
}
__device__ __forceinline__ void write(float* p, const float (&x)[8]) {
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) p[8 * thread() + i] = x[i];
}

extern "C" __global__ void quantize_divide(const float* in, const float* scale, float* out) {
  float x[8];
  read(x, in);
  divide(x, scale[thread()]);
  write(out, x);
}

extern "C" __global__ void quantize_extremes(const float* in, float* amax, float* lo, float* hi) {
  float x[8];
  read(x, in);
  amax[thread()] = amax_of(x);
  lo[thread()] = min_of(x);
  hi[thread()] = max_of(x);
}

// A warp of each block: `active` lanes of it in groups of kLanes.
template <uint32_t kLanes>
__device__ __forceinline__ void reduced(const float* in, float* lo, float* hi, uint32_t active) {
  if (threadIdx.x >= active) return;
  const uint32_t mask = active < 32 ? (1u << active) - 1 : 0xffffffffu;
  lo[thread()] = reduce_min<kLanes>(in[thread()], mask);
  hi[thread()] = reduce_max<kLanes>(in[thread()], mask);
}
extern "C" __global__ void quantize_reduce(const float* in, float* lo, float* hi) {
  if (blockIdx.x == 0) reduced<1>(in, lo, hi, 32);
  if (blockIdx.x == 1) reduced<2>(in, lo, hi, 32);
  if (blockIdx.x == 2) reduced<4>(in, lo, hi, 20);
  if (blockIdx.x == 3) reduced<8>(in, lo, hi, 8);
  if (blockIdx.x == 4) reduced<16>(in, lo, hi, 16);
  if (blockIdx.x == 5) reduced<32>(in, lo, hi, 32);
}

// The scales of five types from one amax each, in four types.
template <typename T>
__device__ __forceinline__ void scales(uint32_t k, float amax, float* f32, uint16_t* half, uint16_t* brain, uint8_t* small, float* power) {
  const uint32_t i = k * gridDim.x * blockDim.x + thread();
  f32[i] = amax_scale<T, float>(amax);
  half[i] = amax_scale<T, f16>(amax).bits;
  brain[i] = amax_scale<T, bf16>(amax).bits;
  small[i] = amax_scale<T, e4m3>(amax).bits;
  power[i] = pow2_scale<T>(amax);
}
extern "C" __global__ void quantize_scales(const float* amax, float* f32, uint16_t* half, uint16_t* brain, uint8_t* small, float* power, uint8_t* most,
                                           uint8_t* two_level, float* divisor) {
  const float x = amax[thread()];
  scales<e4m3>(0, x, f32, half, brain, small, power);
  scales<e5m2>(1, x, f32, half, brain, small, power);
  scales<e2m1x2>(2, x, f32, half, brain, small, power);
  scales<int8_t>(3, x, f32, half, brain, small, power);
  scales<i4x2>(4, x, f32, half, brain, small, power);
  const float global = 0.0371f;
  const e4m3 scale = nvfp4_global_scale(x, global);
  most[thread()] = nvfp4_max_scale(x).bits;
  two_level[thread()] = scale.bits;
  divisor[thread()] = product(scale, global);
}

// Scales that are powers of two, in e8m0 and back, and quotients under floors.
extern "C" __global__ void quantize_powers(const float* amax, uint8_t* exponent, float* back, float* raised, uint8_t* floored) {
  const float x = amax[thread()];
  const e8m0 power = from_f32<e8m0>(pow2_scale<e4m3>(x));
  exponent[thread()] = power.bits;
  back[thread()] = to_f32(power);
  raised[thread()] = raised_quotient<e2m1x2>(x, 1e-4f, 0.0f);
  floored[thread()] = from_f32<e8m0>(power_above(raised_quotient<e4m3>(x, 0.0f, 1e-4f))).bits;
}
extern "C" __global__ void quantize_exponents(const uint8_t* bytes, float* out) { out[thread()] = to_f32(e8m0{bytes[thread()]}); }

// A block a thread: its scale, its codes, and the values of those.
template <typename T>
__device__ __forceinline__ Raw<T, 8>& at(uint8_t* codes) {
  return ((Raw<T, 8>*)codes)[thread()];
}
template <typename T, typename S>
__device__ __forceinline__ void symmetric(const float* in, S* scale, uint8_t* codes, float* out, S found) {
  float x[8];
  read(x, in);
  scale[thread()] = found;
  quantize<T>(at<T>(codes), x, to_f32(found));
  const float one[1] = {to_f32(found)};
  dequantize<T>(x, at<T>(codes), one);
  write(out, x);
}
__device__ __forceinline__ float amax_at(const float* in) {
  float x[8];
  read(x, in);
  return amax_of(x);
}
#define AMAX(name, T, S)                                                                                        \
  extern "C" __global__ void name(const float* in, S* scale, uint8_t* codes, float* out) {                      \
    symmetric<T, S>(in, scale, codes, out, amax_scale<T, S>(amax_at(in)));                                      \
  }
AMAX(recipe_e4m3_f32, e4m3, float)
AMAX(recipe_e5m2_f16, e5m2, f16)
AMAX(recipe_e2m1_e4m3, e2m1x2, e4m3)
AMAX(recipe_i8_bf16, int8_t, bf16)
AMAX(recipe_i4_f16, i4x2, f16)
extern "C" __global__ void recipe_e4m3_pow2(const float* in, float* scale, uint8_t* codes, float* out) {
  symmetric<e4m3, float>(in, scale, codes, out, pow2_scale<e4m3>(amax_at(in)));
}

#define ASYMMETRIC(name, T, S)                                                                                  \
  extern "C" __global__ void name(const float* in, ScaleZero<S>* pairs, uint8_t* codes, float* out) {           \
    float x[8];                                                                                                 \
    read(x, in);                                                                                                \
    const ScaleZero<S> found = asymmetric<T, S>(min_of(x), max_of(x));                                          \
    pairs[thread()] = found;                                                                                    \
    quantize<T>(at<T>(codes), x, to_f32(found.scale), to_f32(found.zero));                                      \
    const float scale[1] = {to_f32(found.scale)}, zero[1] = {to_f32(found.zero)};                               \
    dequantize<T>(x, at<T>(codes), scale, zero);                                                                \
    write(out, x);                                                                                              \
  }
ASYMMETRIC(recipe_u8_f32, uint8_t, float)
ASYMMETRIC(recipe_u8_f16, uint8_t, f16)
ASYMMETRIC(recipe_u4_bf16, u4x2, bf16)

extern "C" __global__ void recipe_u4_least(const float* in, ScaleZero<f16>* pairs, uint8_t* codes, float* out) {
  float x[8];
  read(x, in);
  const ScaleZero<f16> found = scale_from_least<u4x2, f16>(min_of(x), max_of(x));
  pairs[thread()] = found;
  quantize_from_least<u4x2>(at<u4x2>(codes), x, to_f32(found.scale), to_f32(found.zero));
  const float scale[1] = {to_f32(found.scale)}, least[1] = {to_f32(found.zero)};
  dequantize_from_least<u4x2>(x, at<u4x2>(codes), scale, least);
  write(out, x);
}
// Codes of a codebook under norms, a block two threads: the codes come from a word, and go back through one.
__device__ const float kBookValues[] = {-2.5f, -2.0f, -1.5f, -1.25f, -1.0f, -0.5f, -0.25f, -0.125f, 0.0f, 0.125f, 0.5f, 0.75f, 1.0f, 1.5f, 2.0f, 3.0f};
struct Book {
  static constexpr float kLargest = 3.0f;
  __device__ static float value(uint32_t code) { return kBookValues[code]; }
  __device__ static uint32_t code_of(float x) {
    uint32_t code = 0;
    for (uint32_t i = 0; i < 15; ++i) code += x >= (kBookValues[i] + kBookValues[i + 1]) / 2;
    return code;
  }
};
using Code = Coded<u4x2, Book>;
template <Recipe kHow>
struct BookSegment {
  using Element = Code;
  using Scale = f16;
  static constexpr Recipe kRecipe = kHow;
  static constexpr bool kZero = false;
  static constexpr uint32_t kSize = 16, kVector = 8, kBlockHeads = 1, kBlockDims = 16;
  __device__ static Code* base(Code* page) { return page; }
  __device__ static uint32_t offset(uint32_t token, uint32_t, uint32_t dim) { return token * 16 + dim; }
};
extern "C" __global__ void recipe_book(const float* in, f16* norms, f16* units, uint32_t* codes, uint8_t* rounded, float* thirds, float* out) {
  float x[8];
  const uint32_t block = thread() / 2, lane = thread() % 2;
  const auto mine = [&](float (&some)[8], uint32_t) { read(some, in); };
  const auto to = [&](f16* numbers) { return [=](f16 scale, f16) { numbers[block] = scale; }; };
  store_codes_under_norm<BookSegment<Recipe::unit>, 2, 8, 1, 1>((Code*)codes, block, 0, 0, lane, 0xffffffffu, mine, to(units));
  store_codes_under_norm<BookSegment<Recipe::norm>, 2, 8, 1, 1>((Code*)rounded, block, 0, 0, lane, 0xffffffffu, mine, to(norms));
  read(x, in);
  thirds[thread()] = unit_scale<float>(norm_of(reduce_sum<2>(squares_of(x), 0xffffffffu)), lane == 0 ? 3.0f : 0.0f);
  const float scale[1] = {amax_scale<Code, float>(amax_of(x))};
  Raw<Code, 8> raw;
  quantize<Code>(raw, x, scale[0]);
  dequantize<Code>(x, raw, scale);
  write(out, x);
}
// Words of codes there and back.
extern "C" __global__ void recipe_book_words(uint32_t* words, float* out) {
  float x[8];
  decode(Code{}, x, words[thread()]);
  write(out, x);
  words[thread()] = encode(Code{}, x);
}
extern "C" __global__ void recipe_nvfp4_max(const float* in, e4m3* scale, uint8_t* codes, float* out) {
  float x[8];
  read(x, in);
  const e4m3 found = nvfp4_max_scale(amax_of(x));
  scale[thread()] = found;
  quantize<e2m1x2>(at<e2m1x2>(codes), x, to_f32(found));
  const float one[1] = {to_f32(found)};
  dequantize_max(x, at<e2m1x2>(codes), one);
  write(out, x);
}
extern "C" __global__ void recipe_nvfp4_global(const float* in, e4m3* scale, uint8_t* codes, float* out, float global) {
  float x[8];
  read(x, in);
  const e4m3 found = nvfp4_global_scale(amax_of(x), global);
  scale[thread()] = found;
  quantize<e2m1x2>(at<e2m1x2>(codes), x, product(found, global));
  const float one[1] = {to_f32(found)};
  dequantize_global(x, at<e2m1x2>(codes), one, global);
  write(out, x);
}
// Every pair of codes under every scale: [scale, byte].
extern "C" __global__ void recipe_nvfp4_values(const uint8_t* bytes, float* most, float* two_level, float global) {
  const float scale[1] = {to_f32(e4m3{(uint8_t)blockIdx.x})};
  float x[8];
  dequantize_max(x, ((const Raw<e2m1x2, 8>*)bytes)[threadIdx.x], scale);
  write(most, x);
  dequantize_global(x, ((const Raw<e2m1x2, 8>*)bytes)[threadIdx.x], scale, global);
  write(two_level, x);
}
