// Rows on their way to where products of warpgroups read them (row_wgmma.cuh), 16 bytes at a time: rows of Q, and those of K and
// V that tensor copies cannot bring, of pages of one token for instance.
#pragma once

#include "../../memory/cp_async.cuh"
#include "row_wgmma.cuh"

// The address that another lane has.
template <typename T>
__device__ __forceinline__ const T* pointer_of_lane(const T* p, uint32_t lane) {
  return (const T*)__shfl_sync(~0u, (unsigned long long)p, lane);
}

// Starts the copies of kRows rows of kDims elements by one warp: lane n has the address `from` of row first + n, first a multiple
// of 8 (nullptr: the row becomes zeros). Eight lanes copy 64 dims of a row, so that a warp asks for four whole lines of memory,
// and writes to different banks.
template <uint32_t kDims, uint32_t kRows, typename T>
__device__ __forceinline__ void copy_rows_async(uint8_t* to, uint32_t first, const T* from) {
  const uint32_t dim = threadIdx.x % 8 * 8;
  uint32_t row = threadIdx.x % 32 / 8;
  asm volatile("" : "+r"(row));  // or the compiler keeps a register for each four rows from tile to tile
  uint8_t* const even = to + group_offset<kDims>(first + row, dim);
  uint8_t* const odd = to + group_offset<kDims>(first + row + 4, dim);
#pragma unroll
  for (uint32_t n = 0; n < kRows; n += 4) {
    const T* begin = pointer_of_lane(from, n + row);
#pragma unroll
    for (uint32_t chunk = 0; chunk < kDims / 64; ++chunk)
      cp_async16((n % 8 ? odd : even) + n / 8 * kGroupBytes<kDims> + chunk * 1024, begin + chunk * 64 + dim, begin != nullptr);
  }
}
