// K with scales and zero points of channels over a group of tokens (KIVI), and its newest tokens, which wait in 16 bits.
//
// A tile's tokens are of one group, so that a tile has one scale and one zero point a dim: they are copied into its stage with
// the rows and applied to fragments, a = (code - zero) * scale as f16: a rounded product of zero and scale would be off in
// the same way for all tokens of a group, which shows in their LSE. Tiles of waiting tokens have rows of f16 in place of codes.
#pragma once

#include "../../memory/cp_async.cuh"
#include "mma_tile.cuh"

// The scales of a tile, and behind each its zero point, in its stage, where kThreads threads copy them.
template <typename S, uint32_t kTokens, uint32_t kThreads>
struct TileChannels {
  static constexpr bool kGrouped = false;
  static constexpr uint32_t kEach = 1 + S::kZero, kStageBytes = S::kSize * kEach * sizeof(typename S::Scale), kExpandedBytes = 0;
  static constexpr uint32_t kWidest = S::kScaleVector * sizeof(typename S::Scale), kCopyBytes = kWidest < 16 ? kWidest : 16, kCopies = kStageBytes / kCopyBytes;
  static_assert(S::kResidual % kTokens == 0 && kCopyBytes >= 4 && kStageBytes % 16 == 0);
  struct Loaded {
    uint32_t e[1], stage, offset;  // as TileScales has it; unused
  };

  // Copies can begin at the scales of every page.
  template <typename Cache>
  __device__ static __forceinline__ bool aligned(const Cache&) { return true; }
  // Starts the copies of the scales of the tile's group, `offset` tokens into the page; zeros if no token of the tile is
  // needed.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_some(uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t, uint32_t offset, uint32_t head,
                                                   uint32_t begin, uint32_t end) {
    const uint8_t* from = (const uint8_t*)scale_at<S>(cache, page, offset, head, 0);
#pragma unroll
    for (uint32_t i = 0; i < (kCopies + kThreads - 1) / kThreads; ++i) {
      const uint32_t copy = i * kThreads + thread;
      if (copy < kCopies) cp_async<kCopyBytes>(stage + copy * kCopyBytes, from + copy * kCopyBytes, begin < end);
    }
  }
  // The names of TileScales.
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_run(uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset, uint32_t head) {
    copy_some(stage, cache, page, thread, first, offset, head, 0, 1);
  }
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void copy_any(uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset, uint32_t head,
                                                  uint32_t begin, uint32_t end) {
    copy_some(stage, cache, page, thread, first, offset, head, begin, end);
  }
  template <typename Cache, typename Page>
  __device__ static __forceinline__ void store_and_load(Loaded&, uint32_t stage, const Cache& cache, const Page& page, uint32_t thread, uint32_t first, uint32_t offset,
                                                        uint32_t head, uint32_t begin, uint32_t end) {
    copy_some(stage, cache, page, thread, first, offset, head, begin, end);
  }
};

// Dims of a lane's register i of a word of K, as KeyFragments spreads its codes.
template <typename E>
__device__ constexpr uint32_t dim_in_word(uint32_t i, uint32_t element) {
  return kNeighbours<E> ? 2 * i + element : i + KeyFragments<E>::kSteps * element;
}

// Fragments of K times the scales of their channels.
template <typename Tile>
struct KeyChannels {
  using K = typename Tile::K;
  using Keys = typename TileShape<Tile>::Keys;
  const uint8_t* scales;

  __device__ __forceinline__ void operator()(uint32_t (&a)[Keys::kSteps][4], uint32_t block, uint32_t) const {
    constexpr uint32_t kEach = 1 + K::kZero, kWords = Keys::kInWord * kEach / 2;  // of a lane's dims
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t dim = block * Keys::kDims + half * Keys::kHalfDims + Keys::kInWord * (threadIdx.x % 4);
      if (dim >= K::kSize) continue;  // codes of zero
      const auto own = *(const Vec<Vec<uint32_t, kWords % 4 == 0 ? 4 : 2>, kWords % 4 == 0 ? kWords / 4 : kWords / 2>*)(scales + dim * kEach * 2);
      const uint32_t* const words = (const uint32_t*)&own;
#pragma unroll
      for (uint32_t i = 0; i < Keys::kSteps; ++i) {
        const uint32_t first = dim_in_word<typename K::Element>(i, 0), second = dim_in_word<typename K::Element>(i, 1);
        uint32_t (&to)[4] = a[half * Keys::kHalfSteps + i / 2];
        if constexpr (K::kZero) {
          const uint32_t scale = permute(words[first], words[second], 0x5410), less = permute(words[first], words[second], 0x7632) ^ 0x80008000u;
          to[i % 2 * 2] = multiply_halves(add_halves(to[i % 2 * 2], less), scale);
          to[i % 2 * 2 + 1] = multiply_halves(add_halves(to[i % 2 * 2 + 1], less), scale);
        } else {
          const uint32_t scale = permute(words[first / 2], words[second / 2], first % 2 == 0 ? (second % 2 == 0 ? 0x5410 : 0x7610) : (second % 2 == 0 ? 0x5432 : 0x7632));
          to[i % 2 * 2] = multiply_halves(to[i % 2 * 2], scale);
          to[i % 2 * 2 + 1] = multiply_halves(to[i % 2 * 2 + 1], scale);
        }
      }
    }
  }
};

// Rows of f16 of tokens that wait, those of the request from `rows` on; tokens outside [begin, end) are zeros.
template <typename Tile>
struct WaitingRows {
  using K = typename Tile::K;
  using Keys = typename TileShape<Tile>::Keys;
  const f16* rows;
  uint32_t head, first, begin, end;

  // In the place of block `block` of K of tokens 16m to 16m + 15 of the tile.
  __device__ __forceinline__ void load(uint32_t (&a)[Keys::kSteps][4], uint32_t block, uint32_t m) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t row = 0; row < 2; ++row) {
        const uint32_t dim = block * Keys::kDims + half * Keys::kHalfDims + Keys::kInWord * (threadIdx.x % 4);
        const uint32_t token = first + 16 * m + threadIdx.x % 32 / 4 + 8 * row;
        Vec<f16, Keys::kInWord> values;
        fill(values, f16{});
        if (token >= begin && token < end && dim < K::kSize) ::load<K::kTailVector < Keys::kInWord ? K::kTailVector : Keys::kInWord>(values, rows + K::tail_offset(token % K::kResidual, head, dim));
#pragma unroll
        for (uint32_t i = 0; i < Keys::kSteps; ++i) {
          const uint32_t low = values.e[dim_in_word<typename K::Element>(i, 0)].bits, high = values.e[dim_in_word<typename K::Element>(i, 1)].bits;
          a[half * Keys::kHalfSteps + i / 2][i % 2 * 2 + row] = low | high << 16;
        }
      }
  }
};
template <typename Tile>
__device__ __forceinline__ void load_keys(uint32_t (&a)[TileShape<Tile>::Keys::kSteps][4], uint32_t, uint32_t block, uint32_t m, const WaitingRows<Tile>& rows) {
  rows.load(a, block, m);
}
