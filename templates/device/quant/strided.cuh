// Codes that share bytes with others a row's bytes away: byte i of a row has elements i, i + n, ..., n bytes a row, the first one
// in its lowest bits. N such elements are N bytes of memory; loaded, each byte keeps one code.
#pragma once

#include "elements.cuh"

// A byte of T, of unsigned codes that are no neighbours.
template <typename T>
struct Strided {
  uint8_t bits;
};
template <typename T, uint32_t N>
struct Vec<Strided<T>, N> : Bytes<Strided<T>, N> {};
template <typename T>
constexpr uint32_t kPlacesEach<Strided<T>> = kPlacesEach<T>;
template <typename T>
constexpr bool kStrided<Strided<T>> = true;
template <typename T>
constexpr float kLargest<Strided<T>> = kLargest<T>;

template <typename T>
__device__ __forceinline__ uint32_t encode(Strided<T>, const float (&x)[4]) {
  constexpr int kMost = (int)kLargest<T>;
  return gather_bytes<0>(unsigned_code<kMost>(x[0]), unsigned_code<kMost>(x[1]), unsigned_code<kMost>(x[2]), unsigned_code<kMost>(x[3]));
}
template <typename T>
__device__ __forceinline__ void decode(Strided<T>, float (&out)[4], uint32_t word) {
  decode_bytes<0>(out, word);
}

// Keeps the code at `place` of each byte; the bytes of codes, with the codes at `place` last.
template <typename T, uint32_t N>
__device__ __forceinline__ void keep_codes(Vec<T, N>& bytes, uint32_t place) {
  constexpr uint32_t kBits = 8 / kPlacesEach<T>, kMask = ((1u << kBits) - 1) * 0x01010101u;
#pragma unroll
  for (auto& word : bytes.words) word = word >> place * kBits & kMask;
}
template <typename T, uint32_t N>
__device__ __forceinline__ void join_codes(Vec<T, N>& bytes, const Vec<T, N>& codes, uint32_t place) {
  constexpr uint32_t kBits = 8 / kPlacesEach<T>;
#pragma unroll
  for (uint32_t i = 0; i < sizeof(bytes.words) / sizeof(bytes.words[0]); ++i)
    bytes.words[i] = place == 0 ? codes.words[i] : bytes.words[i] | codes.words[i] << place * kBits;
}
