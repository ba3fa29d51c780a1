// C[64, 64] = A[64, K] B[64, K]^T, bf16 in, f32 out: a warp copies 64 x 64 tiles by TMA into a ring of two stages, swizzled by
// 128 bytes; a warpgroup multiplies them by wgmma. K is a multiple of 64.

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

constexpr unsigned kStages = 2, kTile = 64 * 64 * 2;

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_tile(unsigned to, const TensorMap* map, unsigned column, unsigned barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, 0}], [%3];" ::"r"(to), "l"(map),
               "r"(column), "r"(barrier) : "memory");
}

// A matrix of 8-row groups of 1024 bytes, swizzled by 128 bytes.
__device__ __forceinline__ unsigned long long descriptor(unsigned address) {
  return (unsigned long long)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

extern "C" __global__ void __launch_bounds__(160) hopper(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* c,
                                                         unsigned k) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) unsigned long long full[kStages], empty[kStages];
  const unsigned t = threadIdx.x, tiles = shared_address(memory);
  if (t == 0) {
    for (unsigned s = 0; s < kStages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" ::"r"(shared_address(&empty[s])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (t >= 128) {
    if (t == 128) {
      for (unsigned i = 0; i < k / 64; ++i) {
        const unsigned s = i % kStages, barrier = shared_address(&full[s]);
        if (i >= kStages) wait(shared_address(&empty[s]), (i / kStages - 1) & 1);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(2 * kTile) : "memory");
        copy_tile(tiles + s * 2 * kTile, &map_a, i * 64, barrier);
        copy_tile(tiles + s * 2 * kTile + kTile, &map_b, i * 64, barrier);
      }
    }
    return;
  }
  float d[32];
  for (unsigned i = 0; i < 32; ++i) d[i] = 0.0f;
  for (unsigned i = 0; i < k / 64; ++i) {
    const unsigned s = i % kStages;
    wait(shared_address(&full[s]), i / kStages & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (unsigned step = 0; step < 4; ++step) {
      const unsigned long long a = descriptor(tiles + s * 2 * kTile + step * 32), b = descriptor(tiles + s * 2 * kTile + kTile + step * 32);
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1, 0, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]),
            "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
            "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]),
            "+f"(d[31])
          : "l"(a), "l"(b));
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&empty[s])) : "memory");
  }
  const unsigned lane = t % 32, row = t / 32 * 16 + lane / 4;
  for (unsigned i = 0; i < 32; ++i) c[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
