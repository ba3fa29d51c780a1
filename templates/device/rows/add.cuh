// Adding rows to what a cache holds: an element is read, added to in f32 and written back by one thread, a block with a
// computed scale by its lanes. The rows' own elements may be asked for before it is known where they go: load_rows, then
// store_sum.
//
// A block of kThreads threads has some neighbouring rows, or a part of one; its threads take their slots in turn, kBatch each:
// `first` and every kThreads-th one on, counted through the rows. Accesses to the rows are kAccess elements wide. A struct A,
// spelled out in the kernel, names the segment Stored, kThreads, kBatch, kWidth and kAccess, and kLanes, kChunks and kUnroll of
// blocks.
#pragma once

// Elements that are written on their own, kWidth at a time: as they are, cast, or divided by a given scale.
template <typename Cache, typename A>
struct VectorAdd {
  using S = typename A::Stored;
  static constexpr uint32_t kThreads = A::kThreads, kBatch = A::kBatch, kWidth = A::kWidth, kAccess = A::kAccess;
  using Value = typename S::Compute;
  using Slot = TokenSlot<typename Cache::Page>;
  static constexpr uint32_t kSlots = Cache::kHeads * S::kSize / kWidth;  // a row

  Vec<Value, kWidth> more[kBatch];

  __device__ __forceinline__ void load_rows(const Value* from, int64_t stride, uint32_t rows, uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = first + u * kThreads;
      if (i < rows * kSlots) load<kAccess>(more[u], from + i / kSlots * stride + i % kSlots * kWidth);
    }
  }

  __device__ __forceinline__ void store_sum(const Cache& cache, const Slot* cache_slots, const Value*, int64_t, uint32_t rows,
                                      uint32_t first) {
    Vec<float, kWidth> sum[kBatch];
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = first + u * kThreads, element = i % kSlots * kWidth;
      if (i >= rows * kSlots || !cache_slots[i / kSlots].page.found()) continue;
      const Slot& to = cache_slots[i / kSlots];
      load_elements<S>(sum[u], cache, to.page, to.token, element / S::kSize, element % S::kSize);
    }
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t i = first + u * kThreads, element = i % kSlots * kWidth;
      if (i >= rows * kSlots || !cache_slots[i / kSlots].page.found()) continue;
      const Slot& to = cache_slots[i / kSlots];
#pragma unroll
      for (uint32_t j = 0; j < kWidth; ++j) sum[u].e[j] = __fadd_rn(sum[u].e[j], to_f32(more[u].e[j]));
      store_elements<S>(cache, to.page, to.token, element / S::kSize, element % S::kSize, sum[u]);
    }
  }
};

// The scale and zero point of one block, as its readers take them.
struct BlockScale {
  float scale[1], zero[1];
};

// N values of one block.
template <typename S, uint32_t N>
__device__ __forceinline__ void dequantize_in_block(float (&x)[N], const Raw<typename S::Element, N>& raw, const BlockScale& of, float global) {
  if constexpr (S::kRecipe == Recipe::nvfp4_max) {
    dequantize_max(x, raw, of.scale);
  } else if constexpr (S::kRecipe == Recipe::nvfp4_global) {
    dequantize_global(x, raw, of.scale, global);
  } else if constexpr (S::kRecipe == Recipe::least) {
    dequantize_from_least<typename S::Element>(x, raw, of.scale, of.zero);
  } else if constexpr (S::kRecipe == Recipe::signs) {
    dequantize_signs(typename S::Element{}, x, raw, of.scale, of.zero);
  } else if constexpr (S::kZero) {
    dequantize<typename S::Element>(x, raw, of.scale, of.zero);
  } else {
    dequantize<typename S::Element>(x, raw, of.scale);
  }
}

// Blocks whose scale a write computes, kLanes neighbouring lanes each (see store_block). kHeld: a lane keeps its codes and its
// part of the rows in registers; else it reads them twice. The old scale it keeps in any case, the new one overwrites it.
template <typename Cache, typename A>
struct BlockAdd {
  using S = typename A::Stored;
  static constexpr uint32_t kThreads = A::kThreads, kBatch = A::kBatch, kWidth = A::kWidth, kAccess = A::kAccess;
  static constexpr uint32_t kLanes = A::kLanes, kChunks = A::kChunks, kUnroll = A::kUnroll;
  using Value = typename S::Compute;
  using Slot = TokenSlot<typename Cache::Page>;
  static constexpr bool kHeld = kUnroll == kChunks;
  static constexpr uint32_t kKept = kHeld ? kChunks : 1, kBlock = S::kBlockHeads * S::kBlockDims;
  static constexpr uint32_t kGroups = (S::kSize + S::kBlockDims - 1) / S::kBlockDims;
  static constexpr uint32_t kBlocks = (Cache::kHeads + S::kBlockHeads - 1) / S::kBlockHeads * kGroups;
  static constexpr uint32_t kSlots = kBlocks * kLanes;  // a row

  using Scales = Vec<typename S::Scale, 1 + S::kZero>;
  using Codes = Raw<typename S::Element, kWidth>;
  Vec<Value, kWidth> more[kBatch][kKept];

  // The head and dim of chunk c of a slot; whether there is such a chunk.
  struct Chunk {
    uint32_t head, dim;
    bool live;
  };
  __device__ static __forceinline__ Chunk chunk_of(uint32_t slot, uint32_t c) {
    const uint32_t block = slot % kSlots / kLanes, element = (c * kLanes + slot % kLanes) * kWidth;
    const uint32_t dim = block % kGroups * S::kBlockDims + element % S::kBlockDims;
    return {block / kGroups * S::kBlockHeads + element / S::kBlockDims, dim, element < kBlock && dim < S::kSize};
  }
  __device__ static __forceinline__ void load_row(Vec<Value, kWidth>& out, const Value* from, int64_t stride, uint32_t slot, Chunk at) {
    load<kAccess>(out, from + slot / kSlots * stride + at.head * S::kSize + at.dim);
  }

  __device__ __forceinline__ void load_rows(const Value* from, int64_t stride, uint32_t rows, uint32_t first) {
    if constexpr (kHeld) {
#pragma unroll
      for (uint32_t u = 0; u < kBatch; ++u)
#pragma unroll
        for (uint32_t c = 0; c < kChunks; ++c) {
          const uint32_t slot = first + u * kThreads;
          const Chunk at = chunk_of(slot, c);
          if (slot < rows * kSlots && at.live) load_row(more[u][c], from, stride, slot, at);
        }
    }
  }

  __device__ __forceinline__ void store_sum(const Cache& cache, const Slot* cache_slots, const Value* from, int64_t stride,
                                      uint32_t rows, uint32_t first) {
    const float global = global_scale_of<S>(cache);
    const uint32_t lane = threadIdx.x % kLanes, mask = 0xffffffffu >> (32 - kLanes) << (threadIdx.x % 32 - lane);
    Codes codes[kBatch][kKept];
    Scales scales[kBatch];
    load_old(scales, codes, cache, cache_slots, rows, first);
    if constexpr (kLanes > 1) __syncwarp(mask);  // all lanes have the old scale, before the first one overwrites it
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t slot = first + u * kThreads;
      if (slot >= rows * kSlots || !cache_slots[slot / kSlots].page.found()) continue;
      const Slot& to = cache_slots[slot / kSlots];
      const uint32_t block = slot % kSlots / kLanes;
      BlockScale old = {{to_f32(scales[u].e[0])}, {S::kZero ? to_f32(scales[u].e[S::kZero]) : 0.0f}};
      if constexpr (kCorrected<S>) {
        const Chunk first = chunk_of(slot - lane, 0);
        old.scale[0] = corrected_scale<S, kLanes, kWidth>(old.scale[0], to.page, to.token, first.head, first.dim, lane, mask);
      }
      const auto sum = [&](float (&x)[kWidth], uint32_t c) {
        Vec<Value, kWidth> row;
        if constexpr (kHeld) {
          dequantize_in_block<S>(x, codes[u][c], old, global);
          row = more[u][c];
        } else {
          const Chunk at = chunk_of(slot, c);
          Raw<typename S::Element, kWidth> raw;
          load_codes<S, kWidth>(raw, to.page, to.token, at.head, at.dim);
          load_row(row, from, stride, slot, at);
          dequantize_in_block<S>(x, raw, old, global);
        }
#pragma unroll
        for (uint32_t j = 0; j < kWidth; ++j) x[j] = __fadd_rn(x[j], to_f32(row.e[j]));
      };
      store_block<S, kLanes, kWidth, kChunks, kUnroll>(cache, to.page, to.token, block / kGroups * S::kBlockHeads,
                                                       block % kGroups * S::kBlockDims, lane, mask, global, sum);
    }
  }

 private:
  // The cache's values in the thread's slots: the scale of each and, if kHeld, its codes.
  __device__ static __forceinline__ void load_old(Scales (&scales)[kBatch], Codes (&codes)[kBatch][kKept], const Cache& cache, const Slot* cache_slots,
                                                  uint32_t rows, uint32_t first) {
#pragma unroll
    for (uint32_t u = 0; u < kBatch; ++u) {
      const uint32_t slot = first + u * kThreads;
      if (slot >= rows * kSlots || !cache_slots[slot / kSlots].page.found()) continue;
      const Slot& to = cache_slots[slot / kSlots];
      const uint32_t block = slot % kSlots / kLanes;
      load_scales<S, S::kBlockDims, 1>(scales[u], cache, to.page, to.token, block / kGroups * S::kBlockHeads, block % kGroups * S::kBlockDims);
      if constexpr (kHeld) {
#pragma unroll
        for (uint32_t c = 0; c < kChunks; ++c) {
          const Chunk at = chunk_of(slot, c);
          if (at.live) load_codes<S, kWidth>(codes[u][c], to.page, to.token, at.head, at.dim);
        }
      }
    }
  }
};
