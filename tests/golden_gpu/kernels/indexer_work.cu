// indexer_work.cuh: how the blocks of a step divide groups of rows and tiles of keys; what rows have where they see no key.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/attention/indexer/indexer_work.cuh"

constexpr uint32_t kRowsOfCall = 70, kKeys = 48, kBatch = 37, kTiles = 6, kBlocks = 3;
struct Cache {
  const int32_t* lengths;
  uint32_t batch;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return n <= 45; }
};
template <uint32_t N>
struct Work {
  static constexpr uint32_t kThreads = 32, kRows = N, kRequestRows = N, kTokens = N == 3 ? 8 : 4, kRate = N == 3 ? 1 : 2;
  static constexpr bool kNewInLength = N != 3;
};

// Shares of requests 0 to 36 of b % 5 tiles each, of which request 7 is wrong.
__device__ __forceinline__ uint32_t share_of_fives() {
  const TileShare share = sync_share_of<32>(kBatch, false, [](uint32_t b, bool& wrong) {
    wrong |= b == 7;
    return b < kBatch ? b % 5 : 0;
  });
  __syncthreads();
  return share.b << 16 | share.at << 12 | share.count << 1 | share.wrong;
}

// Who has a tile of a row: the block's number, and how many keys the row sees; the tiles that each block counts.
template <typename W>
__device__ __forceinline__ void divide(const Cache& cache, const int32_t* offsets, uint32_t* owners, uint32_t* counts, float* all, float* some, float* blocks, uint64_t* errors) {
  if (const uint32_t fives = share_of_fives(); threadIdx.x == 0) counts[kBlocks + blockIdx.x] = fives;
  const TileShare share = sync_share<W>(cache, offsets, kRowsOfCall, kKeys);
  uint32_t left = share.count, at = share.at;
  for (uint32_t b = share.b; left > 0 && b < cache.batch; ++b, at = 0) {
    const ScoredRequest request = scored_request<W>(cache, offsets, b, kRowsOfCall, kKeys);
    const uint32_t groups = request.fault == Fault::none ? request.groups<W>() : 0;
    const uint32_t first = groups > 0 ? request.group_with<W>(at) : 0;
    uint32_t before = at - request.tiles_before<W>(first);
    for (uint32_t g = first; g < groups && left > 0; ++g, before = 0) {
      const GroupTiles group = group_tiles<W>(request, g, before, left);
      left -= group.counted;
      const uint32_t owned = rows_owned(offsets, cache.batch, b, group.row, group.rows, kRowsOfCall), i = threadIdx.x;
      if (i < group.rows && owned >> i & 1)
        for (uint32_t tile = group.begin; tile < group.end; ++tile) owners[(group.row + i) * kTiles + tile] = request.seen_by<W>(group.i + i) << 8 | (blockIdx.x + 1);
    }
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = part_begin(7, 2, 4) == 4 ? share.count << 1 | share.wrong : 0;
  if (threadIdx.x == 0) counts[2 * kBlocks + blockIdx.x] = room_of<5>(100 + blockIdx.x, blockIdx.x == 1 ? 3 : kU32Max);
  store_unseen<W, Fill::unseen, 1>(cache, offsets, {all, kKeys + 1, kRowsOfCall, kKeys}, kKeys, errors);
  store_unseen<W, Fill::faulty, 1>(cache, offsets, {some, kKeys + 1, kRowsOfCall, kKeys}, kKeys, errors);
  store_unseen<W, Fill::unseen, 5>(cache, offsets, {blocks, 24, kRowsOfCall, 11}, kKeys, errors);
  store_unseen<W, Fill::unscored, 1>(cache, offsets, {blocks + 12, 24, kRowsOfCall, 11}, kKeys, errors);
  if (blockIdx.x == 0 && threadIdx.x < 32) some[threadIdx.x * (kKeys + 1) + kKeys] = unseen_of<W>(cache, offsets, 2 * threadIdx.x, kRowsOfCall, kKeys, errors).from;
}
extern "C" __global__ void indexer_work_two(const int32_t* offsets, const int32_t* lengths, uint32_t* owners, uint32_t* counts, float* all, float* some, float* blocks, uint64_t* errors) {
  divide<Work<2>>({lengths, kBatch}, offsets, owners, counts, all, some, blocks, errors);
}
extern "C" __global__ void indexer_work_three(const int32_t* offsets, const int32_t* lengths, uint32_t* owners, uint32_t* counts, float* all, float* some, float* blocks, uint64_t* errors) {
  divide<Work<3>>({lengths, kBatch}, offsets, owners, counts, all, some, blocks, errors);
}
