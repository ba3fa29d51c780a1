// One K or V cache of a layer: the surface that kernels written against Modular MAX's KVCacheT know, over any layout.
//
// cache.cuh gives a role for K and for V (CacheRole: element types, sizes, places); everything here follows from it. Tokens are
// logical: counted from a request's first. A bad page id, a token past the table, or one that a ring does not reach: load gives
// 0, store is dropped, a pointer is null. The same holds for values that are no elements of `dtype`: dims of a RoPE part of
// another type, and tokens that wait in a tail until they are quantized. A call that a layout cannot serve is a compile-time
// error with the reason.
#pragma once

template <typename T>
constexpr bool kNever = false;

__host__ __device__ constexpr uint32_t low_bit(uint32_t x) { return x & (~x + 1); }

// num_heads heads of head_size, K only if is_mla.
struct KVCacheStaticParams {
  uint32_t num_heads, head_size;
  bool is_mla;
};

template <typename Segment>
constexpr uint32_t kDimsOf = Segment::kSize;
template <>
constexpr uint32_t kDimsOf<void> = 0;

// K or V of a cache. `MainPart` is the segment of its rows; of latent rows of two types it has the latent part, `RopePart` the
// other one. kRow and kScaleRow: from one token's row to the next, as page strides count.
template <typename Cache, typename MainPart, typename RopePart = void>
struct CacheRole {
  using Main = MainPart;
  using Rope = RopePart;
  using Compute = typename Main::Compute;
  using Element = typename Main::Element;
  using Scale = typename Main::Scale;
  static constexpr uint32_t kHeads = Cache::kHeads, kDim = Main::kSize + kDimsOf<Rope>, kPageSize = Cache::kPageSize;
  static constexpr bool kIsMla = Cache::kIsMla, kScaled = Main::kRecipe != Recipe::none;
  static constexpr uint32_t kScaledDims = Main::kSize, kGranularity = Main::kBlockDims;  // dims of a scale
  static constexpr uint32_t kRow = Main::kRow, kScaleRow = Main::kScaleRow;

  template <uint32_t N, typename Out>
  __device__ static __forceinline__ void load(Vec<Out, N>& out, const Cache& cache, const typename Cache::Page& page, uint32_t token,
                                              uint32_t head, uint32_t dim) {
    if constexpr (!kSame<Rope, void>) {
      if (dim >= Rope::kBegin) return load_elements<Rope, N>(out, cache, page, token, head, dim - Rope::kBegin);
    }
    load_elements<Main, N>(out, cache, page, token, head, dim);
  }
  template <typename Ids>
  __device__ static uint64_t page_id(const Ids& ids) { return Main::page_id(ids); }
  __device__ static int64_t page_stride(const Cache& cache) { return Main::page_stride(cache); }
  __device__ static typename Main::ScalePointer scales_begin(const Cache& cache) { return Main::scales_begin(cache); }
  template <typename Ids>
  __device__ static uint64_t scale_page_id(const Ids& ids) { return Main::scale_page_id(ids); }
  __device__ static int64_t scale_page_stride(const Cache& cache) { return Main::scale_page_stride(cache); }
};

// A cache without V has no get_value_cache of its own.
template <typename Cache>
__device__ void get_value_cache(const Cache&) {
  static_assert(kNever<Cache>, "get_value_cache: this cache stores K only; where rows are latent, V is their first dims");
}

// The most rows that a tensor map has, so a row that none holds: TMA fills the tile with zeros.
constexpr uint32_t kNoRow = 0x7fffff00u;

// page_tokens of a cache without pages: a request's tokens are one run of rows, which may begin at any of them.
constexpr uint32_t kRunTokens = 1u << 31;

// The rows in memory of BN tokens: one entry a sub-page. Two CTAs that share a product (pair_cta) take half of K's rows each.
template <uint32_t BN, uint32_t kPageSize, bool kPairCta = false, bool kIsLeader = true>
struct PagedRowIndices {
  static constexpr uint32_t kEffPage = kPageSize == 0 || kPageSize >= BN ? BN : kPageSize;
  static constexpr uint32_t kNumPages = BN / kEffPage;
  static_assert(BN % kEffPage == 0 && (kPageSize == 0 || kPageSize % kEffPage == 0),
                "PagedRowIndices: tiles are whole pages, or equal parts of one; BN must be a multiple of the page size or divide it");
  uint32_t rows[kNumPages];

  // The row of the tile's token `offset`.
  __device__ __forceinline__ uint32_t get_row(uint32_t offset) const { return rows[offset / kEffPage] + offset % kEffPage; }

  // get_row of this CTA's share of K.
  __device__ __forceinline__ uint32_t get_k_row(uint32_t offset) const {
    return get_row(kPairCta && !kIsLeader ? BN / 2 + offset : offset);
  }
};

// A token's place where coordinates of one matrix would not fit 32 bits: its row in its block, and the block.
struct KVCoords {
  uint32_t row_in_block;
  uint32_t block;
  bool valid;
};

template <typename R, typename Collection>
struct KVCache {
  using dtype = typename R::Element;
  using value_dtype = typename R::Compute;
  using scale_dtype = typename R::Scale;
  using scale_pointer = typename R::Main::ScalePointer;  // to const where the caller gives the scales
  using device_type = KVCache;                            // kernels take it by value, as it is
  using Page = typename Collection::Page;
  // kWidth elements as memory holds them; a whole one at least, so that what is wrong with less is said once.
  template <uint32_t kWidth>
  using Elements = Raw<dtype, (kWidth < kTogether<dtype> ? kTogether<dtype> : kWidth)>;
  static constexpr KVCacheStaticParams kv_params{R::kHeads, R::kDim, R::kIsMla};
  static constexpr uint32_t page_size_ = R::kPageSize;  // 0: a block a request
  static constexpr bool quantization_enabled = R::kScaled;
  static constexpr uint32_t quantization_granularity = R::kGranularity;
  static constexpr uint32_t head_dim_granularity = (R::kScaledDims + R::kGranularity - 1) / R::kGranularity;

  Collection cache;

  __device__ static constexpr const char* get_type_name() { return R::kPageSize ? "PagedKVCache" : "ContinuousBatchingKVCache"; }

  // The tensor of lengths; where the page table has them, cache_length(b) is the way to them.
  __device__ auto cache_lengths_nd() const { return cache.lengths_nd(); }
  // Tokens of request b as the engine counts them; a wrong one is kU32Max.
  __device__ uint32_t cache_length(uint32_t b) const { return cache.length(b); }
  __device__ bool empty_cache() const { return cache.max_cache_length == 0; }
  __device__ uint32_t max_prompt_length() const { return cache.max_seq_length; }
  __device__ uint32_t max_context_length() const { return cache.max_cache_length; }
  // The longest run of tokens that lie in one page; -1: no limit.
  __device__ static constexpr int32_t max_tile_size() { return R::kPageSize ? (int32_t)R::kPageSize : -1; }

  // kWidth neighbouring values, dequantized.
  template <uint32_t kWidth, typename Out = value_dtype>
  __device__ __forceinline__ Vec<Out, kWidth> load(uint32_t b, uint32_t head, uint32_t token, uint32_t dim) const {
    Vec<Out, kWidth> out = {};
    const Page page = this->page(b, token);
    if (page.valid) R::load(out, cache, page, token % cache.page_tokens, head, dim);
    return out;
  }

  // The page of a token, looked up once for all that is read from it; ask `valid` first, `fault` says what is wrong.
  __device__ __forceinline__ Page page(uint32_t b, uint32_t token) const { return cache.page_of(b, token); }
  // True if the token `offset` of a page is stored as elements of `dtype`: all are, but those that wait in the tail.
  __device__ __forceinline__ static bool sealed(const Page& page, uint32_t offset) {
    if constexpr (R::Main::kResidual > 0) return offset < R::Main::sealed(page);
    return true;
  }
  // load from a page that was found: `offset` is the token's place in it.
  template <uint32_t kWidth, typename Out = value_dtype>
  __device__ __forceinline__ Vec<Out, kWidth> load(const Page& page, uint32_t head, uint32_t offset, uint32_t dim) const {
    Vec<Out, kWidth> out;
    R::load(out, cache, page, offset, head, dim);
    return out;
  }

  // kWidth neighbouring elements as memory holds them; 0 on caches without scales, as upstream.
  template <uint32_t kWidth>
  __device__ __forceinline__ Elements<kWidth> load_quantized(uint32_t b, uint32_t head, uint32_t token, uint32_t dim) const {
    static_assert(kWidth % kTogether<dtype> == 0, "load_quantized: codes fill whole bytes; 4-bit ones by 2, 2-bit ones by 4, 3-bit ones by 8");
    Elements<kWidth> out = {};
    if constexpr (R::kScaled) {
      const Page page = coded(b, token, dim);
      if (page.valid) load_codes<typename R::Main, kWidth>(out, page, token % cache.page_tokens, head, dim);
    }
    return out;
  }

  // Stores elements as they are: nothing is quantized here.
  template <uint32_t kWidth>
  __device__ __forceinline__ void store(uint32_t b, uint32_t head, uint32_t token, uint32_t dim,
                                        const Elements<kWidth>& elements) const {
    static_assert(!kStrided<dtype>, "store: the codes of a byte are of dims apart, and are stored together; use store_block");
    static_assert(kWidth % kTogether<dtype> == 0, "store: codes fill whole bytes; 4-bit ones by 2, 2-bit ones by 4, 3-bit ones by 8");
    const Page page = this->page(b, token);
    const uint32_t offset = token % cache.page_tokens;
    if (!page.valid || !sealed(page, offset)) return;
    if constexpr (kHasRope) {
      if (dim >= R::Rope::kBegin) {
        if constexpr (kSame<typename R::Rope::Element, dtype>)
          store_raw<typename R::Rope, kWidth>(page, offset, head, dim - R::Rope::kBegin, elements);
        return;
      }
    }
    store_raw<typename R::Main, kWidth>(page, offset, head, dim, elements);
  }

  // The RoPE part of a latent row, whose elements are not those of the latent part; dim counts from the row's first.
  template <uint32_t kWidth>
  __device__ __forceinline__ void store_rope(uint32_t b, uint32_t head, uint32_t token, uint32_t dim,
                                             const Vec<value_dtype, kWidth>& elements) const {
    static_assert(kHasRope, "store_rope: rows of this cache have one type throughout; use store");
    const Page page = this->page(b, token);
    if (page.valid && dim >= R::Rope::kBegin)
      store_raw<typename R::Rope, kWidth>(page, token % cache.page_tokens, head, dim - R::Rope::kBegin, elements);
  }

  // The scales of kWidth neighbouring blocks, from the one that holds `dim`; 0 on caches without scales.
  template <uint32_t kWidth>
  __device__ __forceinline__ Vec<scale_dtype, kWidth> load_scale(uint32_t b, uint32_t head, uint32_t token, uint32_t dim) const {
    Vec<scale_dtype, kWidth> out = {};
    if constexpr (R::kScaled) {
      const Page page = coded(b, token, dim);
      if (!page.valid) return out;
#pragma unroll
      for (uint32_t i = 0; i < kWidth; ++i)
        out.e[i] = *scale_at<typename R::Main>(cache, page, token % cache.page_tokens, head, dim + i * R::kGranularity);
    }
    return out;
  }

  // The block's zero point; 0 where there are none.
  __device__ __forceinline__ scale_dtype load_zero(uint32_t b, uint32_t head, uint32_t token, uint32_t dim) const {
    scale_dtype out = {};
    if constexpr (R::Main::kZero) {
      const Page page = coded(b, token, dim);
      if (page.valid) out = scale_at<typename R::Main>(cache, page, token % cache.page_tokens, head, dim)[1];
    }
    return out;
  }

  // Stores scales of neighbouring blocks; nothing on caches without scales. Scales of the caller's are not for writing.
  template <uint32_t kWidth>
  __device__ __forceinline__ void store_scale(uint32_t b, uint32_t head, uint32_t token, uint32_t dim,
                                              const Vec<scale_dtype, kWidth>& scales) const {
    if constexpr (R::kScaled) {
      static_assert(R::Main::kRecipe != Recipe::given, "store_scale: the scales of this cache are given by the caller");
      const Page page = coded(b, token, dim);
      if (!page.valid) return;
#pragma unroll
      for (uint32_t i = 0; i < kWidth; ++i)
        *scale_at<typename R::Main>(cache, page, token % cache.page_tokens, head, dim + i * R::kGranularity) = scales.e[i];
    }
  }

  // The address of an element; kTile tokens from `token` lie behind it, a token stride apart.
  template <uint32_t kTile>
  __device__ __forceinline__ dtype* block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    static_assert(R::kPageSize == 0 || (kTile <= R::kPageSize && R::kPageSize % kTile == 0),
                  "block_paged_ptr: a tile lies in one page; its size must divide the page size");
    const Page page = this->page(b, token);
    const uint32_t offset = token % cache.page_tokens;
    return page.valid && sealed(page, offset) ? element(page, offset, head, dim) : nullptr;
  }

  // block_paged_ptr in a page that was found: `offset` is the token's place in it; `sealed`: its element is quantized.
  template <uint32_t kTile>
  __device__ __forceinline__ dtype* block_paged_ptr(const Page& page, uint32_t head, uint32_t offset, uint32_t dim = 0) const {
    static_assert(R::kPageSize == 0 || (kTile <= R::kPageSize && R::kPageSize % kTile == 0),
                  "block_paged_ptr: a tile lies in one page; its size must divide the page size");
    return element(page, offset, head, dim);
  }

  // The address of a scale; null on caches without scales.
  __device__ __forceinline__ scale_pointer scales_block_paged_ptr(uint32_t b, uint32_t token, uint32_t head, uint32_t dim = 0) const {
    if constexpr (R::kScaled) {
      const Page page = coded(b, token, dim);
      if (page.valid) return scale_at<typename R::Main>(cache, page, token % cache.page_tokens, head, dim);
    }
    return nullptr;
  }

  // Where the scales of this layer begin; null on caches without scales.
  __device__ __forceinline__ scale_pointer scales_raw_ptr() const {
    if constexpr (R::kScaled) return R::scales_begin(cache);
    return nullptr;
  }

  // --- the cache as a matrix with a row a token --------------------------------------------------------------------------

  // Rows from one page to the next.
  __device__ __forceinline__ uint64_t page_rows() const {
    static_assert(R::kRow > 0, "rows: a token's heads are no row of this layout; use kv_tma_coords, or page() and offset()");
    return (uint64_t)R::page_stride(cache) / R::kRow;
  }
  // 0 for pages that descend, or do not lie whole rows apart: nothing of them has a row.
  template <typename T = R>
  __device__ __forceinline__ uint64_t num_kv_rows() const {
    static_assert(T::kRow > 0, "num_kv_rows: a token's heads are no row of this layout; use kv_tma_coords(b, token)");
    const uint32_t pages = numbered_pages();
    return pages == 0 ? 0 : (pages - 1) * page_rows() + last_rows();
  }
  // The row of a token, in 64 bits; ~0 for a bad page, and where num_kv_rows() is 0.
  template <typename T = R>
  __device__ __forceinline__ uint64_t row_idx(uint32_t b, uint32_t token) const {
    static_assert(T::kRow > 0, "row_idx: a token's heads are no row of this layout; use kv_tma_coords(b, token)");
    const uint64_t id = page_id(b, token / cache.page_tokens);
    return id < numbered_pages() ? id * page_rows() + token % cache.page_tokens : ~0ull;
  }
  // A head's first column, in elements of a row: of packed codes, bytes.
  template <typename T = R>
  __device__ __forceinline__ static constexpr uint32_t col_idx(uint32_t head) {
    static_assert(T::kRow > 0, "col_idx: a token's heads are no row of this layout; use kv_tma_coords(b, token)");
    return (uint32_t)(R::Main::offset(0, head, 0) / kPlacesEach<dtype>);
  }
  template <typename T = R>
  __device__ __forceinline__ uint64_t num_scale_rows() const {
    static_assert(T::kScaleRow > 0, "num_scale_rows: this cache has no rows of scales");
    if constexpr (T::kScaleRow > 0) {
      const uint32_t pages = numbered<R::kScaleRow>(R::scale_page_stride(cache), cache.num_scale_pages);
      return pages == 0 ? 0 : (pages - 1) * ((uint64_t)R::scale_page_stride(cache) / R::kScaleRow) + last_rows();
    }
    return 0;
  }
  template <typename T = R>
  __device__ __forceinline__ uint64_t scale_row_idx(uint32_t b, uint32_t token) const {
    static_assert(T::kScaleRow > 0, "scale_row_idx: this cache has no rows of scales");
    if constexpr (T::kScaleRow > 0) {
      const int64_t stride = R::scale_page_stride(cache);
      const uint64_t id = R::scale_page_id(cache.page_ids(b, token / cache.page_tokens));
      const bool good = id < numbered<R::kScaleRow>(stride, cache.num_scale_pages);
      return good ? id * ((uint64_t)stride / R::kScaleRow) + token % cache.page_tokens : ~0ull;
    }
    return ~0ull;
  }
  // The row of a sparse index: page * page size + offset in pages; without pages the index is the row. -1 where no page has one.
  __device__ __forceinline__ int64_t get_tma_row(int32_t encoded) const {
    if constexpr (R::kPageSize == 0) return encoded;
    if (encoded < 0) return encoded;
    if (numbered_pages() == 0) return -1;
    return (int64_t)(encoded / R::kPageSize * page_rows() + encoded % R::kPageSize);
  }
  // A token's row in its page, and the page: for layouts without rows, and pools of more than 2^31 of them. Without pages all
  // tensors are one.
  __device__ __forceinline__ KVCoords kv_tma_coords(uint32_t b, uint32_t token) const {
    const uint64_t id = page_id(b, token / cache.page_tokens);
    if (cache.page_tokens == kRunTokens) return {(uint32_t)id + token, 0, id < cache.num_pages};
    return {token % cache.page_tokens, (uint32_t)id, id < cache.num_pages};
  }

  // The rows of the tokens [base, base + BN). Vector reads of the page table, as wide as its alignment, base_alignment and
  // the number of sub-pages allow; what lies past the table, or outside the pool, becomes kNoRow.
  template <uint32_t BN, uint32_t base_alignment, bool pair_cta = false, bool is_leader = true>
  __device__ __forceinline__ PagedRowIndices<BN, R::kPageSize, pair_cta, is_leader> populate(uint32_t b, uint32_t base) const {
    using Rows = PagedRowIndices<BN, R::kPageSize, pair_cta, is_leader>;
    Rows found;
    if constexpr (Rows::kNumPages == 1) {
      found.rows[0] = row32(row_idx(b, base));
    } else {
      static_assert(base_alignment % R::kPageSize == 0,
                    "populate: a tile of several pages begins at a page; base_alignment must be a multiple of the page size");
      constexpr uint32_t kChunk = min3(low_bit(Rows::kNumPages), low_bit(base_alignment / R::kPageSize), Collection::kTableVector);
      const uint32_t first = base / R::kPageSize;
      const uint64_t stride = page_rows();
      const uint32_t pages = numbered_pages();
      // Pages of one token can end with token 2^32 - 1, in the tile.
      const auto counted = [&](uint32_t i) { return R::kPageSize > 1 || first + i >= first; };
#pragma unroll
      for (uint32_t i = 0; i < Rows::kNumPages; i += kChunk) {
        if constexpr (kChunk > 1) {
          const auto ids = cache.template page_id_chunk<kChunk>(b, first + i);
#pragma unroll
          for (uint32_t j = 0; j < kChunk; ++j) found.rows[i + j] = ids.e[j] < pages && counted(i) ? row32(ids.e[j] * stride) : kNoRow;
        } else {
          const uint64_t id = page_id(b, first + i);
          found.rows[i] = id < pages && counted(i) ? row32(id * stride) : kNoRow;
        }
      }
    }
    return found;
  }

 private:
  __device__ static constexpr uint32_t min3(uint32_t x, uint32_t y, uint32_t z) {
    const uint32_t least = x < y ? x : y;
    return least < z ? least : z;
  }
  __device__ static uint32_t row32(uint64_t row) { return row < kNoRow ? (uint32_t)row : kNoRow; }
  __device__ __forceinline__ uint64_t page_id(uint32_t b, uint32_t i) const { return R::page_id(cache.page_ids(b, i)); }
  // Rows from a page's first on that are its own.
  __device__ __forceinline__ uint32_t last_rows() const { return cache.page_tokens == kRunTokens ? 1 : cache.page_tokens; }
  // Pages whose rows are numbered: all, or none where they descend or do not lie whole rows apart.
  template <uint32_t kRow>
  __device__ __forceinline__ static uint32_t numbered(int64_t stride, uint32_t pages) {
    return stride >= 0 && (uint64_t)stride % kRow == 0 ? pages : 0;
  }
  __device__ __forceinline__ uint32_t numbered_pages() const { return numbered<R::kRow>(R::page_stride(cache), cache.num_pages); }

  static constexpr bool kHasRope = !kSame<typename R::Rope, void>;
  // The page of a token that has codes and scales at `dim`; not valid where it has none.
  __device__ __forceinline__ Page coded(uint32_t b, uint32_t token, uint32_t dim) const {
    Page page = this->page(b, token);
    if constexpr (R::Main::kResidual > 0) page.valid = page.valid && sealed(page, token % cache.page_tokens);
    if constexpr (kHasRope) page.valid = page.valid && dim < R::Rope::kBegin;
    return page;
  }
  // An element's address; null in a RoPE part of another type.
  __device__ __forceinline__ dtype* element(const Page& page, uint32_t offset, uint32_t head, uint32_t dim) const {
    if constexpr (kHasRope) {
      if (dim >= R::Rope::kBegin) {
        if constexpr (kSame<typename R::Rope::Element, dtype>)
          return element_at<typename R::Rope>(page, offset, head, dim - R::Rope::kBegin);
        return nullptr;
      }
    }
    return element_at<typename R::Main>(page, offset, head, dim);
  }
};
