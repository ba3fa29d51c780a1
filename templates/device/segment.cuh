// Reading and writing a run of dims, whatever it is stored as. cache.cuh has a struct for each segment, which names its
// element type, its scales and its places; the functions here know the rest.
#pragma once

// How the scale of a block comes about.
enum class Recipe : uint32_t {
  none,          // no scale: values as they are, or cast to codes
  given,         // the caller's
  amax,          // largest magnitude / largest code; with a zero point the block's range / all codes
  pow2,          // the same, rounded up to a power of two
  nvfp4_max,     // e4m3 scales; dequantized through e4m3 (Modular MAX)
  nvfp4_global,  // e4m3 scales under an f32 scale of the caller's
};

// What a segment without scales and tail has.
struct Unscaled {
  using Scale = float;
  using ScalePointer = float*;
  static constexpr Recipe kRecipe = Recipe::none;
  static constexpr bool kZero = false;
  static constexpr uint32_t kResidual = 0;
  static constexpr uint32_t kBlockHeads = 1, kBlockDims = 1;
};

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

// Whether a write chooses scales.
template <typename S>
constexpr bool kComputes = S::kRecipe != Recipe::none && S::kRecipe != Recipe::given;

template <typename S, typename Page>
__device__ __forceinline__ typename S::Element* element_at(const Page& page, uint32_t token, uint32_t head, uint32_t dim) {
  return in_global(S::base(page)) + S::offset(token, head, dim) / kPerElement<typename S::Element>;
}

// N neighbouring elements as memory holds them, in accesses as wide as a run allows.
template <typename S, uint32_t N, typename Page>
__device__ __forceinline__ void load_raw(Raw<typename S::Element, N>& raw, const Page& page, uint32_t token, uint32_t head,
                                         uint32_t dim) {
  constexpr uint32_t kPer = kPerElement<typename S::Element>, kAccess = N < S::kVector ? N : S::kVector;
#pragma unroll
  for (uint32_t i = 0; i < N; i += kAccess) {
    using Access = Vec<typename S::Element, kAccess / kPer>;
    *(Access*)&raw.e[i / kPer] = *(const Access*)element_at<S>(page, token, head, dim + i);
  }
}

template <typename S, uint32_t N, typename Page>
__device__ __forceinline__ void store_raw(const Page& page, uint32_t token, uint32_t head, uint32_t dim,
                                          const Raw<typename S::Element, N>& raw) {
  constexpr uint32_t kPer = kPerElement<typename S::Element>, kAccess = N < S::kVector ? N : S::kVector;
#pragma unroll
  for (uint32_t i = 0; i < N; i += kAccess) {
    using Access = Vec<typename S::Element, kAccess / kPer>;
    *(Access*)element_at<S>(page, token, head, dim + i) = *(const Access*)&raw.e[i / kPer];
  }
}

// Of N elements, that begin at a multiple of N, how many neighbours surely share a block of dims: the greatest common divisor.
__host__ __device__ constexpr uint32_t within_block(uint32_t n, uint32_t dims) { return dims == 0 ? n : within_block(dims, n % dims); }

// The scale of an element; its zero point is one place on.
template <typename S, typename Cache, typename Page>
__device__ __forceinline__ typename S::ScalePointer scale_at(const Cache& cache, const Page& page, uint32_t token, uint32_t head,
                                                       uint32_t dim) {
  return in_global(S::scales(cache, page)) + S::scale_offset(token, head, dim);
}

// N neighbouring values of whole bytes, dequantized.
template <typename S, uint32_t N, typename Out, typename Cache, typename Page>
__device__ __forceinline__ void load_bytes(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token,
                                           uint32_t head, uint32_t dim) {
  using Element = typename S::Element;
  float x[N];
  if constexpr (S::kResidual > 0) {
    if (token >= S::sealed(page)) {
      using Compute = typename S::Compute;
      Vec<Compute, N> newest;
      load<N < S::kTailVector ? N : S::kTailVector>(newest, in_global(S::tail(page)) + S::tail_offset(token % S::kResidual, head, dim));
      unpack<Compute>(x, newest);
      pack<Out>(out, x);
      return;
    }
  }
  Raw<Element, N> raw;
  load_raw<S, N>(raw, page, token, head, dim);
  if constexpr (S::kRecipe == Recipe::none && kSame<Out, Element>) {
    out = raw;
    return;
  } else {
    unpack<Element>(x, raw);
    if constexpr (S::kRecipe != Recipe::none) {
      constexpr uint32_t kStep = within_block(N, S::kBlockDims);
#pragma unroll
      for (uint32_t i = 0; i < N; i += kStep) {
        const auto at = scale_at<S>(cache, page, token, head, dim + i);
        const float scale = to_f32(at[0]), zero = S::kZero ? to_f32(at[S::kZero]) : 0.0f;
#pragma unroll
        for (uint32_t j = i; j < i + kStep; ++j) x[j] = __fmul_rn(S::kZero ? __fsub_rn(x[j], zero) : x[j], scale);
      }
      if constexpr (S::kRecipe == Recipe::nvfp4_max) {
        Raw<e4m3, N> rounded;
        pack<e4m3>(rounded, x);
        unpack<e4m3>(x, rounded);
      }
      if constexpr (S::kRecipe == Recipe::nvfp4_global) {
        const float global = S::global_scale(cache);
#pragma unroll
        for (uint32_t i = 0; i < N; ++i) x[i] = __fmul_rn(x[i], global);
      }
    }
    pack<Out>(out, x);
  }
}

// N neighbouring values, dequantized; dim is a multiple of N. The page is valid.
template <typename S, uint32_t N, typename Out, typename Cache, typename Page>
__device__ __forceinline__ void load_elements(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token,
                                              uint32_t head, uint32_t dim) {
  if constexpr (N < kPerElement<typename S::Element>) {  // half a byte
    Vec<Out, 2> pair;
    load_bytes<S>(pair, cache, page, token, head, dim / 2 * 2);
    out.e[0] = pair.e[dim % 2];
  } else {
    load_bytes<S>(out, cache, page, token, head, dim);
  }
}

// Stores N neighbouring values of a segment whose writes choose no scale: as they are, cast, or divided by a given scale.
template <typename S, uint32_t N, typename In, typename Cache, typename Page>
__device__ __forceinline__ void store_elements(const Cache& cache, const Page& page, uint32_t token, uint32_t head,
                                               uint32_t dim, const Vec<In, N>& values) {
  static_assert(!kComputes<S>, "store_elements: this segment's scales are computed over blocks; use store_block");
  using Element = typename S::Element;
  if constexpr (S::kRecipe == Recipe::none && kSame<In, Element>) {
    store_raw<S, N>(page, token, head, dim, values);
  } else {
    Raw<Element, N> raw;
    float x[N];
    unpack<In>(x, values);
    if constexpr (S::kRecipe == Recipe::given) {
      constexpr uint32_t kStep = within_block(N, S::kBlockDims);
#pragma unroll
      for (uint32_t i = 0; i < N; i += kStep) {
        const auto at = scale_at<S>(cache, page, token, head, dim + i);
        const float scale = to_f32(at[0]), zero = S::kZero && scale != 0.0f ? to_f32(at[S::kZero]) : 0.0f;
        divide(*(float(*)[kStep]) & x[i], scale);
#pragma unroll
        for (uint32_t j = i; S::kZero && j < i + kStep; ++j) x[j] = __fadd_rn(x[j], zero);
      }
    }
    pack<Element>(raw, x);
    store_raw<S, N>(page, token, head, dim, raw);
  }
}

// Quantizes and stores one block of a segment whose writes choose scales; (head, dim) is its first element. kLanes
// neighbouring lanes, all of `mask`, hold it: x[c] are the kWidth values from element (c * kLanes + lane) * kWidth of the
// block on, head by head. Values past the block or the segment are not looked at.
template <typename S, uint32_t kLanes, uint32_t kWidth, uint32_t kChunks, typename Cache, typename Page>
__device__ __forceinline__ void store_block(const Cache& cache, const Page& page, uint32_t token, uint32_t head, uint32_t dim,
                                            uint32_t lane, uint32_t mask, const float (&x)[kChunks][kWidth]) {
  using Element = typename S::Element;
  using Scale = typename S::Scale;
  bool live[kChunks];
  float low = infinity(), high = S::kZero ? -infinity() : 0.0f;
#pragma unroll
  for (uint32_t c = 0; c < kChunks; ++c) {
    const uint32_t element = (c * kLanes + lane) * kWidth;
    live[c] = element < S::kBlockHeads * S::kBlockDims && dim + element % S::kBlockDims < S::kSize;
    if (!live[c]) continue;
    high = max_nan(high, S::kZero ? max_of(x[c]) : amax_of(x[c]));
    if constexpr (S::kZero) low = min_nan(low, min_of(x[c]));
  }
  high = reduce_max<kLanes>(high, mask);
  if constexpr (S::kZero) low = reduce_min<kLanes>(low, mask);

  Scale scale, zero = {};
  if constexpr (S::kZero) {
    const ScaleZero<Scale> found = asymmetric<Element, Scale>(low, high);
    scale = found.scale;
    zero = found.zero;
  } else if constexpr (S::kRecipe == Recipe::pow2) {
    scale = pow2_scale<Element>(high);
  } else if constexpr (S::kRecipe == Recipe::nvfp4_max) {
    scale = nvfp4_max_scale(high);
  } else if constexpr (S::kRecipe == Recipe::nvfp4_global) {
    scale = nvfp4_global_scale(high, S::global_scale(cache));
  } else {
    scale = amax_scale<Element, Scale>(high);
  }
  if (lane == 0) {
    const auto at = scale_at<S>(cache, page, token, head, dim);
    at[0] = scale;
    if constexpr (S::kZero) at[1] = zero;
  }

  float divisor = to_f32(scale);
  if constexpr (S::kRecipe == Recipe::nvfp4_global) divisor = product(scale, S::global_scale(cache));
#pragma unroll
  for (uint32_t c = 0; c < kChunks; ++c) {
    const uint32_t element = (c * kLanes + lane) * kWidth;
    if (!live[c]) continue;
    Raw<Element, kWidth> raw;
    if constexpr (S::kZero) {
      quantize<Element>(raw, x[c], divisor, to_f32(zero));
    } else {
      quantize<Element>(raw, x[c], divisor);
    }
    store_raw<S, kWidth>(page, token, head + element / S::kBlockDims, dim + element % S::kBlockDims, raw);
  }
}
