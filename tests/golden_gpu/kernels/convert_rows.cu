// convert_rows.cuh: tokens 0 to 19 of the cache of paged.cuh become tokens 39 to 20, V as it is and, quantized, as K; every third stays
// as it is.
#include "paged.cuh"
#include "../../../templates/device/cache/convert_rows.cuh"

struct SlotPair {
  PageRef from, to;
  uint32_t from_token, to_token;
  bool live;
};
template <bool kTokensFirst>
struct ValueRun {
  using From = Codes<Value>;
  using To = Codes<Value>;
  static constexpr uint32_t kRows = 20, kWidth = 8, kVectors = 10;
  static constexpr bool kByToken = kTokensFirst;
};
template <uint32_t kHeldUnits, bool kTokensFirst>
struct KeyBlocks {
  using Segment = Key;
  using From = Values<Value, float>;
  static constexpr uint32_t kRows = 20, kBlocks = 6, kDimBlocks = 3, kLanes = 2, kWidth = 4, kChunks = 2, kUnits = kHeldUnits, kUnroll = 2;
  static constexpr bool kByToken = kTokensFirst, kScalesByToken = !kTokensFirst;
};

template <typename Run, typename Blocks>
__device__ __forceinline__ void convert(const Cache& cache, uint32_t* parts) {
  __shared__ SlotPair slots[20];
  __shared__ f16 chosen[20 * 12];
  const uint32_t i = threadIdx.x;
  if (i < 20) slots[i] = {cache.page_of(0, i), cache.page_of(0, 39 - i), i % kTokens, (39 - i) % kTokens, i % 3 != 2};
  __syncthreads();
  store_run<Run, 64, 3>(slots, cache, cache);
  store_blocks<Blocks, 64>(chosen, slots, cache, cache);
  __syncthreads();
  store_scales<Blocks, 64>(chosen, slots, cache);
  const auto [row, part] = token_part<Run::kByToken, 20, 10>(i);
  const BlockPlace place = block_place<Blocks>(i % 6);
  Vec<float, 4> some = {};
  load_vector<Blocks>(some, Values<Value, float>(cache), cache, slots, i, 1, 0);  // the second vector of block i
  parts[5 * i] = row, parts[5 * i + 1] = part, parts[5 * i + 2] = place.head, parts[5 * i + 3] = place.dim, parts[5 * i + 4] = __float_as_uint(some.e[0]);
}
extern "C" __global__ void convert_held(const uint32_t* table, uint8_t* codes, f16* scales, bf16* values, uint32_t* parts) {
  convert<ValueRun<false>, KeyBlocks<2, true>>(cache_of(codes, scales, values, nullptr, table), parts);
}
extern "C" __global__ void convert_anew(const uint32_t* table, uint8_t* codes, f16* scales, bf16* values, uint32_t* parts) {
  convert<ValueRun<true>, KeyBlocks<0, false>>(cache_of(codes, scales, values, nullptr, table), parts);
}
