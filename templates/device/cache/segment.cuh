// Reading and writing a run of dims, in any stored type. cache.cuh has a struct for each segment, which names its
// element type, its scales and its places; the functions here know the rest.
#pragma once

// Recipes of a block's scale.
enum class Recipe : uint32_t {
  none,          // no scale: values as they are, or cast to codes
  given,         // the caller's
  amax,          // largest magnitude / largest code; with a zero point the block's range / all codes
  pow2,          // amax, rounded up to a power of two
  amax_raised,   // amax and pow2 with floors: kAmaxMin, kScaleMin
  pow2_raised,
  least,         // the block's range / all codes; in the zero point's place, the value of code 0
  norm,          // the block's Euclidean norm, of codes of a codebook
  norm_corrected,  // norm, which readers divide by the norm of the codes' values
  unit,          // the block's norm divided by the norm of the codes' values
  signs,         // the norm; in the zero point's place the RMS of the codes' error, whose sign is a code's highest bit
  nvfp4_max,     // e4m3 scales; dequantized through e4m3 (Modular MAX)
  nvfp4_global,  // e4m3 scales under an f32 scale of the caller's
};

// The part of a segment that speaks of scales, for elements without any.
struct NoScales {
  using Scale = float;
  using ScalePointer = Scale*;
  static constexpr Recipe kRecipe = Recipe::none;
  static constexpr bool kZero = false;
  static constexpr uint32_t kScaleVector = 1, kBlockHeads = 1, kBlockDims = 1, kResidual = 0, kScaleRow = 0;
};

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

// True if a write chooses scales.
template <typename S>
constexpr bool kComputes = S::kRecipe != Recipe::none && S::kRecipe != Recipe::given;

// True if scales are norms.
template <typename S>
constexpr bool kNorms = S::kRecipe == Recipe::norm || S::kRecipe == Recipe::norm_corrected || S::kRecipe == Recipe::unit || S::kRecipe == Recipe::signs;

// kCorrected: readers need all codes of a block to read one of them. Then also: a block is a row.
template <typename S>
constexpr bool kCorrected = S::kRecipe == Recipe::norm_corrected;
template <typename S>
constexpr bool kRowCorrected = kCorrected<S> && S::kBlockHeads == 1 && S::kBlockDims == S::kSize;

template <typename S, typename Page>
__device__ __forceinline__ typename S::Element* element_at(const Page& page, uint32_t token, uint32_t head, uint32_t dim) {
  return in_global(S::base(page)) + S::offset(token, head, dim) / kPlacesEach<typename S::Element>;
}

// N neighbouring elements as memory holds them, in accesses as wide as a run allows; of strided codes, their bytes.
template <typename S, uint32_t N, typename Page>
__device__ __forceinline__ void load_raw(Raw<typename S::Element, N>& raw, const Page& page, uint32_t token, uint32_t head,
                                         uint32_t dim) {
  using Element = typename S::Element;
  constexpr uint32_t kAccess = N < S::kVector ? N : S::kVector;
#pragma unroll
  for (uint32_t i = 0; i < N; i += kAccess) {
    *(Raw<Element, kAccess>*)&raw.e[units_of<Element>(i)] = *(const Raw<Element, kAccess>*)element_at<S>(page, token, head, dim + i);
  }
}

template <typename S, uint32_t N, typename Page>
__device__ __forceinline__ void store_raw(const Page& page, uint32_t token, uint32_t head, uint32_t dim,
                                          const Raw<typename S::Element, N>& raw) {
  using Element = typename S::Element;
  constexpr uint32_t kAccess = N < S::kVector ? N : S::kVector;
#pragma unroll
  for (uint32_t i = 0; i < N; i += kAccess) {
    *(Raw<Element, kAccess>*)element_at<S>(page, token, head, dim + i) = *(const Raw<Element, kAccess>*)&raw.e[units_of<Element>(i)];
  }
}

// N neighbouring elements: as memory holds them, but of strided codes without the others in their bytes.
template <typename S, uint32_t N, typename Page>
__device__ __forceinline__ void load_codes(Raw<typename S::Element, N>& raw, const Page& page, uint32_t token, uint32_t head,
                                           uint32_t dim) {
  using Element = typename S::Element;
  load_raw<S, N>(raw, page, token, head, dim);
  if constexpr (kStrided<Element>) {
    static_assert(S::kSize / kPlacesEach<Element> % N == 0, "load: the codes of a byte are of dims apart; a load is of one of each, at most as many as a row has bytes");
    keep_codes(raw, (uint32_t)(S::offset(token, head, dim) % kPlacesEach<Element>));
  }
}

// N neighbours by `load(values, dim)`, which reads whole bytes: a part of a byte, or of three, is taken of all its elements.
template <typename Element, typename Out, uint32_t N, typename Load>
__device__ __forceinline__ void load_part(Vec<Out, N>& out, uint32_t dim, const Load& load) {
  constexpr uint32_t kWhole = kTogether<Element>;
  if constexpr (N < kWhole) {
    Vec<Out, kWhole> whole;
    load(whole, dim / kWhole * kWhole);
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) out.e[i] = whole.e[dim % kWhole + i];
  } else {
    load(out, dim);
  }
}

// Values of N neighbouring codes, without scales.
template <typename S, uint32_t N, typename Page>
__device__ __forceinline__ void load_unscaled(Vec<float, N>& out, const Page& page, uint32_t token, uint32_t head, uint32_t dim) {
  using Element = typename S::Element;
  load_part<Element>(out, dim, [&](auto& values, uint32_t first) {
    constexpr uint32_t kValues = sizeof(values.e) / sizeof(float);
    Raw<Element, kValues> raw;
    load_codes<S, kValues>(raw, page, token, head, first);
    unpack<Element>(values.e, raw);
  });
}

// The count of neighbours, among N elements from a multiple of N on, that surely share a block of dims: the greatest common
// divisor.
__host__ __device__ constexpr uint32_t within_block(uint32_t n, uint32_t dims) { return dims == 0 ? n : within_block(dims, n % dims); }

// The scale of an element; its zero point is one place on.
template <typename S, typename Cache, typename Page>
__device__ __forceinline__ typename S::ScalePointer scale_at(const Cache& cache, const Page& page, uint32_t token, uint32_t head,
                                                       uint32_t dim) {
  return in_global(S::scales(cache, page)) + S::scale_offset(token, head, dim);
}

// A scale as its values are multiplied with it. One of the caller's that is 0, negative or not finite is NaN, and so are they.
template <typename S>
__device__ __forceinline__ float scale_value(typename S::Scale stored) {
  const float scale = to_f32(stored);
  if constexpr (S::kRecipe == Recipe::given) return usable_scale(scale);
  return scale;
}

// Reports the first of a layer's scales of the caller's that is none, and the one above all blocks; for one block. Any page will
// do.
template <typename S, typename Cache, typename Page>
__device__ __forceinline__ void report_scales(const Cache& cache, const Page& page, GivenScale which, GivenScale global, uint64_t* errors) {
  if constexpr (S::kRecipe == Recipe::nvfp4_global) {
    const float scale = usable_scale(S::global_scale(cache));
    if (threadIdx.x == 0 && scale != scale) report(errors, Fault::scale, (uint32_t)global, 0);
  }
  if constexpr (S::kRecipe == Recipe::given) {
    constexpr uint32_t kGroups = (S::kSize + S::kBlockDims - 1) / S::kBlockDims, kScales = Cache::kHeads / S::kBlockHeads * kGroups;
    for (uint32_t i = threadIdx.x; i < kScales; i += blockDim.x) {
      const float scale = scale_value<S>(*scale_at<S>(cache, page, 0, i / kGroups * S::kBlockHeads, i % kGroups * S::kBlockDims));
      if (scale != scale) report(errors, Fault::scale, (uint32_t)which, i);
    }
  }
}

// The zeros behind the scales of a token, of one head, where the cache has room for some: whoever stores the last scale stores
// them.
template <typename S, typename Cache, typename Page>
__device__ __forceinline__ void store_scale_pad(const Cache& cache, const Page& page, uint32_t token) {
  constexpr uint32_t kNumbers = (S::kSize + S::kBlockDims - 1) / S::kBlockDims * (1 + S::kZero);
#pragma unroll
  for (uint32_t i = 0; i < S::kScalePad; ++i) scale_at<S>(cache, page, token, 0, 0)[kNumbers + i] = typename S::Scale{};
}

// The scales of kSteps neighbouring runs of kStep elements, each in one block, zero points between them: in accesses as
// wide as neighbours are aligned.
template <typename S, uint32_t kStep, uint32_t kSteps, typename Cache, typename Page>
__device__ __forceinline__ void load_scales(Vec<typename S::Scale, kSteps*(1 + S::kZero)>& out, const Cache& cache, const Page& page,
                                            uint32_t token, uint32_t head, uint32_t dim) {
  constexpr uint32_t kEach = 1 + S::kZero, kTogether = kStep == S::kBlockDims ? kSteps * kEach : kEach;
  constexpr uint32_t kAccess = kTogether < S::kScaleVector ? kTogether : S::kScaleVector;
  using Access = Vec<typename S::Scale, kAccess>;
#pragma unroll
  for (uint32_t i = 0; i < kSteps * kEach; i += kAccess)
    *(Access*)&out.e[i] = *(const Access*)(scale_at<S>(cache, page, token, head, dim + i / kEach * kStep) + i % kEach);
#pragma unroll
  for (uint32_t i = 0; S::kRecipe == Recipe::given && i < kSteps; ++i) out.e[i] = from_f32<typename S::Scale>(scale_value<S>(out.e[i]));
}

// The factor of a block's codes if its norm is corrected. kLanes neighbouring lanes, all of `mask`, compute it together; (head,
// dim) is the first element of the block; a lane reads kWidth elements at a time.
template <typename S, uint32_t kLanes, uint32_t kWidth, typename Page>
__device__ __forceinline__ float corrected_scale(float norm, const Page& page, uint32_t token, uint32_t head, uint32_t dim, uint32_t lane,
                                                 uint32_t mask) {
  using Book = typename S::Element::Book;
  uint32_t squares = 0;
#pragma unroll 4
  for (uint32_t i = lane * kWidth; i < S::kBlockHeads * S::kBlockDims; i += kLanes * kWidth) {
    Vec<float, kWidth> x;
    load_unscaled<S>(x, page, token, head + i / S::kBlockDims, dim + i % S::kBlockDims);
    squares += squares_in_units<Book>(x.e);
  }
  if constexpr (kLanes > 1) squares = reduce_sum<kLanes>(squares, mask);
  return corrected_norm<Book>(norm, squares);
}
template <typename S, uint32_t kLanes, uint32_t kWidth, typename Cache, typename Page>
__device__ __forceinline__ float stored_corrected_scale(const Cache& cache, const Page& page, uint32_t token, uint32_t head, uint32_t dim,
                                                        uint32_t lane, uint32_t mask) {
  return corrected_scale<S, kLanes, kWidth>(to_f32(*scale_at<S>(cache, page, token, head, dim)), page, token, head, dim, lane, mask);
}

// The one scale above all blocks; it is the same throughout a kernel.
template <typename S, typename Cache>
__device__ __forceinline__ float global_scale_of(const Cache& cache) {
  if constexpr (S::kRecipe == Recipe::nvfp4_global) return usable_scale(S::global_scale(cache));
  return 1.0f;
}

// N neighbouring elements of whole bytes and their scales, as memory holds them.
template <typename S, uint32_t N, bool kScaled = S::kRecipe != Recipe::none>
struct Stored {
  static constexpr uint32_t kStep = within_block(N, S::kBlockDims), kSteps = N / kStep, kEach = 1 + S::kZero;
  Raw<typename S::Element, N> raw;
  Vec<typename S::Scale, kSteps * kEach> scales;
};
template <typename S, uint32_t N>
struct Stored<S, N, false> {
  Raw<typename S::Element, N> raw;
};

template <typename S, uint32_t N, typename Cache, typename Page>
__device__ __forceinline__ void load_stored(Stored<S, N>& out, const Cache& cache, const Page& page, uint32_t token, uint32_t head,
                                            uint32_t dim) {
  load_codes<S, N>(out.raw, page, token, head, dim);
  if constexpr (S::kRecipe != Recipe::none) load_scales<S, Stored<S, N>::kStep, Stored<S, N>::kSteps>(out.scales, cache, page, token, head, dim);
}

// Their values. `global` is global_scale_of<S>(cache).
template <typename S, uint32_t N, typename Out>
__device__ __forceinline__ void dequantize_stored(Vec<Out, N>& out, const Stored<S, N>& stored, float global) {
  static_assert(!kCorrected<S>, "dequantize_stored: norms of this segment are corrected by all codes of a block; use load_elements");
  using Element = typename S::Element;
  float x[N];
  if constexpr (S::kRecipe != Recipe::none) {
    constexpr uint32_t kSteps = Stored<S, N>::kSteps, kEach = Stored<S, N>::kEach;
    float scale[kSteps], zero[kSteps];
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      scale[i] = to_f32(stored.scales.e[i * kEach]);
      zero[i] = S::kZero ? to_f32(stored.scales.e[i * kEach + S::kZero]) : 0.0f;
    }
    if constexpr (S::kRecipe == Recipe::nvfp4_max) {
      dequantize_max(x, stored.raw, scale);
    } else if constexpr (S::kRecipe == Recipe::nvfp4_global) {
      dequantize_global(x, stored.raw, scale, global);
    } else if constexpr (S::kRecipe == Recipe::least) {
      dequantize_from_least<Element>(x, stored.raw, scale, zero);
    } else if constexpr (S::kRecipe == Recipe::signs) {
      dequantize_signs(Element{}, x, stored.raw, scale, zero);
    } else if constexpr (S::kZero) {
      dequantize<Element>(x, stored.raw, scale, zero);
    } else {
      dequantize<Element>(x, stored.raw, scale);
    }
    pack<Out>(out, x);
  } else if constexpr (kSame<Out, Element>) {
    out = stored.raw;
  } else {
    unpack<Element>(x, stored.raw);
    pack<Out>(out, x);
  }
}

// N neighbouring values of whole bytes whose scales are known: M of them, each of N / M neighbours.
template <typename S, uint32_t N, uint32_t M, typename Out, typename Page>
__device__ __forceinline__ void load_scaled(Vec<Out, N>& out, const Page& page, uint32_t token, uint32_t head, uint32_t dim, const float (&scale)[M]) {
  Raw<typename S::Element, N> raw;
  float x[N];
  load_codes<S, N>(raw, page, token, head, dim);
  dequantize<typename S::Element>(x, raw, scale);
  pack<Out>(out, x);
}

// N neighbouring values of whole bytes, dequantized.
template <typename S, uint32_t N, typename Out, typename Cache, typename Page>
__device__ __forceinline__ void load_bytes(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token,
                                           uint32_t head, uint32_t dim, float global) {
  if constexpr (S::kResidual > 0) {
    if (token >= S::sealed(page)) {
      float x[N];
      using Compute = typename S::Compute;
      Vec<Compute, N> newest;
      load<N < S::kTailVector ? N : S::kTailVector>(newest, in_global(S::tail(page)) + S::tail_offset(token % S::kResidual, head, dim));
      unpack<Compute>(x, newest);
      pack<Out>(out, x);
      return;
    }
  }
  if constexpr (kCorrected<S>) {
    constexpr uint32_t kStep = within_block(N, S::kBlockDims), kSteps = N / kStep;
    float scale[kSteps];
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) {
      const uint32_t first = (dim + i * kStep) / S::kBlockDims * S::kBlockDims;
      scale[i] = stored_corrected_scale<S, 1, kStep>(cache, page, token, head / S::kBlockHeads * S::kBlockHeads, first, 0, 0);
    }
    load_scaled<S>(out, page, token, head, dim, scale);
  } else {
    Stored<S, N> stored;
    load_stored(stored, cache, page, token, head, dim);
    dequantize_stored(out, stored, global);
  }
}

// N neighbouring values, dequantized; dim is a multiple of N. The page is valid. `global` is global_scale_of<S>(cache).
template <typename S, uint32_t N, typename Out, typename Cache, typename Page>
__device__ __forceinline__ void load_elements(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token,
                                              uint32_t head, uint32_t dim, float global) {
  load_part<typename S::Element>(out, dim, [&](auto& values, uint32_t first) { load_bytes<S>(values, cache, page, token, head, first, global); });
}
template <typename S, uint32_t N, typename Out, typename Cache, typename Page>
__device__ __forceinline__ void load_elements(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token,
                                              uint32_t head, uint32_t dim) {
  load_elements<S>(out, cache, page, token, head, dim, global_scale_of<S>(cache));
}

// The factor that load_of_row takes, for a head's row that kLanes neighbouring lanes, all of `mask`, read together if it is
// `live`:
// `global`, or the row's scale if its norm is corrected, which the lanes compute together, kWidth elements at a time.
template <typename S, uint32_t kLanes, uint32_t kWidth, typename Cache, typename Page>
__device__ __forceinline__ float row_factor(const Cache& cache, const Page& page, uint32_t token, uint32_t head, bool live, uint32_t lane,
                                            uint32_t mask, float global) {
  if constexpr (kRowCorrected<S>) return live ? stored_corrected_scale<S, kLanes, kWidth>(cache, page, token, head, 0, lane, mask) : 0.0f;
  return global;
}
template <typename S, uint32_t N, typename Out, typename Cache, typename Page>
__device__ __forceinline__ void load_of_row(Vec<Out, N>& out, const Cache& cache, const Page& page, uint32_t token, uint32_t head,
                                            uint32_t dim, float factor) {
  if constexpr (kRowCorrected<S>) {
    const float scale[1] = {factor};
    load_part<typename S::Element>(out, dim, [&](auto& values, uint32_t first) { load_scaled<S>(values, page, token, head, first, scale); });
  } else {
    load_elements<S>(out, cache, page, token, head, dim, factor);
  }
}

// A part of a row whose norm is corrected: what its codes stand for; their squares are added to `squares`.
template <typename S, uint32_t N, typename Page>
__device__ __forceinline__ void load_direction(Vec<float, N>& out, uint32_t& squares, const Page& page, uint32_t token, uint32_t head, uint32_t dim) {
  load_unscaled<S>(out, page, token, head, dim);
  squares += squares_in_units<typename S::Element::Book>(out.e);
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
      static_assert(!S::kZero, "store_elements: given scales have no zero points");
      constexpr uint32_t kStep = within_block(N, S::kBlockDims), kSteps = N / kStep;
      Vec<typename S::Scale, kSteps> found;
      load_scales<S, kStep, kSteps>(found, cache, page, token, head, dim);
      float scale[kSteps];
      unpack<typename S::Scale>(scale, found);
      divide(x, scale);
    }
    pack<Element>(raw, x);
    store_raw<S, N>(page, token, head, dim, raw);
  }
}

// The scale and the zero point of a block with values in [low, high], or, without zero points, up to high in magnitude.
template <typename S>
__device__ __forceinline__ ScaleZero<typename S::Scale> block_scale(float low, float high, float global) {
  using Element = typename S::Element;
  using Scale = typename S::Scale;
  if constexpr (S::kRecipe == Recipe::least) {
    return scale_from_least<Element, Scale>(low, high);
  } else if constexpr (S::kZero) {
    return asymmetric<Element, Scale>(low, high);
  } else if constexpr (S::kRecipe == Recipe::amax_raised) {
    return {from_f32<Scale>(raised_quotient<Element>(high, S::kAmaxMin, S::kScaleMin)), {}};
  } else if constexpr (S::kRecipe == Recipe::pow2_raised) {
    return {from_f32<Scale>(power_above(raised_quotient<Element>(high, S::kAmaxMin, S::kScaleMin))), {}};
  } else if constexpr (S::kRecipe == Recipe::pow2) {
    return {from_f32<Scale>(pow2_scale<Element>(high)), {}};
  } else if constexpr (S::kRecipe == Recipe::nvfp4_max) {
    return {nvfp4_max_scale(high), {}};
  } else if constexpr (S::kRecipe == Recipe::nvfp4_global) {
    return {nvfp4_global_scale(high, global), {}};
  } else {
    return {amax_scale<Element, Scale>(high), {}};
  }
}

// Stores the codes of a block, kLanes * kWidth elements at a time: make(raw, c) gives the codes from element (c * kLanes + lane)
// * kWidth on, if live(element) is true. A lane has all strided codes that share its bytes.
template <typename S, uint32_t kLanes, uint32_t kWidth, uint32_t kChunks, uint32_t kUnroll, typename Page, typename Live, typename Make>
__device__ __forceinline__ void store_chunks(const Page& page, uint32_t token, uint32_t head, uint32_t dim, uint32_t lane, const Live& live,
                                             const Make& make) {
  using Element = typename S::Element;
  constexpr uint32_t kApart = kStrided<Element> ? kPlacesEach<Element> : 1, kRounds = kChunks / kApart;
  static_assert(kApart == 1 || S::kBlockDims == kApart * kRounds * kLanes * kWidth, "store_chunks: a lane has all codes of its bytes");
#pragma unroll kUnroll
  for (uint32_t c = 0; c < kRounds; ++c) {
    const uint32_t element = (c * kLanes + lane) * kWidth;
    if (!live(element)) continue;
    Raw<Element, kWidth> raw;
    make(raw, c);
    if constexpr (kStrided<Element>) {
#pragma unroll
      for (uint32_t place = 1; place < kApart; ++place) {
        Raw<Element, kWidth> codes;
        make(codes, c + place * kRounds);
        join_codes(raw, codes, place);
      }
    }
    store_raw<S, kWidth>(page, token, head + element / S::kBlockDims, dim + element % S::kBlockDims, raw);
  }
}

// store_codes of a block under its norm, which divides before it is rounded where codes alone give the direction. "unit" knows
// its scale once it has the codes, and "signs" what these leave.
template <typename S, uint32_t kLanes, uint32_t kWidth, uint32_t kChunks, uint32_t kUnroll, typename Page, typename Read, typename Keep>
__device__ __forceinline__ void store_codes_under_norm(const Page& page, uint32_t token, uint32_t head, uint32_t dim, uint32_t lane,
                                                       uint32_t mask, const Read& read, const Keep& keep) {
  using Element = typename S::Element;
  using Scale = typename S::Scale;
  const auto live = [](uint32_t element) { return element < S::kBlockHeads * S::kBlockDims; };
  double squares = 0.0, of_codes = 0.0;  // or of what they leave
#pragma unroll kUnroll
  for (uint32_t c = 0; c < kChunks; ++c) {
    if (!live((c * kLanes + lane) * kWidth)) continue;
    float x[kWidth];
    read(x, c);
    squares += squares_of(x);
  }
  const float norm = norm_of(reduce_sum<kLanes>(squares, mask));
  const Scale rounded = from_f32<Scale>(norm);
  const float divisor = S::kRecipe == Recipe::norm ? to_f32(rounded) : norm;
  store_chunks<S, kLanes, kWidth, kChunks, kUnroll>(page, token, head, dim, lane, live, [&](Raw<Element, kWidth>& raw, uint32_t c) {
    float x[kWidth];
    read(x, c);
    divide(x, divisor);
    pack<Element>(raw, x);
    float values[kWidth];
    unpack<Element>(values, raw);
#pragma unroll
    for (uint32_t i = 0; S::kRecipe == Recipe::signs && i < kWidth; ++i) values[i] = __fsub_rn(x[i], values[i]);
    of_codes += squares_of(values);
  });
  if constexpr (S::kRecipe == Recipe::unit) {
    const float of_all = norm_of(reduce_sum<kLanes>(of_codes, mask));
    if (lane == 0) keep(unit_scale<Scale>(norm, of_all), Scale{});
  } else if constexpr (S::kRecipe == Recipe::signs) {
    const float left = norm_of(reduce_sum<kLanes>(of_codes, mask) / (S::kBlockHeads * S::kBlockDims));
    if (lane == 0) keep(rounded, from_f32<Scale>(left));
  } else {
    if (lane == 0) keep(rounded, Scale{});
  }
}

// Quantizes and stores one block of a segment whose writes choose scales, and hands its scale and zero point to
// keep(scale, zero), in its first lane; (head, dim) is its first element. kLanes neighbouring lanes, all of `mask`, have it:
// read(x, c) gives the kWidth values from element (c * kLanes + lane) * kWidth of the block on, head by head. It is asked
// twice, for the range and for the codes, and not for values past the block or the segment. kUnroll below kChunks is for
// values that are read anew, not held in registers. `global` is global_scale_of<S>(cache).
template <typename S, uint32_t kLanes, uint32_t kWidth, uint32_t kChunks, uint32_t kUnroll, typename Page, typename Read, typename Keep>
__device__ __forceinline__ void store_codes(const Page& page, uint32_t token, uint32_t head, uint32_t dim, uint32_t lane,
                                            uint32_t mask, float global, const Read& read, const Keep& keep) {
  if constexpr (kNorms<S>) return store_codes_under_norm<S, kLanes, kWidth, kChunks, kUnroll>(page, token, head, dim, lane, mask, read, keep);
  using Element = typename S::Element;
  constexpr uint32_t kBlock = S::kBlockHeads * S::kBlockDims;
  constexpr bool kWhole = kBlock == kLanes * kWidth * kChunks && S::kSize % S::kBlockDims == 0;
  const auto live = [&](uint32_t element) { return kWhole || (element < kBlock && dim + element % S::kBlockDims < S::kSize); };
  float low = infinity(), high = S::kZero ? -infinity() : 0.0f;
#pragma unroll kUnroll
  for (uint32_t c = 0; c < kChunks; ++c) {
    if (!live((c * kLanes + lane) * kWidth)) continue;
    float x[kWidth];
    read(x, c);
    high = max_nan(high, S::kZero ? max_of(x) : amax_of(x));
    if constexpr (S::kZero) low = min_nan(low, min_of(x));
  }
  high = reduce_max<kLanes>(high, mask);
  if constexpr (S::kZero) low = reduce_min<kLanes>(low, mask);

  const auto [scale, zero] = block_scale<S>(low, high, global);
  if (lane == 0) keep(scale, zero);

  float divisor = to_f32(scale);
  if constexpr (S::kRecipe == Recipe::nvfp4_global) divisor = product(scale, global);
  const float shift = to_f32(zero);
  store_chunks<S, kLanes, kWidth, kChunks, kUnroll>(page, token, head, dim, lane, live, [&](Raw<Element, kWidth>& raw, uint32_t c) {
    float x[kWidth];
    read(x, c);
    if constexpr (S::kRecipe == Recipe::least) {
      quantize_from_least<Element>(raw, x, divisor, shift);
    } else if constexpr (S::kZero) {
      quantize<Element>(raw, x, divisor, shift);
    } else {
      quantize<Element>(raw, x, divisor);
    }
  });
}

// store_chunks for a whole block, with its scale.
template <typename S, uint32_t kLanes, uint32_t kWidth, uint32_t kChunks, uint32_t kUnroll = kChunks, typename Cache, typename Page, typename Read>
__device__ __forceinline__ void store_block(const Cache& cache, const Page& page, uint32_t token, uint32_t head, uint32_t dim,
                                            uint32_t lane, uint32_t mask, float global, const Read& read) {
  const auto keep = [&](typename S::Scale scale, typename S::Scale zero) {
    const auto at = scale_at<S>(cache, page, token, head, dim);
    at[0] = scale;
    if constexpr (S::kZero) at[1] = zero;
    if (dim + S::kBlockDims >= S::kSize) store_scale_pad<S>(cache, page, token);
  };
  store_codes<S, kLanes, kWidth, kChunks, kUnroll>(page, token, head, dim, lane, mask, global, read, keep);
}
