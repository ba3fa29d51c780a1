// Every element of every request through the accessor, in every width: stores, stores by pointer, and loads.
#include "cache.cuh"

enum Mode : uint32_t { kStore, kStoreByPointer, kLoad };

template <uint32_t N>
struct Width {
  static constexpr uint32_t value = N;
};

// go(width, index) for every power of two in kWidths from kWidth on that divides both sizes; returns how many there are.
template <uint32_t kWidths, uint32_t kWidth, uint32_t kSize, uint32_t kOther, typename Go>
__device__ __forceinline__ uint32_t each_width(Go go, uint32_t index = 0) {
  if constexpr (kWidth <= kWidths && kSize % kWidth == 0 && kOther % kWidth == 0) {
    if constexpr ((kWidths & kWidth) != 0) go(Width<kWidth>{}, index++);
    return each_width<kWidths, 2 * kWidth, kSize, kOther>(go, index);
  }
  return index;
}

template <typename S>
constexpr uint32_t kSizeOf = S::kSize;
template <>
constexpr uint32_t kSizeOf<void> = 0;

// What a role's rows are made of, [request][token][head][...], as elements of these arrays.
struct Arrays {
  uint8_t *main, *rope, *scales, *values, *floats, *raw, *found_scales, *zeros, *nulls;
};

template <uint32_t kWidths, typename R, typename C>
struct Rows {
  using Main = typename R::Main;
  using Element = typename C::dtype;
  using Value = typename C::value_dtype;
  using Scale = typename C::scale_dtype;
  static constexpr uint32_t kPer = kPerElement<Element>, kMain = Main::kSize, kRope = kSizeOf<typename R::Rope>;
  static constexpr uint32_t kHeads = C::kv_params.num_heads, kGroups = C::head_dim_granularity, kScalePlaces = kGroups * (1 + Main::kZero);
  static constexpr bool kOwnScales = C::quantization_enabled && Main::kRecipe != Recipe::given;

  C cache;
  Arrays in;
  uint32_t rows;  // of all requests

  // Whether this token and head begin a block of scales.
  __device__ bool begins_block(uint32_t token, uint32_t head) const {
    return head % Main::kBlockHeads == 0 && (Main::kResidual == 0 || token % (Main::kResidual + (Main::kResidual == 0)) == 0);
  }
  __device__ const Scale* scales_of(uint64_t row, uint32_t head) const {
    return (const Scale*)in.scales + (row * (kHeads / Main::kBlockHeads) + head / Main::kBlockHeads) * kScalePlaces;
  }

  __device__ void store(uint32_t b, uint32_t token, uint32_t head, uint64_t row) const {
    const Element* from = (const Element*)in.main + (row * kHeads + head) * (kMain / kPer);
    const uint32_t widths = each_width<kWidths, kPer, kMain, kMain>([](auto, uint32_t) {}), turn = (token + head) % widths;
    each_width<kWidths, kPer, kMain, kMain>([&](auto width, uint32_t index) {
      constexpr uint32_t kWidth = decltype(width)::value;
      if (index != turn) return;
#pragma unroll 1
      for (uint32_t dim = 0; dim < kMain; dim += kWidth) {
        Raw<Element, kWidth> elements;
#pragma unroll 1
        for (uint32_t i = 0; i < kWidth / kPer; ++i) elements.e[i] = from[dim / kPer + i];
        cache.template store<kWidth>(b, head, token, dim, elements);
      }
    });
    if constexpr (kRope > 0) {
      const Value* rope = (const Value*)in.rope + (row * kHeads + head) * kRope;
      each_width<7, 1, kRope, kRope>([&](auto width, uint32_t index) {
        constexpr uint32_t kWidth = decltype(width)::value;
        if (index != token % 3) return;
#pragma unroll 1
        for (uint32_t dim = 0; dim < kRope; dim += kWidth) {
          Vec<Value, kWidth> elements;
#pragma unroll 1
          for (uint32_t i = 0; i < kWidth; ++i) elements.e[i] = rope[dim + i];
          cache.template store_rope<kWidth>(b, head, token, kMain + dim, elements);
        }
      });
    }
    if constexpr (kOwnScales) {
      if (!begins_block(token, head)) return;
      const Scale* scales = scales_of(row, head);
      constexpr uint32_t kMany = kGroups <= 16 ? kGroups : 1;
      if (kMany > 1 && token % 2) {
        Vec<Scale, low_bit(kMany)> some;
#pragma unroll 1
        for (uint32_t g = 0; g < kGroups; g += low_bit(kMany)) {
#pragma unroll 1
          for (uint32_t i = 0; i < low_bit(kMany); ++i) some.e[i] = scales[(g + i) * (1 + Main::kZero)];
          cache.template store_scale<low_bit(kMany)>(b, head, token, g * C::quantization_granularity, some);
        }
      } else {
#pragma unroll 1
        for (uint32_t g = 0; g < kGroups; ++g) {
          Vec<Scale, 1> scale;
          scale.e[0] = scales[g * (1 + Main::kZero)];
          cache.template store_scale<1>(b, head, token, g * C::quantization_granularity, scale);
        }
      }
      if constexpr (Main::kZero) {
#pragma unroll 1
        for (uint32_t g = 0; g < kGroups; ++g) {
          auto at = cache.scales_block_paged_ptr(b, token, head, g * C::quantization_granularity);
          if (at != nullptr) at[1] = scales[2 * g + 1];
        }
      }
    }
  }

  __device__ void store_by_pointer(uint32_t b, uint32_t token, uint32_t head, uint64_t row) const {
    const Element* from = (const Element*)in.main + (row * kHeads + head) * (kMain / kPer);
    for (uint32_t dim = 0; dim < kMain; dim += kPer) {
      Element* at = cache.template block_paged_ptr<1>(b, token, head, dim);
      if (at != nullptr) *at = from[dim / kPer];
    }
    if constexpr (kOwnScales) {
      if (!begins_block(token, head)) return;
      const Scale* scales = scales_of(row, head);
#pragma unroll 1
      for (uint32_t g = 0; g < kGroups; ++g) {
        Scale* at = cache.scales_block_paged_ptr(b, token, head, g * C::quantization_granularity);
#pragma unroll 1
        for (uint32_t i = 0; at != nullptr && i <= Main::kZero; ++i) at[i] = scales[g * (1 + Main::kZero) + i];
      }
    }
  }

  __device__ void load(uint32_t b, uint32_t token, uint32_t head, uint64_t row) const {
    const uint64_t one = row * kHeads + head, all = (uint64_t)rows * kHeads;
    constexpr uint32_t kOther = kRope ? kRope : kMain;
    const uint32_t widths = each_width<kWidths, kPer, kMain, kOther>([&](auto width, uint32_t index) {
      constexpr uint32_t kWidth = decltype(width)::value;
      Value* to = (Value*)in.values + (index * all + one) * (kMain + kRope);
#pragma unroll 1
      for (uint32_t dim = 0; dim < kMain + kRope; dim += kWidth) {
        const Vec<Value, kWidth> found = cache.template load<kWidth>(b, head, token, dim);
#pragma unroll 1
        for (uint32_t i = 0; i < kWidth; ++i) to[dim + i] = found.e[i];
      }
    });
    each_width<kWidths, kPer, kMain, kOther>([&](auto width, uint32_t index) {
      constexpr uint32_t kWidth = decltype(width)::value;
      if (index + 1 != widths) return;
      float* to = (float*)in.floats + one * (kMain + kRope);
#pragma unroll 1
      for (uint32_t dim = 0; dim < kMain + kRope; dim += kWidth) {
        const Vec<float, kWidth> found = cache.template load<kWidth, float>(b, head, token, dim);
#pragma unroll 1
        for (uint32_t i = 0; i < kWidth; ++i) to[dim + i] = found.e[i];
      }
    });
    each_width<kWidths, kPer, kMain, kMain>([&](auto width, uint32_t index) {
      constexpr uint32_t kWidth = decltype(width)::value;
      Element* to = (Element*)in.raw + (index * all + one) * (kMain / kPer);
#pragma unroll 1
      for (uint32_t dim = 0; dim < kMain; dim += kWidth) {
        const Raw<Element, kWidth> found = cache.template load_quantized<kWidth>(b, head, token, dim);
#pragma unroll 1
        for (uint32_t i = 0; i < kWidth / kPer; ++i) to[dim / kPer + i] = found.e[i];
      }
    });
    if constexpr (C::quantization_enabled) {
      Scale* to = (Scale*)in.found_scales + one * kGroups;
#pragma unroll 1
      for (uint32_t g = 0; g < kGroups; ++g) to[g] = cache.template load_scale<1>(b, head, token, g * C::quantization_granularity).e[0];
      constexpr uint32_t kMany = low_bit(kGroups) <= 16 ? low_bit(kGroups) : 16;
#pragma unroll 1
      for (uint32_t g = 0; g < kGroups; g += kMany) {
        const Vec<Scale, kMany> some = cache.template load_scale<kMany>(b, head, token, g * C::quantization_granularity);
#pragma unroll 1
        for (uint32_t i = 0; i < kMany; ++i) to[all * kGroups + g + i] = some.e[i];
      }
      Scale* zeros = (Scale*)in.zeros + one * kGroups;
#pragma unroll 1
      for (uint32_t g = 0; g < kGroups; ++g) zeros[g] = cache.load_zero(b, head, token, g * C::quantization_granularity);
    }
    in.nulls[one] = (cache.template block_paged_ptr<1>(b, token, head) == nullptr) +
                    2 * (cache.scales_block_paged_ptr(b, token, head) == nullptr) + 4 * (cache.scales_raw_ptr() == nullptr);
  }

  // Tokens below the length go first, a barrier before the others: where lengths come before the step, a ring's oldest token
  // and one of the step may have one place, and both are reached.
  __device__ void run(uint32_t mode, uint32_t tokens) const {
    const uint32_t b = blockIdx.x, all = tokens * kHeads, below = min(cache.cache_length(b), tokens) * kHeads;
#pragma unroll 1
    for (uint32_t begin = 0, end = below; begin < all; begin = end, end = all) {
      for (uint32_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const uint32_t token = i / kHeads, head = i % kHeads;
        const uint64_t row = (uint64_t)b * tokens + token;
        if (mode == kStore) store(b, token, head, row);
        if (mode == kStoreByPointer) store_by_pointer(b, token, head, row);
        if (mode == kLoad) load(b, token, head, row);
      }
      __syncthreads();
    }
  }
};

extern "C" __global__ void accessor(const __grid_constant__ Cache cache, uint8_t* main, uint8_t* rope, uint8_t* scale_rows,
                                    uint8_t* values, uint8_t* floats, uint8_t* raw, uint8_t* found_scales, uint8_t* zeros,
                                    uint8_t* nulls, uint32_t requests, uint32_t tokens, uint32_t mode, uint32_t value) {
  pdl_wait();
  const Arrays in{main, rope, scale_rows, values, floats, raw, found_scales, zeros, nulls};
#if K_WIDTHS
  if (value == 0) Rows<K_WIDTHS, KeyRole, KeyCache>{get_key_cache(cache), in, requests * tokens}.run(mode, tokens);
#endif
#if HAS_V && V_WIDTHS
  if (value == 1) Rows<V_WIDTHS, ValueRole, ValueCache>{get_value_cache(cache), in, requests * tokens}.run(mode, tokens);
#endif
}
