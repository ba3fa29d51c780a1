// mma.cuh and fragments.cuh: the kernels of tests/device_fragments/fragments.cu, and what they are made of.
#include "../../device_fragments/fragments.cu"

// [register, lane] of rows of 16 bytes: 1, 2 and 4 matrices, the same transposed, and one transposed in registers.
extern "C" __global__ void fragments_matrices(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t rows[128];
  const uint32_t lane = threadIdx.x;
  for (uint32_t i = 0; i < 4; ++i) rows[lane + 32 * i] = in[lane + 32 * i];
  __syncwarp();
  const uint32_t address = matrix_address(rows) + lane * 16;
  uint32_t one[2][1], two[2][2], four[2][4];
  load_matrices(one[0], address);
  load_matrices(two[0], address);
  load_matrices(four[0], address);
  load_transposed(one[1], address);
  load_transposed(two[1], address);
  load_transposed(four[1], address);
  for (uint32_t t = 0; t < 2; ++t) {
    out[(7 * t) * 32 + lane] = one[t][0];
    for (uint32_t i = 0; i < 2; ++i) out[(7 * t + 1 + i) * 32 + lane] = two[t][i];
    for (uint32_t i = 0; i < 4; ++i) out[(7 * t + 3 + i) * 32 + lane] = four[t][i];
  }
  out[14 * 32 + lane] = transposed(one[0][0]);
}

// [function, i] of words of codes, and of pairs of whole numbers.
extern "C" __global__ void fragments_words(const uint32_t* codes, const uint32_t* pairs, uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x, word = codes[i];
  uint32_t bytes[2][2], nibbles[4], small[2][2], upper[2][2], moved[2][2], moved_pairs[2][4];
  widen_bytes<true>(bytes[0], word, 0xe400e400u);
  widen_bytes<false>(bytes[1], word, 0xe400e400u);
  widen_nibbles(nibbles, word, 0, 0xe400e400u, 0xd400d400u);
  widen<true>(e4m3{}, small[0], word);
  widen<false>(e4m3{}, small[1], word);
  widen<true>(e5m2{}, upper[0], word);
  widen<false>(e5m2{}, upper[1], word);
  widen<false>(FromZero<uint8_t>{}, moved[0], word);
  widen<false>(FromZero<int8_t>{}, moved[1], word);
  widen<false>(FromZero<u4x2>{}, moved_pairs[0], word);
  widen<false>(FromZero<i4x2>{}, moved_pairs[1], word);
  const uint32_t values[] = {bytes[0][0], bytes[0][1], bytes[1][0], bytes[1][1], nibbles[0],  nibbles[1],  nibbles[2],
                             nibbles[3],  small[0][0], small[0][1], small[1][0], small[1][1], upper[0][0], upper[0][1],
                             upper[1][0], upper[1][1], moved[0][0], moved[0][1], moved[1][0], moved[1][1], moved_pairs[0][0],
                             moved_pairs[0][1], moved_pairs[0][2], moved_pairs[0][3], moved_pairs[1][0], moved_pairs[1][1], moved_pairs[1][2],
                             moved_pairs[1][3], flipped(word, 0x00ff00ffu, 0x00800080u), (uint32_t)even_out<FromZero<u4x2>>(i), add_halves(pairs[i], pairs[i ^ 1]), multiply_add_halves(pairs[i], pairs[i ^ 1], pairs[i ^ 2])};
#pragma unroll
  for (uint32_t k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}
