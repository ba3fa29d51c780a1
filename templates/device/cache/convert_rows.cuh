// Tokens moved from a cache of another spec: runs that are copied vector by vector, and blocks that are quantized anew. A slot in
// shared memory has a token's source and destination: pages `from` and `to`, `from_token` and `to_token` in them. A token that is
// not `live` stays as it is. If the caches have different heads, some heads move: a HeadPair names the first ones.
//
//   struct KeyValues {                          // a run: views of stored.cuh with the same type
//     using From = Values<source::Key, bf16>;
//     using To = Values<Key, bf16>;
//     static constexpr uint32_t kRows = 8;      // tokens of a block
//     static constexpr uint32_t kWidth = 8, kVectors = 16;  // elements of a vector, vectors of a token's heads that move
//     static constexpr bool kByToken = false;   // neighbouring threads have neighbouring tokens, which share sectors
//   };
//   struct KeyBlocks {                          // blocks that share a scale
//     using Segment = Key;
//     using From = Values<source::Key, bf16>;
//     static constexpr uint32_t kRows = 8, kBlocks = 4, kDimBlocks = 1;  // blocks of a token's moved heads, and of a head's dims
//     static constexpr uint32_t kLanes = 16, kWidth = 8, kChunks = 1;    // lanes of a block, which have kChunks vectors each
//     static constexpr uint32_t kUnits = 2;     // blocks that a lane has in registers; 0: none, its values are read twice
//     static constexpr uint32_t kUnroll = 1;    // vectors of a lane that are written out
//     static constexpr bool kByToken = false, kScalesByToken = false;
//   };
#pragma once

#include "stored.cuh"

// The first head that moves: in the source, and where it goes.
struct HeadPair {
  uint32_t from, to;
};

// Which token and which part of it thread or unit i has.
struct TokenPart {
  uint32_t row, part;
};
template <bool kByToken, uint32_t kRows, uint32_t kParts>
__device__ __forceinline__ TokenPart token_part(uint32_t i) {
  if constexpr (kByToken) {
    return {i % kRows, i / kRows};
  } else {
    return {i / kParts, i % kParts};
  }
}

// Copies a run of every live token. All threads call it; kInFlight vectors of a thread are on their way at once.
template <typename Run, uint32_t kThreads, uint32_t kInFlight, typename Slot, typename Source, typename Cache>
__device__ __forceinline__ void store_run(const Slot* slots, const Source& source, const Cache& cache, HeadPair head = {0, 0}) {
  constexpr uint32_t kAll = Run::kRows * Run::kVectors;
  const typename Run::From from(source);
  const typename Run::To to(cache);
  const uint32_t begin_from = head.from / Run::From::kHeads * Run::From::kDims, begin_to = head.to / Run::To::kHeads * Run::To::kDims;
  for (uint32_t base = threadIdx.x; base < kAll; base += kThreads * kInFlight) {
    Vec<typename Run::To::Type, Run::kWidth> value[kInFlight];
    bool live[kInFlight];
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      const uint32_t i = base + u * kThreads;
      const auto [row, vector] = token_part<Run::kByToken, Run::kRows, Run::kVectors>(i);
      live[u] = i < kAll && slots[row].live;
      fill(value[u], typename Run::To::Type{});  // so that the vector stays words in registers, loaded or not
      if (live[u]) from.load(value[u], source, slots[row].from, slots[row].from_token, begin_from + vector * Run::kWidth);
    }
#pragma unroll
    for (uint32_t u = 0; u < kInFlight; ++u) {
      const uint32_t i = base + u * kThreads;
      const auto [row, vector] = token_part<Run::kByToken, Run::kRows, Run::kVectors>(i);
      if (live[u]) to.store(cache, slots[row].to, slots[row].to_token, begin_to + vector * Run::kWidth, value[u]);
    }
  }
}

// The first element of block `block` of a token, heads counted from the first that moves.
struct BlockPlace {
  uint32_t head, dim;
};
template <typename B>
__device__ __forceinline__ BlockPlace block_place(uint32_t block) {
  using S = typename B::Segment;
  return {block / B::kDimBlocks * S::kBlockHeads, block % B::kDimBlocks * S::kBlockDims};
}

// Loads vector c of lane `lane` of a block of a live token, whose heads the source counts from `first_head`; nothing of what is
// past the block or the segment.
template <typename B, typename Slot, typename Source>
__device__ __forceinline__ void load_vector(Vec<typename B::From::Type, B::kWidth>& value, const typename B::From& from, const Source& source,
                                            const Slot* slots, uint32_t first_head, uint32_t unit, uint32_t lane, uint32_t c) {
  using S = typename B::Segment;
  constexpr uint32_t kBlock = S::kBlockHeads * S::kBlockDims;
  constexpr bool kWhole = kBlock % (B::kLanes * B::kWidth) == 0 && S::kSize % S::kBlockDims == 0;
  const auto [row, block] = token_part<B::kByToken, B::kRows, B::kBlocks>(unit);
  if (!slots[row].live) return;
  const BlockPlace first = block_place<B>(block);
  const uint32_t element = (c * B::kLanes + lane) * B::kWidth, dim = first.dim + element % S::kBlockDims;
  const uint32_t head = first_head + first.head + element / S::kBlockDims;
  if (!kWhole && (element >= kBlock || dim >= S::kSize)) return;
  from.load(value, source, slots[row].from, slots[row].from_token, head * S::kSize + dim);
}

// Quantizes and stores the blocks of every live token; their scales, each followed by its zero point if there is one, go to
// `scales` [kRows][kBlocks] in shared memory. kLanes neighbouring lanes have a block. All threads call it.
template <typename B, uint32_t kThreads, typename Slot, typename Source, typename Cache>
__device__ __forceinline__ void store_blocks(typename B::Segment::Scale* scales, const Slot* slots, const Source& source, const Cache& cache,
                                             HeadPair head = {0, 0}) {
  using S = typename B::Segment;
  using Type = typename B::From::Type;
  constexpr bool kHeld = B::kUnits > 0;
  constexpr uint32_t kUnits = kHeld ? B::kUnits : 1, kAll = B::kRows * B::kBlocks, kStep = kThreads / B::kLanes;
  const float global = global_scale_of<S>(cache);
  const typename B::From from(source);
  const uint32_t lane = threadIdx.x % B::kLanes, mask = (~0u >> (32 - B::kLanes)) << (threadIdx.x % 32 - lane);
  for (uint32_t base = threadIdx.x / B::kLanes; base < kAll; base += kStep * kUnits) {
    Vec<Type, B::kWidth> values[kUnits][kHeld ? B::kChunks : 1];
#pragma unroll
    for (uint32_t n = 0; kHeld && n < kUnits * B::kChunks; ++n) {
      const uint32_t unit = base + n / B::kChunks * kStep;
      Vec<Type, B::kWidth>& value = values[n / B::kChunks][n % B::kChunks];
      fill(value, Type{});  // so that the vector stays words in registers, loaded or not
      if (unit < kAll) load_vector<B>(value, from, source, slots, head.from, unit, lane, n % B::kChunks);
    }
    // One body for all units, which move up in the registers: unrolled, it would take twice as many.
#pragma unroll 1
    for (uint32_t unit = base; unit < min(base + kStep * kUnits, kAll); unit += kStep) {
      const auto [row, block] = token_part<B::kByToken, B::kRows, B::kBlocks>(unit);
      const auto chunk = [&](float (&x)[B::kWidth], uint32_t c) {
        if constexpr (!kHeld) load_vector<B>(values[0][0], from, source, slots, head.from, unit, lane, c);
        unpack<Type>(x, values[0][kHeld ? c : 0]);
      };
      const uint32_t number = (row * B::kBlocks + block) * (1 + S::kZero);
      const auto keep = [&](typename S::Scale scale, typename S::Scale zero) {
        scales[number] = scale;
        if constexpr (S::kZero) scales[number + 1] = zero;
      };
      const BlockPlace at = block_place<B>(block);
      const Slot& slot = slots[row];
      if (slot.live) {
        store_codes<S, B::kLanes, B::kWidth, B::kChunks, B::kUnroll>(slot.to, slot.to_token, head.to + at.head, at.dim, lane, mask, global, chunk, keep);
      }
#pragma unroll
      for (uint32_t c = 0; kUnits > 1 && c < B::kChunks; ++c) values[0][c] = values[kUnits - 1][c];
    }
  }
}

// Stores the scales and zero points that store_blocks left in shared memory, of heads from `first_head` on: neighbouring threads
// store neighbours.
template <typename B, uint32_t kThreads, typename Slot, typename Cache>
__device__ __forceinline__ void store_scales(const typename B::Segment::Scale* scales, const Slot* slots, const Cache& cache, uint32_t first_head = 0) {
  using S = typename B::Segment;
  constexpr uint32_t kEach = 1 + S::kZero, kNumbers = B::kBlocks * kEach;
  for (uint32_t i = threadIdx.x; i < B::kRows * kNumbers; i += kThreads) {
    const auto [row, number] = token_part<B::kScalesByToken, B::kRows, kNumbers>(i);
    if (!slots[row].live) continue;
    const BlockPlace at = block_place<B>(number / kEach);
    scale_at<S>(cache, slots[row].to, slots[row].to_token, first_head + at.head, at.dim)[number % kEach] = scales[row * kNumbers + number];
    if (number + 1 == kNumbers) store_scale_pad<S>(cache, slots[row].to, slots[row].to_token);
  }
}
