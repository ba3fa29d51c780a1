// Tiles of a cache in shared memory, by tensor copies or (sm_80) by cp.async, beside what the accessor says they are.
#include "cache.cuh"
#include "../device/memory/cp_async.cuh"
#include "../device/memory/mbarrier.cuh"
#include "../device/tma/tma.cuh"
#include "../device/tma/tma_tile.cuh"

extern __shared__ __align__(1024) unsigned char shared_tile[];

// How a map numbers what it copies: rows of all pages, or pages and their tokens; and how a tile lies in shared memory.
enum class Form { rows, pages, folded, folded_pages, row_major };

template <uint32_t kBytes>
struct Unsigned;
template <>
struct Unsigned<1> {
  using type = uint8_t;
};
template <>
struct Unsigned<2> {
  using type = uint16_t;
};
template <>
struct Unsigned<4> {
  using type = uint32_t;
};

// A tile of BN tokens x BK columns of a head: of the main part, or of the RoPE part of latent rows.
template <Form kForm, bool kRope, uint32_t kSwizzle, uint32_t BN, uint32_t BK, uint32_t kGran>
struct Tile {
  template <typename C>
  using Element = typename Unsigned<kRope ? sizeof(typename C::value_dtype) : sizeof(typename C::dtype)>::type;

  // Asks for it; one thread.
  template <typename C, typename T>
  __device__ static void ask(const C& cache, const TensorMap* map, uint64_t* bar, T* to, uint32_t b, uint32_t base, uint32_t head) {
    constexpr uint32_t kPage = C::page_size_, kIssue = kPage == 0 || kPage >= BN ? BN : kPage, kPages = BN / kIssue;
    mbarrier_arrive_expect_tx(bar, tile_bytes<T>(BN, BK));
    if constexpr (kForm == Form::pages || kForm == Form::folded_pages) {
      uint32_t pages[kPages];
      for (uint32_t p = 0; p < kPages; ++p) {
        const KVCoords at = cache.kv_tma_coords(b, base + p * kIssue);
        pages[p] = at.valid ? at.block : kOutOfRange;
      }
      const int32_t token = (int32_t)cache.kv_tma_coords(b, base).row_in_block;
      if constexpr (kForm == Form::folded_pages) tma_load_folded_page_tile<kGran>(to, map, bar, token, tma_row(pages[0]), head, 0);
      else if constexpr (kPages == 1) tma_load_page_tile<BN, BK, kGran>(to, map, bar, token, tma_row(pages[0]), head, 0);
      else tma_load_pages_tile<BN, kIssue, BK, kGran, true>(to, map, bar, pages, kPages, head, 0);
    } else {
      const auto rows = cache.template populate<BN, BN>(b, base);
      if constexpr (kForm == Form::folded) tma_load_folded_tile<kGran>(to, map, bar, tma_row(rows.rows[0]), head, 0);
      else if constexpr (kForm == Form::row_major && kPages == 1) tma_load_row_major_tile<kGran>(to, map, bar, tma_row(rows.rows[0]), head, 0);
      else if constexpr (kForm == Form::row_major) tma_load_paged_row_major_tile<BN, kIssue, BK, kGran, true>(to, map, bar, rows.rows, kPages, head, 0);
      else if constexpr (kPages == 1) tma_load_split_tile<BN, BK, kGran>(to, map, bar, tma_row(rows.rows[0]), head, 0);
      else tma_load_paged_tile<BN, kIssue, BK, kGran, true>(to, map, bar, rows.rows, kPages, head, 0);
    }
  }

  // The element that the accessor has there; 0 where it has none.
  template <typename C>
  __device__ static Element<C> accessor(const C& cache, uint32_t b, uint32_t head, uint32_t token, uint32_t column) {
    using T = Element<C>;
    if constexpr (kRope) {
      if (column >= kRopeDims) return 0;
      const auto found = cache.template load<1>(b, head, token, C::kv_params.head_size - kRopeDims + column);
      return *(const T*)&found;
    } else {
      const uint32_t dim = column * kPerElement<typename C::dtype>;
      const auto* at = dim < C::kv_params.head_size - kRopeDims ? cache.template block_paged_ptr<1>(b, token, head, dim) : nullptr;
      return at != nullptr ? *(const T*)at : 0;
    }
  }

  // Every tile of every request and head, [tile][BN][BK]: as copied, and as the accessor has them.
  template <typename C>
  __device__ static void run(const C& cache, const TensorMap* map, uint8_t* copied, uint8_t* direct, uint32_t batch, uint32_t tokens) {
    using T = Element<C>;
    __shared__ alignas(8) uint64_t bar;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      mbarrier_init(&bar, 1);
      fence_mbarrier_init();
    }
#endif
    __syncthreads();
    constexpr uint32_t kHeads = C::kv_params.num_heads;
    const uint32_t tiles = (tokens + BN - 1) / BN;
    for (uint32_t turn = 0; turn < batch * tiles * kHeads; ++turn) {
      const uint32_t b = turn / kHeads / tiles, base = turn / kHeads % tiles * BN, head = turn % kHeads;
#if __CUDA_ARCH__ >= 900
      if (threadIdx.x == 0) ask(cache, map, &bar, (T*)shared_tile, b, base, head);
      mbarrier_wait(&bar, turn % 2);
#else
      constexpr uint32_t kPiece = 16 / sizeof(T);
      for (uint32_t i = threadIdx.x; i < BN * BK / kPiece; i += blockDim.x) {
        const uint32_t row = i / (BK / kPiece), column = i % (BK / kPiece) * kPiece, dim = column * kPerElement<typename C::dtype>;
        const void* from = dim < C::kv_params.head_size - kRopeDims ? cache.template block_paged_ptr<1>(b, base + row, head, dim) : nullptr;
        cp_async16(shared_tile + tile_offset<T, kSwizzle, BN, kGran>(row, column), from != nullptr ? from : copied, from != nullptr);
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
#endif
      for (uint32_t i = threadIdx.x; i < BN * BK; i += blockDim.x) {
        const uint32_t row = i / BK, column = i % BK;
        const uint32_t byte = kForm == Form::row_major ? row_major_offset<T, kSwizzle, BK, kGran>(row, column)
                                                       : tile_offset<T, kSwizzle, BN, kGran>(row, column);
        ((T*)copied)[turn * BN * BK + i] = *(const T*)(shared_tile + byte);
        ((T*)direct)[turn * BN * BK + i] = accessor(cache, b, head, base + row, column);
      }
      __syncthreads();
    }
  }
};

#if __CUDA_ARCH__ >= 900
// The scales of BN tokens, [request][tile][BN][kScaleRow], by their numbers in the pool, or one a token by its row.
template <typename R, bool kIndex, uint32_t BN, typename C>
__device__ void scale_tiles(const C& cache, const TensorMap* map, uint8_t* copied, uint8_t* direct, uint32_t batch, uint32_t tokens) {
  using T = typename Unsigned<sizeof(typename C::scale_dtype)>::type;
  constexpr uint32_t kRow = R::kScaleRow, kZero = R::Main::kZero;
  __shared__ alignas(8) uint64_t bar;
  __shared__ uint32_t start;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  const uint32_t tiles = (tokens + BN - 1) / BN;
  for (uint32_t turn = 0; turn < batch * tiles; ++turn) {
    const uint32_t b = turn / tiles, base = turn % tiles * BN;
    if (threadIdx.x == 0) {
      const uint64_t row = cache.scale_row_idx(b, base);
      const int32_t first = row < kNoRow / kRow ? (int32_t)(row * kRow) : (int32_t)kOutOfRange;
      mbarrier_arrive_expect_tx(&bar, tile_bytes<T>(BN, kRow) + 16 * kIndex);
      start = 0;
      if constexpr (kIndex) start = tma_load_index_scale_tile((T*)shared_tile, map, &bar, first);
      else tma_load_scale_tile((T*)shared_tile, map, &bar, first);
    }
    __syncthreads();
    mbarrier_wait(&bar, turn % 2);
    for (uint32_t i = threadIdx.x; i < BN * kRow; i += blockDim.x) {
      const uint32_t token = base + i / kRow;
      ((T*)copied)[turn * BN * kRow + i] = ((const T*)shared_tile)[start + i];
      const auto* first = cache.scales_block_paged_ptr(b, token, 0);
      T found = 0;
      for (uint32_t head = 0; first != nullptr && head < C::kv_params.num_heads; ++head)
        for (uint32_t g = 0; g < C::head_dim_granularity; ++g) {
          const auto* at = cache.scales_block_paged_ptr(b, token, head, g * C::quantization_granularity);
          if ((uint64_t)(at - first) <= i % kRow && i % kRow <= (uint64_t)(at - first) + kZero) found = ((const T*)first)[i % kRow];
        }
      ((T*)direct)[turn * BN * kRow + i] = found;
    }
    __syncthreads();
  }
}

// The first `valid` rows of a tile to the tokens from `base` of request b, head by head; the tile is `copied`.
template <uint32_t kSwizzle, uint32_t BM, uint32_t BK, uint32_t kGran, typename C>
__device__ void store_tile(const C& cache, const TensorMap* map, const uint8_t* copied, uint32_t b, uint32_t base, uint32_t valid) {
  using T = typename Unsigned<sizeof(typename C::dtype)>::type;
  for (uint32_t head = 0; head < C::kv_params.num_heads; ++head) {
    for (uint32_t i = threadIdx.x; i < BM * BK; i += blockDim.x)
      *(T*)(shared_tile + tile_offset<T, kSwizzle, BM, kGran>(i / BK, i % BK)) = ((const T*)copied)[head * BM * BK + i];
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint64_t row = cache.row_idx(b, base);
      if (row < kNoRow) tma_store_ragged_tile<BM, BK, kGran>(map, (const T*)shared_tile, (int32_t)row, valid, C::kv_params.num_heads, head, 0);
      tma_store_commit();
      tma_store_wait<0>();
    }
    __syncthreads();
  }
}
#endif

