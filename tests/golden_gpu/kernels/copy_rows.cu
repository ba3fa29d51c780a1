// copy_rows.cuh, row_runs.cuh and move_tokens.cuh over the cache of paged.cuh: where the tokens of rows lie, and rows copied from and to them.
#include "paged.cuh"
#include "../../../templates/device/cache/copy_rows.cuh"
#include "../../../templates/device/cache/row_runs.cuh"
#include "../../../templates/device/cache/move_tokens.cuh"

// Three requests; every fifth token is not stored, as in a ring.
struct Requests {
  Cache cache;
  static constexpr uint32_t batch = kBatch, page_tokens = kTokens;
  __device__ uint32_t length(uint32_t b) const { return cache.length(b); }
  __device__ bool stored(uint32_t b, uint32_t token) const { return token % 5 != 4; }
  __device__ PageRef page(uint32_t b, uint32_t i) const { return i < kTable ? cache.page_of(b, i * kTokens) : no_page(Fault::position); }
  __device__ PageRef page_at(uint64_t n) const {
    if (n >= kPages) return no_page(Fault::page_id);
    return {cache.codes + n * kPageBytes, cache.scales + n * kScaleStride, nullptr, kU32Max, Fault::none, true, cache.values + n * kInPage};
  }
};

// A page's number, its fault, the token in it, and flags.
__device__ __forceinline__ Vec<uint32_t, 4> told(const Cache& cache, const PageRef& page, uint32_t token, uint32_t flags) {
  const uint32_t number = page.codes == nullptr ? kU32Max : (uint32_t)((page.codes - cache.codes) / kPageBytes);
  return {number, (uint32_t)page.fault, token, flags};
}
// A block has its own offsets and starts; a thread a row. `errors`: a word for each way to find tokens, and for the last offset.
extern "C" __global__ void copy_find(const int32_t* offsets, const int32_t* starts, const int64_t* named, const int32_t* step, uint8_t* codes,
                                     f16* scales, bf16* values, const int32_t* lengths, const uint32_t* table, Vec<uint32_t, 4>* tokens,
                                     Vec<uint32_t, 4>* targets, Vec<uint32_t, 4>* names, Vec<uint32_t, 4>* keys, Vec<uint32_t, 4>* placed,
                                     uint64_t* errors) {
  const Requests requests = {cache_of(codes, scales, values, lengths, table)};
  const uint32_t row = threadIdx.x, num_rows = blockDim.x, i = blockIdx.x * num_rows + row;
  const int32_t *own = offsets + 4 * blockIdx.x, *start = starts + 3 * blockIdx.x;
  uint64_t* words = errors + 6 * blockIdx.x;
  const StoredToken token = find_token(requests, own, blockIdx.x == 3 ? nullptr : start, row, num_rows, words);
  tokens[i] = told(requests.cache, token.page, token.token, token.skip);
  const TargetSlot target = find_target(requests, own, start, row, num_rows, words + 1);
  targets[i] = told(requests.cache, target.page, target.token, 0);
  const GapSlot name = find_named_token(requests, own, named, 2, row, row % 2, num_rows, words + 2);
  names[i] = told(requests.cache, name.page, name.token, name.skip | name.gap << 1);
  const GapSlot key = find_key<true, 8>(requests, own, start, step, row, num_rows, words + 3);
  keys[i] = told(requests.cache, key.page, key.token, key.skip | key.gap << 1);
  if (row == 0) report_bad_total(own, kBatch, num_rows, words + 4);
  const StoredToken place = find_slot(requests, named + blockIdx.x, row, words + 5);
  placed[i] = told(requests.cache, place.page, place.token, place.skip);
}

// The same by runs of rows: a block has its own begins and counts. Then whose rows they are; `errors`: a word for tokens, one for the last run.
extern "C" __global__ void copy_find_runs(const int32_t* begins, const int32_t* counts, const int32_t* starts, uint8_t* codes, f16* scales,
                                          bf16* values, const int32_t* lengths, const uint32_t* table, Vec<uint32_t, 4>* tokens,
                                          Vec<uint32_t, 4>* ranges, uint64_t* errors) {
  const Requests requests = {cache_of(codes, scales, values, lengths, table)};
  const uint32_t row = threadIdx.x, num_rows = blockDim.x, i = blockIdx.x * num_rows + row;
  const int32_t *own = begins + 3 * blockIdx.x, *count = counts + 3 * blockIdx.x, *start = starts + 3 * blockIdx.x;
  uint64_t* words = errors + 2 * blockIdx.x;
  const RowRange range = run_of(own, count, kBatch, row, num_rows);
  const StoredToken token = blockIdx.x == 1 ? token_of_row(requests, range, (const int32_t*)nullptr, row, words)
                                            : find_run_token(requests, own, count, start, row, num_rows, words);
  tokens[i] = told(requests.cache, token.page, token.token, token.skip);
  ranges[i] = {range.b, range.padding ? 0 : range.begin, range.padding ? 0 : range.end, range.padding | range.valid << 1};
  if (row == 0) report_bad_runs(own, count, kBatch, num_rows, words + 1);
}

template <typename View, uint32_t kN, uint32_t kCount, uint32_t kDimsOfHead, bool kTokensFirst = false>
struct Copied {
  using Stored = View;
  static constexpr uint32_t kRows = 24, kWidth = kN, kVectors = kCount / kN, kHeadDims = kDimsOfHead;
  static constexpr bool kByToken = kTokensFirst;
};
using KeyDims = RoleValues<Role<Key, RopePart, false>, float, 32, 16>;

// Rows 24 of request 0, three in a row: one token, one token that is a gap where its number is odd, one that is skipped.
extern "C" __global__ void copy_rows(uint8_t* codes, f16* scales, bf16* values, const int32_t* lengths, const uint32_t* table, float* k, float* dims,
                                     uint8_t* k_codes, bf16* v, f16* k_scales, float* named) {
  const Cache cache = cache_of(codes, scales, values, lengths, table);
  __shared__ StoredToken slots[24];
  __shared__ GapSlot gaps[24];
  __shared__ int64_t places[24];
  if (threadIdx.x < 24) {
    const PageRef page = cache.page_of(0, threadIdx.x * 2);
    slots[threadIdx.x] = {page, threadIdx.x * 2 % kTokens, threadIdx.x % 3 == 2};
    gaps[threadIdx.x] = {threadIdx.x % 2 == 1 ? no_page(Fault::none) : page, threadIdx.x * 2 % kTokens, threadIdx.x % 3 == 2, threadIdx.x % 4 == 1};
    places[threadIdx.x] = (23 - threadIdx.x) * 80;
  }
  __syncthreads();
  store_rows<Copied<Values<Key, float>, 4, 80, 48>, 64, 2>(k, 100, 1, 24, slots, cache);
  store_rows<Copied<KeyDims, 4, 32, 16>, 64, 3>(dims, 32, 1, 24, slots, cache);
  store_rows<Copied<Codes<Key>, 8, 80, 40>, 64, 2>(k_codes, 80, 1, 24, slots, cache);
  store_rows<Copied<Values<Value, bf16>, 8, 80, 40>, 64, 1>(v, 80, 1, 24, slots, cache);
  store_rows<Copied<ScaleRow<Key, 2>, 4, 12, 6>, 64, 2>(k_scales, 12, 1, 24, slots, cache);
  store_rows_at<Copied<Values<Key, float>, 4, 80, 40>, 64, 2>(named, places, 24, gaps, cache);
}

// Tokens of request 0, of which every third has no page.
extern "C" __global__ void copy_tokens(const uint32_t* table, const uint8_t* k_codes, const bf16* v, const f16* k_scales, uint8_t* codes, f16* scales,
                                       bf16* values) {
  const Cache cache = cache_of(codes, scales, values, nullptr, table);
  __shared__ TargetSlot slots[24];
  if (threadIdx.x < 24) slots[threadIdx.x] = {threadIdx.x % 3 == 2 ? no_page(Fault::none) : cache.page_of(0, threadIdx.x), threadIdx.x % kTokens};
  __syncthreads();
  store_tokens<Copied<Codes<Key>, 8, 80, 40>, 64, 2>(k_codes, 80, 1, 20, slots, cache);
  store_tokens<Copied<Values<Value, bf16>, 4, 80, 48, true>, 64, 3>(v, 100, 1, 20, slots, cache);
  store_tokens<Copied<ScaleRow<Key, 2>, 4, 12, 6, true>, 64, 2>(k_scales, 12, 1, 20, slots, cache);
}

// A thread a vector of a block of rows: where it lies, what is loaded of it, and what stands for a token without a page.
extern "C" __global__ void copy_pieces(uint8_t* codes, f16* scales, bf16* values, const int32_t* lengths, const uint32_t* table, uint32_t* places,
                                       uint8_t* loaded, uint32_t* missing) {
  const Cache cache = cache_of(codes, scales, values, lengths, table);
  using Rows = Copied<Codes<Key>, 8, 80, 40>;
  using Apart = Copied<Values<Key, float>, 8, 80, 48>;
  using Tokens = Copied<Codes<Key>, 8, 80, 40, true>;
  const uint32_t i = threadIdx.x;
  const auto [row, vector] = row_vector<Rows>(i);
  const auto [last, first] = row_vector<Tokens>(i);
  uint32_t* to = places + 6 * i;
  to[0] = row, to[1] = vector, to[2] = last, to[3] = first, to[4] = place_in_row<Apart>(vector * 8), to[5] = place_in_row<Tokens>(vector * 8);
  __shared__ StoredToken slots[24];
  if (i < 24) slots[i] = {cache.page_of(0, i), i % kTokens, false};
  __syncthreads();
  Vec<uint8_t, 8> vectors[1];  // of rows 0 to 6
  load_vectors<Rows, 64>(vectors, Codes<Key>(cache), cache, slots, i, 24);
  for (uint32_t j = 0; j < 8; ++j) loaded[8 * i + j] = vectors[0].e[j];
  const GapSlot gap = {slots[i % 24].page, 0, false, i % 2 == 1};
  missing[3 * i] = slots[i % 24].missing<Codes<Key>>(), missing[3 * i + 1] = __float_as_uint(gap.missing<Values<Key, float>>());
  missing[3 * i + 2] = Values<Key, float>::found(slots[i % 24].page);
}

// The pairs of three requests by offsets of each block; then pairs found and moved by 24 threads: codes by vectors of 8, scales by 4.
extern "C" __global__ void copy_moves(const int32_t* offsets, const int64_t* src, const int64_t* dst, uint8_t* codes, f16* scales, bf16* values,
                                      const int32_t* lengths, const uint32_t* table, Vec<uint32_t, 4>* pairs, Vec<uint32_t, 4>* sources,
                                      Vec<uint32_t, 4>* targets, uint64_t* errors) {
  const Requests requests = {cache_of(codes, scales, values, lengths, table)};
  const uint32_t i = threadIdx.x;
  for (uint32_t n = 0; n < 4 * kBatch; ++n) {
    const RowRange range = pairs_of(offsets + n / kBatch * 4, kBatch, n % kBatch, 24, errors + n);
    if (i == 0) pairs[n] = {range.b, range.begin, range.end, range.begin < range.end ? range.padding | range.valid << 1 : 0};
  }
  __shared__ MovedToken moves[24];
  moves[i] = find_move(requests, src, dst, 7, i, errors + 4 * kBatch);
  sources[i] = told(requests.cache, moves[i].from, moves[i].from_token, 0);
  targets[i] = told(requests.cache, moves[i].to, moves[i].to_token, 0);
  __syncthreads();
  store_moved<Copied<Codes<Key>, 8, 80, 40>, 24, 2>(requests.cache, moves, 24);
  store_moved<Copied<ScaleRow<Key, 2>, 4, 12, 6>, 24, 3>(requests.cache, moves, 24);
}
