// key_lists.cuh: what rows see, as rows of a pool and of a buffer, over a table by hand of 20 pages a request, of 16 entries each.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/cache/key_lists.cuh"

constexpr uint32_t kColumns = 20, kRow = 96;

struct PageIds {
  uint32_t id;
  Fault fault;
};
struct PageList {
  uint32_t first, count;
};

struct Cache {
  using Page = uint32_t;
  const uint32_t* table;
  uint32_t batch, num_pages, page_tokens;
  __device__ bool keeps(uint32_t token, uint32_t last) const { return last - token < 900; }
  __device__ static PageIds no_ids(Fault fault) { return {kU32Max, fault}; }
  __device__ static PageList no_list(Fault) { return {0, 0}; }
  __device__ PageList page_list(uint32_t b) const { return {b * kColumns, kColumns}; }
  __device__ PageIds page_ids(const PageList& list, uint32_t i) const {
    if (i >= list.count) return no_ids(Fault::position);
    return {load_index(table, list.first + i), Fault::none};
  }
  __device__ PageIds page_ids(uint32_t b, uint32_t i) const { return page_ids(page_list(b), i); }
};

// A warp a row: the newest 70 entries of 3 tokens that it sees, in lists with room for 64 or 70 of them, and 90 columns.
extern "C" __global__ void lists_seen(const uint32_t* positions, const uint32_t* states, const uint32_t* table, int32_t* out, int32_t* counts,
                                      uint64_t* errors) {
  const uint32_t b = blockIdx.x;
  const Cache cache = {table, gridDim.x, 40, 16};
  KeyRun run = keys_seen<3, 70>({b, positions[b], positions[b], (RowState)states[b]});
  require_room(run, b == 5 ? 64 : 70, threadIdx.x == 0 ? errors + b : nullptr);
  const bool lost = store_key_rows<32, 2>(out + b * kRow, cache, run, 90, threadIdx.x, errors + b);
  counts[b * 32 + threadIdx.x] = run.valid && !lost ? (int32_t)(run.count << 16 | run.first) : -1;
}

// A warp a list: entries from 250 on are not seen; block 2 has no request.
extern "C" __global__ void lists_counted(const int32_t* entries, const uint32_t* table, int32_t* out, int32_t* counts, uint64_t* errors) {
  const uint32_t b = blockIdx.x;
  const Cache cache = {table, gridDim.x, 40, 16};
  Listed listed = {0, b == 7};
  for (uint32_t i = threadIdx.x; i < 90; i += 64) {
    int32_t mine[2];
    PageIds ids[2];
    load_tokens(mine, entries + b * kRow, i, 90);
    hide_unseen(mine, 250);
    load_token_pages(ids, cache, b, b != 2, mine);
    store_listed_rows(out + b * kRow, cache, ids, b, b != 2, mine, i, 90, listed, errors + b);
  }
  counts[b * 32 + threadIdx.x] = count_of(listed);
}

// A warp a list in a buffer of 500 rows: up to 40 picked entries (odd blocks: 30, in order), 20 tokens, in 90 columns.
extern "C" __global__ void lists_buffer(const int32_t* picks, const int64_t* begins, int32_t* out, int32_t* lost, int32_t* one, uint64_t* errors) {
  const uint32_t b = blockIdx.x;
  const BufferPlace place = {begins[2 * b], begins[2 * b + 1], 500};
  const KeyRun entries = {b, 0, b % 2 ? 30u : 40u, 0, true}, tokens = {b, 100, 20, 0, true};
  lost[b * 32 + threadIdx.x] = store_buffer_rows(out + b * kRow, b % 2 ? nullptr : picks + b * kRow, entries, 35, tokens, place, 90, errors + b);
  one[b * 32 + threadIdx.x] = buffer_row(place, place.entries, 8 * threadIdx.x, b, nullptr);
}
