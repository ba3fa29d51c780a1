// C[128 x 128] = A[128 x K] * B[128 x K]^T in bf16, as a warp-specialised sm_90a kernel: warpgroup 0 gives its registers
// away and one of its threads loads tiles of 64 columns by TMA (128-byte swizzle) into a ring of 4 stages; warpgroups 1
// and 2 multiply 64 rows each with wgmma, one product in flight, and store their rows by TMA.
//
//   full[s]:  the bytes of stage s have landed (1 arrival + 32 KB)      producer -> consumers
//   empty[s]: both consumers have read stage s (2 arrivals)              consumers -> producer
//
// -DWITHOUT_<name> leaves one synchronisation out.
typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { unsigned char bytes[128]; };

constexpr int kStages = 4, kTileBytes = 128 * 128, kStageBytes = 2 * kTileBytes;

#define DEVICE static __device__ __forceinline__
DEVICE u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void init(u64* bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(bar)), "r"(count) : "memory"); }
DEVICE void expect(u64* bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(bar)), "r"(bytes) : "memory"); }
DEVICE void arrive(u64* bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(bar)) : "memory"); }
DEVICE void wait(u64* bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\nbra AGAIN;\nREADY:\n}" ::"r"(shared(bar)), "r"(parity)
      : "memory");
}
DEVICE void load_tile(void* to, const TensorMap* map, int x, int y, u64* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(shared(bar))
               : "memory");
}
DEVICE void store_tile(const TensorMap* map, int x, int y, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x), "r"(y), "r"(shared(from)) : "memory");
}
DEVICE u64 descriptor(const void* p) { return (u64)((shared(p) & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62; }
DEVICE void multiply(float (&d)[64], u64 a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, 1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
        "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
        "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
        "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b));
}
DEVICE u32 pack(float low, float high) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }

extern "C" __global__ void __launch_bounds__(384, 1)
    hopper(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_c, u32 tiles) {
  extern __shared__ __align__(1024) unsigned char stages[];  // A and B tile of each stage; the result of both consumers
  __shared__ __align__(8) u64 full[kStages], empty[kStages];
  const u32 group = threadIdx.x / 128, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) init(&full[s], 1), init(&empty[s], 2);
#ifndef WITHOUT_INIT_FENCE
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
#ifndef WITHOUT_INIT_BARRIER
  __syncthreads();
#endif

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (u32 i = 0; i < tiles; ++i) {
        const u32 s = i % kStages;
#ifndef WITHOUT_EMPTY_WAIT
        if (i >= kStages) wait(&empty[s], (i / kStages + 1) & 1);
#endif
#ifndef WITHOUT_EXPECT
        expect(&full[s], kStageBytes);
#else
        arrive(&full[s]);
#endif
        load_tile(stages + s * kStageBytes, &map_a, i * 64, 0, &full[s]);
        load_tile(stages + s * kStageBytes + kTileBytes, &map_b, i * 64, 0, &full[s]);
      }
    }
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  float d[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) d[i] = 0.f;
  for (u32 i = 0; i < tiles; ++i) {
    const u32 s = i % kStages;
#ifndef WITHOUT_FULL_WAIT
    wait(&full[s], i / kStages & 1);
#endif
#ifndef WITHOUT_WGMMA_FENCE
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
    const unsigned char* tile = stages + s * kStageBytes;
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(d, descriptor(tile + (group - 1) * 64 * 128 + k * 32), descriptor(tile + kTileBytes + k * 32));
#ifndef WITHOUT_COMMIT
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
    // One product stays in flight, so the stage before this one has been read.
#ifndef WITHOUT_WGMMA_WAIT
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#endif
#ifdef WITHOUT_PATIENCE
    if (threadIdx.x % 128 == 0) arrive(&empty[s]);
#elif !defined(WITHOUT_EMPTY_ARRIVE)
    if (i > 0 && threadIdx.x % 128 == 0) arrive(&empty[(i - 1) % kStages]);
#endif
  }
#ifndef WITHOUT_LAST_WAIT
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif

  // The 64 x 128 result as two tiles of 64 columns, swizzled as TMA expects them: 16-byte chunks XOR the row.
  unsigned char* result = stages + kStages * kStageBytes + (group - 1) * kTileBytes;
  const u32 row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    const u32 r = row + (i / 2 % 2) * 8, column = i / 4 * 8 + lane % 4 * 2, chunk = column % 64 / 8;
    *(u32*)(result + column / 64 * 8192 + r * 128 + (chunk ^ r % 8) * 16 + column % 8 * 2) = pack(d[i], d[i + 1]);
  }
#ifndef WITHOUT_PROXY_FENCE
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
#ifndef WITHOUT_RESULT_BARRIER
  asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory");
#endif
  if (threadIdx.x % 128 == 0) {
    for (int half = 0; half < 2; ++half) store_tile(&map_c, half * 64, (group - 1) * 64, result + half * 8192);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#ifndef WITHOUT_STORE_WAIT
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
  }
}
