// add.cuh: six rows added to tokens of two pages, element by element and block by block; one of them goes nowhere.
#include "runs.cuh"
#include "../../../templates/device/rows/new_rows.cuh"
#include "../../../templates/device/rows/add.cuh"

constexpr uint32_t kThreads = 96, kRows = 6;
constexpr int64_t kStride = 88;

struct Cache {
  using Page = PageRef;
  static constexpr uint32_t kHeads = ::kHeads;
  float global;
};

template <typename S>
__device__ __forceinline__ PageRef page_of(uint32_t i, uint8_t* codes, typename S::Scale* scales) {
  constexpr uint32_t kBytes = kInPage / kPerElement<typename S::Element> * sizeof(typename S::Element);
  return {codes + i * kBytes, scales + i * kTokens * (S::kRecipe == Recipe::none ? 0 : S::kScaleRow), nullptr, kU32Max, Fault::none, true};
}
template <typename Adder, typename S>
__device__ __forceinline__ void add_rows(const Cache& cache, const bf16* rows, uint8_t* codes, typename S::Scale* scales) {
  __shared__ TokenSlot<PageRef> cache_slots[kRows];
  if (threadIdx.x < kRows) {
    const uint32_t i = threadIdx.x;
    cache_slots[i] = {i == 2 ? no_page(Fault::none) : page_of<S>(i % 2, codes, scales), i * 5 % kTokens};
  }
  Adder adder;
  adder.load_rows(rows, kStride, kRows, threadIdx.x);
  __syncthreads();
  adder.store_sum(cache, cache_slots, rows, kStride, kRows, threadIdx.x);
}
// As kernels spell it out: elements, and lanes, chunks and those that are unrolled of a block.
template <typename S, uint32_t kW, uint32_t kA, uint32_t kL = 1, uint32_t kC = 1, uint32_t kU = 1>
struct Add {
  using Stored = S;
  static constexpr uint32_t kThreads = ::kThreads, kBatch = 2, kWidth = kW, kAccess = kA, kLanes = kL, kChunks = kC, kUnroll = kU;
};
#define ADD(name, Adder, S, ...)                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const bf16* rows, S::Scale* scales, uint8_t* codes, float global) { \
    add_rows<Adder<Cache, Add<S, __VA_ARGS__>>, S>(Cache{global}, rows, codes, scales);                     \
  }
using ScaledI8 = Run<int8_t, f16, Recipe::amax>;
using ZeroU8 = Run<uint8_t, f16, Recipe::amax, true>;
using ZeroU4 = Run<u4x2, bf16, Recipe::amax, true>;
using MaxE2m1 = Run<e2m1x2, e4m3, Recipe::nvfp4_max>;
using GlobalE2m1 = Run<e2m1x2, e4m3, Recipe::nvfp4_global>;
using GivenE4m3 = Run<e4m3, float, Recipe::given, false, 1, 4>;
using PlainBf16 = Run<bf16, float, Recipe::none>;
ADD(add_bf16, VectorAdd, PlainBf16, 4, 4)
ADD(add_given_e4m3, VectorAdd, GivenE4m3, 4, 2)
ADD(add_i8, BlockAdd, ScaledI8, 4, 4, 2, 2, 2)
ADD(add_u8, BlockAdd, ZeroU8, 4, 4, 2, 2, 1)
ADD(add_u4, BlockAdd, ZeroU4, 4, 2, 4, 1, 1)
ADD(add_nvfp4_max, BlockAdd, MaxE2m1, 8, 8, 2, 1, 1)
ADD(add_nvfp4_global, BlockAdd, GlobalE2m1, 4, 4, 1, 4, 1)

// What a thread's slot is made of: the place of two chunks, the row's values there; codes of one block as numbers.
extern "C" __global__ void add_pieces(const bf16* rows, const uint8_t* codes, const float* scales, uint32_t* chunks, bf16* parts, float* values) {
  using Adder = BlockAdd<Cache, Add<ZeroU8, 4, 4, 2, 2, 2>>;
  const uint32_t slot = threadIdx.x;
#pragma unroll
  for (uint32_t c = 0; c < 2; ++c) {
    const Adder::Chunk at = Adder::chunk_of(slot, c);
    chunks[2 * slot + c] = at.live ? at.head << 8 | at.dim : kU32Max;
    Vec<bf16, 4> row;
    fill(row, bf16{0});
    if (at.live) Adder::load_row(row, rows, kStride, slot, at);
    store<4>(parts + (2 * slot + c) * 4, row);
  }
  Raw<uint8_t, 4> raw;
  float x[4];
  load<4>(raw, codes + 4 * slot);
  dequantize_in_block<ZeroU8>(x, raw, BlockScale{{scales[0]}, {scales[1]}}, 1.0f);
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) values[4 * slot + j] = x[j];
}
