// bytes.cuh, elements.cuh, fp8.cuh, fp4.cuh and integers.cuh: every element type to and from f32, and what they are made of.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/bytes.cuh"
#include "../../../templates/device/quant/elements.cuh"

__device__ __forceinline__ uint32_t thread() { return blockIdx.x * blockDim.x + threadIdx.x; }
template <uint32_t N>
__device__ __forceinline__ void read(float (&x)[N], const float* p) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) x[i] = p[i];
}
template <uint32_t N>
__device__ __forceinline__ void write(float* p, const float (&x)[N]) {
#pragma unroll
  for (uint32_t i = 0; i < N; ++i) p[i] = x[i];
}

// Eight numbers a thread, at once, and again by vectors below a word: both must be the same.
template <typename T>
__device__ __forceinline__ void packed(uint8_t* out, const float (&x)[8]) {
  constexpr uint32_t kPer = kPerElement<T>;
  Raw<T, 8> raw;
  pack<T>(raw, x);
#pragma unroll
  for (uint32_t i = 0; i < 8; i += 2 * kPer) {
    float two[2 * kPer], one[kPer];
#pragma unroll
    for (uint32_t j = 0; j < 2 * kPer; ++j) two[j] = x[i + j], one[j % kPer] = x[i + j];
    Raw<T, 2 * kPer> pair;
    Raw<T, kPer> single;
    pack<T>(pair, two);
    pack<T>(single, one);
    out[8 / kPer * thread() + i / kPer] = pair.e[0].bits == raw.e[i / kPer].bits ? raw.e[i / kPer].bits : 0xee;
    out[8 / kPer * thread() + i / kPer + 1] = single.e[0].bits == pair.e[1].bits ? raw.e[i / kPer + 1].bits : 0xee;
  }
}
template <typename T>
__device__ __forceinline__ void packed_integers(uint8_t* out, const float (&x)[8]) {
  Raw<T, 8> raw;
  pack<T>(raw, x);
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) out[8 * thread() + i] = (uint8_t)raw.e[i];
}
template <typename T>
__device__ __forceinline__ void packed_plain(uint16_t* out, const float (&x)[8]) {
  Raw<T, 8> raw;
  pack<T>(raw, x);
#pragma unroll
  for (uint32_t i = 0; i < 8; i += 2) {
    Vec<T, 2> pair;
    pack_pair(pair.e, x[i], x[i + 1]);
    out[8 * thread() + i] = raw.e[i].bits;
    out[8 * thread() + i + 1] = pair.e[1].bits;
  }
}
extern "C" __global__ void elements_pack(const float* in, uint8_t* to_e4m3, uint8_t* to_e5m2, uint8_t* to_e2m1, uint8_t* to_i8, uint8_t* to_u8,
                                         uint8_t* to_i4, uint8_t* to_u4, uint16_t* to_bf16, uint16_t* to_f16) {
  float x[8];
  read(x, in + 8 * thread());
  packed<e4m3>(to_e4m3, x);
  packed<e5m2>(to_e5m2, x);
  packed<e2m1x2>(to_e2m1, x);
  packed_integers<int8_t>(to_i8, x);
  packed_integers<uint8_t>(to_u8, x);
  packed<i4x2>(to_i4, x);
  packed<u4x2>(to_u4, x);
  packed_plain<bf16>(to_bf16, x);
  packed_plain<f16>(to_f16, x);
}

// Eight bytes a thread.
template <typename T>
__device__ __forceinline__ void unpacked(float* out, const uint8_t* in) {
  constexpr uint32_t kPer = kPerElement<T>;
  float x[8 * kPer];
  unpack<T>(x, *(const Raw<T, 8 * kPer>*)(in + 8 * thread()));
  write(out + 8 * kPer * thread(), x);
}
extern "C" __global__ void elements_unpack(const uint8_t* in, float* of_e4m3, float* of_e5m2, float* of_e2m1, float* of_i8, float* of_u8, float* of_i4,
                                           float* of_u4) {
  unpacked<e4m3>(of_e4m3, in);
  unpacked<e5m2>(of_e5m2, in);
  unpacked<e2m1x2>(of_e2m1, in);
  unpacked<int8_t>(of_i8, in);
  unpacked<uint8_t>(of_u8, in);
  unpacked<i4x2>(of_i4, in);
  unpacked<u4x2>(of_u4, in);
}
// Every 16-bit pattern, an odd number of them a vector.
extern "C" __global__ void elements_widen(const uint16_t* in, float* of_bf16, float* of_f16) {
  const uint32_t i = 4 * thread();
  float x[4];
  unpack<bf16>(x, *(const Raw<bf16, 4>*)(in + i));
  write(of_bf16 + i, x);
  unpack<f16>(x, *(const Raw<f16, 4>*)(in + i));
  write(of_f16 + i, x);
}

// [function, i] of three words each.
extern "C" __global__ void elements_bytes(const uint32_t* a, const uint32_t* b, const uint32_t* c, uint32_t* out) {
  const uint32_t i = thread(), n = gridDim.x * blockDim.x, x = a[i], y = b[i], z = c[i], w = x * 2654435761u + z;
  const BytePlanes planes = gather_planes(x, y, z, w);
  float low, high;
  widen_halves(low, high, x);
  const uint32_t values[] = {permute(x, y, z),
                             blend(x, y, z),
                             gather_bytes<0>(x, y, z, w),
                             gather_bytes<1>(x, y, z, w),
                             gather_bytes<2>(x, y, z, w),
                             gather_bytes<3>(x, y, z, w),
                             planes.first,
                             planes.second,
                             __float_as_uint(min_nan(__uint_as_float(x), __uint_as_float(y))),
                             __float_as_uint(max_nan(__uint_as_float(x), __uint_as_float(y))),
                             __float_as_uint(low),
                             __float_as_uint(high)};
#pragma unroll
  for (uint32_t k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}

// [function, i] of a number: codes before words are made of them.
extern "C" __global__ void elements_codes(const float* in, uint32_t* out) {
  const uint32_t i = thread(), n = gridDim.x * blockDim.x;
  const float x = in[i];
  const e4m3 scale = from_f32<e4m3>(x);
  const float four[4] = {x, -x, x, -x}, eight[8] = {x, x, -x, -x, x, x, -x, -x};
  const uint32_t values[] = {magnitude_code<3, -6>(min_nan(fabsf(x), 448.0f)) & 255,
                             magnitude_code<2, -14>(min_nan(fabsf(x), 57344.0f)) & 255,
                             magnitude_code<1, 0>(fminf(fabsf(x), 6.0f)) & 255,
                             biased_code<127>(x) & 0xffff,
                             biased_code<7>(x) & 0xffff,
                             unsigned_code<255>(x),
                             unsigned_code<15>(x),
                             scale.bits,
                             __float_as_uint(to_f32(scale)),
                             __float_as_uint(x * power_of_two(-9)),
                             encode(e4m3{}, four),
                             encode(e5m2{}, four),
                             encode(e2m1x2{}, eight),
                             encode(int8_t{}, four),
                             encode(uint8_t{}, four),
                             encode(i4x2{}, eight),
                             encode(u4x2{}, eight)};
#pragma unroll
  for (uint32_t k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}

// [function, i] of a word.
template <typename T, uint32_t N>
__device__ __forceinline__ void decoded(T type, float*& out, uint32_t word) {
  float x[N];
  decode(type, x, word);
  write(out, x);
  out += N;
}
extern "C" __global__ void elements_words(const uint32_t* in, float* out) {
  const uint32_t word = in[thread()];
  float* to = out + 64 * thread();
  decoded<e4m3, 4>({}, to, word);
  decoded<e5m2, 4>({}, to, word);
  decoded<e2m1x2, 8>({}, to, word);
  decoded<int8_t, 4>({}, to, word);
  decoded<uint8_t, 4>({}, to, word);
  decoded<i4x2, 8>({}, to, word);
  decoded<u4x2, 8>({}, to, word);
  float four[4], eight[8];
  decode_bytes<128>(four, word);
  write(to, four);
  decode_nibbles<8>(eight, word);
  write(to + 4, eight);
  const float nibbles[4] = {decode_field<4, 0, 0>(word), decode_field<4, 4, 8>(word), decode_field<4, 8, 0>(word), decode_field<4, 12, 8>(word)};
  write(to + 12, nibbles);
  write(to + 16, {kLargest<e4m3>, kLargest<e5m2>, kLargest<e2m1x2>, kLargest<int8_t>, kLargest<uint8_t>, kLargest<i4x2>, kLargest<u4x2>, kLargest<bf16>});
}

#if __CUDA_ARCH__ < 890
// Codes of four magnitudes, 0xfe for NaN, under the signs of four numbers.
extern "C" __global__ void elements_signs(const uint32_t* codes, const float* in, uint32_t* out) {
  float x[4];
  read(x, in + 4 * thread());
  out[thread()] = with_signs(codes[thread()], x);
}
#endif
