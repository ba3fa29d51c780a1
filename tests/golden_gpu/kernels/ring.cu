// ring.cuh, and the copies of cp_async.cuh that it is made of: rows of every length, in every way, into tiles of 0xee; teams of threads.
#include "../../../templates/device/base/types.cuh"
#include "../../../templates/device/memory/ring.cuh"

constexpr uint32_t kBlock = 128, kMostBytes = 32 * 272, kMostChunks = 32 * 16;

// How often each chunk of each row is copied.
template <typename Copy, uint32_t kThreads>
__device__ __forceinline__ void count(uint32_t* out) {
  if (threadIdx.x >= kThreads) return;
#pragma unroll 1
  for (uint32_t step = 0; step < Copy::kSteps; ++step) {
    if (Copy::has(step, threadIdx.x)) atomicAdd(out + Copy::row(step, threadIdx.x) * Copy::kChunks + Copy::chunk(step, threadIdx.x), 1);
  }
}

// Rows 3 kBytes apart: all of them; from row 3 on, but the last two, row 0 lying before the memory; all but the first; anywhere.
template <uint32_t kBytes, uint32_t kAccess, uint32_t kPitch, uint32_t kTokens, uint32_t kThreads>
__device__ __forceinline__ void copies(uint8_t* tile, const uint8_t* in, const int32_t* rows, uint32_t* to, uint32_t* out) {
  using Copy = TileCopy<kBytes, kAccess, kPitch, kTokens, kThreads>;
  constexpr uint32_t kWords = kTokens * kPitch / 4;
  constexpr uint64_t kStep = 3 * kBytes;
  const uint32_t thread = threadIdx.x, shared = (uint32_t)__cvta_generic_to_shared(tile);
  count<Copy, kThreads>(to);
#pragma unroll 1
  for (uint32_t way = 0; way < 4; ++way) {
    for (uint32_t i = thread; i < kWords; i += kBlock) ((uint32_t*)tile)[i] = 0xeeeeeeeeu;
    __syncthreads();
    if (thread < kThreads) {
      if (way == 0) Copy::all<kStep>(shared, in, thread);
      if (way == 1) Copy::some<kStep>(shared, in - 3 * kStep, thread, 3, kTokens - 2);
      if (way == 2) Copy::some<kStep>(shared, in, thread, 1, kU32Max);
      if (way == 3) {
        const int32_t row = rows[thread % 32 % kTokens];
        Copy::scattered(shared, row < 0 ? nullptr : in + row * kAccess, thread);
      }
      cp_async_commit();
      cp_async_wait<0>();
    }
    __syncthreads();
    for (uint32_t i = thread; i < kWords; i += kBlock) out[way * (kMostBytes / 4) + i] = ((const uint32_t*)tile)[i];
    __syncthreads();
  }
}

// A block a shape.
extern "C" __global__ void ring_copies(const uint8_t* in, const int32_t* rows, uint32_t* times, uint32_t* out) {
  extern __shared__ __align__(16) uint8_t tile[];
  uint32_t *to = times + blockIdx.x * kMostChunks, *tiles = out + blockIdx.x * kMostBytes;
  switch (blockIdx.x) {
    case 0: return copies<8, 4, 16, 32, 32>(tile, in, rows, to, tiles);
    case 1: return copies<8, 8, 16, 16, 32>(tile, in, rows, to, tiles);
    case 2: return copies<20, 4, 48, 32, 64>(tile, in, rows, to, tiles);
    case 3: return copies<32, 4, 48, 16, 32>(tile, in, rows, to, tiles);
    case 4: return copies<40, 8, 48, 16, 32>(tile, in, rows, to, tiles);
    case 5: return copies<64, 8, 80, 32, 64>(tile, in, rows, to, tiles);
    case 6: return copies<80, 16, 80, 32, 128>(tile, in, rows, to, tiles);
    case 7: return copies<96, 16, 112, 8, 32>(tile, in, rows, to, tiles);
    case 8: return copies<128, 16, 144, 32, 32>(tile, in, rows, to, tiles);
    case 9: return copies<144, 16, 144, 16, 64>(tile, in, rows, to, tiles);
    case 10: return copies<160, 16, 176, 32, 32>(tile, in, rows, to, tiles);
    case 11: return copies<256, 16, 272, 32, 128>(tile, in, rows, to, tiles);
    case 12: return copies<256, 16, 272, 8, 128>(tile, in, rows, to, tiles);
  }
}

// A lane's 16 bytes: 4, 8 and 16 of them, as they are and where lanes are even; the others are not in memory.
extern "C" __global__ void ring_accesses(const uint8_t* in, Vec<uint32_t, 4>* out, uint32_t* numbers) {
  __shared__ Vec<uint32_t, 4> held[6][32];
  const uint32_t lane = threadIdx.x;
  const bool valid = lane % 2 == 0;
  const uint8_t *from = in + 16 * lane, *far = valid ? from : in + 16 * (1 << 20);
  for (uint32_t i = 0; i < 6; ++i) held[i][lane] = {0xeeeeeeeeu, 0xeeeeeeeeu, 0xeeeeeeeeu, 0xeeeeeeeeu};
  const auto at = [&](uint32_t i) { return (uint32_t)__cvta_generic_to_shared(&held[i][lane]); };
  cp_async<4>(at(0), from);
  cp_async<8>(at(1), from);
  cp_async<16>(at(2), from);
  cp_async<4>(at(3), far, valid);
  cp_async<8>(at(4), far, valid);
  cp_async<16>(at(5), far, valid);
  cp_async_commit();
  cp_async_wait<0>();
  for (uint32_t i = 0; i < 6; ++i) out[32 * i + lane] = held[i][lane];
  numbers[lane] = (kSharedKb == 228 ? 100 : kSharedKb == 164 ? 200 : 300) + lane;
}

// Words between others that stay as they are, cleared by 96 threads of 192; then three teams of 64 threads go round as often as each likes:
// a thread adds what its neighbour in the team left the round before.
extern "C" __global__ void ring_teams(const uint32_t* in, uint32_t* cleared, uint32_t* out) {
  struct alignas(16) Held {
    uint32_t before[4], words[100], after[4];
  };
  __shared__ Held held;
  __shared__ uint32_t sums[2][192];
  const uint32_t i = threadIdx.x, team = i / 64;
  if (i < 108) ((uint32_t*)&held)[i] = 0xeeeeeeeeu;
  __syncthreads();
  if (i < 96) clear_shared<96>(held.words);
  __syncthreads();
  if (i < 108) cleared[i] = ((const uint32_t*)&held)[i];
  uint32_t mine = in[i];
  for (uint32_t round = 0; round < 5 + 3 * team; ++round) {
    sums[round % 2][i] = mine;
    sync_team<64>(team);
    mine = 3 * mine + sums[round % 2][team * 64 + (i + 1) % 64];
  }
  out[i] = mine;
}
