// latent_pairs.cuh: a pair of warps and one tile of 16 rows, 448 codes and 64 bf16, 8 columns.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/quant/elements.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/launch.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"
#include "../../../templates/device/quant/quantize.cuh"
#include "../../../templates/device/cache/segment.cuh"
#include "../../../templates/device/attention/mla/latent_pairs.cuh"

struct Tile {
  using Element = e4m3;
  using PlainElement = bf16;
  using QueryElement = bf16;
  static constexpr uint32_t kThreads = 64, kCols = 8, kTokens = 16, kPitch = 592, kSteps = 32, kHeld = 12, kValueDims = 512;
  static constexpr uint32_t kCodeBlocks = 14, kGroupDims = 64, kScalePitch = 8, kWarpsM = 1, kWarpsN = 1, kWarpsK = 1;
  static constexpr float kSlack = 8.0f;
};
struct CodeKey {
  using Element = e4m3;
  static constexpr uint32_t kBlocks = 14, kAt = 0, kFirstStep = 0;
};
using Shape = PairShape<Tile>;
struct Merged {
  float max[1][8], sum[1][8], out[1][8][512];
};

__device__ __forceinline__ bool same(const PairSums<Tile>& a, const PairSums<Tile>& b) {
  bool equal = true;
#pragma unroll
  for (uint32_t m = 0; m < Shape::kTiles; ++m)
#pragma unroll
    for (uint32_t r = 0; r < 4; ++r) equal &= a.e[m][0][r] == b.e[m][0][r];
  return equal;
}

// Element r of a fragment is token g + r / 2 * 8, column 2j + r % 2.
extern "C" __global__ void __launch_bounds__(64) latent_pairs_tile(const bf16* q, const uint32_t* in, const uint32_t* scales_in, float* parts, float* scores,
                                                                   uint32_t* operands, float* scales_of, uint32_t* flags, float* merged_out) {
  __shared__ alignas(16) LatentShape<Tile>::Query queries;
  __shared__ alignas(16) uint8_t rows[16 * 592];
  __shared__ alignas(16) uint8_t scale_bytes[16 * 8];
  __shared__ alignas(16) Shape::Scores exchanged;
  __shared__ Merged merged;
  const uint32_t warp = threadIdx.x / 32, half = warp, lane = threadIdx.x % 32, g = lane / 4, j = lane % 4;
  for (uint32_t i = threadIdx.x; i < 16 * 148; i += 64) ((uint32_t*)rows)[i] = in[i];
  for (uint32_t i = threadIdx.x; i < 32; i += 64) ((uint32_t*)scale_bytes)[i] = scales_in[i];
  for (uint32_t col = warp; col < 8; col += 2) {
    QueryColumn<Tile, CodeKey> x;
    x.load(q + col * 512, true);
    x.store(queries, col);
  }
  __syncthreads();
  const uint32_t at = matrix_address(rows), half_rows = at + half * 256;
  const auto query = PairQuery<Tile>(queries, half);
  const auto scales = PairScales<Tile>(scale_bytes, half);
  for (uint32_t group = 0; group < 4; ++group)
    for (uint32_t h = 0; h < 2; ++h) scales_of[(half * 4 + group) * 16 + g + 8 * h] = scales.of(group, h);

  float s[1][4] = {}, again[1][4] = {};
  multiply_half_qk(s, at, query, scales, half);
  if (half == 0) {
    multiply_code_groups<4>(again, half_rows, query, scales);
  } else {
    multiply_code_groups<3>(again, half_rows, query, scales);
    multiply_plain(again, half_rows, query);
  }
  bool equal = query.at(3).e[0][1] == query.read(3).e[0][1] && query.at(13).e[0][0] == query.read(13).e[0][0];
  for (uint32_t r = 0; r < 4; ++r) {
    equal &= again[0][r] == s[0][r];
    parts[(half * 16 + g + r / 2 * 8) * 8 + 2 * j + r % 2] = s[0][r];
  }
  store_scores<Tile>(exchanged[half], s, half, g != 3);  // tokens 3 and 11 are not there
  __syncthreads();
  const float qk_scale[1][2] = {{2.0f, 1.0f}};
  read_scores<Tile>(s, exchanged, qk_scale);
  if (half == 0)
    for (uint32_t r = 0; r < 4; ++r) scores[(g + r / 2 * 8) * 8 + 2 * j + r % 2] = s[0][r];

  auto columns = PairColumns<Tile>();
  PairSums<Tile> out, other;
  bool failed = false;
  weigh_pair(s, columns, out);
  multiply_half_pv(out, failed, at, s, scales, half);
  raise_unit(other, failed, scales, half);
  uint32_t weights[1][2], scaled[1][2];
  weight_operands<f16>(weights, s);
  if (half == 0) {
    add_code_groups<4>(other, half_rows, weights, scales);
  } else {
    add_code_groups<3>(other, half_rows, weights, scales);
    add_plain(other, half_rows, s);
  }
  const float by[2] = {(float)(1u << g % 3), (float)(1u << g % 2)};
  scale_operands(scaled, weights, by);
  for (uint32_t h = 0; h < 2; ++h) operands[(half * 2 + h) * 32 + lane] = scaled[0][h];
  flags[threadIdx.x] = equal | same(out, other) << 1 | failed << 2 | out.is_code(11, half) << 3 | out.is_code(12, half) << 4;
  const float columns_by[1][2] = {{2.0f, 4.0f}};
  out.multiply_columns(columns_by);
  out.multiply_codes(0.5f, half);
  store_pair(merged, 0, half, columns, out);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < sizeof(Merged) / 4; i += 64) merged_out[i] = ((const float*)&merged)[i];
}
