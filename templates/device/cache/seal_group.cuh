// Groups of tokens whose K is quantized together, each channel (dim of a head) with a scale over the group. A thread has
// neighbouring channels; their values of the group's tokens are read twice, for the range and for the codes.
#pragma once

// The values of a group's tokens, `first` its oldest: those of earlier steps lie in the tail, those from `before` on in the
// step's rows, `row_of_0` being where the row of position 0 would lie.
template <typename Key>
struct GroupTokens {
  using T = typename Key::Compute;
  const T* tail;
  const T* row_of_0;
  int64_t stride;
  uint32_t first, before;

  // Token t of the group: kWidth dims of a head from `dim` on, which are elements from `element` on of a row.
  template <uint32_t kWidth>
  __device__ __forceinline__ void read(float (&x)[kWidth], uint32_t t, uint32_t element, uint32_t head, uint32_t dim) const {
    Vec<T, kWidth> value;
    if (first + t >= before) {
      load<kWidth>(value, row_of_0 + (int64_t)(first + t) * stride + element);
    } else {
      load<kWidth>(value, tail + Key::tail_offset(t, head, dim));
    }
    unpack<T>(x, value);
  }
};

// (Results go to references: returned by value they cost 16 registers.)

// The range of a thread's channels over a group: from `low` to `high`; without zero points `high` is the largest magnitude.
template <uint32_t kWidth>
struct ChannelRanges {
  float low[kWidth], high[kWidth];
};
template <uint32_t kGroup, uint32_t kWidth, typename Key>
__device__ __forceinline__ void find_ranges(ChannelRanges<kWidth>& range, const GroupTokens<Key>& tokens, uint32_t element, uint32_t head,
                                            uint32_t dim) {
  for (uint32_t t = 0; t < kGroup; ++t) {
    float x[kWidth];
    tokens.read(x, t, element, head, dim);
#pragma unroll
    for (uint32_t j = 0; j < kWidth; ++j) {
      const float most = Key::kZero ? x[j] : fabsf(x[j]);
      range.high[j] = t == 0 ? most : max_nan(range.high[j], most);
      if (Key::kZero) range.low[j] = t == 0 ? x[j] : min_nan(range.low[j], x[j]);
    }
  }
}

// The scales of a thread's channels as codes are divided by them, and the zero points that are added (0 with a scale of 0).
template <uint32_t kWidth>
struct ChannelScales {
  float scale[kWidth], zero[kWidth];
};

// Chooses them, and stores them for the group whose first token is `token` of its page.
template <typename Key, uint32_t kWidth, typename Cache, typename Page>
__device__ __forceinline__ void store_channel_scales(ChannelScales<kWidth>& chosen, const Cache& cache, const Page& page,
                                                     const ChannelRanges<kWidth>& range, uint32_t token, uint32_t head, uint32_t dim) {
#pragma unroll
  for (uint32_t j = 0; j < kWidth; ++j) {
    const auto at = scale_at<Key>(cache, page, token, head, dim + j);
    if constexpr (Key::kZero) {
      const auto found = asymmetric<typename Key::Element, typename Key::Scale>(range.low[j], range.high[j]);
      at[0] = found.scale;
      at[1] = found.zero;
      chosen.scale[j] = to_f32(found.scale);
      chosen.zero[j] = chosen.scale[j] == 0.0f ? 0.0f : to_f32(found.zero);
    } else {
      at[0] = amax_scale<typename Key::Element, typename Key::Scale>(range.high[j]);
      chosen.scale[j] = to_f32(at[0]);
    }
  }
}

// Stores the codes of a group's tokens in a thread's channels.
template <uint32_t kGroup, uint32_t kWidth, typename Key, typename Page>
__device__ __forceinline__ void store_group_codes(const Page& page, const GroupTokens<Key>& tokens, const ChannelScales<kWidth>& chosen,
                                                  uint32_t token, uint32_t element, uint32_t head, uint32_t dim) {
  for (uint32_t t = 0; t < kGroup; ++t) {
    float x[kWidth];
    tokens.read(x, t, element, head, dim);
    divide(x, chosen.scale);
    if constexpr (Key::kZero) {
#pragma unroll
      for (uint32_t j = 0; j < kWidth; ++j) x[j] = __fadd_rn(x[j], chosen.zero[j]);
    }
    Raw<typename Key::Element, kWidth> codes;
    pack<typename Key::Element>(codes, x);
    store_raw<Key, kWidth>(page, token + t, head, dim, codes);
  }
}
