// Pieces of attention over latent rows, one row for keys and values of all heads (ops/mla_mma.cu.j2).
#pragma once

#include "../common/fragments.cuh"
#include "../../memory/ring.cuh"

// Copies kTokens rows of kChunks times 16 bytes each, kTogether rows by kLanes lanes: rows[t], or zeros if it is null.
template <uint32_t kThreads, uint32_t kTokens, uint32_t kPitch, uint32_t kChunks, uint32_t kLanes, uint32_t kTogether>
__device__ __forceinline__ void copy_rows(uint32_t to, const uint8_t* const* rows) {
  constexpr uint32_t kUnits = kTokens / kTogether, kAtOnce = kThreads / kLanes, kAll = kTogether * kChunks;
  static_assert(kTokens % kTogether == 0);
  const uint32_t lane = threadIdx.x % kLanes;
#pragma unroll
  for (uint32_t n = 0; n < (kUnits + kAtOnce - 1) / kAtOnce; ++n) {
    const uint32_t unit = n * kAtOnce + threadIdx.x / kLanes;
    if (kUnits % kAtOnce != 0 && unit >= kUnits) break;
    if constexpr (kTogether == 1 && kChunks % kLanes == 0) {
      const uint8_t* row = rows[unit];
      const uint32_t mine = to + unit * kPitch + lane * 16;
#pragma unroll
      for (uint32_t i = 0; i < kChunks / kLanes; ++i) cp_async<16>(mine + i * kLanes * 16, row + (lane + i * kLanes) * 16, row != nullptr);
    } else {
      // Addresses first: if they alternate with copies, each copy waits for the one before.
      constexpr uint32_t kSteps = (kAll + kLanes - 1) / kLanes;
      const uint8_t* from[kSteps];
#pragma unroll
      for (uint32_t i = 0; i < kSteps; ++i) {
        const uint32_t chunk = min(lane + i * kLanes, kAll - 1);
        from[i] = rows[unit * kTogether + chunk / kChunks];
      }
#pragma unroll
      for (uint32_t i = 0; i < kSteps; ++i) {
        const uint32_t chunk = lane + i * kLanes, at = chunk % kChunks * 16;
        if (chunk < kAll) cp_async<16>(to + (unit * kTogether + chunk / kChunks) * kPitch + at, from[i] + at, from[i] != nullptr);
      }
    }
  }
}

// The softmax over a tile: kThreads / kCols neighbouring threads have a column, kEach of its tokens each.
template <uint32_t kThreads, uint32_t kCols, uint32_t kTokens>
struct ColumnThreads {
  static constexpr uint32_t kMembers = kThreads / kCols, kEach = kTokens / kMembers, kVector = kEach < 4 ? kEach : 4;
  static constexpr uint32_t kColsOfWarp = 32 / kMembers;
  // Eight lanes that read 16 bytes each are one column's, or eight columns'.
  static constexpr bool kMembersFirst = kMembers >= 8;
  static constexpr uint32_t kStep = kMembersFirst ? 1 : kColsOfWarp;  // from a member's lane to the next one's
  static_assert(kMembers <= 32 && kEach % kVector == 0);

  __device__ static uint32_t col() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return warp * kColsOfWarp + (kMembersFirst ? lane / kMembers : lane % kColsOfWarp);
  }
  __device__ static uint32_t member() { return kMembersFirst ? threadIdx.x % kMembers : threadIdx.x % 32 / kColsOfWarp; }
  // The token of this thread's score number n.
  __device__ static uint32_t token(uint32_t n) { return (n / kVector * kMembers + member()) * kVector + n % kVector; }

  // The scores of this column, from partial sums in kParts arrays.
  template <uint32_t kParts, uint32_t kRow>
  __device__ static __forceinline__ void read(float (&x)[kEach], const float (&scores)[kParts][kCols][kRow]) {
#pragma unroll
    for (uint32_t n = 0; n < kEach; n += kVector) {
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
        const auto found = *(const Vec<float, kVector>*)&scores[part][col()][token(n)];
#pragma unroll
        for (uint32_t i = 0; i < kVector; ++i) x[n + i] = part == 0 ? found.e[i] : x[n + i] + found.e[i];
      }
    }
  }
  __device__ static __forceinline__ float largest(float x) {
#pragma unroll
    for (uint32_t step = kStep; step < kStep * kMembers; step *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  __device__ static __forceinline__ float total(float x) {
#pragma unroll
    for (uint32_t step = kStep; step < kStep * kMembers; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }
};

// Weights of a tile, 16 bits each, a column a row. 16-byte pieces are placed so that reads of 8 matrix rows, and writes
// of neighbouring threads, have no bank conflicts.
template <uint32_t kCols, uint32_t kTokens>
struct Weights {
  static constexpr uint32_t kChunks = kTokens / 8;
  static_assert(kChunks == 4 || kChunks == 8);
  alignas(16) uint16_t e[kCols * kTokens];

  __device__ static uint32_t place(uint32_t col, uint32_t token) {
    const uint32_t chunk = token / 8 ^ (kChunks == 4 ? col / 2 % 4 : col % 8);
    return (col * kChunks + chunk) * 8 + token % 8;
  }
  template <typename T, typename Threads>
  __device__ __forceinline__ void store(const float (&x)[Threads::kEach]) {
    constexpr uint32_t kVector = Threads::kVector;
#pragma unroll
    for (uint32_t n = 0; n < Threads::kEach; n += kVector) {
      uint16_t* to = &e[place(Threads::col(), Threads::token(n))];
      uint32_t pair[(kVector + 1) / 2];
#pragma unroll
      for (uint32_t i = 0; i + 1 < kVector; i += 2) pack_pair((T*)&pair[i / 2], x[n + i], x[n + i + 1]);
      if constexpr (kVector == 1) *to = from_f32<T>(x[n]).bits;
      if constexpr (kVector == 2) *(uint32_t*)to = pair[0];
      if constexpr (kVector == 4) *(uint64_t*)to = pair[0] | (uint64_t)pair[1] << 32;
    }
  }
  // b of every tile of 8 columns, for the tile's tokens from 16 k on.
  __device__ __forceinline__ void load(uint32_t (&b)[kCols / 8][2], uint32_t k, uint32_t lane) const {
    constexpr uint32_t kAtOnce = kCols > 8 ? 2 : 1;
#pragma unroll
    for (uint32_t n = 0; n < kCols / 8; n += kAtOnce) {
      uint32_t r[2 * kAtOnce];
      load_matrices(r, matrix_address(&e[place(8 * n + lane / 16 % kAtOnce * 8 + lane % 8, k * 16 + lane / 8 % 2 * 8)]));
#pragma unroll
      for (uint32_t i = 0; i < 2 * kAtOnce; ++i) b[n + i / 2][i % 2] = r[i];
    }
  }
};

// The largest magnitude of scales of 16 rows, without scales that are infinite, NaN or huge; lane 4g + j has rows g and g + 8.
__device__ __forceinline__ float largest_of_rows(const float (&x)[2]) {
  const auto usual = [](float y) { return fabsf(y) < 1e37f ? fabsf(y) : 0.0f; };
  float largest = fmaxf(usual(x[0]), usual(x[1]));
#pragma unroll
  for (uint32_t step = 4; step < 32; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  return largest;
}

// A power of two above every scale so far, so that quotients by it are f16 below 1.
struct ScaleUnit {
  float value = 0.0f, inverse = 0.0f;

  __device__ __forceinline__ bool below(float scale) const { return scale >= value && scale > 0.0f && scale < 1e37f; }
  // Raises the unit above `scale`; returns the factor of sums relative to the old unit.
  __device__ __forceinline__ float raise(float scale) {
    const uint32_t exponent = __float_as_uint(scale) / (1u << 23) + 1, old = __float_as_uint(inverse);
    const float before = value;
    value = __uint_as_float(exponent << 23);
    inverse = __uint_as_float((254 - exponent) << 23);
    return old == 0 ? 1.0f : before * inverse;
  }
};

// Turns infinities and NaNs among the first kDims elements of a row in shared memory into zeros; a warp does it.
template <typename E, uint32_t kDims>
__device__ __forceinline__ void clear_special(uint8_t* row) {
  using Bits = typename Word<sizeof(E)>::type;
  constexpr Bits kSpecial = sizeof(E) == 1 ? 0x7f : sizeof(E) == 4 ? 0x7f800000u : kSame<E, f16> ? 0x7c00 : 0x7f80;
  for (uint32_t i = threadIdx.x % 32; i < kDims; i += 32) {
    Bits& x = ((Bits*)row)[i];
    if ((x & kSpecial) == kSpecial) x = 0;
  }
}
