// Codes that stand for the values of a codebook. `Codes` is what memory is made of, unsigned; `Book` has value(code), and
// code_of(x): the code whose value is nearest to x, the larger one of two, 0 where x is NaN.
#pragma once

#include "elements.cuh"

template <typename Codes, typename OfBook>
struct Coded {
  using Book = OfBook;
  uint8_t bits;
};
template <typename Codes, typename Book, uint32_t N>
struct Vec<Coded<Codes, Book>, N> : Bytes<Coded<Codes, Book>, N> {};
template <typename Codes, typename Book>
constexpr uint32_t kPerElement<Coded<Codes, Book>> = kPerElement<Codes>;
template <typename Codes, typename Book>
constexpr uint32_t kElementBits<Coded<Codes, Book>> = kElementBits<Codes>;
template <typename Codes, typename Book>
constexpr uint32_t kTogether<Coded<Codes, Book>> = kTogether<Codes>;
template <typename Codes, typename Book>
constexpr uint32_t kPlacesEach<Coded<Codes, Book>> = kPlacesEach<Codes>;
template <typename Codes, typename Book>
constexpr bool kStrided<Coded<Codes, Book>> = kStrided<Codes>;
template <typename Codes, typename Book>
constexpr float kLargest<Coded<Codes, Book>> = Book::kLargest;
template <typename Codes, typename Book>
struct CopiedAs<Coded<Codes, Book>> {
  using Type = Codes;
};

// The highest bits of such codes alone: 1 if the bit is set, else -1.
template <typename T>
struct Signs {
  uint8_t bits;
};
template <typename T, uint32_t N>
struct Vec<Signs<T>, N> : Bytes<Signs<T>, N> {};
template <typename T>
constexpr uint32_t kPerElement<Signs<T>> = kPerElement<T>;
template <typename T>
constexpr uint32_t kElementBits<Signs<T>> = kElementBits<T>;
template <typename T>
constexpr uint32_t kTogether<Signs<T>> = kTogether<T>;

template <typename Codes, typename Book, uint32_t N>
__device__ __forceinline__ uint32_t encode(Coded<Codes, Book>, const float (&x)[N]) {
  uint32_t word = 0;
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) word |= Book::code_of(x[i]) << i * kElementBits<Codes>;
  return word;
}
template <typename Codes, typename Book, uint32_t N>
__device__ __forceinline__ void decode(Coded<Codes, Book>, float (&out)[N], uint32_t word) {
  constexpr uint32_t kMask = (1u << kElementBits<Codes>) - 1;
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) out[i] = Book::value(word >> i * kElementBits<Codes> & kMask);
}
template <typename T, uint32_t N>
__device__ __forceinline__ void decode(Signs<T>, float (&out)[N], uint32_t word) {
  constexpr uint32_t kHighest = (kStrided<T> ? 8 / kPlacesEach<T> : kElementBits<T>)-1;
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) out[i] = word >> (i * kElementBits<T> + kHighest) & 1 ? 1.0f : -1.0f;
}

// Values of codes with signs: what they stand for and, by their sign, so much more or less, times the scale.
template <typename T, uint32_t N, uint32_t M>
__device__ __forceinline__ void dequantize_signs(T, float (&out)[N], const Raw<T, N>& raw, const float (&scale)[M], const float (&left)[M]) {
  float sign[N];
  unpack<T>(out, raw);
  unpack<Signs<T>>(sign, *(const Raw<Signs<T>, N>*)&raw);
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) out[i] = __fmul_rn(__fmaf_rn(sign[i], left[i / (N / M)], out[i]), scale[i / (N / M)]);
}
