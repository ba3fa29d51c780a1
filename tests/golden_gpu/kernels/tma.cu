// The copy engine's tiled mode: rank 1 to 5, one tile a launch.

typedef unsigned int u32;

struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

#define LOAD(rank, coordinates)                                                                                                        \
  asm volatile("cp.async.bulk.tensor." #rank "d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {" coordinates "}], [%2];" \
               ::"r"(to), "l"(&map), "r"(done), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]) : "memory")
#define STORE(rank, coordinates)                                                                                     \
  asm volatile("cp.async.bulk.tensor." #rank "d.global.shared::cta.bulk_group [%0, {" coordinates "}], [%1];" \
               ::"l"(&map), "r"(from), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]) : "memory")
#define REDUCE(op) \
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." op ".bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from), "r"(at[0]), "r"(at[1]) : "memory")

// The tile of `bytes` bytes (a multiple of 16) at coordinates `at` of the tensor, as it lies in shared memory.
extern "C" __global__ void tile_load(const unsigned char* tensor, uint4* out, const int* at, u32 rank, u32 bytes, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) uint4 memory[];
  // Behind the tile: with no static shared memory before it, the tile lies at a multiple of 1024 bytes.
  const u32 to = shared_address(memory), done = to + bytes;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(done) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(done), "r"(bytes) : "memory");
    if (rank == 1) LOAD(1, "%3");
    if (rank == 2) LOAD(2, "%3, %4");
    if (rank == 3) LOAD(3, "%3, %4, %5");
    if (rank == 4) LOAD(4, "%3, %4, %5, %6");
    if (rank == 5) LOAD(5, "%3, %4, %5, %6, %7");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again; }" ::"r"(done) : "memory");
  for (u32 i = threadIdx.x; i < bytes / 16; i += blockDim.x) out[i] = memory[i];
}

// The way back: `in`, laid out in shared memory as it is, to the tensor; `reduce` is 0 to store, or 1 to 3 for
// add, max and xor at rank 2.
extern "C" __global__ void tile_store(unsigned char* tensor, const uint4* in, const int* at, u32 rank, u32 bytes, u32 reduce, const __grid_constant__ TensorMap map) {
  extern __shared__ __align__(1024) uint4 memory[];
  const u32 from = shared_address(memory);
  for (u32 i = threadIdx.x; i < bytes / 16; i += blockDim.x) memory[i] = in[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    if (reduce == 1) REDUCE("add");
    else if (reduce == 2) REDUCE("max");
    else if (reduce == 3) REDUCE("xor");
    else if (rank == 1) STORE(1, "%2");
    else if (rank == 2) STORE(2, "%2, %3");
    else if (rank == 3) STORE(3, "%2, %3, %4");
    else if (rank == 4) STORE(4, "%2, %3, %4, %5");
    else STORE(5, "%2, %3, %4, %5, %6");
    asm volatile("cp.async.bulk.commit_group;");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
