// latent_warpgroups.cuh, listed_rows.cuh, wgmma_narrow.cuh: a warpgroup and one tile of 64 rows, 448 codes and 64 bf16, 16 columns.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/launch.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/memory/mbarrier.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/mla/listed_rows.cuh"
#include "../../../templates/device/attention/mla/latent_warpgroups.cuh"

struct Tile {
  using Element = e4m3;
  using PlainElement = bf16;
  using QueryElement = bf16;
  static constexpr uint32_t kThreads = 128, kCols = 16, kTokens = 64, kPitch = 592, kSteps = 32, kValueDims = 512, kCodeBlocks = 14;
  static constexpr uint32_t kWarpsM = 1, kWarpsN = 1, kWarpsK = 1;
  static constexpr float kSlack = 8.0f;
};
struct CodeKey {
  using Element = e4m3;
  static constexpr uint32_t kBlocks = 14, kAt = 0, kFirstStep = 0;
};
using Shape = WarpgroupShape<Tile>;
struct Merged {
  float max[1][16], sum[1][16], out[1][16][512];
};
struct Shared {
  alignas(1024) uint8_t query[8 * Shape::kPanelBytes];
  alignas(1024) uint8_t weights[8 * Shape::kPanelBytes];
  alignas(16) uint8_t rows[64 * 592];
  alignas(16) uint8_t scales[64 * 8];
  Merged merged;
  Told<Tile> told;
};

// Element r of fragment n is token 16 warp + g + r / 2 * 8, column 8n + 2j + r % 2.
extern "C" __global__ void __launch_bounds__(128) latent_warpgroups_tile(const bf16* q, const uint32_t* in, const uint32_t* scales_in, uint32_t* query_out, float* scores,
                                                                         float* scales_of, uint32_t* weights_out, uint32_t* pairs, uint32_t* flags,
                                                                         float* merged_out) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *(Shared*)dynamic;
  const uint32_t warp = Shape::warp(), lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  for (uint32_t i = threadIdx.x; i < 64 * 148; i += 128) ((uint32_t*)shared.rows)[i] = in[i];
  for (uint32_t i = threadIdx.x; i < 64 * 2; i += 128) ((uint32_t*)shared.scales)[i] = scales_in[i];
  for (uint32_t col = warp; col < 16; col += 4) {
    QueryColumn<Tile, CodeKey> x;
    x.load(q + col * 512, true);
    store_query_panels<Tile>(shared.query, x, col, 2.0f);
  }
  fence_async_shared();
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < sizeof(shared.query) / 4; i += 128) query_out[i] = ((const uint32_t*)shared.query)[i];
  const uint32_t at = matrix_address(shared.rows);
  const uint64_t query = swizzled_tile(matrix_address(shared.query)), weights = swizzled_tile(matrix_address(shared.weights));
  const auto scales = TokenScales<Tile>(shared.scales);
  for (uint32_t group = 0; group < 7; ++group)
    for (uint32_t h = 0; h < 2; ++h) scales_of[group * 64 + warp * 16 + g + 8 * h] = scales.of(group, h);

  Shape::Fragment s, again, part[8];
  multiply_tile_qk(s, at, query, scales);
  const uint32_t keys = at + warp * 16 * 592 + Shape::Keys::offset(lane, 592);
#pragma unroll
  for (uint32_t group = 0; group < 8; ++group) {
    StoredGroup stored;
    uint32_t a[4][4];
    load_keys<Tile>(stored, keys, group);
    widen_keys<Tile>(a, stored, group);
    wgmma_fence();
    begin_group<Tile>(part[group], a, query, group, false);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(flat(part[group]));
    add_group<Tile>(again, part[group], scales, group);
  }
  bool equal = true;
  for (uint32_t n = 0; n < 2; ++n)
    for (uint32_t r = 0; r < 4; ++r) equal &= s[n][r] == again[n][r];
  const float qk_scale[2][2] = {{1.0f, 0.5f}, {1.0f, 0.5f}};
  scale_and_hide(s, qk_scale, {(warp * 16 + g) % 5 != 3, (warp * 16 + g + 8) % 5 != 3});
  for (uint32_t n = 0; n < 2; ++n)
    for (uint32_t r = 0; r < 4; ++r) scores[(warp * 16 + g + r / 2 * 8) * 16 + 8 * n + 2 * j + r % 2] = s[n][r];

  auto columns = TileColumns<Tile>();
  TileSums<Tile> out, other;
  bool failed = false;
  const bool passed = columns.passed(s), any = any_of_group(1, threadIdx.x == 77), none = any_of_group(1, false);
  sync_raise(shared.told, 1, s, scales.largest(), columns, out, failed);
  const bool passed_later = columns.passed(s);
  Shape::Fragment p;
  weigh(p, s, columns);
  store_weights(matrix_address(shared.weights), p, scales, out.unit);
  columns.add(p);
  uint32_t packed[4];
  pack_weights<f16>(packed, p);
  for (uint32_t i = 0; i < 4; ++i) pairs[i * 128 + threadIdx.x] = packed[i];
  fence_async_shared();
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < sizeof(shared.weights) / 4; i += 128) weights_out[i] = ((const uint32_t*)shared.weights)[i];
  multiply_tile_pv(out, at, weights);
#pragma unroll
  for (uint32_t group = 0; group < 8; ++group) {
    StoredGroup stored;
    uint32_t a[4][4];
    load_values<Tile>(stored, at, group);
    widen_values<Tile>(a, stored, group);
    wgmma_fence();
    begin_group<Tile>(other.e[group], a, weights, group, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(flat(other.e[group]));
  }
#pragma unroll
  for (uint32_t i = 0; i < 64; ++i) equal &= out.e[i / 8][i / 4 % 2][i % 4] == other.e[i / 8][i / 4 % 2][i % 4];
  flags[threadIdx.x] = equal | passed << 1 | any << 2 | none << 3 | passed_later << 4 | failed << 5;
  out.multiply({{2.0f, 4.0f}, {2.0f, 4.0f}}, 0.5f);
  store_row_sums(shared.told, columns);
  __syncthreads();
  store_warpgroup(shared.merged, 0, shared.told, columns, out);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < sizeof(Merged) / 4; i += 128) merged_out[i] = ((const float*)&shared.merged)[i];
}

// Two lists of rows in pages of 4: 16 bytes a row, 8 bytes of scales behind the rows.
struct PageRef {
  uint8_t* bytes;
  bool valid;
};
struct Pool {
  static constexpr uint32_t page_tokens = 4;
  uint8_t* bytes;
  uint32_t num_pages;

  __device__ PageRef page_at(uint32_t id) const { return {id < num_pages ? bytes + id * 96 : nullptr, id < num_pages}; }
};
struct Rows {
  using Element = e4m3;
  using ScalePointer = uint8_t*;
  __device__ static e4m3* base(const PageRef& page) { return (e4m3*)page.bytes; }
  __device__ static constexpr uint32_t offset(uint32_t token, uint32_t, uint32_t dim) { return token * 16 + dim; }
  __device__ static uint8_t* scales(const Pool&, const PageRef& page) { return page.bytes; }
  __device__ static constexpr uint32_t scale_offset(uint32_t token, uint32_t, uint32_t) { return 64 + token * 8; }
};
// What lane i knows of tiles 0 to 3: entries of its tokens, and how far into the pool their rows and scales lie, -1 for none.
extern "C" __global__ void __launch_bounds__(32) listed_rows(const int32_t* first, const int32_t* second, uint8_t* bytes, int32_t* out) {
  const KeyList lists[2] = {{first, 70, 0}, {second, 66, 2}};
  const Pool pool = {bytes, 5};
  for (uint32_t tile = 0; tile < 4; ++tile) {
    const ListedPair entries = listed_pair<Tile>(lists, tile, threadIdx.x);
    const RowPair rows = find_rows<Rows>(pool, entries);
    const int32_t known[5] = {entries.e[0], entries.e[1], rows.rows[0] == nullptr ? -1 : (int32_t)(rows.rows[0] - bytes),
                              rows.rows[1] == nullptr ? -1 : (int32_t)(rows.rows[1] - bytes), rows.scales == nullptr ? -1 : (int32_t)(rows.scales - bytes)};
    for (uint32_t i = 0; i < 5; ++i) out[(tile * 32 + threadIdx.x) * 5 + i] = known[i];
  }
}

// wgmma_narrow.cuh: a product of 64 x 64 by 64 x 8 and 64 x 16; the second one adds to the first.
template <typename T, uint32_t N>
__device__ __forceinline__ void multiply_narrow(const uint32_t* a, uint64_t b, float* out) {
  float d[N / 2];
  for (uint32_t twice = 0; twice < 2; ++twice) {
    wgmma_fence();
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      const uint32_t x[4] = {a[k * 512 + threadIdx.x], a[k * 512 + 128 + threadIdx.x], a[k * 512 + 256 + threadIdx.x], a[k * 512 + 384 + threadIdx.x]};
      multiply_keys<T>(d, x, tile_at(b, 2 * k), twice > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(d);
  }
#pragma unroll
  for (uint32_t i = 0; i < N / 2; ++i) out[i * 128 + threadIdx.x] = d[i];
}
// a: step of 16, register, thread. Rows of b, 16 of 64, are brought to their places by stmatrix.
template <typename T>
__device__ __forceinline__ void multiply_both(const uint32_t* a, const uint32_t* b, float* eight, float* sixteen, uint32_t* turned) {
  extern __shared__ __align__(1024) uint8_t dynamic[];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = warp * 2 + lane / 8 % 2 ^ lane % 8;
  // Warp w has k from 16 w on: matrices of 8 k by 8 rows of b.
  uint32_t r[4];
  for (uint32_t i = 0; i < 4; ++i) r[i] = b[(warp * 4 + i) * 32 + lane];
  if constexpr (kSame<T, bf16>) {
    store_transposed(matrix_address(dynamic) + (lane / 16 * 8 + lane % 8) * 128 + chunk * 16, r);
  } else {
    const uint32_t first[2] = {r[0], r[1]}, second[2] = {r[2], r[3]};
    const uint32_t to = matrix_address(dynamic) + lane % 8 * 128 + chunk * 16;
    store_transposed(to, first);
    store_transposed(to + 1024, second);
  }
  fence_async_shared();
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < 512; i += 128) turned[i] = ((const uint32_t*)dynamic)[i];
  const uint64_t tile = swizzled_tile(matrix_address(dynamic));
  multiply_narrow<T, 8>(a, tile, eight);
  multiply_narrow<T, 16>(a, tile, sixteen);
}
extern "C" __global__ void __launch_bounds__(128) narrow_products_bf16(const uint32_t* a, const uint32_t* b, float* eight, float* sixteen, uint32_t* turned) {
  multiply_both<bf16>(a, b, eight, sixteen, turned);
}
extern "C" __global__ void __launch_bounds__(128) narrow_products_f16(const uint32_t* a, const uint32_t* b, float* eight, float* sixteen, uint32_t* turned) {
  multiply_both<f16>(a, b, eight, sixteen, turned);
}
