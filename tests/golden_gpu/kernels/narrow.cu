// Codes of 2 and 3 bits (integers.cuh, elements.cuh, bytes.cuh), and rows of codes of a codebook whose norm readers correct (quantize.cuh,
// segment.cuh).
#include "runs.cuh"
#include "../../../templates/device/quant/codebook.cuh"
#include "../../../templates/device/quant/strided.cuh"

__device__ __forceinline__ uint32_t thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// kWidth numbers a thread to codes and back.
template <typename T, uint32_t kWidth>
__device__ __forceinline__ void there_and_back(const float* in, uint8_t* codes, float* out) {
  constexpr uint32_t kBytes = units_of<T>(kWidth);
  static_assert(elements_of<T>(kBytes) == kWidth && sizeof(Raw<T, kWidth>) == kBytes);
  float x[kWidth];
#pragma unroll
  for (uint32_t i = 0; i < kWidth; ++i) x[i] = in[thread() * kWidth + i];
  Raw<T, kWidth> raw;
  pack<T>(raw, x);
  unpack<T>(x, raw);
#pragma unroll
  for (uint32_t i = 0; i < kBytes; ++i) codes[thread() * kBytes + i] = raw.e[i].bits;
#pragma unroll
  for (uint32_t i = 0; i < kWidth; ++i) out[thread() * kWidth + i] = x[i];
}
extern "C" __global__ void narrow_u2(const float* in, uint8_t* codes, float* out) { there_and_back<u2x4, 4>(in, codes, out); }
extern "C" __global__ void narrow_u2_words(const float* in, uint8_t* codes, float* out) { there_and_back<u2x4, 16>(in, codes, out); }
extern "C" __global__ void narrow_u3(const float* in, uint8_t* codes, float* out) { there_and_back<u3, 8>(in, codes, out); }
extern "C" __global__ void narrow_u3_halves(const float* in, uint8_t* codes, float* out) { there_and_back<u3, 16>(in, codes, out); }
extern "C" __global__ void narrow_u3_words(const float* in, uint8_t* codes, float* out) { there_and_back<u3, 32>(in, codes, out); }

extern "C" __global__ void narrow_strided_u4(const float* in, uint8_t* codes, float* out) { there_and_back<Strided<u4x2>, 4>(in, codes, out); }
extern "C" __global__ void narrow_strided_u2(const float* in, uint8_t* codes, float* out) { there_and_back<Strided<u2x4>, 8>(in, codes, out); }

// Eight bytes taken apart, a code a byte, and put together again.
template <typename T>
__device__ __forceinline__ void apart_and_back(const uint8_t* in, uint8_t* codes, uint8_t* bytes) {
  Vec<T, 8> whole, joined;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) whole.e[i].bits = in[8 * thread() + i];
#pragma unroll
  for (uint32_t place = 0; place < kPlacesEach<T>; ++place) {
    Vec<T, 8> kept = whole;
    keep_codes(kept, place);
    join_codes(joined, kept, place);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) codes[(kPlacesEach<T> * thread() + place) * 8 + i] = kept.e[i].bits;
  }
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) bytes[8 * thread() + i] = joined.e[i].bits;
}
extern "C" __global__ void narrow_apart_u4(const uint8_t* in, uint8_t* codes, uint8_t* bytes) { apart_and_back<Strided<u4x2>>(in, codes, bytes); }
extern "C" __global__ void narrow_apart_u2(const uint8_t* in, uint8_t* codes, uint8_t* bytes) { apart_and_back<Strided<u2x4>>(in, codes, bytes); }

// Rows of 40 numbers, one a thread: the bytes of each, a lane's chunks of 4 joined, and what its codes are.
extern "C" __global__ void narrow_strided_rows(const float* in, uint8_t* codes, float* out) {
  using S = Run<Strided<u4x2>, f16, Recipe::amax, true, 1, kDims, 0, 4>;
  const PageRef page = {codes, nullptr, nullptr, kU32Max, Fault::none, true};
  const uint32_t row = threadIdx.x, token = row / kHeads, head = row % kHeads;
  const auto make = [&](Raw<Strided<u4x2>, 4>& raw, uint32_t c) {
    float x[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) x[i] = in[row * kDims + 4 * c + i];
    raw.words[0] = encode(Strided<u4x2>{}, x);
  };
  store_chunks<S, 1, 4, 10, 10>(page, token, head, 0, 0, [](uint32_t) { return true; }, make);
#pragma unroll
  for (uint32_t c = 0; c < 10; ++c) {
    Raw<Strided<u4x2>, 4> raw;
    float x[4];
    load_codes<S, 4>(raw, page, token, head, 4 * c);
    decode(Strided<u4x2>{}, x, raw.words[0]);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) out[row * kDims + 4 * c + i] = x[i];
  }
}

// Three words as numbers of 24 bits and back; their fields of 3 bits.
extern "C" __global__ void narrow_bits(const uint32_t* in, uint32_t* numbers, uint32_t* words, float* fields) {
  uint32_t three[3], four[4];
  float eight[8];
#pragma unroll
  for (uint32_t i = 0; i < 3; ++i) three[i] = in[3 * thread() + i];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) numbers[4 * thread() + i] = four[i] = number_in<24>(three, i);
#pragma unroll
  for (uint32_t i = 0; i < 3; ++i) words[3 * thread() + i] = joined_word<24, 32>(four, i);
  decode_fields<3, 0, 0, 0>(eight, four[0]);
  decode_fields<3, 4, 3, 1>(eight, four[0]);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) fields[8 * thread() + i] = eight[i];
}

__device__ const float kBookValues[] = {-2.5f, -1.25f, -0.5f, 0.0f, 0.125f, 0.75f, 1.5f, 3.0f};
struct Book {
  static constexpr float kLargest = 3.0f, kSquareBase = 32.0f, kNormUnit = 0.001953125f;
  __device__ static float value(uint32_t code) { return kBookValues[code]; }
  __device__ static uint32_t code_of(float x) {
    uint32_t code = 0;
    for (uint32_t i = 0; i < 7; ++i) code += x >= (kBookValues[i] + kBookValues[i + 1]) / 2;
    return code;
  }
};
// The same numbers with a sign above.
struct SignBook : Book {
  __device__ static float value(uint32_t code) { return kBookValues[code % 8]; }
  __device__ static uint32_t code_of(float x) {
    const uint32_t code = Book::code_of(x);
    return x >= value(code) ? code + 8 : code;
  }
};
// Eight numbers a thread to such codes and back, of which four have one scale and left each; T's bytes.
template <typename T>
__device__ __forceinline__ void signs_and_back(const float* in, const float* scales, uint8_t* codes, float* out) {
  float x[8], scale[2], left[2];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) x[i] = in[8 * thread() + i];
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    scale[i] = scales[4 * thread() + i];
    left[i] = scales[4 * thread() + 2 + i];
  }
  Raw<T, 8> raw;
  pack<T>(raw, x);
#pragma unroll
  for (uint32_t i = 0; i < sizeof(raw); ++i) codes[sizeof(raw) * thread() + i] = raw.e[i].bits;
  dequantize_signs(T{}, x, raw, scale, left);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) out[8 * thread() + i] = x[i];
}
extern "C" __global__ void narrow_signs(const float* in, const float* scales, uint8_t* codes, float* out) {
  signs_and_back<Coded<u4x2, SignBook>>(in, scales, codes, out);
}
extern "C" __global__ void narrow_signs_strided(const float* in, const float* scales, uint8_t* codes, float* out) {
  signs_and_back<Coded<Strided<u4x2>, SignBook>>(in, scales, codes, out);
}

struct Cache {};
using Row = Run<Coded<u3, Book>, f16, Recipe::norm_corrected, false, 1, 40>;
using Parts = Run<Coded<u3, Book>, f16, Recipe::norm_corrected, false, 1, 8>;
using Heads = Run<Coded<u3, Book>, f16, Recipe::norm_corrected, false, 2, 40>;

// Five elements of a vector of 8 each: a token's row of a head is 5 lanes of 8. Every way to read it: out[way][token][head][dim].
template <typename S>
__device__ __forceinline__ void rows_of(uint8_t* codes, f16* norms, float* out) {
  const Cache cache;
  const PageRef page = {codes, norms, nullptr, kU32Max, Fault::none, true};
  const uint32_t lane = threadIdx.x % 8, row = threadIdx.x / 8, token = row / kHeads, head = row % kHeads, mask = 0xffu << threadIdx.x % 32 / 8 * 8;
  const float factor = row_factor<S, 8, 8>(cache, page, token, head, true, lane, mask, 1.0f);
  const float alone = stored_corrected_scale<S, 1, 8>(cache, page, token, head / S::kBlockHeads * S::kBlockHeads, 0, 0, 0);
  const float norm = to_f32(*scale_at<S>(cache, page, token, head, 0));
  const float together = corrected_scale<S, 8, 8>(norm, page, token, head / S::kBlockHeads * S::kBlockHeads, 0, lane, mask);
  if (lane >= 5) return;
  Vec<float, 8> found[6];
  uint32_t squares = 0;
  const float scale[1] = {alone};
  load_elements<S>(found[0], cache, page, token, head, 8 * lane);
  load_of_row<S>(found[1], cache, page, token, head, 8 * lane, factor);
  load_scaled<S>(found[2], page, token, head, 8 * lane, scale);
  load_direction<S>(found[3], squares, page, token, head, 8 * lane);
#pragma unroll
  for (uint32_t i = 0; i < 8; i += 4) {  // parts of three bytes
    Vec<float, 4> codes, values;
    load_unscaled<S>(codes, page, token, head, 8 * lane + i);
    load_part<typename S::Element>(values, 8 * lane + i, [&](auto& whole, uint32_t dim) { load_scaled<S>(whole, page, token, head, dim, scale); });
#pragma unroll
    for (uint32_t e = 0; e < 4; ++e) found[4].e[i + e] = codes.e[e], found[5].e[i + e] = values.e[e];
  }
  uint32_t again = squares_in_units<Book>(found[3].e);
  const float part = corrected_norm<Book>(norm, squares);
#pragma unroll
  for (uint32_t way = 0; way < 7; ++way)
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const float same = together == alone || alone != alone ? part : nan_f32();
      out[((way * kTokens + token) * kHeads + head) * kDims + 8 * lane + i] = way < 6 ? found[way].e[i] : again == squares ? same : nan_f32();
    }
}
extern "C" __global__ void narrow_rows(uint8_t* codes, f16* norms, float* out) { rows_of<Row>(codes, norms, out); }
extern "C" __global__ void narrow_parts(uint8_t* codes, f16* norms, float* out) { rows_of<Parts>(codes, norms, out); }
extern "C" __global__ void narrow_heads(uint8_t* codes, f16* norms, float* out) { rows_of<Heads>(codes, norms, out); }
