// heads.cuh: heads of every walk through bias, norm and RoPE, and out of the cache.
#include "runs.cuh"
#include "../../../templates/device/rows/heads.cuh"

struct Cache {};

template <uint32_t kLanes>
__device__ __forceinline__ uint32_t lanes_of(uint32_t lane) {
  return 0xffffffffu >> (32 - kLanes) << (threadIdx.x - lane);
}
// As kernels spell it out.
template <uint32_t kD, uint32_t kBegin, uint32_t kRotary, bool kN, uint32_t kW, uint32_t kL>
struct Dims {
  static constexpr uint32_t kDim = kD, kRotaryBegin = kBegin, kRotaryDim = kRotary, kWidth = kW, kLanes = kL;
  static constexpr bool kNeox = kN;
};
template <uint32_t kC, typename C>
struct Norm {
  using Cast = C;
  static constexpr uint32_t kCount = kC;
  static constexpr float kEps = 0.0625f, kOffset = 1.0f;
};
template <typename H>
__device__ __forceinline__ void put(Head<H>& head, uint32_t lane, float* out) {
  head.vectors(lane, [&](float (&x)[H::kWidth], uint32_t e) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) out[e + j] = x[j];
  });
}

// kLanes threads a head. Of the first kCount elements, the sum of squares and the factor it makes; they are scaled by another one.
template <typename H, typename N, typename T, typename Weight>
__device__ __forceinline__ void change(const T* rows, const bf16* bias, const Weight* weight, const float2* angles, float* out, float* squares,
                                       float* factors) {
  using W = HeadLayout<H>;
  __shared__ float2 placed[W::kRotaryPairs * W::kWidth];
  for (uint32_t i = threadIdx.x; i < W::kRotaryPairs * W::kWidth; i += 32) placed[W::angle(i)] = angles[i];
  __syncthreads();
  const uint32_t lane = threadIdx.x % W::kLanes, h = threadIdx.x / W::kLanes;
  Head<H> head;
  head.load(rows + h * W::kDim, lane);
  head.add(bias, lane);
  const float sum = reduce_sum<W::kLanes>(head.template squares<N::kCount>(lane), lanes_of<W::kLanes>(lane));
  squares[threadIdx.x] = sum;
  factors[threadIdx.x] = rms_factor(sum, (float)N::kCount, N::kEps);
  head.template norm_by<N>(0.25f, weight, lane);
  head.rotate(placed, lane);
  put(head, lane, out + h * W::kDim);
}
#define HEADS(name, T, Weight, kCount, Cast, ...)                                                                                    \
  extern "C" __global__ void name(const T* rows, const bf16* bias, const Weight* weight, const float2* angles, float* out, float* squares, \
                                  float* factors) {                                                                                     \
    change<Dims<__VA_ARGS__>, Norm<kCount, Cast>>(rows, bias, weight, angles, out, squares, factors);                                   \
  }
HEADS(heads_neox, bf16, float, 40, float, 40, 8, 16, true, 4, 4)
HEADS(heads_interleaved, float, bf16, 18, bf16, 24, 0, 24, false, 4, 2)
HEADS(heads_single, float, float, 3, bf16, 5, 1, 4, false, 1, 8)
HEADS(heads_wide, float, bf16, 64, float, 64, 0, 32, true, 8, 32)

// Tokens of a page, read as heads of all their dims, and of those from 16 on.
using Plain = Run<bf16, float, Recipe::none>;
using Scaled = Run<uint8_t, f16, Recipe::amax, true>;
template <typename S, typename H>
__device__ __forceinline__ void taken(uint8_t* codes, f16* scales, uint32_t begin, float* out) {
  const uint32_t lane = threadIdx.x % H::kLanes, h = threadIdx.x / H::kLanes;
  const PageRef page = {codes, scales, nullptr, kU32Max, Fault::none, true};
  Head<H> head;
  head.template take<S>(Cache{}, page, h / kHeads, h % kHeads, begin, lane);
  put(head, lane, out + h * H::kDim);
}
extern "C" __global__ void heads_take(uint8_t* codes, bf16* plain, f16* scales, float* whole, float* parts, float* values, float* four) {
  taken<Scaled, Dims<40, 8, 16, true, 4, 4>>(codes, scales, 0, whole);
  taken<Scaled, Dims<24, 0, 24, false, 4, 4>>(codes, scales, 16, parts);
  taken<Plain, Dims<40, 8, 16, true, 4, 4>>((uint8_t*)plain, nullptr, 0, values);
  float x[4];
  take<Scaled>(x, Cache{}, PageRef{codes, scales, nullptr, kU32Max, Fault::none, true}, threadIdx.x % kTokens, 1, threadIdx.x / kTokens * 4);
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) four[threadIdx.x * 4 + j] = x[j];
}

// A thread each: 1 / sqrt; a pair rotated; eight neighbours read, and written rounded; a head cleared. How often a walk comes by each element.
extern "C" __global__ void heads_numbers(const float* in, const float2* pairs, const bf16* rows, float* roots, float2* rotated, float* read_,
                                         bf16* eight, f16* four, uint32_t* visits, float* normed) {
  using Part = Dims<40, 8, 16, true, 4, 4>;
  using Walk = HeadLayout<Part>;
  const uint32_t i = threadIdx.x;
  for (uint32_t k = i; k < 256; k += 32) roots[k] = rsqrt_f32(in[k]);
  float2 pair = pairs[2 * i];
  Head<Part>::rotate_pair(pair.x, pair.y, pairs[2 * i + 1]);
  rotated[i] = pair;
  float x[8], y[8];
  read(x, in + 8 * i);
  read(y, rows + 8 * i);
#pragma unroll
  for (uint32_t j = 0; j < 8; ++j) read_[16 * i + j] = x[j], read_[16 * i + 8 + j] = y[j];
  write(eight + 8 * i, y);
  write(four + 4 * i, *(const float (*)[4])&y);
  Head<Part> head;
  head.load(rows + i / 4 * 16, i % 4);
  head.norm<Norm<24, float>>(rows, i % 4);
  put(head, i % 4, normed + i / 4 * 40);
  head.clear();
  if (i < Walk::kPairs) {
#pragma unroll
    for (uint32_t v = 0; v < 2; ++v) {
      const uint32_t e = Walk::element(i, v);
      if (e >= Walk::kDim) continue;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) visits[e + j] += 4 + (head.squares<40>(i % 4) == 0.0f);
    }
  }
}
