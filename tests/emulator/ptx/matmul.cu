// C[32, 16] = A[32, 32] B[32, 16], bf16 in, f32 out, by ldmatrix and mma.sync: two warps, a 16 x 16 tile each.

typedef unsigned short bf16;

__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

extern "C" __global__ void __launch_bounds__(64) matmul(const bf16* a, const bf16* b, float* c) {
  __shared__ __align__(16) bf16 left[32][40], right[32][24];  // rows padded by 16 bytes: no bank conflicts
  const unsigned t = threadIdx.x, lane = t % 32, warp = t / 32;
  for (unsigned i = t; i < 32 * 4; i += 64) *(uint4*)&left[i / 4][i % 4 * 8] = *(const uint4*)(a + i * 8);
  for (unsigned i = t; i < 32 * 2; i += 64) *(uint4*)&right[i / 2][i % 2 * 8] = *(const uint4*)(b + i * 8);
  __syncthreads();
  float d[2][4] = {};
  for (unsigned k = 0; k < 32; k += 16) {
    unsigned x[4], y[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(&left[warp * 16 + lane % 16][k + lane / 16 * 8])));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3])
                 : "r"(shared_address(&right[k + lane % 16][lane / 16 * 8])));
    for (unsigned n = 0; n < 2; ++n)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                   : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
                   : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[2 * n]), "r"(y[2 * n + 1]));
  }
  for (unsigned n = 0; n < 2; ++n)
    for (unsigned i = 0; i < 4; ++i) c[(warp * 16 + lane / 4 + i / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + i % 2] = d[n][i];
}
