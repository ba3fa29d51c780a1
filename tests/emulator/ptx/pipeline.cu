// Tiles of 16-byte vectors through a ring of shared memory with cp.async; each thread sums what its neighbour copied.

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

constexpr unsigned kStages = 3, kThreads = 64;

extern "C" __global__ void __launch_bounds__(kThreads) pipeline(const float4* in, float* out, unsigned tiles, unsigned vectors) {
  __shared__ __align__(16) float4 ring[kStages][kThreads];
  const unsigned t = threadIdx.x;
  auto copy = [&](unsigned tile) {
    const unsigned at = (blockIdx.x * tiles + tile) * kThreads + t;
    if (tile < tiles) {  // past the end: zeros
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(&ring[tile % kStages][t])),
                   "l"(in + (at < vectors ? at : 0)), "r"(at < vectors ? 16 : 0));
    }
    asm volatile("cp.async.commit_group;");
  };
  for (unsigned s = 0; s < kStages - 1; ++s) copy(s);
  float sum = 0;
  for (unsigned tile = 0; tile < tiles; ++tile) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
    __syncthreads();
    copy(tile + kStages - 1);
    const float4 v = ring[tile % kStages][(t + 1) % kThreads];
    sum += v.x + 2 * v.y + 3 * v.z + 4 * v.w;
  }
  out[blockIdx.x * kThreads + t] = sum;
}
