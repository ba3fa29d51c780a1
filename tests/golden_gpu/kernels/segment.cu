// segment.cuh: two pages of every kind of run, stored block by block or vector by vector, and read in every way.
#include "runs.cuh"

struct Cache {
  float global;
};

template <typename S>
__device__ __forceinline__ PageRef page_of(uint32_t i, uint8_t* codes, typename S::Scale* scales, const bf16* tail) {
  constexpr uint32_t kBytes = kInPage / kPerElement<typename S::Element> * sizeof(typename S::Element);
  const uint32_t sealed = i == 0 ? 5 : 0;
  return {codes + i * kBytes, scales + i * kTokens * (S::kRecipe == Recipe::none ? 0 : S::kScaleRow), tail, sealed, Fault::none, true};
}

// Two lanes a block, each of them four values twice; whole warps at a time. Codes go to the copy too, by a write that keeps
// the scales of every other token.
template <typename S>
__device__ __forceinline__ void put_blocks(const Cache& cache, const float* in, uint8_t* codes, uint8_t* copy, typename S::Scale* scales) {
  constexpr uint32_t kBlocks = kHeads / S::kBlockHeads * S::kDimBlocks;
  const uint32_t block = threadIdx.x / 2, lane = threadIdx.x % 2, token = block / kBlocks;
  if (token >= 2 * kTokens) return;
  const uint32_t head = block % kBlocks / S::kDimBlocks * S::kBlockHeads, dim = block % S::kDimBlocks * S::kBlockDims;
  float x[2][4];
#pragma unroll
  for (uint32_t c = 0; c < 2; ++c) {
    const uint32_t element = (c * 2 + lane) * 4, h = element / S::kBlockDims, d = dim + element % S::kBlockDims;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) x[c][i] = h < S::kBlockHeads && d < kDims ? in[(token * kHeads + head + h) * kDims + d + i] : nan_f32();
  }
  const PageRef page = page_of<S>(token / kTokens, codes, scales, nullptr);
  const auto chunk = [&](float (&some)[4], uint32_t c) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) some[i] = x[c][i];
  };
  const float global = global_scale_of<S>(cache);
  store_block<S, 2, 4, 2>(cache, page, token % kTokens, head, dim, lane, 0xffffffffu, global, chunk);

  const auto at = scale_at<S>(cache, page, token % kTokens, head, dim);
  if (token % 2 && lane == 0) {
    at[0] = {};
    if constexpr (S::kZero) at[1] = {};
  }
  const PageRef other = page_of<S>(token / kTokens, copy, scales, nullptr);
  store_codes<S, 2, 4, 2, 2>(other, token % kTokens, head, dim, lane, 0xffffffffu, global, chunk,
                             [&](typename S::Scale, typename S::Scale) {
                               if (token % 2 == 0) return;
                               // The same scale and zero point, of the block's range.
                               float low = infinity(), high = S::kZero ? -infinity() : 0.0f;
                               for (uint32_t h = 0; h < S::kBlockHeads; ++h) {
                                 for (uint32_t d = dim; d < min(dim + S::kBlockDims, kDims); ++d) {
                                   const float value = in[(token * kHeads + head + h) * kDims + d];
                                   low = min_nan(low, value);
                                   high = max_nan(high, S::kZero ? value : fabsf(value));
                                 }
                               }
                               const auto found = block_scale<S>(low, high, global);
                               at[0] = found.scale;
                               if constexpr (S::kZero) at[1] = found.zero;
                             });
}

// Eight values a thread.
struct Place {
  uint32_t page, token, head, dim;
};
__device__ __forceinline__ Place place_of(uint32_t i) {
  return {i * 8 / kInPage, i * 8 / (kHeads * kDims) % kTokens, i * 8 / kDims % kHeads, i * 8 % kDims};
}
template <typename S>
__device__ __forceinline__ void put_vectors(const Cache& cache, const float* in, uint8_t* codes, uint8_t*, typename S::Scale* scales) {
  const Place at = place_of(threadIdx.x);
  if (at.page >= 2) return;
  Vec<bf16, 8> values;
  float x[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) x[i] = in[8 * threadIdx.x + i];
  pack<bf16>(values, x);
  store_elements<S, 8>(cache, page_of<S>(at.page, codes, scales, nullptr), at.token, at.head, at.dim, values);
}

template <typename S>
__device__ __forceinline__ void get(const Cache& cache, uint8_t* codes, uint8_t* copy, typename S::Scale* scales, const bf16* tail, float* out,
                                    float* ones, bf16* halves, typename S::Scale* found) {
  const uint32_t i = threadIdx.x;
  const Place at = place_of(i);
  if (at.page >= 2) return;
  const PageRef page = page_of<S>(at.page, codes, scales, tail), other = page_of<S>(at.page, copy, scales, tail);
  Vec<float, 4> wide[2];
  Vec<float, 1> one;
  Vec<bf16, 8> half;
  Raw<typename S::Element, 8> raw;
  load_elements<S>(wide[0], cache, page, at.token, at.head, at.dim);
  load_bytes<S>(wide[1], cache, page, at.token, at.head, at.dim + 4, global_scale_of<S>(cache));
  load_elements<S>(half, cache, page, at.token, at.head, at.dim);
  load_raw<S, 8>(raw, page, at.token, at.head, at.dim);
  if constexpr (!kComputes<S>) store_raw<S, 8>(other, at.token, at.head, at.dim, raw);
  const bool found_it = *(const uint8_t*)element_at<S>(page, at.token, at.head, at.dim) == *(const uint8_t*)&raw;
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) {
    load_elements<S>(one, cache, page, at.token, at.head, at.dim + j);
    ones[8 * i + j] = one.e[0];
    out[8 * i + j] = found_it ? wide[j / 4].e[j % 4] : nan_f32();
    halves[8 * i + j] = half.e[j];
  }
  if constexpr (S::kRecipe != Recipe::none) {
    Vec<typename S::Scale, 1 + S::kZero> pair;
    load_scales<S, 1, 1>(pair, cache, page, at.token, at.head, at.dim);
    const bool same = to_f32(pair.e[0]) == to_f32(*scale_at<S>(cache, page, at.token, at.head, at.dim));
    found[i] = same || to_f32(pair.e[0]) != to_f32(pair.e[0]) ? pair.e[0] : typename S::Scale{};
  }
  static_assert(within_block(8, 16) == 8 && within_block(8, 4) == 4 && within_block(4, 3) == 1);
}

#define SEGMENT(name, put, ...)                                                                                                   \
  extern "C" __global__ void __launch_bounds__(192) name(const float* in, const bf16* tail, __VA_ARGS__::Scale* scales, uint8_t* codes, \
                                                         uint8_t* copy, float* out, float* ones, bf16* halves,                     \
                                                         __VA_ARGS__::Scale* found, float global) {                                \
    using S = __VA_ARGS__;                                                                                                         \
    const Cache cache{global};                                                                                                     \
    put<S>(cache, in, codes, copy, scales);                                                                                        \
    __syncthreads();                                                                                                               \
    get<S>(cache, codes, copy, scales, tail, out, ones, halves, found);                                                            \
  }
using ScaledE4m3 = Run<e4m3, float, Recipe::amax>;
using PowerE5m2 = Run<e5m2, float, Recipe::pow2, false, 2, 8>;
using ScaledI8 = Run<int8_t, f16, Recipe::amax, false, 1, 16>;
using ZeroU8 = Run<uint8_t, f16, Recipe::amax, true>;
using ZeroU4 = Run<u4x2, bf16, Recipe::amax, true>;
using ScaledI4 = Run<i4x2, e4m3, Recipe::amax, false, 2, 8>;
using MaxE2m1 = Run<e2m1x2, e4m3, Recipe::nvfp4_max>;
using GlobalE2m1 = Run<e2m1x2, e4m3, Recipe::nvfp4_global>;
using WaitingU8 = Run<uint8_t, f16, Recipe::amax, true, 1, 16, 4>;
using GivenE4m3 = Run<e4m3, float, Recipe::given, false, 1, 4>;
using GivenI4 = Run<i4x2, float, Recipe::given, false, 1, 4>;
using GivenI8 = Run<int8_t, float, Recipe::given, false, 1, 1>;
using CastE5m2 = Run<e5m2, float, Recipe::none>;
using PlainF16 = Run<f16, float, Recipe::none, false, 1, 16, 0, 4>;
using PlainBf16 = Run<bf16, float, Recipe::none>;
SEGMENT(segment_e4m3, put_blocks, ScaledE4m3)
SEGMENT(segment_e5m2_pow2, put_blocks, PowerE5m2)
SEGMENT(segment_i8, put_blocks, ScaledI8)
SEGMENT(segment_u8, put_blocks, ZeroU8)
SEGMENT(segment_u4, put_blocks, ZeroU4)
SEGMENT(segment_i4, put_blocks, ScaledI4)
SEGMENT(segment_nvfp4_max, put_blocks, MaxE2m1)
SEGMENT(segment_nvfp4_global, put_blocks, GlobalE2m1)
SEGMENT(segment_waiting, put_blocks, WaitingU8)
SEGMENT(segment_given_e4m3, put_vectors, GivenE4m3)
SEGMENT(segment_given_i4, put_vectors, GivenI4)
SEGMENT(segment_given_i8, put_vectors, GivenI8)
SEGMENT(segment_cast, put_vectors, CastE5m2)
SEGMENT(segment_f16, put_vectors, PlainF16)
SEGMENT(segment_bf16, put_vectors, PlainBf16)

// Three scales and a zero a token.
struct PaddedE4m3 : Run<e4m3, e8m0, Recipe::pow2> {
  static constexpr uint32_t kScalePad = 1;
  __device__ static constexpr uint32_t scale_offset(uint32_t token, uint32_t head, uint32_t dim) { return token * 4 + dim / kBlockDims; }
};
extern "C" __global__ void segment_pad(uint8_t* scales) {
  store_scale_pad<PaddedE4m3>(Cache{0.0f}, PageRef{scales, scales, nullptr, 0, Fault::none, true}, threadIdx.x);
}

// Scales of the caller's: two heads and 16 dims share one; a block has the scales of a layer.
struct GivenCache {
  static constexpr uint32_t kHeads = 4;
  const float* scales;
};
struct GivenRun {
  using Scale = float;
  using ScalePointer = const float*;
  static constexpr Recipe kRecipe = Recipe::given;
  static constexpr uint32_t kSize = 24, kBlockDims = 16, kBlockHeads = 2;
  __device__ static ScalePointer scales(const GivenCache& cache, const PageRef&) { return cache.scales; }
  __device__ static constexpr uint32_t scale_offset(uint32_t, uint32_t head, uint32_t dim) { return head / 2 * 2 + dim / 16; }
};
extern "C" __global__ void segment_given_scales(const float* in, float* out, uint64_t* errors, uint64_t* first) {
  const GivenCache cache{in + 4 * blockIdx.x};
  const PageRef none{nullptr, nullptr, nullptr, 0, Fault::none, true};
  report_scales<GivenRun>(cache, none, GivenScale::k, GivenScale::k_global, errors + blockIdx.x);
  report_scale(in, GivenScale::q, first);  // the first thread of all
  if (threadIdx.x < 4) {
    out[8 * blockIdx.x + threadIdx.x] = scale_value<GivenRun>(cache.scales[threadIdx.x]);
    out[8 * blockIdx.x + 4 + threadIdx.x] = usable_scale(-cache.scales[threadIdx.x]);
  }
}
