// Operands of attention kernels, K and V: a cache, its scales, a contiguous tensor or ragged rows, with one interface.
//
// The order of arguments is Modular MAX's MHAOperand: batch, token, head, dim.
#pragma once

// A K or V cache.
template <typename CacheT>
struct KVCacheMHAOperand {
  using device_type = KVCacheMHAOperand;
  using dtype = typename CacheT::dtype;
  using scale_dtype = typename CacheT::scale_dtype;
  static constexpr uint32_t page_size = CacheT::page_size_;
  static constexpr bool quantization_enabled = CacheT::quantization_enabled;
  static constexpr uint32_t quantization_granularity = CacheT::quantization_granularity;

  CacheT cache;

  __device__ static constexpr const char* get_type_name() { return "KVCacheMHAOperand"; }
  template <uint32_t kTile>
  __device__ __forceinline__ const dtype* block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    return cache.template block_paged_ptr<kTile>(b, token, head, dim);
  }
  __device__ __forceinline__ const scale_dtype* scales_block_paged_ptr(uint32_t b, uint32_t token, uint32_t head,
                                                                      uint32_t dim = 0) const {
    return cache.scales_block_paged_ptr(b, token, head, dim);
  }
  template <uint32_t kWidth>
  __device__ __forceinline__ Vec<scale_dtype, kWidth> load_scale(uint32_t b, uint32_t token, uint32_t head, uint32_t dim) const {
    return cache.template load_scale<kWidth>(b, head, token, dim);
  }
  __device__ __forceinline__ uint32_t cache_length(uint32_t b) const { return cache.cache_length(b); }
  __device__ __forceinline__ uint32_t max_context_length() const { return cache.max_context_length(); }
  __device__ __forceinline__ uint64_t num_kv_rows() const { return cache.num_kv_rows(); }
  __device__ __forceinline__ uint64_t row_idx(uint32_t b, uint32_t token) const { return cache.row_idx(b, token); }
  __device__ __forceinline__ uint64_t scale_row_idx(uint32_t b, uint32_t token) const { return cache.scale_row_idx(b, token); }
  __device__ __forceinline__ int64_t get_tma_row(int32_t encoded) const { return cache.get_tma_row(encoded); }
  __device__ __forceinline__ auto scales_raw_ptr() const { return cache.scales_raw_ptr(); }
  template <uint32_t BN, uint32_t base_alignment, bool pair_cta = false, bool is_leader = true>
  __device__ __forceinline__ auto populate(uint32_t b, uint32_t base) const {
    return cache.template populate<BN, base_alignment, pair_cta, is_leader>(b, base);
  }
};

// The scales of a cache as an operand of their own: rows of scales, found as the cache finds them.
template <typename CacheT>
struct KVCacheScalesMHAOperand {
  using device_type = KVCacheScalesMHAOperand;
  using dtype = typename CacheT::scale_dtype;
  using scale_dtype = typename CacheT::scale_dtype;
  static constexpr uint32_t page_size = CacheT::page_size_;
  static constexpr bool quantization_enabled = false;
  static constexpr uint32_t quantization_granularity = CacheT::kv_params.head_size;

  CacheT cache;

  __device__ static constexpr const char* get_type_name() { return "KVCacheScalesMHAOperand"; }
  template <uint32_t kTile>
  __device__ __forceinline__ const dtype* block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    static_assert(page_size == 0 || (kTile <= page_size && page_size % kTile == 0),
                  "block_paged_ptr: a tile lies in one page; its size must divide the page size");
    return cache.scales_block_paged_ptr(b, token, head, dim);
  }
  __device__ __forceinline__ const scale_dtype* scales_block_paged_ptr(uint32_t b, uint32_t token, uint32_t head,
                                                                      uint32_t dim = 0) const {
    return cache.scales_block_paged_ptr(b, token, head, dim);
  }
  template <uint32_t kWidth>
  __device__ __forceinline__ Vec<scale_dtype, kWidth> load_scale(uint32_t b, uint32_t token, uint32_t head, uint32_t dim) const {
    return cache.template load_scale<kWidth>(b, head, token, dim);
  }
  __device__ __forceinline__ uint32_t cache_length(uint32_t b) const { return cache.cache_length(b); }
  __device__ __forceinline__ uint32_t max_context_length() const { return cache.max_context_length(); }
  __device__ __forceinline__ uint64_t num_kv_rows() const { return cache.num_scale_rows(); }
  __device__ __forceinline__ uint64_t row_idx(uint32_t b, uint32_t token) const { return cache.scale_row_idx(b, token); }
  __device__ __forceinline__ uint64_t scale_row_idx(uint32_t b, uint32_t token) const { return cache.scale_row_idx(b, token); }
  __device__ __forceinline__ auto scales_raw_ptr() const { return cache.scales_raw_ptr(); }
  template <typename T = CacheT>
  __device__ __forceinline__ int64_t get_tma_row(int32_t) const {
    static_assert(kNever<T>, "get_tma_row: a sparse index names rows of values; scales are found by scale_row_idx(b, token)");
    return 0;
  }
  // The rows of the scales of [base, base + BN).
  template <uint32_t BN, uint32_t base_alignment, bool pair_cta = false, bool is_leader = true>
  __device__ __forceinline__ PagedRowIndices<BN, page_size, pair_cta, is_leader> populate(uint32_t b, uint32_t base) const {
    using Rows = PagedRowIndices<BN, page_size, pair_cta, is_leader>;
    static_assert(Rows::kNumPages == 1 || base_alignment % Rows::kEffPage == 0,
                  "populate: a tile of several pages begins at a page; base_alignment must be a multiple of the page size");
    Rows found;
#pragma unroll
    for (uint32_t i = 0; i < Rows::kNumPages; ++i) {
      const uint32_t token = base + i * Rows::kEffPage;
      const uint64_t row = token >= base ? cache.scale_row_idx(b, token) : ~0ull;
      found.rows[i] = row < kNoRow ? (uint32_t)row : kNoRow;
    }
    return found;
  }
};

// A contiguous tensor [batch, tokens, heads, depth]: every request has as many tokens.
template <typename T, uint32_t kHeads, uint32_t kDepth, typename ScaleT = float, uint32_t kScalesPerRow = 0>
struct LayoutTensorMHAOperand {
  using device_type = LayoutTensorMHAOperand;
  using dtype = T;
  using scale_dtype = ScaleT;
  static constexpr uint32_t page_size = 0;
  static constexpr bool quantization_enabled = kScalesPerRow > 0;
  static constexpr uint32_t quantization_granularity = kScalesPerRow ? (kDepth + kScalesPerRow - 1) / kScalesPerRow : 1;

  T* buffer;
  uint32_t batch, tokens;
  ScaleT* scales = nullptr;  // [batch, tokens, heads, kScalesPerRow]

  __device__ static constexpr const char* get_type_name() { return "LayoutTensorMHAOperand"; }
  template <uint32_t kTile>
  __device__ __forceinline__ const T* block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    if (b >= batch || token >= tokens) return nullptr;
    return buffer + ((row_idx(b, token) * kHeads + head) * kDepth + dim) / kPerElement<T>;
  }
  __device__ __forceinline__ const ScaleT* scales_block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    if (scales == nullptr || b >= batch || token >= tokens) return nullptr;
    return scales + (row_idx(b, token) * kHeads + head) * kScalesPerRow + dim / quantization_granularity;
  }
  template <uint32_t kWidth>
  __device__ __forceinline__ Vec<ScaleT, kWidth> load_scale(uint32_t b, uint32_t token, uint32_t head, uint32_t dim) const {
    Vec<ScaleT, kWidth> out = {};
    const ScaleT* at = scales_block_paged_ptr(b, token, head, dim);
    if (at != nullptr)
#pragma unroll
      for (uint32_t i = 0; i < kWidth; ++i) out.e[i] = at[i];
    return out;
  }
  __device__ __forceinline__ uint32_t cache_length(uint32_t) const { return tokens; }
  __device__ __forceinline__ uint32_t max_context_length() const { return tokens; }
  __device__ __forceinline__ uint64_t num_kv_rows() const { return (uint64_t)batch * tokens; }
  // ~0 for a token that there is not.
  __device__ __forceinline__ uint64_t row_idx(uint32_t b, uint32_t token) const {
    return b < batch && token < tokens ? (uint64_t)b * tokens + token : ~0ull;
  }
  __device__ __forceinline__ uint64_t scale_row_idx(uint32_t b, uint32_t token) const { return row_idx(b, token); }
  __device__ __forceinline__ int64_t get_tma_row(int32_t encoded) const { return encoded; }
  __device__ __forceinline__ ScaleT* scales_raw_ptr() const { return scales; }
  template <uint32_t BN, uint32_t base_alignment, bool pair_cta = false, bool is_leader = true>
  __device__ __forceinline__ PagedRowIndices<BN, 0, pair_cta, is_leader> populate(uint32_t b, uint32_t base) const {
    const uint64_t row = row_idx(b, base);
    return {{row < kNoRow ? (uint32_t)row : kNoRow}};
  }
};

// Ragged rows [total tokens, heads, depth]: request b has those of [offsets[b], offsets[b + 1]), which are untrusted.
template <typename T, uint32_t kHeads, uint32_t kDepth, typename Index = uint32_t, typename ScaleT = float, uint32_t kScalesPerRow = 0>
struct RaggedMHAOperand {
  using device_type = RaggedMHAOperand;
  using dtype = T;
  using scale_dtype = ScaleT;
  static constexpr uint32_t page_size = 0;
  static constexpr bool quantization_enabled = kScalesPerRow > 0;
  static constexpr uint32_t quantization_granularity = kScalesPerRow ? (kDepth + kScalesPerRow - 1) / kScalesPerRow : 1;

  T* buffer;
  const Index* offsets;
  uint32_t batch, rows;
  uint32_t longest;          // tokens of the longest request, for max_context_length
  ScaleT* scales = nullptr;  // [rows, heads, kScalesPerRow]

  __device__ static constexpr const char* get_type_name() { return "RaggedMHAOperand"; }
  template <uint32_t kTile>
  __device__ __forceinline__ const T* block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    const uint64_t row = row_idx(b, token);
    return row < rows ? buffer + ((row * kHeads + head) * kDepth + dim) / kPerElement<T> : nullptr;
  }
  __device__ __forceinline__ const ScaleT* scales_block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    const uint64_t row = row_idx(b, token);
    if (scales == nullptr || row >= rows) return nullptr;
    return scales + (row * kHeads + head) * kScalesPerRow + dim / quantization_granularity;
  }
  template <uint32_t kWidth>
  __device__ __forceinline__ Vec<ScaleT, kWidth> load_scale(uint32_t b, uint32_t token, uint32_t head, uint32_t dim) const {
    Vec<ScaleT, kWidth> out = {};
    const ScaleT* at = scales_block_paged_ptr(b, token, head, dim);
    if (at != nullptr)
#pragma unroll
      for (uint32_t i = 0; i < kWidth; ++i) out.e[i] = at[i];
    return out;
  }
  // 0 where the offsets contradict: nothing of such a request is read.
  __device__ __forceinline__ uint32_t cache_length(uint32_t b) const {
    if (b >= batch) return 0;
    const uint32_t begin = load_index(offsets, b), end = load_index(offsets, b + 1);
    return begin <= end && end <= rows ? end - begin : 0;
  }
  __device__ __forceinline__ uint32_t max_context_length() const { return longest; }
  __device__ __forceinline__ uint64_t num_kv_rows() const { return rows; }
  // ~0 for a token that the request does not have.
  __device__ __forceinline__ uint64_t row_idx(uint32_t b, uint32_t token) const {
    return token < cache_length(b) ? (uint64_t)load_index(offsets, b) + token : ~0ull;
  }
  __device__ __forceinline__ uint64_t scale_row_idx(uint32_t b, uint32_t token) const { return row_idx(b, token); }
  __device__ __forceinline__ int64_t get_tma_row(int32_t encoded) const { return encoded; }
  __device__ __forceinline__ ScaleT* scales_raw_ptr() const { return scales; }
  template <uint32_t BN, uint32_t base_alignment, bool pair_cta = false, bool is_leader = true>
  __device__ __forceinline__ PagedRowIndices<BN, 0, pair_cta, is_leader> populate(uint32_t b, uint32_t base) const {
    const uint64_t row = row_idx(b, base);
    return {{row < kNoRow ? (uint32_t)row : kNoRow}};
  }
};
