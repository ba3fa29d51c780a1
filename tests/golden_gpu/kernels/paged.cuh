// A paged cache by hand, for probes of kv_cache.cuh and operands.cuh: K are bytes with a scale and a zero point, its last 8 dims
// bf16 behind them; V is bf16. A row of the page table is 8 entries long, of which 6 count.
#include "runs.cuh"
#include "../../../templates/device/cache/kv_cache.cuh"

constexpr uint32_t kTable = 6, kTableStride = 8, kPages = 5, kBatch = 3, kLongest = 44;
constexpr uint32_t kPageBytes = 960, kScaleStride = 120;  // 12 rows of 80 bytes, 10 rows of 12 scales

struct PageIds {
  uint32_t id;
  Fault fault;
};

struct Cache {
  using Page = PageRef;
  static constexpr uint32_t page_tokens = kTokens, kTableVector = 4;
  uint8_t* codes;
  f16* scales;
  bf16* values;
  const int32_t* lengths;
  const uint32_t* table;
  uint32_t num_pages, num_scale_pages, max_seq_length, max_cache_length;

  __device__ auto lengths_nd() const { return lengths; }
  __device__ uint32_t length(uint32_t b) const { return load_index(lengths, b); }
  __device__ PageIds page_ids(uint32_t b, uint32_t i) const {
    if (i >= kTable) return {kU32Max, Fault::position};
    return {load_index(table, b * kTableStride + i), Fault::none};
  }
  __device__ PageRef page_of(uint32_t b, uint32_t token) const {
    const auto [id, fault] = page_ids(b, token / kTokens);
    if (id >= num_pages) return {nullptr, nullptr, nullptr, kU32Max, fault == Fault::none ? Fault::page_id : fault, false};
    return {codes + id * kPageBytes, scales + id * kScaleStride, nullptr, kU32Max, Fault::none, true, values + id * kInPage};
  }
  template <uint32_t kCount>
  __device__ Vec<uint64_t, kCount> page_id_chunk(uint32_t b, uint32_t i) const {
    Vec<uint64_t, kCount> ids;
    Vec<uint32_t, kCount> entries = {};
    const bool whole = i < kTable && kTable - i >= kCount;
    if (whole) entries = *(const Vec<uint32_t, kCount>*)(table + b * kTableStride + i);
#pragma unroll
    for (uint32_t j = 0; j < kCount; ++j) ids.e[j] = whole ? entries.e[j] : i + j < kTable ? load_index(table, b * kTableStride + i + j) : ~0ull;
    return ids;
  }
};
__device__ __forceinline__ Cache cache_of(uint8_t* codes, f16* scales, bf16* values, const int32_t* lengths, const uint32_t* table) {
  return {codes, scales, values, lengths, table, kPages, kPages, 9, kLongest};
}

using Key = Run<uint8_t, f16, Recipe::amax, true>;
struct RopePart {
  using Scale = float;
  using ScalePointer = float*;
  static constexpr Recipe kRecipe = Recipe::none;
  static constexpr bool kZero = false;
  static constexpr uint32_t kResidual = 0, kBlockHeads = 1, kBlockDims = 1, kScaleVector = 1;
  using Compute = bf16;
  using Element = bf16;
  static constexpr uint32_t kBegin = kDims, kSize = 8, kVector = 8;
  __device__ static bf16* base(const PageRef& page) { return (bf16*)(page.codes + kInPage); }
  __device__ static constexpr uint32_t offset(uint32_t token, uint32_t head, uint32_t dim) { return (token * kHeads + head) * kSize + dim; }
};
struct Value : Run<bf16, float, Recipe::none> {
  __device__ static bf16* base(const PageRef& page) { return page.plain; }
};

template <typename R, typename P, bool kIsV>
struct Role {
  using Main = R;
  using Rope = P;
  using Compute = bf16;
  using Element = typename R::Element;
  using Scale = typename R::Scale;
  static constexpr uint32_t kHeads = ::kHeads, kDim = kDims, kPageSize = kTokens;
  static constexpr bool kIsMla = false, kScaled = R::kRecipe != Recipe::none;
  static constexpr uint32_t kScaledDims = kDims, kGranularity = kScaled ? 16 : 1, kRow = kHeads * kDims, kScaleRow = kScaled ? R::kScaleRow : 0;

  template <uint32_t N, typename Out>
  __device__ static void load(Vec<Out, N>& out, const Cache& cache, const PageRef& page, uint32_t token, uint32_t head, uint32_t dim) {
    if constexpr (!kIsV) {
      if (dim >= P::kBegin) return load_elements<P, N>(out, cache, page, token, head, dim - P::kBegin);
    }
    load_elements<R, N>(out, cache, page, token, head, dim);
  }
  __device__ static uint64_t page_id(const PageIds& ids) { return ids.id; }
  __device__ static uint64_t scale_page_id(const PageIds& ids) { return ids.id; }
  __device__ static int64_t page_stride(const Cache& cache) { return kIsV ? kInPage : kPageBytes; }
  __device__ static int64_t scale_page_stride(const Cache& cache) { return kScaleStride; }
  __device__ static f16* scales_begin(const Cache& cache) { return cache.scales; }
};
using KeyCache = KVCache<Role<Key, RopePart, false>, Cache>;
using ValueCache = KVCache<Role<Value, void, true>, Cache>;

// Where a pointer points, in bytes; ~0 for null.
__device__ __forceinline__ uint64_t distance(const void* p, const void* base) { return p == nullptr ? ~0ull : (uint64_t)p - (uint64_t)base; }
__device__ __forceinline__ uint64_t hash(const char* text) {
  uint64_t found = 5381;
  for (; *text != 0; ++text) found = found * 33 + (uint8_t)*text;
  return found;
}
