// Tiles by tensor copies (sm_90a and newer): which boxes a plan of kvgen.tensor_map asks for, and where its elements lie.
// A kernel includes types.cuh, mbarrier.cuh and tma.cuh before it. One thread calls a load, after mbarrier_arrive_expect_tx
// with tile_bytes. T is the map's element or anything of its size, kGran the plan's `gran`; 4-bit elements count as bytes.
//
// A tile starts at a multiple of the plan's smem_alignment. Chunk j of kGran columns lies at j * rows * kGran; its rows,
// one swizzle span each, behind one another.
#pragma once

// ---------------------------------------------------------------- where an element lies
// The byte at which the hardware puts `byte` of a tile: 16-byte pieces of a line of 128 bytes change places by line number.
template <uint32_t kSwizzle>
__device__ __forceinline__ constexpr uint32_t swizzle(uint32_t byte) {
  static_assert(kSwizzle == 0 || kSwizzle == 32 || kSwizzle == 64 || kSwizzle == 128, "0, 32, 64 or 128 bytes");
  return kSwizzle == 0 ? byte : byte ^ (byte >> 7 & (kSwizzle / 16 - 1)) << 4;
}
// Byte of element (row, column) of a tile of kRows rows.
template <typename T, uint32_t kSwizzle, uint32_t kRows, uint32_t kGran>
__device__ __forceinline__ constexpr uint32_t tile_offset(uint32_t row, uint32_t column) {
  return swizzle<kSwizzle>(((column / kGran * kRows + row) * kGran + column % kGran) * (uint32_t)sizeof(T));
}
// The offset in a row-major folded tile of BK columns: groups of 8 rows, all chunks of a group together.
template <typename T, uint32_t kSwizzle, uint32_t BK, uint32_t kGran>
__device__ __forceinline__ constexpr uint32_t row_major_offset(uint32_t row, uint32_t column) {
  return swizzle<kSwizzle>((row / 8 * 8 * BK + column / kGran * 8 * kGran + row % 8 * kGran + column % kGran) * (uint32_t)sizeof(T));
}
template <typename T>
__device__ __forceinline__ constexpr uint32_t tile_bytes(uint32_t rows, uint32_t columns) {
  return rows * columns * (uint32_t)sizeof(T);
}

// A row of any number as coordinates that fit: its row in a block of `pitch` rows, and the block.
struct KvTmaCoords {
  int32_t row, block;
};
__device__ __forceinline__ KvTmaCoords kv_tma_coords(uint64_t row, uint32_t pitch) {
  return {(int32_t)(row % pitch), (int32_t)(row / pitch)};
}

// A row (or page) that no tensor has, so that its whole box is filled; kU32Max would be -1, and its box hold row 0.
constexpr uint32_t kOutOfRange = 0xc0000000u;
__device__ __forceinline__ int32_t tma_row(uint32_t row) { return (int32_t)(row >> 31 ? kOutOfRange : row); }

// ---------------------------------------------------------------- split tiles: a copy for each chunk
template <uint32_t BN, uint32_t BK, uint32_t kGran, typename T>
__device__ __forceinline__ void tma_load_split_tile(T* to, const TensorMap* map, uint64_t* bar, int32_t row,
    int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  static_assert(BK % kGran == 0, "a tile is whole chunks");
#pragma unroll
  for (uint32_t j = 0; j < BK / kGran; ++j) {
    tma_load(to + j * BN * kGran, map, bar, hint, depth + (int32_t)(j * kGran), head, row);
  }
}
// The bf16 part of mixed rows, from its column 0 on.
template <uint32_t BN, uint32_t BK, uint32_t kGran, typename T>
__device__ __forceinline__ void tma_load_rope_tile(T* to, const TensorMap* map, uint64_t* bar, int32_t row,
    int32_t head, CacheHint hint = CacheHint::normal) {
  tma_load_split_tile<BN, BK, kGran>(to, map, bar, row, head, 0, hint);
}
// Loads from a PageView: rows from `token` of `page` on; rows past the page's last token are filled.
template <uint32_t BN, uint32_t BK, uint32_t kGran, typename T>
__device__ __forceinline__ void tma_load_page_tile(T* to, const TensorMap* map, uint64_t* bar, int32_t token,
    int32_t page, int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  static_assert(BK % kGran == 0, "a tile is whole chunks");
#pragma unroll
  for (uint32_t j = 0; j < BK / kGran; ++j) {
    tma_load(to + j * BN * kGran, map, bar, hint, depth + (int32_t)(j * kGran), head, token, page);
  }
}

// ---------------------------------------------------------------- tiles of several pages
// Sub-page p, kIssueRows rows, starts at row rows[p] (PagedRowIndices). The first `valid` of kRows / kIssueRows sub-pages
// exist: kFill fills the others (all bytes are expected), without it they are left alone (expect those of valid ones).
// A row past int32, kU32Max of a bad page id too, is filled.
template <uint32_t kRows, uint32_t kIssueRows, uint32_t BK, uint32_t kGran, bool kFill = false, typename T>
__device__ __forceinline__ void tma_load_paged_tile(T* to, const TensorMap* map, uint64_t* bar, const uint32_t* rows,
    uint32_t valid, int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  static_assert(kRows % kIssueRows == 0 && BK % kGran == 0, "a tile is whole sub-pages and chunks");
#pragma unroll
  for (uint32_t p = 0; p < kRows / kIssueRows; ++p) {
    if (!kFill && p >= valid) break;
    const int32_t row = tma_row(p < valid ? rows[p] : kU32Max);
#pragma unroll
    for (uint32_t j = 0; j < BK / kGran; ++j) {
      tma_load(to + (j * kRows + p * kIssueRows) * kGran, map, bar, hint, depth + (int32_t)(j * kGran), head, row);
    }
  }
}
// Loads sub-pages from a PageView: sub-page p is page pages[p], from its first token on.
template <uint32_t kRows, uint32_t kIssueRows, uint32_t BK, uint32_t kGran, bool kFill = false, typename T>
__device__ __forceinline__ void tma_load_pages_tile(T* to, const TensorMap* map, uint64_t* bar,
    const uint32_t* pages, uint32_t valid, int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  static_assert(kRows % kIssueRows == 0 && BK % kGran == 0, "a tile is whole sub-pages and chunks");
#pragma unroll
  for (uint32_t p = 0; p < kRows / kIssueRows; ++p) {
    if (!kFill && p >= valid) break;
    const int32_t page = tma_row(p < valid ? pages[p] : kU32Max);
#pragma unroll
    for (uint32_t j = 0; j < BK / kGran; ++j) {
      tma_load(to + (j * kRows + p * kIssueRows) * kGran, map, bar, hint, depth + (int32_t)(j * kGran), head, 0, page);
    }
  }
}
// Loads sub-pages by a row-major folded plan: one copy for each sub-page, whose rows start at multiples of 8.
template <uint32_t kRows, uint32_t kIssueRows, uint32_t BK, uint32_t kGran, bool kFill = false, typename T>
__device__ __forceinline__ void tma_load_paged_row_major_tile(T* to, const TensorMap* map, uint64_t* bar,
    const uint32_t* rows, uint32_t valid, int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  static_assert(kRows % kIssueRows == 0 && kIssueRows % 8 == 0, "sub-pages of whole groups of 8 rows");
#pragma unroll
  for (uint32_t p = 0; p < kRows / kIssueRows; ++p) {
    if (!kFill && p >= valid) break;
    const int32_t row = tma_row(p < valid ? rows[p] : kU32Max);
    tma_load(to + p * kIssueRows * BK, map, bar, hint, 0, 0, depth / (int32_t)kGran, row / 8, head);
  }
}

// ---------------------------------------------------------------- groups of 8 rows of a page, all chunks of a group together
// One copy: groups of `page` from `group` on, chunks from `chunk` on. A page past the pool is filled.
template <typename T>
__device__ __forceinline__ void tma_load_groups(T* to, const TensorMap* map, uint64_t* bar, uint32_t chunk, uint32_t group,
    uint32_t page, CacheHint hint = CacheHint::normal) {
  tma_load(to, map, bar, hint, 0, 0, (int32_t)chunk, (int32_t)group, tma_row(page));
}

// ---------------------------------------------------------------- folded tiles: one copy for all chunks
template <uint32_t kGran, typename T>
__device__ __forceinline__ void tma_load_folded_tile(T* to, const TensorMap* map, uint64_t* bar, int32_t row,
    int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  tma_load(to, map, bar, hint, 0, row, depth / (int32_t)kGran, head);
}
template <uint32_t kGran, typename T>
__device__ __forceinline__ void tma_load_folded_page_tile(T* to, const TensorMap* map, uint64_t* bar, int32_t token,
    int32_t page, int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  tma_load(to, map, bar, hint, 0, token, depth / (int32_t)kGran, head, page);
}
template <uint32_t kGran, typename T>
__device__ __forceinline__ void tma_load_row_major_tile(T* to, const TensorMap* map, uint64_t* bar, int32_t row,
    int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  tma_load(to, map, bar, hint, 0, 0, depth / (int32_t)kGran, row / 8, head);
}

#if __CUDA_ARCH__ >= 1000
// kHeight rows at rows[0], rows[1], ..., kWidth columns from `column` on, rounded up to chunks of kGran.
template <uint32_t kHeight, uint32_t kWidth, uint32_t kGran, typename T>
__device__ __forceinline__ void tma_load_gather4_tile(T* to, const TensorMap* map, uint64_t* bar,
    const int32_t* rows, int32_t column, CacheHint hint = CacheHint::normal) {
  static_assert(kHeight % 4 == 0, "four rows a copy");
#pragma unroll
  for (uint32_t i = 0; i < kHeight; i += 4) {
#pragma unroll
    for (uint32_t j = 0; j < (kWidth + kGran - 1) / kGran; ++j) {
      tma_gather4(to + (j * kHeight + i) * kGran, map, bar, hint, column + (int32_t)(j * kGran), rows[i],
          rows[i + 1], rows[i + 2], rows[i + 3]);
    }
  }
}
#endif

// ---------------------------------------------------------------- scales
// The plan's box from number `first` on.
template <typename T>
__device__ __forceinline__ void tma_load_scale_tile(T* to, const TensorMap* map, uint64_t* bar, int32_t first,
    CacheHint hint = CacheHint::normal) {
  tma_load(to, map, bar, hint, first, 0);
}
// From the 16 bytes on that hold `row`; returns where in the tile its scale is, the others follow.
template <typename T>
__device__ __forceinline__ uint32_t tma_load_index_scale_tile(T* to, const TensorMap* map, uint64_t* bar,
    int32_t row, CacheHint hint = CacheHint::normal) {
  constexpr int32_t kTogether = 16 / (int32_t)sizeof(T);
  tma_load(to, map, bar, hint, row / kTogether * kTogether, 0);
  return (uint32_t)(row % kTogether);
}

// ---------------------------------------------------------------- ragged tiles
// Rows [row, row + valid) of `head` out of a tile of BM rows; no row past them is written. kGroup query heads a head lie in
// the tile as kGroup lines a row. `heads` are the groups of a row.
template <uint32_t BM, uint32_t BK, uint32_t kGran, uint32_t kGroup = 1, typename T>
__device__ __forceinline__ void tma_store_ragged_tile(const TensorMap* map, const T* from, int32_t row,
    int32_t valid, int32_t heads, int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  const int32_t start = (int32_t)BM - valid, merged = (row + valid) * heads + head;
#pragma unroll
  for (uint32_t j = 0; j < BK / kGran; ++j) {
    const T* chunk = from + j * BM * kGroup * kGran;
    const int32_t column = depth + (int32_t)(j * kGran);
    if constexpr (kGroup == 1) tma_store(map, chunk, hint, column, start, merged);
    if constexpr (kGroup > 1) tma_store(map, chunk, hint, column, 0, start, merged);
  }
}
// Stores by a plan with `blocks`: all chunks by one copy.
template <uint32_t BM, uint32_t kGran, uint32_t kGroup = 1, typename T>
__device__ __forceinline__ void tma_store_ragged_blocks(const TensorMap* map, const T* from, int32_t row,
    int32_t valid, int32_t heads, int32_t head, int32_t depth, CacheHint hint = CacheHint::normal) {
  const int32_t start = (int32_t)BM - valid, merged = (row + valid) * heads + head, chunk = depth / (int32_t)kGran;
  if constexpr (kGroup == 1) tma_store(map, from, hint, 0, start, chunk, merged);
  if constexpr (kGroup > 1) tma_store(map, from, hint, 0, 0, start, chunk, merged);
}
