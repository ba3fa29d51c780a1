// A token's values, codes or scales as one contiguous row, element by element: what kernels that copy rows read and write.
// Each view is a run of a segment's head after head; load and store move N neighbouring elements, from a multiple of N on.
// kHeads heads have kDims neighbouring elements in common.
#pragma once

#include "segment.cuh"

// Values of a segment, dequantized and rounded to Out, or stored as given: no scale is computed. kLanes neighbouring lanes load a
// head's row at once, a vector each; 1: every lane for itself.
template <typename S, typename Out, uint32_t kLanes = 1>
struct Values {
  using Type = Out;
  static constexpr uint32_t kBegin = S::kBegin, kHeads = 1, kDims = S::kSize;
  float global;

  template <typename Cache>
  __device__ __forceinline__ explicit Values(const Cache& cache) : global(global_scale_of<S>(cache)) {}

  template <typename Page>
  __device__ static bool found(const Page& page) {
    return S::found(page);
  }
  // The value of a row whose page was not found.
  __device__ static Out missing() { return from_f32<Out>(nan_f32()); }

  template <uint32_t N, typename Cache, typename Page>
  __device__ __forceinline__ void load(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token, uint32_t i) const {
    if constexpr (kLanes > 1) {
      static_assert(kLanes * N == S::kSize, "Values: lanes that load together have a row");
      const uint32_t lane = threadIdx.x % kLanes, mask = ~0u >> (32 - kLanes) << (threadIdx.x % 32 - lane);
      const float factor = row_factor<S, kLanes, N>(cache, page, token, i / S::kSize, true, lane, mask, global);
      load_of_row<S>(out, cache, page, token, i / S::kSize, i % S::kSize, factor);
    } else {
      load_elements<S>(out, cache, page, token, i / S::kSize, i % S::kSize, global);
    }
  }
  template <uint32_t N, typename Cache, typename Page>
  __device__ __forceinline__ void store(const Cache& cache, const Page& page, uint32_t token, uint32_t i, const Vec<Out, N>& in) const {
    store_elements<S>(cache, page, token, i / S::kSize, i % S::kSize, in);
  }
};

// Values of dims [kBegin, kBegin + kSize) of a role, in whatever segments they lie.
template <typename Role, typename Out, uint32_t kBegin, uint32_t kSize>
struct RoleValues {
  using Type = Out;
  static constexpr uint32_t kHeads = 1, kDims = kSize;

  template <typename Cache>
  __device__ __forceinline__ explicit RoleValues(const Cache&) {}

  template <typename Page>
  __device__ static bool found(const Page& page) {
    return Role::Main::found(page);
  }
  __device__ static Out missing() { return from_f32<Out>(nan_f32()); }

  template <uint32_t N, typename Cache, typename Page>
  __device__ __forceinline__ void load(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token, uint32_t i) const {
    Role::template load<N>(out, cache, page, token, i / kSize, kBegin + i % kSize);
  }
};

// Missing codes: NaN if elements are their own codes, else all ones, which is NaN in e4m3 and e5m2.
template <typename T>
__device__ __forceinline__ T missing_code() {
  if constexpr (kPlain<T>) {
    return from_f32<T>(nan_f32());
  } else {
    T code;
    *(uint8_t*)&code = 0xff;
    return code;
  }
}

// Units of memory in a head's row.
template <typename S>
constexpr uint32_t kRowUnits = kStrided<typename S::Element> ? S::kSize / kPlacesEach<typename S::Element> : units_of<typename S::Element>(S::kSize);

// Elements of a segment as memory holds them, packed ones together.
template <typename S>
struct Codes {
  using Element = typename S::Element;
  using Type = typename CopiedAs<Element>::Type;
  static constexpr uint32_t kHeads = 1, kDims = kRowUnits<S>;

  template <typename Cache>
  __device__ __forceinline__ explicit Codes(const Cache&) {}

  template <typename Page>
  __device__ static bool found(const Page& page) {
    return S::found(page);
  }

  __device__ static Type missing() { return missing_code<Type>(); }

  template <uint32_t N, typename Cache, typename Page>
  __device__ __forceinline__ void load(Vec<Type, N>& out, const Cache&, const Page& page, uint32_t token, uint32_t i) const {
    load_raw<S, elements_of<Type>(N)>(*(Vec<Element, N>*)&out, page, token, i / kDims, elements_of<Type>(i % kDims));
  }
  template <uint32_t N, typename Cache, typename Page>
  __device__ __forceinline__ void store(const Cache&, const Page& page, uint32_t token, uint32_t i, const Vec<Type, N>& in) const {
    store_raw<S, elements_of<Type>(N)>(page, token, i / kDims, elements_of<Type>(i % kDims), *(const Vec<Element, N>*)&in);
  }
};

// Scales of a segment, each followed by its zero point if it has one; kAccess of them are neighbours in memory, aligned.
template <typename S, uint32_t kAccess>
struct ScaleRow {
  using Type = typename S::Scale;
  static constexpr uint32_t kEach = 1 + S::kZero, kHeads = S::kBlockHeads;
  static constexpr uint32_t kDims = (S::kSize + S::kBlockDims - 1) / S::kBlockDims * kEach;

  template <typename Cache>
  __device__ __forceinline__ explicit ScaleRow(const Cache&) {}

  template <typename Page>
  __device__ static bool found(const Page& page) {
    return S::found(page);
  }

  __device__ static Type missing() { return from_f32<Type>(nan_f32()); }

  template <typename Cache, typename Page>
  __device__ static __forceinline__ Type* at(const Cache& cache, const Page& page, uint32_t token, uint32_t i) {
    const uint32_t head = i / kDims * S::kBlockHeads, dim = i % kDims / kEach * S::kBlockDims;
    return scale_at<S>(cache, page, token, head, dim) + i % kEach;
  }
  template <uint32_t N, typename Cache, typename Page>
  __device__ __forceinline__ void load(Vec<Type, N>& out, const Cache& cache, const Page& page, uint32_t token, uint32_t i) const {
    constexpr uint32_t kStep = N < kAccess ? N : kAccess;
#pragma unroll
    for (uint32_t j = 0; j < N; j += kStep) *(Vec<Type, kStep>*)&out.e[j] = *(const Vec<Type, kStep>*)at(cache, page, token, i + j);
  }
  template <uint32_t N, typename Cache, typename Page>
  __device__ __forceinline__ void store(const Cache& cache, const Page& page, uint32_t token, uint32_t i, const Vec<Type, N>& in) const {
    constexpr uint32_t kStep = N < kAccess ? N : kAccess;
#pragma unroll
    for (uint32_t j = 0; j < N; j += kStep) *(Vec<Type, kStep>*)at(cache, page, token, i + j) = *(const Vec<Type, kStep>*)&in.e[j];
    if (i + N == kDims) store_scale_pad<S>(cache, page, token);
  }
};
