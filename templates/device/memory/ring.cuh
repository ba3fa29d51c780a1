// Tiles of K and V on their way into shared memory: a token a row, rows an odd number of 16 bytes apart
// (device/attention/common/fragments.cuh).
#pragma once

#include "cp_async.cuh"

// Shared memory of a multiprocessor, in KB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr uint32_t kSharedKb = 228;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
constexpr uint32_t kSharedKb = 164;
#else
constexpr uint32_t kSharedKb = 100;
#endif

// Zeros to an array in shared memory, a multiple of 16 bytes, by kThreads threads; readers need a barrier.
template <uint32_t kThreads, typename T>
__device__ __forceinline__ void clear_shared(T& array) {
  for (uint32_t i = threadIdx.x; i < sizeof(array) / 16; i += kThreads) ((Vec<uint32_t, 4>*)&array)[i] = {};
}

// A barrier of the kThreads threads of team `team`, one of at most 15.
template <uint32_t kThreads>
__device__ __forceinline__ void sync_team(uint32_t team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kThreads) : "memory");
}

// The asynchronous copies of one role's rows by kThreads threads: kBytes a row, kAccess at a time.
template <uint32_t kRowBytes, uint32_t kAccessBytes, uint32_t kRowPitch, uint32_t kTokens, uint32_t kThreads>
struct TileCopy {
  static constexpr uint32_t kBytes = kRowBytes, kAccess = kAccessBytes, kPitch = kRowPitch;
  static constexpr uint32_t kChunks = kBytes / kAccess, kAll = kChunks * kTokens;
  // Eight neighbouring lanes write 128 bytes of one row where rows have so many: no two in one bank. Their next rows are its
  // neighbours, which the immediate of a copy's address reaches.
  static constexpr bool kEights = kChunks % 8 == 0 && kThreads / 8 <= kTokens && kTokens % (kThreads / 8) == 0;
  // Else 64 bytes of two rows that are four apart, again in different banks: of a block of 8 rows, four such pairs.
  static constexpr bool kFours = !kEights && kChunks % 4 == 0 && kAccess == 16 && kTokens % 8 == 0 && kTokens / 2 % (kThreads / 8) == 0;
  static constexpr uint32_t kSteps = (kAll + kThreads - 1) / kThreads;
  static_assert(kBytes % kAccess == 0 && kThreads % 8 == 0);

  // The row and chunk of a thread's copy number `step`.
  __device__ static constexpr uint32_t row(uint32_t step, uint32_t thread) {
    if constexpr (kEights) {
      return step / (kChunks / 8) + thread / 8 * (kTokens / (kThreads / 8));
    } else if constexpr (kFours) {
      const uint32_t pair = step / (kChunks / 4) * (kThreads / 8) + thread / 8;
      return pair / 4 * 8 + pair % 4 + thread % 8 / 4 * 4;
    } else {
      return (step * kThreads + thread) / kChunks;
    }
  }
  __device__ static constexpr uint32_t chunk(uint32_t step, uint32_t thread) {
    if constexpr (kEights) return step % (kChunks / 8) * 8 + thread % 8;
    else if constexpr (kFours) return step % (kChunks / 4) * 4 + thread % 4;
    else return (step * kThreads + thread) % kChunks;
  }
  // True if a thread has a copy number `step`.
  __device__ static constexpr bool has(uint32_t step, uint32_t thread) { return kAll % kThreads == 0 || step * kThreads + thread < kAll; }

  // Rows that lie kStep bytes apart from `first` on: all of them.
  template <uint64_t kStep>
  __device__ static __forceinline__ void all(uint32_t to, const uint8_t* first, uint32_t thread) {
    const uint32_t mine = to + row(0, thread) * kPitch + chunk(0, thread) * kAccess;
    const uint8_t* from = first + row(0, thread) * kStep + chunk(0, thread) * kAccess;
    asm("" : "+l"(from));  // or the compiler makes every copy's address of the page's id and stride anew
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
      if (!has(step, thread)) break;
      if constexpr (kEights || kFours) {
        cp_async<kAccess>(mine + row(step, 0) * kPitch + chunk(step, 0) * kAccess, from + row(step, 0) * kStep + chunk(step, 0) * kAccess);
      } else {
        cp_async<kAccess>(to + row(step, thread) * kPitch + chunk(step, thread) * kAccess,
                          first + row(step, thread) * kStep + chunk(step, thread) * kAccess);
      }
    }
  }

  // Rows [begin, end) of them, zeros for the others.
  template <uint64_t kStep>
  __device__ static __forceinline__ void some(uint32_t to, const uint8_t* first, uint32_t thread, uint32_t begin, uint32_t end) {
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
      if (!has(step, thread)) break;
      const uint32_t r = row(step, thread), c = chunk(step, thread) * kAccess;
      cp_async<kAccess>(to + r * kPitch + c, first + r * kStep + c, r >= begin && r < end);
    }
  }

  // Rows that lie anywhere: `address` is that of row `lane`, null for zeros. All lanes of the warp call it.
  __device__ static __forceinline__ void scattered(uint32_t to, const uint8_t* address, uint32_t thread) {
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
      const uint32_t r = row(step, thread), c = chunk(step, thread) * kAccess;
      const uint64_t from = __shfl_sync(~0u, (uint64_t)address, r % 32);
      if (has(step, thread)) cp_async<kAccess>(to + r * kPitch + c, (const uint8_t*)from + c, from != 0);
    }
  }
};
