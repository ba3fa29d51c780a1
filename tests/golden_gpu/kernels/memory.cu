// Accesses, atomics and copies.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Waits for phase `parity` of a barrier.
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(barrier), "r"(parity) : "memory");
}

// Every width of load and store: each lane moves 256 bytes.
extern "C" __global__ void vectors(const u8* in, u8* out) {
  const u8* from = in + threadIdx.x * 256;
  u8* to = out + threadIdx.x * 256;
  u32 a, b, c, d;
  u64 x, y;
  u16 h;
  asm volatile("ld.global.u8 %0, [%1]; st.global.u8 [%2], %0;" : "=r"(a) : "l"(from), "l"(to) : "memory");
  asm volatile("ld.global.s8 %0, [%1]; st.global.s16 [%2], %0;" : "=r"(a) : "l"(from + 1), "l"(to + 2) : "memory");
  asm volatile("ld.global.nc.u16 %0, [%1]; st.global.u16 [%2], %0;" : "=h"(h) : "l"(from + 4), "l"(to + 4) : "memory");
  asm volatile("ld.global.s16 %0, [%1]; st.global.b32 [%2], %0;" : "=r"(a) : "l"(from + 6), "l"(to + 8) : "memory");
  asm volatile("ld.global.v2.u8 {%0, %1}, [%2]; st.global.v2.u8 [%3], {%1, %0};" : "=r"(a), "=r"(b) : "l"(from + 8), "l"(to + 12) : "memory");
  asm volatile("ld.global.v4.u8 {%0, %1, %2, %3}, [%4]; st.global.v4.u8 [%5], {%3, %2, %1, %0};" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from + 12), "l"(to + 16) : "memory");
  asm volatile("ld.global.L1::no_allocate.b64 %0, [%1]; st.global.L1::no_allocate.b64 [%2], %0;" : "=l"(x) : "l"(from + 24), "l"(to + 24) : "memory");
  asm volatile("ld.global.nc.L1::evict_last.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4]; st.global.cs.v4.b32 [%5], {%1, %0, %3, %2};" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from + 32), "l"(to + 32) : "memory");
  asm volatile("ld.global.v2.b64 {%0, %1}, [%2]; st.global.v2.b64 [%3], {%1, %0};" : "=l"(x), "=l"(y) : "l"(from + 48), "l"(to + 48) : "memory");
  asm volatile("ld.volatile.global.v2.b32 {%0, %1}, [%2]; st.volatile.global.v2.b32 [%3], {%1, %0};" : "=r"(a), "=r"(b) : "l"(from + 64), "l"(to + 64) : "memory");
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1]; st.release.gpu.global.b32 [%2], %0;" : "=r"(a) : "l"(from + 72), "l"(to + 72) : "memory");
  asm volatile("ld.relaxed.sys.b64 %0, [%1]; st.relaxed.cta.b64 [%2], %0;" : "=l"(x) : "l"(from + 80), "l"(to + 80) : "memory");
  asm volatile("{ .reg .b128 q; ld.b128 q, [%0]; st.b128 [%1], q; }" ::"l"(from + 96), "l"(to + 96) : "memory");
  asm volatile("{ .reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0; ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], p; st.global.L2::cache_hint.v4.f32 [%5], {%0, %1, %2, %3}, p; }" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from + 112), "l"(to + 112) : "memory");
  // Through local and shared memory, by generic addresses, indexed by data.
  __shared__ u32 shared[32][4];
  u32 local[4];
  for (u32 i = 0; i < 4; ++i) local[(i + from[128]) % 4] = ((const u32*)(from + 128))[i];
  for (u32 i = 0; i < 4; ++i) shared[threadIdx.x][i] = local[(i + from[129]) % 4];
  u32* generic = from[130] % 2 ? local : shared[threadIdx.x];
  for (u32 i = 0; i < 4; ++i) ((u32*)(to + 128))[i] = generic[i] + shared[threadIdx.x][i];
  u32 spaces;
  asm volatile("{ .reg .pred p; isspacep.global p, %1; selp.u32 %0, 1, 0, p; isspacep.shared p, %2; @p or.b32 %0, %0, 2; isspacep.shared p, %1; @p or.b32 %0, %0, 4; }" : "=r"(spaces) : "l"(to), "l"(&shared[0][0]));
  *(u32*)(to + 144) = spaces;
}

// 128-bit atomics, a cell a thread, and 16-bit compare and swap.
extern "C" __global__ void wide_atomics(u8* cells, const u8* in, u8* out) {
  const u32 i = threadIdx.x;
  const u64* x = (const u64*)(in + i * 32);
  u64* old = (u64*)(out + i * 48);
  asm volatile("{ .reg .b128 a, b; mov.b128 a, {%3, %4}; atom.global.b128.exch b, [%2], a; mov.b128 {%0, %1}, b; }" : "=l"(old[0]), "=l"(old[1]) : "l"(cells + i * 48), "l"(x[0]), "l"(x[1]) : "memory");
  asm volatile("{ .reg .b128 a, b, c; mov.b128 a, {%3, %4}; mov.b128 b, {%5, %6}; atom.global.b128.cas c, [%2], a, b; mov.b128 {%0, %1}, c; }" : "=l"(old[2]), "=l"(old[3]) : "l"(cells + i * 48 + 16), "l"(x[0]), "l"(x[1]), "l"(x[2]), "l"(x[3]) : "memory");
  u16 h;
  asm volatile("atom.global.cas.b16 %0, [%1], %2, %3;" : "=h"(h) : "l"(cells + i * 48 + 32), "h"((u16)x[2]), "h"((u16)x[3]) : "memory");
  old[4] = h;
  asm volatile("atom.global.add.noftz.f16 %0, [%1], %2;" : "=h"(h) : "l"(cells + i * 48 + 34), "h"((u16)x[3]) : "memory");
  old[5] = h;
}

// Atomics in shared memory, a cell a thread; f32 keeps subnormals there.
extern "C" __global__ void shared_atomics(const u32* before, const u32* x, u32* after, u32* old) {
  __shared__ u32 cells[6][32];
  const u32 i = threadIdx.x;
  u32 was[6];
  for (u32 k = 0; k < 6; ++k) cells[k][i] = before[k * 32 + i];
  __syncwarp();
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(was[0]) : "r"(shared_address(&cells[0][i])), "r"(x[i]) : "memory");
  asm volatile("atom.shared.add.f32 %0, [%1], %2;" : "=r"(was[1]) : "r"(shared_address(&cells[1][i])), "r"(x[32 + i]) : "memory");
  asm volatile("atom.shared.add.noftz.f16x2 %0, [%1], %2;" : "=r"(was[2]) : "r"(shared_address(&cells[2][i])), "r"(x[64 + i]) : "memory");
  asm volatile("atom.shared.max.s32 %0, [%1], %2;" : "=r"(was[3]) : "r"(shared_address(&cells[3][i])), "r"(x[i]) : "memory");
  asm volatile("atom.shared.cas.b32 %0, [%1], %2, %3;" : "=r"(was[4]) : "r"(shared_address(&cells[4][i])), "r"(x[i]), "r"(x[32 + i]) : "memory");
  asm volatile("atom.shared.inc.u32 %0, [%1], %2;" : "=r"(was[5]) : "r"(shared_address(&cells[5][i])), "r"(x[i]) : "memory");
  __syncwarp();
  for (u32 k = 0; k < 6; ++k) after[k * 32 + i] = cells[k][i], old[k * 32 + i] = was[k];
}

// Many threads on one cell; the operations commute, and the floats are whole numbers that add up exactly.
extern "C" __global__ void contention(u32* cells, const u32* x) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x, value = x[i] % 16;
  atomicAdd(cells, x[i]);
  atomicMax((int*)cells + 1, (int)x[i]);
  atomicOr(cells + 2, 1u << x[i] % 32);
  atomicXor(cells + 3, x[i]);
  atomicAdd((float*)cells + 4, (float)value);
  asm volatile("{ .reg .f32 f; .reg .b16 h; .reg .b32 w; cvt.rn.f32.u32 f, %1; cvt.rn.f16.f32 h, f; mov.b32 w, {h, h}; red.global.add.noftz.f16x2 [%0], w; }" ::"l"(cells + 5), "r"(value % 2) : "memory");
  atomicAdd((u64*)(cells + 6), (u64)x[i] << 20);
  atomicInc(cells + 8, 99);
}

// cp.async: each lane fills 64 bytes, some of them with zeros.
extern "C" __global__ void async_copies(const u8* in, u8* out) {
  __shared__ __align__(16) u8 memory[32][64];
  const u32 i = threadIdx.x, to = shared_address(memory[i]);
  const u8* from = in + i * 64;
  for (u32 k = 0; k < 16; ++k) ((u32*)memory[i])[k] = 0xaaaaaaaa;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(i % 17) : "memory");
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; cp.async.ca.shared.global [%0], [%1], 16, p; }" ::"r"(to + 16), "l"(from + 16), "r"(i % 2) : "memory");
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.ca.shared.global.L2::64B [%0], [%1], 8, %2;" ::"r"(to + 32), "l"(from + 32), "r"(i % 9) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to + 40), "l"(from + 40) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 48), "l"(from + 48), "r"(i % 5) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 52), "l"(from + 52) : "memory");
  asm volatile("cp.async.commit_group;");
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  for (u32 k = 0; k < 16; ++k) ((u32*)(out + i * 64))[k] = ((u32*)memory[i])[k];
}

// Barriers that vote, and named ones between two warps.
extern "C" __global__ void barriers(const u32* x, u32* out) {
  __shared__ u32 handed[32];
  const u32 i = threadIdx.x;
  u32 count, all, any;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; barrier.cta.red.popc.aligned.u32 %0, 0, p; }" : "=r"(count) : "r"(x[i] & 1));
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.and.pred p, 0, p; selp.u32 %0, 1, 0, p; }" : "=r"(all) : "r"(x[i] & 2));
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; bar.red.or.pred p, 0, p; selp.u32 %0, 1, 0, p; }" : "=r"(any) : "r"(x[i] & 4));
  if (i < 32) {
    handed[i] = x[i];
    asm volatile("bar.arrive 1, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
    out[64 + i - 32] = handed[63 - i];
  }
  out[i] = count | all << 8 | any << 9;
}

// Bulk copies: global to shared by a barrier's bytes, back by a bulk group, and reductions into global memory.
extern "C" __global__ void bulk_copies(const u8* in, u8* copied, u8* stored, u8* reduced) {
  __shared__ __align__(128) u8 memory[1024];
  __shared__ __align__(8) u64 barrier;
  const u32 i = threadIdx.x, to = shared_address(memory), done = shared_address(&barrier);
  if (i == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(done) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(done) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 768, [%2];" ::"r"(to), "l"(in + 256), "r"(done) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(to + 768), "l"(in), "r"(done) : "memory");
  }
  __syncthreads();
  wait(done, 0);
  for (u32 k = i; k < 256; k += blockDim.x) ((u32*)copied)[k] = ((u32*)memory)[k];
  __syncthreads();
  // Written by plain stores, read by the copy engine: a fence of its proxy lies between.
  for (u32 k = i; k < 16; k += blockDim.x) ((u32*)memory)[k] = ((u32*)memory)[k] ^ 0xffffffff;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (i == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(stored), "r"(to) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 64;" ::"l"(reduced), "r"(to) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.min.s32 [%0], [%1], 64;" ::"l"(reduced + 64), "r"(to + 64) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.u64 [%0], [%1], 64;" ::"l"(reduced + 128), "r"(to + 128) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.xor.b32 [%0], [%1], 64;" ::"l"(reduced + 192), "r"(to + 192) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.u32 [%0], [%1], 64;" ::"l"(reduced + 256), "r"(to + 256) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], 64;" ::"l"(reduced + 320), "r"(to + 320) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], 64;" ::"l"(reduced + 384), "r"(to + 384) : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 64;" ::"l"(reduced + 448), "r"(to + 448) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
