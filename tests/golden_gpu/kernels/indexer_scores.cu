// indexer_scores.cuh, indexer_packed.cuh, mma_codes.cuh, wgmma_codes.cuh: scores of a tile of keys by warps and by a warpgroup; products of codes.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/indexer/indexer_packed.cuh"

template <typename E, uint32_t H, uint32_t R>
struct TileOf {
  using Element = E;
  static constexpr uint32_t kHeads = H, kRows = R, kTokens = 128, kRowBytes = 128 * sizeof(E), kTogether = R;
};
template <typename T>
struct alignas(1024) Shared {
  uint8_t query[T::kRows * T::kHeads * T::kRowBytes], ring[128 * T::kRowBytes];
  float weights[T::kRows * T::kHeads];
};

// Scores [warps or a warpgroup][row][key]; key n of the tile is row places[n] of `keys`, of none where that is negative. The last row has no q.
template <typename T>
__device__ __forceinline__ void score(const uint8_t* keys, const int32_t* places, const uint8_t* q, const float* weights, float* out, uint32_t* which, float* maxima) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared<T>& shared = *(Shared<T>*)dynamic;
  const uint32_t query = matrix_address(shared.query), ring = matrix_address(shared.ring), rows = T::kRows == 1 ? 1 : T::kRows - 1;
  const int32_t place = places[threadIdx.x];
  copy_queries_async<T>(query, q, T::kHeads * T::kRowBytes + 32, rows);
  copy_weights_async<T>(matrix_address(shared.weights), weights, T::kHeads + 1, rows);
  copy_keys_async<T>(ring, place < 0 ? nullptr : keys + place * T::kRowBytes);
  cp_async_commit();
  cp_async_wait<0>();
  fence_products();
  __syncthreads();
  TileKeys<T, false> warps;
  warps.load(ring);
  for (uint32_t row = 0; row < T::kRows; ++row) {
    float scores[1][4];
    warps.await_scores(scores, query, shared.weights, row);
    out[row * 128 + thread_key()] = sum_of_quad(scores[0]);
  }
  TileKeys<T, true> group;
  group.load(ring);
  float scores[T::kRows][4];
  group.await_scores(scores, query, shared.weights, 0);
  for (uint32_t row = 0; row < T::kRows; ++row) out[(T::kRows + row) * 128 + thread_key()] = sum_of_quad(scores[row]);
  float sum = 1.0f;
  const Vec<float, 2> w = {{2.0f, -1.0f}};
  add_weighed(sum, (float)threadIdx.x - 64.0f, threadIdx.x == 5 ? nan_f32() : 3.0f, w);
  which[2 * threadIdx.x] = thread_key();
  which[2 * threadIdx.x + 1] = sum == sum ? (uint32_t)(int32_t)sum : ~0u;
  const float x = thread_key() == 77 ? nan_f32() : (float)(thread_key() * 37 % 128) - 64.0f;
  const float most[4] = {max_of_block<2>(x), max_of_block<4>(x), max_of_block<8>(x), max_of_block<16>(x)};
  for (uint32_t i = 0; i < 4; ++i) maxima[threadIdx.x * 4 + i] = most[i];
}
extern "C" __global__ void indexer_scores_codes(const uint8_t* keys, const int32_t* places, const uint8_t* q, const float* weights, float* out, uint32_t* which, float* maxima) {
  score<TileOf<e4m3, 32, 2>>(keys, places, q, weights, out, which, maxima);
}
extern "C" __global__ void indexer_scores_values(const uint8_t* keys, const int32_t* places, const uint8_t* q, const float* weights, float* out, uint32_t* which, float* maxima) {
  score<TileOf<bf16, 32, 1>>(keys, places, q, weights, out, which, maxima);
}

// The same of keys and q of 4 bits, whose scales are words.
struct PackedTile {
  using Element = e2m1x2;
  static constexpr uint32_t kHeads = 32, kRows = 2, kTokens = 128, kRowBytes = 64, kTogether = 2;
};
template <typename K>
__device__ __forceinline__ void score_packed(const K& keys, uint32_t query, const float* weights, float* out) {
  for (uint32_t row = 0; row < 2; row += K::kTogether) {
    float scores[K::kTogether][4];
    keys.await_scores(scores, query, weights, row);
    for (uint32_t u = 0; u < K::kTogether; ++u) out[(row + u) * 128 + thread_key()] = sum_of_quad(scores[u]);
  }
}
extern "C" __global__ void indexer_scores_packed(const uint8_t* keys, const uint32_t* key_scales, const int32_t* places, const uint8_t* q, const int32_t* q_scales,
                                                 const float* weights, float* out, uint32_t* wide) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  uint8_t *query = dynamic, *ring = dynamic + 64 * 256;
  float* held = (float*)(ring + 128 * 64);
  uint32_t* scales = (uint32_t*)(held + 64);
  const int32_t place = places[threadIdx.x];
  store_packed_queries<PackedTile>(query, q, 32 * 64 + 16, q_scales, 33, 1);
  copy_weights_async<PackedTile>(matrix_address(held), weights, 33, 1);
  copy_packed_keys_async<PackedTile>(matrix_address(ring), place < 0 ? nullptr : keys + place * 64);
  scales[threadIdx.x] = place < 0 ? 0x7f7f7f7fu : key_scales[place];
  cp_async_commit();
  cp_async_wait<0>();
  fence_products();
  __syncthreads();
  PackedTileKeys<PackedTile, false> warps;
  warps.load(matrix_address(ring), scales);
  score_packed(warps, matrix_address(query), held, out);
  PackedTileKeys<PackedTile, true> group;
  load_packed_keys<PackedTile>(group.keys, matrix_address(ring), scales);
  score_packed(group, matrix_address(query), held, out + 256);
  float zeros[2][4] = {}, ones[32];
  for (uint32_t i = 0; i < 32; ++i) ones[i] = 1.0f;
  add_heads<PackedTile>(zeros, ones, 0, held);
  uint32_t pairs[4];
  widen_scaled(pairs, threadIdx.x * 0x02468ace, threadIdx.x == 7 ? 255 : threadIdx.x == 9 ? 0 : 100 + threadIdx.x / 2);
  for (uint32_t i = 0; i < 4; ++i) wide[threadIdx.x * 5 + i] = pairs[i];
  wide[threadIdx.x * 5 + 4] = (uint32_t)(int32_t)(zeros[0][0] + zeros[0][1] + zeros[1][0]);
}

// One step of 32 codes: a warp's product, and a warpgroup's of 64 rows by 32, 64 and 128 columns, added to their own.
template <uint32_t N>
__device__ __forceinline__ void columns(uint64_t a, uint64_t b, float* out) {
  float d[N];
  wgmma_fence();
  multiply_codes(d, a, b, false);
  multiply_codes(d, a, b, true);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_done(d);
  for (uint32_t i = 0; i < N; ++i) out[threadIdx.x * N + i] = d[i];
}
extern "C" __global__ void indexer_scores_products(const uint8_t* a, const uint8_t* b, float* warp, float* out) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  for (uint32_t i = threadIdx.x; i < 192 * 32; i += 128) {  // rows of 128 bytes, of which the first 32 are there
    const uint32_t row = i / 32, at = row * 128 + (i % 32 / 16 ^ row % 8) * 16 + i % 16;
    dynamic[at] = row < 64 ? a[i] : b[i - 64 * 32];
  }
  fence_async_shared();
  __syncthreads();
  const uint64_t rows = swizzled_tile(matrix_address(dynamic)), cols = swizzled_tile(matrix_address(dynamic) + 64 * 128);
  columns<16>(rows, cols, out);
  columns<32>(rows, cols, out + 128 * 16);
  columns<64>(rows, cols, out + 128 * 48);
  if (threadIdx.x >= 32) return;
  const uint32_t g = threadIdx.x / 4, j = threadIdx.x % 4;
  uint32_t x[4], y[2];
  for (uint32_t i = 0; i < 4; ++i) x[i] = *(const uint32_t*)(a + (g + i % 2 * 8) * 32 + i / 2 * 16 + 4 * j);
  for (uint32_t i = 0; i < 2; ++i) y[i] = *(const uint32_t*)(b + g * 32 + i * 16 + 4 * j);
  float c[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  multiply_add_codes(c, x, y);
  for (uint32_t i = 0; i < 4; ++i) warp[threadIdx.x * 4 + i] = c[i];
}
