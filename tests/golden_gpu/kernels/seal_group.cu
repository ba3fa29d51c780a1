// seal_group.cuh: groups of 4 tokens whose channels share scales, with zero points and without, in pages of runs.cuh.
#include "runs.cuh"
#include "../../../templates/device/cache/seal_group.cuh"

constexpr uint32_t kGroup = 4, kWidth = 4;
struct Cache {};

// A thread 4 channels: of 2 heads of 40 dims. The group begins at token 4 of its page and at position 20; the step's rows begin at 22.
template <typename Key>
__device__ __forceinline__ void seal(const bf16* tail, const bf16* rows, uint8_t* codes, f16* scales, float* ranges) {
  if (threadIdx.x >= kHeads * kDims / kWidth) return;
  const PageRef page = {codes, scales, nullptr, 0, Fault::none, true};
  const GroupTokens<Key> tokens = {tail, rows - 22 * 96, 96, 20, 22};
  const uint32_t element = threadIdx.x * kWidth, head = element / kDims, dim = element % kDims;
  float x[kWidth];
  tokens.read(x, 1, element, head, dim);
  ChannelRanges<kWidth> range;
  ChannelScales<kWidth> chosen;
  find_ranges<kGroup>(range, tokens, element, head, dim);
  store_channel_scales<Key>(chosen, Cache{}, page, range, 4, head, dim);
  store_group_codes<kGroup>(page, tokens, chosen, 4, element, head, dim);
  for (uint32_t j = 0; j < kWidth; ++j) ranges[2 * (element + j)] = range.high[j], ranges[2 * (element + j) + 1] = x[j];
}
extern "C" __global__ void seal_zero(const bf16* tail, const bf16* rows, uint8_t* codes, f16* scales, float* ranges) {
  seal<Run<uint8_t, f16, Recipe::amax, true, 1, 1, kGroup>>(tail, rows, codes, scales, ranges);
}
extern "C" __global__ void seal_amax(const bf16* tail, const bf16* rows, uint8_t* codes, f16* scales, float* ranges) {
  seal<Run<int8_t, f16, Recipe::amax, false, 1, 1, kGroup>>(tail, rows, codes, scales, ranges);
}
