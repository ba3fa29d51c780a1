// Every function of templates/device/, called as kernels call it.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/base/fault.cuh"
#include "../../../templates/device/base/launch.cuh"
#include "../../../templates/device/base/index.cuh"
#include "../../../templates/device/memory/copy.cuh"

// [function, i] of the bit patterns `in`.
extern "C" __global__ void library_types(const uint32_t* in, uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x, word = in[i];
  const float x = __uint_as_float(word);
  pdl_wait();
  pdl_trigger();
  const uint32_t values[] = {__float_as_uint(to_f32(x)),
                             __float_as_uint(to_f32(f16{(uint16_t)word})),
                             __float_as_uint(to_f32(bf16{(uint16_t)word})),
                             __float_as_uint(from_f32<float>(x)),
                             from_f32<f16>(x).bits,
                             from_f32<bf16>(x).bits,
                             __float_as_uint(exp2_approx(x)),
                             __float_as_uint(log2_approx(x)),
                             __float_as_uint(infinity()),
                             __float_as_uint(nan_f32())};
#pragma unroll
  for (uint32_t k = 0; k < sizeof(values) / sizeof(values[0]); ++k) out[k * n + i] = values[k];
}

// Offsets of 8 batches of 5 requests each, some of them wrong; a thread a row.
template <typename Index>
__device__ __forceinline__ void indices(const Index* offsets, uint32_t* out) {
  const uint32_t row = threadIdx.x, rows = blockDim.x, batch = blockIdx.x;
  const Index* own = offsets + batch * 6;
  const RowRange range = range_of(own, 5, row, 20);
  uint32_t* to = out + batch * rows * 5 + row * 5;
  to[0] = range.b | (uint32_t)range.padding << 8 | (uint32_t)range.valid << 9 | (uint32_t)bad_total(own, 5, 20) << 10;
  to[1] = range.valid && !range.padding ? range.begin << 16 | range.end : 0;
  to[2] = request_of(own, 5, row);
  to[3] = load_index(own, row % 6);
  to[4] = load_page_id(own, row % 6);
}
extern "C" __global__ void library_index_u32(const uint32_t* offsets, uint32_t* out) { indices(offsets, out); }
extern "C" __global__ void library_index_i32(const int32_t* offsets, uint32_t* out) { indices(offsets, out); }
extern "C" __global__ void library_index_i64(const int64_t* offsets, uint32_t* out) { indices(offsets, out); }

// The same of a batch of 40 requests: kLanes threads a row, each of which writes down what it was told.
template <uint32_t kLanes, typename Index>
__device__ __forceinline__ void ask_lanes(const Index* own, uint32_t* out) {
  const uint32_t lane = threadIdx.x % kLanes, mask = 0xffffffffu >> (32 - kLanes) << (threadIdx.x - lane);
  const auto packed = [](const RowRange& r) {
    return r.b | (uint32_t)r.padding << 6 | (uint32_t)r.valid << 7 | (r.valid && !r.padding ? r.begin << 8 | r.end << 16 : 0);
  };
  for (uint32_t row = threadIdx.x / kLanes; row < 96; row += 32 / kLanes) {
    uint32_t* to = out + (row * kLanes + lane) * 3;
    to[0] = packed(range_of<kLanes>(own, 40, row, 90, lane, mask));
    to[1] = request_of<kLanes>(own, 40, row, lane, mask);
    to[2] = packed(range_at(own, 40, row * 7 % 40, row, 90));
  }
}
template <typename Index>
__device__ __forceinline__ void lanes(const Index* offsets, uint32_t* two, uint32_t* eight, uint32_t* all) {
  const uint32_t batch = blockIdx.x;
  ask_lanes<2>(offsets + batch * 41, two + batch * 96 * 2 * 3);
  ask_lanes<8>(offsets + batch * 41, eight + batch * 96 * 8 * 3);
  ask_lanes<32>(offsets + batch * 41, all + batch * 96 * 32 * 3);
}
extern "C" __global__ void library_lanes_u32(const uint32_t* offsets, uint32_t* two, uint32_t* eight, uint32_t* all) { lanes(offsets, two, eight, all); }
extern "C" __global__ void library_lanes_i32(const int32_t* offsets, uint32_t* two, uint32_t* eight, uint32_t* all) { lanes(offsets, two, eight, all); }
extern "C" __global__ void library_lanes_i64(const int64_t* offsets, uint32_t* two, uint32_t* eight, uint32_t* all) { lanes(offsets, two, eight, all); }

// Thread i reports (code, request, position) = in[3 i ...] to error word i / 8.
extern "C" __global__ void library_report(const uint32_t* in, uint64_t* errors) {
  const uint32_t i = threadIdx.x;
  report(errors + i / 8, (Fault)(in[3 * i] % 7), in[3 * i + 1], in[3 * i + 2]);
  report(nullptr, Fault::slot, i, i);
}

// Thread i: what is wrong with a length, or the start of a run, in[2 i], and so many rows, in[2 i + 1].
extern "C" __global__ void library_lengths(const uint32_t* in, uint32_t* out) {
  const uint32_t i = threadIdx.x, length = in[2 * i], rows = in[2 * i + 1];
  out[i] = (uint32_t)bad_length<false>(length, rows) | (uint32_t)bad_length<true>(length, rows) << 1 | (uint32_t)bad_run(length, rows) << 2;
}

// Eight 16-bit values a thread, with every width of access, and four floats.
template <uint32_t N>
__device__ __forceinline__ void pass(const bf16* from, bf16* to) {
  Vec<bf16, 8> v;
  fill(v, bf16{0x1234});
  if (threadIdx.x % 3 != 0) load<N>(v, from);
  store<N>(to, v);
}
extern "C" __global__ void library_copy(const bf16* in, bf16* out) {
  __shared__ const bf16* table[64];
  const uint32_t i = threadIdx.x, n = blockDim.x;
  table[i] = in + i * 8;
  __syncthreads();
  const bf16* from = in_global(table[n - 1 - i]);
  pass<1>(from, out + i * 8);
  pass<2>(from, out + (n + i) * 8);
  pass<4>(from, out + (2 * n + i) * 8);
  pass<8>(from, out + (3 * n + i) * 8);
  Vec<float, 4> v;
  load<4>(v, (const float*)from);
  store<2>((float*)(out + (4 * n + i) * 8), v);
}

// [bytes of an access][thread]: four words behind a load of so many bytes, so far behind the thread's first one; every third thread's leads nowhere.
template <uint32_t kBytes>
__device__ __forceinline__ void pass_live(const uint8_t* in, Vec<uint32_t, 4>* out) {
  const bool live = threadIdx.x % 3 != 0;
  Vec<uint32_t, 4> v = {0x01234567u, 0x89abcdefu, 0xfedcba98u, 0x76543210u};
  load_live<kBytes>(v.e, live ? in + threadIdx.x * 16 + kBytes % 16 : nullptr, live);
  out[threadIdx.x] = v;
}
extern "C" __global__ void library_load_live(const uint8_t* in, Vec<uint32_t, 4>* out) {
  pass_live<1>(in, out);
  pass_live<2>(in, out + 32);
  pass_live<4>(in, out + 64);
  pass_live<8>(in, out + 96);
  pass_live<16>(in, out + 128);
}
