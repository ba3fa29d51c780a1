// Kernels in the styles of public libraries. Each is a template: <RIGHT> on hardware, <WRONG> has a bug planted.
// They take the liberties that those libraries take: aligned instructions order the lanes of their warp.

enum { RIGHT, WRONG, UNFENCED };
#define BARRIER(what, id, count) asm volatile("bar." what " %0, %1;" ::"r"(id), "r"(count) : "memory")
// Where a warpgroup's products would be waited for: an aligned instruction, after which one lane speaks for its warp.
#define PRODUCTS_DONE asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory")

// FlashAttention 3: two consumer warpgroups take turns; each has a barrier for which both count. The first arrives at its own
// before it ever waits there, so that the turns begin. What a turn leaves in `sums` is the next one's.
template <int KIND> DEVICE void scheduler(u32* out, u32 rounds) {
  __shared__ u32 sums[128];
  const u32 group = threadIdx.x / 128, t = threadIdx.x % 128;
  if (group == 0) sums[t] = t;
  if (group == 0) BARRIER("arrive", 1, 256);
  for (u32 i = 0; i < rounds; i++) {
    BARRIER("sync", 1 + group, 256);
    const u32 sum = sums[127 - t];
    BARRIER("sync", 3 + group, 128);
    if (KIND == WRONG) BARRIER("arrive", 2 - group, 256);  // before the turn's last word
    sums[t] = sum * 3 + group;
    if (KIND == RIGHT) BARRIER("arrive", 2 - group, 256);
  }
  __syncthreads();
  if (group == 0) out[t] = sums[t];
}

// Marlin: the blocks of one column of output add their parts to it one after another, behind a lock that counts them.
template <int KIND> DEVICE void locked_sum(float* out, int* locks, const float* parts, u32 slices) {
  const u32 column = blockIdx.x / slices, slice = blockIdx.x % slices, t = threadIdx.x;
  int* lock = locks + column;
  if (t == 0) {
    int state = -1;
    do asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(state) : "l"(lock) : "memory");
    while (state != (int)slice);
  }
  __syncthreads();
  float* mine = out + column * 128 + t;
  *mine = (slice ? *mine : 0.f) + parts[blockIdx.x * 128 + t];
  if (KIND == RIGHT) __syncthreads();
  if (t == 0) {
    if (slice + 1 == slices) {
      *(volatile int*)lock = 0;
    } else {
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
      asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(lock) : "memory");
    }
  }
}

// CUTLASS, DeepGEMM: each of two blocks loads half of a tile for both; who has read a stage tells both, as either writes to it.
template <int KIND> DEVICE void multicast_sum(u32* out, const u32* in, u32 tiles) {
  __shared__ __align__(128) u32 tile[2][256];
  __shared__ u64 full[2], empty[2];
  const u32 r = rank(), t = threadIdx.x;
  if (t == 0) {
    for (int s = 0; s < 2; s++) init(&full[s], 1), init(&empty[s], KIND == WRONG ? 4 : 8);
    if (KIND != UNFENCED) fence_init();  // the cluster's barrier is enough for hardware
  }
  SYNC;
  u32 sum = 0;
  for (u32 i = 0; i < tiles; i++) {
    const u32 s = i % 2, round = i / 2;
    if (t == 0) {
      if (round) wait(&empty[s], round + 1 & 1);
      expect(&full[s], 1024);
      multicast(tile[s] + r * 128, in + i * 256 + r * 128, 512, &full[s], 3);
    }
    wait(&full[s], round & 1);
    sum = sum * 5 + tile[s][t] + tile[s][255 - t];
    PRODUCTS_DONE;
    if (KIND == WRONG ? t % 32 == 0 : t % 32 < 2) arrive_remote(at(&empty[s], KIND == WRONG ? r : t % 32));  // not the other block
  }
  out[r * 128 + t] = sum;
  SYNC;
}

#define KERNEL(bounds, name, template_of, params, ...) \
  extern "C" __global__ void __launch_bounds__(bounds) name params { template_of(__VA_ARGS__); }
KERNEL(256, scheduler_right, scheduler<RIGHT>, (u32* out, u32 rounds), out, rounds)
KERNEL(256, scheduler_wrong, scheduler<WRONG>, (u32* out, u32 rounds), out, rounds)
KERNEL(128, locks_right, locked_sum<RIGHT>, (float* out, int* locks, const float* parts, u32 slices), out, locks, parts, slices)
KERNEL(128, locks_wrong, locked_sum<WRONG>, (float* out, int* locks, const float* parts, u32 slices), out, locks, parts, slices)
KERNEL(128, multicast_right, multicast_sum<RIGHT>, (u32* out, const u32* in, u32 tiles), out, in, tiles)
KERNEL(128, multicast_unfenced, multicast_sum<UNFENCED>, (u32* out, const u32* in, u32 tiles), out, in, tiles)
KERNEL(128, multicast_wrong, multicast_sum<WRONG>, (u32* out, const u32* in, u32 tiles), out, in, tiles)
