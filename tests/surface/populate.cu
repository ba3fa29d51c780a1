#include "cache.cuh"

// Rows of a tile, then a few of its tokens' rows; 16 numbers a form.
template <uint32_t BN, uint32_t kAlign, bool kPair, bool kLeader, typename C>
__device__ void put(const C& c, uint32_t* out, uint32_t b, uint32_t tile) {
  const auto found = c.template populate<BN, kAlign, kPair, kLeader>(b, tile * kAlign);
  constexpr uint32_t kPages = sizeof(found.rows) / 4;
#pragma unroll
  for (uint32_t i = 0; i < kPages; ++i) out[i] = found.rows[i];
  out[8] = found.get_row(0);
  out[9] = found.get_row(BN - 1);
  out[10] = found.get_k_row(0);
  out[11] = found.get_k_row(BN / 2 - 1);
  out[12] = kPages;
}

// page_size 1 and 0 have forms of their own.
template <typename C>
__device__ void forms(const C& c, uint32_t* out, uint32_t b, uint32_t tile) {
  if constexpr (C::page_size_ == 1) {
    put<8, 8, false, true>(c, out, b, tile);
    put<4, 2, false, true>(c, out + 16, b, tile);
    put<1, 1, false, true>(c, out + 32, b, tile);
    put<8, 8, true, false>(c, out + 48, b, tile);
  } else {
    put<128, 128, false, true>(c, out, b, tile);
    put<64, 32, true, false>(c, out + 16, b, tile);
    put<16, 16, true, true>(c, out + 32, b, tile);
    put<8, 8, true, false>(c, out + 48, b, tile);
  }
}

extern "C" __global__ void populate(const __grid_constant__ Cache cache, const uint32_t* places, uint32_t* rows, uint32_t count) {
  pdl_wait();
  const uint32_t i = blockIdx.x;
  if (threadIdx.x == 0) forms(get_key_cache(cache), rows + i * 128, places[i * 2], places[i * 2 + 1]);
#if HAS_V
  if (threadIdx.x == 1) forms(get_value_cache(cache), rows + i * 128 + 64, places[i * 2], places[i * 2 + 1]);
#endif
}
