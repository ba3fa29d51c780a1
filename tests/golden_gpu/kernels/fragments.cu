// Matrix fragments between shared memory and registers.

typedef unsigned int u32;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8 x 8 matrices of 16-bit elements lie in `in`; what each lane gets of them, [form, register, lane].
extern "C" __global__ void load_fragments(const uint4* in, u32* out) {
  __shared__ __align__(16) uint4 rows[32];
  const u32 lane = threadIdx.x, row = shared_address(&rows[lane]);
  rows[lane] = in[lane];
  __syncwarp();
  u32 r[6][4] = {};
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0][0]) : "r"(row) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];" : "=r"(r[1][0]) : "r"(row) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[2][0]), "=r"(r[2][1]) : "r"(row) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[3][0]), "=r"(r[3][1]) : "r"(row) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[4][0]), "=r"(r[4][1]), "=r"(r[4][2]), "=r"(r[4][3]) : "r"(row) : "memory");
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[5][0]), "=r"(r[5][1]), "=r"(r[5][2]), "=r"(r[5][3]) : "r"(row) : "memory");
#pragma unroll
  for (u32 form = 0; form < 6; ++form)
#pragma unroll
    for (u32 k = 0; k < 4; ++k) out[(form * 4 + k) * 32 + lane] = r[form][k];
}

// The same backwards: [form, row] of what stmatrix made of registers [register, lane]; the rest stays as it was.
extern "C" __global__ void store_fragments(const u32* in, uint4* out) {
  __shared__ __align__(16) uint4 rows[6][32];
  const u32 lane = threadIdx.x;
  u32 a = in[lane], b = in[32 + lane], c = in[64 + lane], d = in[96 + lane], turned;
#pragma unroll
  for (u32 form = 0; form < 6; ++form) rows[form][lane] = make_uint4(0xaaaaaaaa, 0xaaaaaaaa, 0xaaaaaaaa, 0xaaaaaaaa);
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(shared_address(&rows[0][lane])), "r"(a) : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(shared_address(&rows[1][lane])), "r"(a) : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(&rows[2][lane])), "r"(a), "r"(b) : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(&rows[3][lane])), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(&rows[4][lane])), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(a));
  ((u32*)rows[5])[lane] = turned;
  __syncwarp();
#pragma unroll
  for (u32 form = 0; form < 6; ++form) out[form * 32 + lane] = rows[form][lane];
}
