// indexer_lists.cuh: how the blocks of a grid divide lists of blocks of keys, and what their columns name.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/attention/indexer/indexer_lists.cuh"

constexpr uint32_t kRowsOfCall = 40, kBatch = 11, kNumbers = 29, kTiles = 8, kColumns = kNumbers * 8, kGrid = 3;  // 4 numbers a tile
struct Cache {
  const int32_t* lengths;
  uint32_t batch;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return n <= 1200; }
};
template <uint32_t N>
struct Work {
  static constexpr uint32_t kThreads = 32, kRows = 1, kRequestRows = 3, kTokens = 32, kBlock = 8, kRate = N;
  static constexpr bool kNewInLength = N == 1;
};

// Who has a tile of a row's list: the block's number, and in which part. Of tiles that name a key the keys, of others -inf in `out`.
template <typename W>
__device__ __forceinline__ void divide(const Cache& cache, const int32_t* offsets, const int32_t* lists, uint32_t* owners, uint32_t* keys, float* out, uint32_t* counts) {
  for (uint32_t part = 0; part < 2; ++part) {
    __syncthreads();
    const TileShare share = sync_list_share<W>(cache, offsets, kRowsOfCall, kTiles, part == 1);
    if (threadIdx.x == 0) counts[blockIdx.x * 2 + part] = share.count << 2 | (uint32_t)has_nobodys<W>(cache, offsets, kRowsOfCall) << 1 | share.wrong;
    uint32_t left = share.count, at = share.at;
    for (uint32_t b = share.b; left > 0 && b < cache.batch; ++b, at = 0) {
      const ListTiles<W> tiles = {scored_request<W>(cache, offsets, b, kRowsOfCall, kU32Max), kTiles, part == 1};
      const uint32_t rows = tiles.request.fault == Fault::none ? tiles.request.rows : 0, first = rows > 0 ? tiles.row_with(at) : 0;
      uint32_t before = at - tiles.before(first);
      for (uint32_t i = first; i < rows && left > 0; ++i, before = 0) {
        const ListRun run = list_run(tiles, i, before, left);
        left -= run.count;
        if (run.count == 0 || tiles.seen(i) != run.seen) continue;
        const int32_t* list = lists + run.row * kNumbers;
        const bool names = sync_names_a_key<W>(list, kNumbers, run);
        for (uint32_t tile = run.begin; tile < run.end; ++tile) {
          if (threadIdx.x == 0) owners[run.row * kTiles + tile] = tiles.front(i) << 16 | (uint32_t)names << 8 | part << 4 | (blockIdx.x + 1);
          keys[(run.row * kTiles + tile) * 32 + threadIdx.x] = listed_key<W>(list, kNumbers, run.seen, tile, threadIdx.x);
        }
        if (!names) store_unlisted<W>(out + run.row * kColumns, kNumbers, run);
      }
    }
  }
}
extern "C" __global__ void indexer_lists_each(const int32_t* offsets, const int32_t* lengths, const int32_t* lists, uint32_t* owners, uint32_t* keys, float* out, uint32_t* counts) {
  divide<Work<1>>({lengths, kBatch}, offsets, lists, owners, keys, out, counts);
}
extern "C" __global__ void indexer_lists_fours(const int32_t* lengths, const int32_t* lists, uint32_t* owners, uint32_t* keys, float* out, uint32_t* counts) {
  divide<Work<4>>({lengths, kBatch}, nullptr, lists, owners, keys, out, counts);
}
