// convert_rows.cuh: tokens 0 to 19 of the cache of paged.cuh become tokens 39 to 20, V as it is and, quantized, as K; every third stays
// as it is. Both heads move, or the second one, which becomes the first.
#include "paged.cuh"
#include "../../../templates/device/cache/convert_rows.cuh"

struct SlotPair {
  PageRef from, to;
  uint32_t from_token, to_token;
  bool live;
};
template <bool kTokensFirst, uint32_t kMoved>
struct ValueRun {
  using From = Codes<Value>;
  using To = Codes<Value>;
  static constexpr uint32_t kRows = 20, kWidth = 8, kVectors = 5 * kMoved;
  static constexpr bool kByToken = kTokensFirst;
};
template <uint32_t kHeldUnits, bool kTokensFirst, uint32_t kMoved>
struct KeyBlocks {
  using Segment = Key;
  using From = Values<Value, float>;
  static constexpr uint32_t kRows = 20, kBlocks = 3 * kMoved, kDimBlocks = 3, kLanes = 2, kWidth = 4, kChunks = 2, kUnits = kHeldUnits, kUnroll = 2;
  static constexpr bool kByToken = kTokensFirst, kScalesByToken = !kTokensFirst;
};

template <typename Run, typename Blocks>
__device__ __forceinline__ void convert(const Cache& cache, HeadPair head, uint32_t* parts) {
  __shared__ SlotPair slots[20];
  __shared__ f16 chosen[20 * 2 * Blocks::kBlocks];
  const uint32_t i = threadIdx.x;
  if (i < 20) slots[i] = {cache.page_of(0, i), cache.page_of(0, 39 - i), i % kTokens, (39 - i) % kTokens, i % 3 != 2};
  __syncthreads();
  store_run<Run, 64, 3>(slots, cache, cache, head);
  store_blocks<Blocks, 64>(chosen, slots, cache, cache, head);
  __syncthreads();
  store_scales<Blocks, 64>(chosen, slots, cache, head.to);
  const auto [row, part] = token_part<Run::kByToken, 20, Run::kVectors>(i);
  const BlockPlace place = block_place<Blocks>(i % Blocks::kBlocks);
  Vec<float, 4> some = {};
  if (i < 20 * Blocks::kBlocks) load_vector<Blocks>(some, Values<Value, float>(cache), cache, slots, head.from, i, 1, 0);  // the second vector of block i
  parts[5 * i] = row, parts[5 * i + 1] = part, parts[5 * i + 2] = place.head, parts[5 * i + 3] = place.dim, parts[5 * i + 4] = __float_as_uint(some.e[0]);
}
extern "C" __global__ void convert_held(const uint32_t* table, uint8_t* codes, f16* scales, bf16* values, uint32_t* parts) {
  convert<ValueRun<false, 2>, KeyBlocks<2, true, 2>>(cache_of(codes, scales, values, nullptr, table), {0, 0}, parts);
}
extern "C" __global__ void convert_anew(const uint32_t* table, uint8_t* codes, f16* scales, bf16* values, uint32_t* parts) {
  convert<ValueRun<true, 1>, KeyBlocks<0, false, 1>>(cache_of(codes, scales, values, nullptr, table), {1, 0}, parts);
}
