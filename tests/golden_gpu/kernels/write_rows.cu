// write_rows.cuh, store_heads.cuh, row_norm.cuh: six rows into tokens of two pages, one of them nowhere; heads out of registers.
#include "runs.cuh"
#include "../../../templates/device/rows/store_heads.cuh"
#include "../../../templates/device/rows/row_norm.cuh"
#include "../../../templates/device/rows/write_rows.cuh"

constexpr uint32_t kThreads = 96, kRows = 6;

struct Cache {
  using Page = PageRef;
  float global;
  bf16* tails;
  __device__ bf16* tail(uint32_t b) const { return tails + b * 4 * kHeads * kDims; }
};

// Row i goes to page i % 2, token i * 5 % 8; row 2 nowhere. It waits in the tail of request i / 2, but for row 3.
template <typename S>
__device__ __forceinline__ TailSlot<PageRef> slot_of_row(uint32_t i, uint8_t* codes, typename S::Scale* scales) {
  constexpr uint32_t kBytes = kInPage / kPerElement<typename S::Element> * sizeof(typename S::Element);
  typename S::Scale* own = scales + i % 2 * kTokens * (S::kRecipe == Recipe::none ? 0 : S::kScaleRow);
  const PageRef page = {codes + i % 2 * kBytes, own, nullptr, kU32Max, Fault::none, true};
  return {i == 2 ? no_page(Fault::none) : page, i * 5 % kTokens, RowState::known, i == 3 ? kU32Max : i / 2};
}
template <typename S, uint32_t kW>
struct Copied {
  using Stored = S;
  static constexpr uint32_t kHeads = 1, kHeadStride = 44, kBegin = 4, kWidth = kW, kBatch = 2;
};
template <typename S, uint32_t kL, uint32_t kW, uint32_t kC, uint32_t kUn, uint32_t kUs>
struct Quantized {
  using Stored = S;
  static constexpr uint32_t kHeads = ::kHeads, kHeadStride = 40, kBegin = 0, kBlocks = kHeads / S::kBlockHeads * S::kDimBlocks;
  static constexpr uint32_t kNumbers = kBlocks * (1 + S::kZero), kLanes = kL, kWidth = kW, kChunks = kC, kUnroll = kUn, kUnits = kUs;
  __device__ static uint32_t scale_row(uint32_t i) { return i / kNumbers; }
  __device__ static uint32_t scale_at(uint32_t i) { return i % kNumbers; }
};
using PlainBf16 = Run<bf16, float, Recipe::none>;
using PlainF16 = Run<f16, float, Recipe::none>;
using Waiting = Run<uint8_t, f16, Recipe::amax, true, 1, 16, 4>;
using ScaledI8 = Run<int8_t, f16, Recipe::amax>;
using ZeroU8 = Run<uint8_t, f16, Recipe::amax, true>;
using GlobalE2m1 = Run<e2m1x2, e4m3, Recipe::nvfp4_global>;

// Head 1 of rows of 88 elements, that is its 40 dims from 48 on, as head 1 of the cache: as it is; cast, by token; from padded rows, three
// of a request that are 100 elements apart; and from a tile of floats into the tails, two heads.
extern "C" __global__ void __launch_bounds__(kThreads) rows_written(const bf16* rows, bf16* plain, f16* cast, bf16* padded, bf16* tails) {
  __shared__ TailSlot<PageRef> one[kRows], two[kRows], three[kRows];
  __shared__ alignas(16) float tile[kRows][88];
  if (threadIdx.x < kRows) {
    one[threadIdx.x] = slot_of_row<PlainBf16>(threadIdx.x, (uint8_t*)plain, nullptr);
    two[threadIdx.x] = slot_of_row<PlainF16>(threadIdx.x, (uint8_t*)cast, nullptr);
    three[threadIdx.x] = slot_of_row<PlainBf16>(threadIdx.x, (uint8_t*)padded, nullptr);
  }
  for (uint32_t i = threadIdx.x; i < kRows * 88; i += kThreads) tile[i / 88][i % 88] = to_f32(rows[i]);
  __syncthreads();
  const Cache cache = {1.0f, tails};
  const Rows<const bf16> from = {rows + 44 - 88, 88, 1};
  store_rows<Copied<PlainBf16, 4>, kThreads>(cache, from, one, kRows, 1);
  store_rows_by_token<Copied<PlainF16, 4>, kThreads>(cache, from, two, kRows, 1);
  const PaddedRows<const bf16> apart = {rows, 100, 0, 3, 44};
  store_vectors<Copied<PlainBf16, 2>, kThreads, false>(cache, apart, three, kRows, 0);
  store_tails<Quantized<Waiting, 1, 4, 1, 1, 1>, kThreads>(cache, tile, three, kRows);
}

// Codes, then scales: a block of 16 dims on kL lanes, in registers or read twice.
template <typename W>
__device__ __forceinline__ void quantized(const bf16* rows, typename W::Stored::Scale* scales, uint8_t* codes, float global) {
  __shared__ TailSlot<PageRef> cache_slots[kRows];
  __shared__ typename W::Stored::Scale found[kRows][W::kNumbers];
  if (threadIdx.x < kRows) cache_slots[threadIdx.x] = slot_of_row<typename W::Stored>(threadIdx.x, codes, scales);
  __syncthreads();
  const Cache cache = {global, nullptr};
  const Rows<const bf16> from = {rows, 88, 0};
  store_row_codes<W, kThreads>(cache, from, cache_slots, kRows, found);
  __syncthreads();
  store_row_scales<W, kThreads>(cache, cache_slots, kRows, found);
}
#define QUANTIZED(name, S, ...)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads) name(const bf16* rows, S::Scale* scales, uint8_t* codes, float global) { \
    quantized<Quantized<S, __VA_ARGS__>>(rows, scales, codes, global);                                                      \
  }
QUANTIZED(rows_i8, ScaledI8, 2, 4, 2, 2, 2)
QUANTIZED(rows_u8, ZeroU8, 2, 4, 2, 1, 1)
QUANTIZED(rows_nvfp4_global, GlobalE2m1, 4, 4, 1, 1, 2)

// A warp's four heads of 40 dims: known, unknown and padding into q_out, and its codes; into the cache (two of them) and into a tile.
struct Part {
  static constexpr uint32_t kDim = 40, kRotaryBegin = 0, kRotaryDim = 0, kWidth = 4, kLanes = 8;
  static constexpr bool kNeox = false;
};
extern "C" __global__ void rows_heads(const bf16* rows, const float* q_scale, bf16* out, e4m3* codes, e4m3* ones, bf16* plain, float* tiles,
                                      float* squares, uint32_t* pieces) {
  __shared__ alignas(16) float tile[4][40];
  const uint32_t lane = threadIdx.x % 8, h = threadIdx.x / 8;
  const RowState state = h == 1 ? RowState::unknown : h == 2 ? RowState::padding : RowState::known;
  Head<Part> head;
  head.load(rows + h * 40, lane);
  store_q_out(out + h * 40, head, state, lane);
  head.load(rows + h * 40, lane);
  store_q_codes(codes + h * 40, head, state, q_scale, lane);
  head.load(rows + h * 40, lane);
  store_q_codes(ones + h * 40, head, state, nullptr, lane);
  head.load(rows + h * 40, lane);
  store_head<PlainBf16>(Cache{}, slot_of_row<PlainBf16>(h, (uint8_t*)plain, nullptr), 1, 0, head, lane);
  store_tile(tile[h], head, lane);
  __syncwarp();
  for (uint32_t i = threadIdx.x; i < 160; i += 32) tiles[i] = tile[0][i];
  __syncwarp();
  const float whole = row_squares<152, 4>(rows), added = row_squares<152, 8>(rows, rows + 160);
  const auto slot = slot_of_row<PlainBf16>(3, (uint8_t*)plain, nullptr);
  const float stored = stored_row_squares<PlainBf16, 80, 4>(Cache{}, slot);
  const float none = stored_row_squares<PlainBf16, 80, 4>(Cache{}, slot_of_row<PlainBf16>(2, (uint8_t*)plain, nullptr));
  squares[4 * threadIdx.x] = whole, squares[4 * threadIdx.x + 1] = added;
  squares[4 * threadIdx.x + 2] = stored, squares[4 * threadIdx.x + 3] = none;

  using Blocks = RowBlocks<Quantized<ZeroU8, 2, 4, 2, 2, 1>>;
  Vec<bf16, 4> value;
  fill(value, bf16{0});
  Blocks::read(value, rows, threadIdx.x % 6, threadIdx.x / 6 % 2, threadIdx.x / 12 % 2);
  pieces[4 * threadIdx.x] = Blocks::head(threadIdx.x), pieces[4 * threadIdx.x + 1] = Blocks::dim(threadIdx.x);
  pieces[4 * threadIdx.x + 2] = value.e[0].bits, pieces[4 * threadIdx.x + 3] = access<bf16>(4) * 100 + access<float>(8);
}
