// Heads in registers out of them: into the caller's q_out, into the cache, or into a tile in shared memory, from which
// write_rows.cuh stores what is quantized by blocks or lies token by token.
#pragma once

#include "heads.cuh"
#include "new_rows.cuh"

// A head of q_out as T, from `out` on: NaN where the row is unknown, nothing where it is padding.
template <typename T, typename H>
__device__ __forceinline__ void store_q_out(T* out, Head<H>& x, RowState state, uint32_t lane) {
  if (state == RowState::padding) return;
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t e) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] = state == RowState::known ? at[j] : nan_f32();
    write(out + e, at);
  });
}

// store_q_out as codes of x / *q_scale; without q_scale, codes of x.
template <typename T, typename H>
__device__ __forceinline__ void store_q_codes(T* out, Head<H>& x, RowState state, const float* q_scale, uint32_t lane) {
  if (state == RowState::padding) return;
  const float divisor = given_scale(q_scale);
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t e) {
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) at[j] = state == RowState::known ? at[j] : nan_f32();
    divide(at, divisor);
    write(out + e, at);
  });
}

// A head of segment S, whose dims from `begin` on these are; nothing where the page has null pointers.
template <typename S, typename Cache, typename Slot, typename H>
__device__ __forceinline__ void store_head(const Cache& cache, const Slot& to, uint32_t head, uint32_t begin, Head<H>& x, uint32_t lane) {
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t e) {
    if (!to.page.found()) return;
    Vec<float, H::kWidth> values;
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) values.e[j] = at[j];
    store_elements<S>(cache, to.page, to.token, head, begin + e, values);
  });
}

// A head of a tile, from `out` in shared memory on.
template <typename H>
__device__ __forceinline__ void store_tile(float* out, Head<H>& x, uint32_t lane) {
  x.vectors(lane, [&](float (&at)[H::kWidth], uint32_t e) {
    Vec<float, H::kWidth> values;
#pragma unroll
    for (uint32_t j = 0; j < H::kWidth; ++j) values.e[j] = at[j];
    store<H::kWidth < 4 ? H::kWidth : 4>(out + e, values);
  });
}
