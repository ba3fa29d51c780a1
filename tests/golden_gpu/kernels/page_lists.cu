// page_lists.cuh: lists of page ids and of pool rows, over a table by hand whose rows are 80 entries long.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/cache/page_lists.cuh"

constexpr uint32_t kColumns = 80, kRow = 96;

struct PageIds {
  uint32_t id;
  Fault fault;
};

struct Cache {
  const uint32_t* table;
  const int32_t* lengths;
  uint32_t batch, num_pages, page_tokens;
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ bool holds(uint32_t b, uint32_t first, uint32_t n) const { return n <= kColumns * page_tokens; }
  __device__ static PageIds no_ids(Fault fault) { return {kU32Max, fault}; }
  __device__ PageIds page_ids(uint32_t b, uint32_t i) const {
    if (i >= kColumns) return no_ids(Fault::position);
    return {load_index(table, b * kColumns + i), Fault::none};
  }
};

// A block a request: its pages are entries 3 to 69 of the list, and 20 more entries have none.
extern "C" __global__ void lists_entries(const uint32_t* table, int32_t* list, uint64_t* errors) {
  const uint32_t b = blockIdx.x;
  const Cache cache = {table, nullptr, gridDim.x, 40, 16};
  for (uint32_t i = threadIdx.x; i < 90; i += 64) {
    PageIds ids[2];
    load_page_ids(ids, cache, b, i, {3, 70, 90});
    store_entries<2>(list + b * kRow, (int32_t)-7, ids, cache, b, i, {3, 70, 90}, errors + b);
  }
}

// A block a row of tokens; block 2 has no request, and the pool of block 3 is larger than its rows can be counted.
extern "C" __global__ void lists_rows(const int32_t* tokens, const uint32_t* table, int32_t* out, int32_t* one, uint64_t* errors) {
  const uint32_t b = blockIdx.x;
  const Cache cache = {table, nullptr, gridDim.x, b == 3 ? 1u << 28 : 40, 16};
  for (uint32_t i = threadIdx.x; i < 90; i += 64) {
    int32_t mine[2];
    PageIds ids[2];
    load_tokens(mine, tokens + b * kRow, i, 90);
    load_token_pages(ids, cache, b, b != 2, mine);
    store_pool_rows(out + b * kRow, cache, ids, b, b != 2, mine, i, 90, errors + b);
  }
  one[b * 32 + threadIdx.x] = pool_row(cache, PageIds{table[b * kColumns + threadIdx.x], Fault::none}, b, threadIdx.x, nullptr);
}

// A block a row of columns, whose list of blocks has 20 numbers.
extern "C" __global__ void lists_columns(const int32_t* columns, const int32_t* blocks, int32_t* out) {
  int32_t mine[2] = {columns[threadIdx.x], columns[threadIdx.x + 32]};
  load_listed_tokens<8>(mine, blocks + blockIdx.x * 24, 20);
  for (uint32_t u = 0; u < 2; ++u) out[blockIdx.x * kRow + threadIdx.x + 32 * u] = mine[u];
}

// A thread's share of the pages of all requests.
extern "C" __global__ void lists_pages(const int32_t* lengths, const int32_t* offsets, uint64_t* out) {
  const Cache cache = {nullptr, lengths, 100, 40, 16};
  out[threadIdx.x] = earlier_pages<true, 32>(cache, offsets, 100 - blockIdx.x);
  out += 32;
  if (blockIdx.x == 0) out[threadIdx.x] = earlier_pages<false, 32>(cache, offsets, 67);
}
