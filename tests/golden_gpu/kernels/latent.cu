// latent.cuh: rows copied in every way, columns shared by few threads and by many, weights as operands, and units of scales.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/mla/latent.cuh"

constexpr uint32_t kMostWords = 16 * 144 / 4;

// 16 rows of kChunks times 16 bytes, at a pitch of 144; some are not there.
template <uint32_t kChunks, uint32_t kLanes, uint32_t kTogether>
__device__ __forceinline__ void copied(const uint8_t* in, const int32_t* rows, uint32_t* out) {
  __shared__ alignas(16) uint32_t tile[kMostWords];
  __shared__ const uint8_t* from[16];
  const uint32_t i = threadIdx.x;
  if (i < 16) from[i] = rows[i] < 0 ? nullptr : in + 16 * rows[i];
  for (uint32_t n = i; n < kMostWords; n += 64) tile[n] = 0xeeeeeeeeu;
  __syncthreads();
  copy_rows<64, 16, 144, kChunks, kLanes, kTogether>(matrix_address(tile), from);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (uint32_t n = i; n < kMostWords; n += 64) out[n] = tile[n];
}
extern "C" __global__ void latent_copies(const uint8_t* in, const int32_t* rows, uint32_t* out) {
  uint32_t* to = out + blockIdx.x * kMostWords;
  switch (blockIdx.x) {
    case 0: return copied<8, 8, 1>(in, rows, to);
    case 1: return copied<8, 4, 1>(in, rows, to);
    case 2: return copied<9, 32, 1>(in, rows, to);
    case 3: return copied<5, 4, 1>(in, rows, to);
    case 4: return copied<1, 4, 4>(in, rows, to);
    case 5: return copied<1, 16, 16>(in, rows, to);
    case 6: return copied<3, 2, 2>(in, rows, to);
  }
}

// Two parts of scores, [part][column][32 + 4]: where a thread's scores are, their sums, the largest and all of its column.
template <typename T, uint32_t kCols>
__device__ __forceinline__ void column(const uint32_t* in, uint32_t* places, uint32_t* sums, uint16_t* weights, uint32_t* operands) {
  using Threads = ColumnThreads<64, kCols, 32>;
  __shared__ alignas(16) float scores[2][kCols][36];
  const uint32_t i = threadIdx.x;
  for (uint32_t n = i; n < 2 * kCols * 36; n += 64) ((uint32_t*)scores)[n] = in[n];
  __syncthreads();
  float x[Threads::kEach], high = 0.0f, all = 0.0f;
  Threads::read(x, scores);
#pragma unroll
  for (uint32_t n = 0; n < Threads::kEach; ++n) {
    const uint32_t at = Threads::col() * 32 + Threads::token(n);
    places[at] = 1 + i << 16 | Threads::member() << 8 | n;
    sums[at] = __float_as_uint(x[n]);
    high = fmaxf(high, x[n]);
    all += x[n];
  }
  high = Threads::largest(high);
  all = Threads::total(all);
  if (Threads::member() == Threads::kMembers - 1) {
    sums[kCols * 32 + Threads::col()] = __float_as_uint(high);
    sums[kCols * 33 + Threads::col()] = __float_as_uint(all);
  }
  if constexpr (kCols % 8 == 0) {
    using Held = Weights<kCols, 32>;
    __shared__ Held held;
    held.template store<T, Threads>(x);
    __syncthreads();
    for (uint32_t n = i; n < kCols * 32; n += 64) weights[n] = held.e[Held::place(n / 32, n % 32)];
    if (i >= 32) return;
    for (uint32_t k = 0; k < 2; ++k) {
      uint32_t b[kCols / 8][2];
      held.load(b, k, i);
      for (uint32_t n = 0; n < kCols / 8; ++n)
        for (uint32_t half = 0; half < 2; ++half) operands[((k * kCols / 8 + n) * 2 + half) * 32 + i] = b[n][half];
    }
  }
}
extern "C" __global__ void latent_columns_2(const uint32_t* in, uint32_t* places, uint32_t* sums) {
  column<bf16, 2>(in, places, sums, nullptr, nullptr);
}
extern "C" __global__ void latent_columns_8(const uint32_t* in, uint32_t* places, uint32_t* sums, uint16_t* weights, uint32_t* operands) {
  column<bf16, 8>(in, places, sums, weights, operands);
}
extern "C" __global__ void latent_columns_16(const uint32_t* in, uint32_t* places, uint32_t* sums, uint16_t* weights, uint32_t* operands) {
  column<f16, 16>(in, places, sums, weights, operands);
}
extern "C" __global__ void latent_columns_64(const uint32_t* in, uint32_t* places, uint32_t* sums, uint16_t* weights, uint32_t* operands) {
  column<f16, 64>(in, places, sums, weights, operands);
}

// 64 tokens and 32 columns, a pair of tokens a thread; as rows of columns, and as operands.
extern "C" __global__ void latent_weights(const float* in, uint16_t* weights, uint32_t* operands) {
  using Threads = ColumnThreads<1024, 32, 64>;
  using Held = Weights<32, 64>;
  __shared__ Held held;
  const uint32_t i = threadIdx.x;
  const float x[2] = {in[Threads::col() * 64 + Threads::token(0)], in[Threads::col() * 64 + Threads::token(1)]};
  held.store<bf16, Threads>(x);
  __syncthreads();
  for (uint32_t n = i; n < 32 * 64; n += 1024) weights[n] = held.e[Held::place(n / 64, n % 64)];
  if (i >= 32) return;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t b[4][2];
    held.load(b, k, i);
#pragma unroll
    for (uint32_t n = 0; n < 8; ++n) operands[(k * 8 + n) * 32 + i] = b[n / 2][n % 2];
  }
}

// Products of halves; the largest of 16 rows; a unit raised by 8 scales, if they pass it: [what][i].
extern "C" __global__ void latent_words(const uint32_t* halves, const float* rows, const float* scales, uint32_t* products, float* largest,
                                        Vec<float, 4>* units) {
  const uint32_t i = threadIdx.x;
  products[i] = multiply_halves(halves[i], halves[i ^ 1]);
  largest[i] = largest_of_rows({rows[i], rows[32 + i]});
  ScaleUnit unit;
  for (uint32_t n = 0; n < 8; ++n) {
    const float scale = scales[n * 32 + i];
    const bool below = unit.below(scale);
    const float by = below ? unit.raise(scale) : -1.0f;
    units[n * 32 + i] = {unit.value, unit.inverse, by, below ? 1.0f : 0.0f};
  }
}

// All but the last 16 bytes of each array.
template <typename E, uint32_t kDims>
__device__ __forceinline__ void cleared(const uint32_t* in, uint32_t* out) {
  __shared__ alignas(16) uint32_t row[(kDims * sizeof(E) + 16) / 4];
  for (uint32_t i = threadIdx.x; i < sizeof(row) / 4; i += 32) row[i] = in[i];
  __syncwarp();
  clear_special<E, kDims>((uint8_t*)row);
  __syncwarp();
  for (uint32_t i = threadIdx.x; i < sizeof(row) / 4; i += 32) out[i] = row[i];
}
extern "C" __global__ void latent_clear(const uint32_t* eighths, const uint32_t* halves, const uint32_t* brains, const uint32_t* floats, uint32_t* eighths_to,
                                        uint32_t* halves_to, uint32_t* brains_to, uint32_t* floats_to) {
  cleared<e4m3, 256>(eighths, eighths_to);
  cleared<f16, 72>(halves, halves_to);
  cleared<bf16, 72>(brains, brains_to);
  cleared<float, 36>(floats, floats_to);
}
