// Rows of a block into the cache: copied or cast, quantized by blocks, or into the tail of a residual.
//
// `from[row]` is where row `row` of the block begins: Rows, PaddedRows, or a tile in shared memory. A `W` struct, spelled out in
// the kernel, names the segment `Stored` and kHeads heads of a row that are kHeadStride elements apart, stored from element
// kBegin of each on; head 0 of them is head `head0` of the cache. `cache_slots[row]` has the row's page and token.
// A row whose page has null pointers is not stored.
#pragma once

#include "new_rows.cuh"

// The elements of rows, Rows or a tile; and how many of them a load has at once: `width`, but at most 16 bytes.
template <typename T>
struct Pointee;
template <typename T>
struct Pointee<const T*> {
  using Type = T;
};
template <typename From>
using RowElement = typename Pointee<decltype(&(*(const From*)nullptr)[0][0])>::Type;
template <typename T>
__host__ __device__ constexpr uint32_t access(uint32_t width) {
  return width * sizeof(T) < 16 ? width : 16 / sizeof(T);
}

// Rows first, first + 1, ... of the caller's array, `stride` elements apart.
template <typename T>
struct Rows {
  T* base;
  int64_t stride;
  uint32_t first;
  __device__ __forceinline__ T* operator[](uint32_t row) const { return base + (int64_t)(first + row) * stride; }
};

// Rows of requests of padded_rows rows each: requests are `stride` elements apart, rows of a request `elements`.
template <typename T>
struct PaddedRows {
  T* base;
  int64_t stride;
  uint32_t first, padded_rows, elements;
  __device__ __forceinline__ T* operator[](uint32_t row) const {
    return base + (int64_t)((first + row) / padded_rows) * stride + (int64_t)((first + row) % padded_rows) * elements;
  }
};

// Rows whose scales are the caller's, or that have none, W::kWidth elements an access and W::kBatch accesses a thread in flight.
// Thread i has vector i % kVectors of row i / kVectors, or, kByToken, vector i / rows of row i % rows.
template <typename W, uint32_t kThreads, bool kByToken, typename Cache, typename From, typename Slot>
__device__ __forceinline__ void store_vectors(const Cache& cache, const From& from, const Slot* cache_slots, uint32_t rows, uint32_t head0) {
  using S = typename W::Stored;
  using T = RowElement<From>;
  constexpr uint32_t kVectors = W::kHeads * S::kSize / W::kWidth, kAccess = access<T>(W::kWidth);
  const auto row_of = [&](uint32_t i) { return kByToken ? i % rows : i / kVectors; };
  const auto element_of = [&](uint32_t i) { return (kByToken ? i / rows : i % kVectors) * W::kWidth; };
  for (uint32_t base = threadIdx.x; base < rows * kVectors; base += kThreads * W::kBatch) {
    Vec<T, W::kWidth> value[W::kBatch];
#pragma unroll
    for (uint32_t u = 0; u < W::kBatch; ++u) {
      // Past the last vector a thread reads that one again: without a condition, vectors stay whole words in registers.
      const uint32_t i = u == 0 ? base : min(base + u * kThreads, rows * kVectors - 1), element = element_of(i);
      load<kAccess>(value[u], from[row_of(i)] + element / S::kSize * W::kHeadStride + element % S::kSize + W::kBegin);
    }
#pragma unroll
    for (uint32_t u = 0; u < W::kBatch; ++u) {
      const uint32_t i = base + u * kThreads, element = element_of(i);
      if (u > 0 && i >= rows * kVectors) break;
      const Slot& to = cache_slots[row_of(i)];
      if (!S::found(to.page)) continue;
      store_elements<S>(cache, to.page, to.token, head0 + element / S::kSize, element % S::kSize, value[u]);
    }
  }
}

// Stores rows; neighbouring threads have neighbouring vectors of a row.
template <typename W, uint32_t kThreads, typename Cache, typename From, typename Slot>
__device__ __forceinline__ void store_rows(const Cache& cache, const From& from, const Slot* cache_slots, uint32_t rows, uint32_t head0 = 0) {
  store_vectors<W, kThreads, false>(cache, from, cache_slots, rows, head0);
}

// Stores rows; neighbouring threads have neighbouring tokens, whose vectors lie side by side in the cache.
template <typename W, uint32_t kThreads, typename Cache, typename From, typename Slot>
__device__ __forceinline__ void store_rows_by_token(const Cache& cache, const From& from, const Slot* cache_slots, uint32_t rows, uint32_t head0 = 0) {
  store_vectors<W, kThreads, true>(cache, from, cache_slots, rows, head0);
}

// K of the rows that a residual does not quantize yet, into the tail of their request.
template <typename W, uint32_t kThreads, typename Cache, typename From, typename Slot>
__device__ __forceinline__ void store_tails(const Cache& cache, const From& from, const Slot* cache_slots, uint32_t rows, uint32_t head0 = 0) {
  using S = typename W::Stored;
  using T = RowElement<From>;
  constexpr uint32_t kVectors = W::kHeads * S::kSize / W::kWidth;
  for (uint32_t i = threadIdx.x; i < rows * kVectors; i += kThreads) {
    const Slot& to = cache_slots[i / kVectors];
    if (!S::found(to.page) || to.tail == kU32Max) continue;
    const uint32_t element = i % kVectors * W::kWidth, head = element / S::kSize, dim = element % S::kSize;
    Vec<T, W::kWidth> value;
    load<access<T>(W::kWidth)>(value, from[i / kVectors] + head * W::kHeadStride + dim + W::kBegin);
    Vec<typename S::Compute, W::kWidth> kept;
    if constexpr (kSame<T, typename S::Compute>) {
      kept = value;
    } else {
      float x[W::kWidth];
      unpack<T>(x, value);
      pack<typename S::Compute>(kept, x);
    }
    store<W::kWidth>(cache.tail(to.tail) + S::tail_offset(to.token % S::kResidual, head0 + head, dim), kept);
  }
}

// Blocks of S::kBlockHeads heads x S::kBlockDims dims that share a scale, W::kBlocks a row; W::kLanes lanes have a block,
// W::kChunks accesses of W::kWidth elements each.
template <typename W>
struct RowBlocks {
  using S = typename W::Stored;
  static constexpr uint32_t kGroups = (S::kSize + S::kBlockDims - 1) / S::kBlockDims, kBlock = S::kBlockHeads * S::kBlockDims;
  static constexpr uint32_t kEach = 1 + S::kZero;  // numbers of a block: its scale, and its zero point
  static constexpr bool kHeld = W::kUnroll == W::kChunks;  // its values stay in registers from the range to the codes
  static constexpr bool kWhole = kBlock == W::kLanes * W::kWidth * W::kChunks && S::kSize % S::kBlockDims == 0;

  __device__ static __forceinline__ uint32_t head(uint32_t block) { return block / kGroups * S::kBlockHeads; }
  __device__ static __forceinline__ uint32_t dim(uint32_t block) { return block % kGroups * S::kBlockDims; }

  // Access c of a lane to block `block` of a row in the caller's memory or a tile.
  template <typename T, typename Value>
  __device__ static __forceinline__ void read(Value& value, const T* row, uint32_t block, uint32_t c, uint32_t lane) {
    const uint32_t element = (c * W::kLanes + lane) * W::kWidth, at = dim(block) + element % S::kBlockDims;
    if (!kWhole && (element >= kBlock || at >= S::kSize)) return;
    load<access<T>(W::kWidth)>(value, row + (head(block) + element / S::kBlockDims) * W::kHeadStride + W::kBegin + at);
  }
};

// The codes of rows whose scales a write computes. The scales stay in `scales[row]`, number by number, for store_row_scales.
template <typename W, uint32_t kThreads, typename Cache, typename From, typename Slot, uint32_t kNumbers>
__device__ __forceinline__ void store_row_codes(const Cache& cache, const From& from, const Slot* cache_slots, uint32_t rows,
                                                typename W::Stored::Scale (*scales)[kNumbers], uint32_t head0 = 0) {
  using S = typename W::Stored;
  using Blocks = RowBlocks<W>;
  using T = RowElement<From>;
  using Value = Vec<T, W::kWidth>;
  constexpr uint32_t kStep = kThreads / W::kLanes, kHeldChunks = Blocks::kHeld ? W::kChunks : 1;
  const float global = global_scale_of<S>(cache);
  const uint32_t lane = threadIdx.x % W::kLanes, mask = 0xffffffffu >> (32 - W::kLanes) << (threadIdx.x % 32 - lane);
  for (uint32_t base = threadIdx.x / W::kLanes; base < rows * W::kBlocks; base += kStep * W::kUnits) {
    Value values[W::kUnits][kHeldChunks];
    if constexpr (Blocks::kHeld) {
#pragma unroll
      for (uint32_t u = 0; u < W::kUnits; ++u)
#pragma unroll
        for (uint32_t c = 0; c < W::kChunks; ++c) {
          const uint32_t unit = u == 0 ? base : min(base + u * kStep, rows * W::kBlocks - 1);
          Blocks::read(values[u][c], from[unit / W::kBlocks], unit % W::kBlocks, c, lane);
        }
    }
    // One body for all units, which move up in the registers: unrolled, it would take twice as many.
#pragma unroll 1
    for (uint32_t unit = base; unit < min(base + kStep * W::kUnits, rows * W::kBlocks); unit += kStep) {
      const uint32_t row = unit / W::kBlocks, block = unit % W::kBlocks;
      const Slot& to = cache_slots[row];
      const auto chunk = [&](float (&x)[W::kWidth], uint32_t c) {
        Value value;
        if constexpr (Blocks::kHeld) value = values[0][c]; else Blocks::read(value, from[row], block, c, lane);
        unpack<T>(x, value);
      };
      const auto keep = [&](typename S::Scale scale, typename S::Scale zero) {
        scales[row][block * Blocks::kEach] = scale;
        if constexpr (S::kZero) scales[row][block * 2 + 1] = zero;
      };
      if (S::found(to.page)) {
        store_codes<S, W::kLanes, W::kWidth, W::kChunks, W::kUnroll>(to.page, to.token, head0 + Blocks::head(block), Blocks::dim(block), lane,
                                                                     mask, global, chunk, keep);
      }
      if constexpr (W::kUnits > 1) {
#pragma unroll
        for (uint32_t c = 0; c < W::kChunks; ++c) values[0][c] = values[1][c];
      }
    }
  }
}

// Their scales, of kRows rows at most, into the cache: thread i has number W::scale_at(i) (block by block, a zero point behind
// its scale) of row W::scale_row(i); there is none of these for one number or one row.
template <typename W, uint32_t kThreads, typename Cache, typename Slot, uint32_t kRows, uint32_t kNumbers>
__device__ __forceinline__ void store_row_scales(const Cache& cache, const Slot (&cache_slots)[kRows], uint32_t rows,
                                                 const typename W::Stored::Scale (&scales)[kRows][kNumbers], uint32_t head0 = 0) {
  using S = typename W::Stored;
  using Blocks = RowBlocks<W>;
  for (uint32_t i = threadIdx.x; i < kRows * kNumbers; i += kThreads) {
    uint32_t row = 0, at = 0;
    if constexpr (kRows > 1) row = W::scale_row(i);
    if constexpr (kNumbers > 1) at = W::scale_at(i);
    if (row >= rows) continue;
    const uint32_t block = at / Blocks::kEach;
    const Slot& to = cache_slots[row];
    if (!S::found(to.page)) continue;
    scale_at<S>(cache, to.page, to.token, head0 + Blocks::head(block), Blocks::dim(block))[at % Blocks::kEach] = scales[row][at];
    if (at + 1 == kNumbers) store_scale_pad<S>(cache, to.page, to.token);
  }
}
