// What a GPU's parts take, by one small kernel each: kvgen/verify/calibrate.py launches them and works the figures out. Every
// stretch that is timed leaves a Record with the clock before and behind it, its steps, and a sum that is known beforehand.
// Chains of dependent steps give latencies, independent ones intervals; operands are arguments, so that ptxas folds nothing.
#line 5 "kvgen/verify/calibrate.cu"
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

struct Record {
  uint64_t begin, end;  // clk of this multiprocessor
  uint64_t ns, steps, sum;
};
struct alignas(16) Vector {
  uint32_t e[4];
};
// A link of a chain through memory: its line of 128 bytes begins with the next one's address.
struct alignas(128) Line {
  const Line* next;
  uint64_t number;
};

__device__ __forceinline__ uint32_t lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ uint32_t warp_id() { return threadIdx.x / 32; }
__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}
__device__ __forceinline__ uint64_t cycles() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}
// The clock once `value` is there: a read under a predicate that hangs on it. One value in 2^32 gives 0.
__device__ __forceinline__ uint64_t cycles_after(uint32_t value) {
  uint64_t t;
  asm volatile("{\n.reg .pred p;\nmov.u64 %0, 0;\nsetp.ne.u32 p, %1, 0x9e3779b9;\n@p mov.u64 %0, %%clock64;\n}" : "=l"(t) : "r"(value) : "memory");
  return t;
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t x) {
#pragma unroll
  for (uint32_t i = 16; i; i /= 2) x += __shfl_xor_sync(~0u, x, i);
  return x;
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---------------------------------------------------------------- memory that the others read
// Words i * 0x9e3779b1 + seed, whose sums have a closed form.
extern "C" __global__ void __launch_bounds__(512) calibrate_fill(uint32_t* to, uint32_t words, uint32_t seed) {
  for (uint64_t i = (uint64_t)blockIdx.x * 512 + threadIdx.x; i < words; i += (uint64_t)gridDim.x * 512) to[i] = (uint32_t)i * 0x9e3779b1u + seed;
}
// Line i points to line (i * factor + 1) % lines: one circle through all of them where lines is 2^n and factor 4 k + 1.
extern "C" __global__ void __launch_bounds__(512) calibrate_link(Line* to, uint32_t lines, uint32_t factor) {
  for (uint32_t i = blockIdx.x * 512 + threadIdx.x; i < lines; i += gridDim.x * 512) {
    to[i].next = to + ((i * factor + 1) & (lines - 1));
    to[i].number = i;
  }
}

// ---------------------------------------------------------------- instructions: latency and interval
// Operands and places of a thread's steps. `a` and `b` are the kernel's arguments.
struct Place {
  uint32_t lane, neighbour, a, b, shared;
};

// f32 product and sum: x + 1.
struct Fma {
  static constexpr uint32_t kChains = 8, kWords = 0;
  float x;
  __device__ void begin(const Place& p, uint32_t chain) { x = (float)(p.lane + chain); }
  __device__ void step(const Place& p) {
    asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(__uint_as_float(p.a)), "f"(__uint_as_float(p.b)));
  }
  __device__ uint32_t value() const { return (uint32_t)x; }
};
// Two f16 products and sums: both halves + 1, exact up to 2048.
struct Half {
  static constexpr uint32_t kChains = 8, kWords = 0;
  uint32_t x;
  __device__ void begin(const Place&, uint32_t) { x = 0; }
  __device__ void step(const Place& p) { asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(p.a), "r"(p.b)); }
  __device__ uint32_t value() const { return x; }
};
// A permutation of bytes, of the integer pipe: the lower three in a circle.
struct Permute {
  static constexpr uint32_t kChains = 8, kWords = 0;
  uint32_t x;
  __device__ void begin(const Place& p, uint32_t chain) { x = 0x03020100u + p.lane + chain; }
  __device__ void step(const Place& p) { asm volatile("prmt.b32 %0, %0, %0, %1;" : "+r"(x) : "r"(p.a)); }
  __device__ uint32_t value() const { return x; }
};
// Integer product and sum.
struct Imad {
  static constexpr uint32_t kChains = 8, kWords = 0;
  uint32_t x;
  __device__ void begin(const Place& p, uint32_t chain) { x = p.lane + chain; }
  __device__ void step(const Place& p) { asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x) : "r"(p.a), "r"(p.b)); }
  __device__ uint32_t value() const { return x; }
};
// A special function: 2^-x, which comes near 0.6412 (the sign is the operand's modifier).
struct Exp2 {
  static constexpr uint32_t kChains = 8, kWords = 0;
  float x;
  __device__ void begin(const Place& p, uint32_t chain) { x = (float)(p.lane + chain) / 64; }
  __device__ void step(const Place&) { asm volatile("{\n.reg .f32 t;\nneg.f32 t, %0;\nex2.approx.ftz.f32 %0, t;\n}" : "+f"(x)); }
  __device__ uint32_t value() const { return (uint32_t)(x * 65536); }
};
// A conversion: f32 to the lower half of an f16 pair, whose bits are the next one's f32.
struct ToHalf {
  static constexpr uint32_t kChains = 8, kWords = 0;
  uint32_t x;
  __device__ void begin(const Place& p, uint32_t chain) { x = 0x3f800000u + (p.lane + chain << 16); }
  __device__ void step(const Place& p) {
    asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(__uint_as_float(p.a)), "f"(__uint_as_float(x)));
  }
  __device__ uint32_t value() const { return x; }
};
// A conversion whose result comes by scoreboard: the next lower integer.
struct Floor {
  static constexpr uint32_t kChains = 8, kWords = 0;
  float x;
  __device__ void begin(const Place& p, uint32_t chain) { x = (float)(p.lane + chain) + 0.5f; }
  __device__ void step(const Place&) { asm volatile("cvt.rmi.f32.f32 %0, %0;" : "+f"(x)); }
  __device__ uint32_t value() const { return (uint32_t)(x * 2); }
};
// Two conversions: an e4m3 pair to f16 and back.
struct Fp8 {
  static constexpr uint32_t kChains = 8, kWords = 0;
  uint16_t x;
  __device__ void begin(const Place& p, uint32_t chain) { x = (uint16_t)(0x3011u + p.lane + chain * 256); }
  __device__ void step(const Place&) {
#if __CUDA_ARCH__ >= 890
    asm volatile("{\n.reg .b32 t;\ncvt.rn.f16x2.e4m3x2 t, %0;\ncvt.rn.satfinite.e4m3x2.f16x2 %0, t;\n}" : "+h"(x));
#endif
  }
  __device__ uint32_t value() const { return x; }
};
// A shuffle: every lane takes its neighbour's, in a circle of 31 lanes.
struct Shuffle {
  static constexpr uint32_t kChains = 8, kWords = 0;
  uint32_t x;
  __device__ void begin(const Place& p, uint32_t chain) { x = p.lane * p.lane + chain; }
  __device__ void step(const Place& p) { asm volatile("shfl.sync.idx.b32 %0, %0, %1, 0x1f, 0xffffffff;" : "+r"(x) : "r"(p.neighbour)); }
  __device__ uint32_t value() const { return x * (lane_id() + 1); }
};
// A load of 4 bytes from shared memory whose result is the next one's address: word (i, lane) points to ((i + 1) % 3, lane).
struct Lds {
  static constexpr uint32_t kChains = 8, kWords = 96;
  uint32_t x, base;
  __device__ static uint32_t word(uint32_t i, uint32_t base) { return base + 4 * ((i + 32) % 96); }
  __device__ void begin(const Place& p, uint32_t) { x = p.shared + 4 * p.lane, base = p.shared; }
  __device__ void step(const Place&) { x = load_shared(x); }
  __device__ uint32_t value() const { return x - base; }
};
// ldmatrix of four matrices: register 0 is the next one's address, in the next of three copies of them. The lane's own row is at
// 16 * lane, and lane 4 g + j gets word (g, j) of the first matrix.
struct Ldsm {
  static constexpr uint32_t kChains = 4, kWords = 384;
  uint32_t x, more, base;
  __device__ static uint32_t word(uint32_t i, uint32_t base) { return i % 128 < 32 ? base + (i / 128 + 1) % 3 * 512 + i % 32 * 16 : i; }
  __device__ void begin(const Place& p, uint32_t) { x = p.shared + 16 * p.lane, more = 0, base = p.shared; }
  __device__ void step(const Place&) {
    uint32_t r1, r2, r3;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(x)
                 : "memory");
    more = r1 + r2 + r3;  // of the last step only
  }
  __device__ uint32_t value() const { return x - base + more; }
};
// A product of m16n8k16 with f32 sums: + 16 a b.
struct Hmma {
  static constexpr uint32_t kChains = 4, kWords = 0;
  float c[4];
  __device__ void begin(const Place& p, uint32_t chain) { c[0] = c[1] = c[2] = c[3] = (float)(p.lane + chain); }
  __device__ void step(const Place& p) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(p.a), "r"(p.b));
  }
  __device__ uint32_t value() const { return (uint32_t)c[0] + (uint32_t)c[1] + (uint32_t)c[2] + (uint32_t)c[3]; }
};
// A load of a constant, whose value is the next one's place in a circle of 61.
#define NEXT4(i) (i + 7) % 61 * 4, (i + 8) % 61 * 4, (i + 9) % 61 * 4, (i + 10) % 61 * 4
#define NEXT16(i) NEXT4(i), NEXT4((i + 4)), NEXT4((i + 8)), NEXT4((i + 12))
__constant__ uint32_t kCircle[64] = {NEXT16(0), NEXT16(16), NEXT16(32), NEXT16(48)};
struct Ldc {
  static constexpr uint32_t kChains = 1, kWords = 0;
  uint32_t x;
  __device__ void begin(const Place& p, uint32_t) { x = p.a; }
  __device__ void step(const Place&) { x = *(const uint32_t*)((const uint8_t*)kCircle + x); }
  __device__ uint32_t value() const { return x; }
};
// The barrier of a block.
struct Barrier {
  static constexpr uint32_t kChains = 1, kWords = 0;
  uint32_t x;
  __device__ void begin(const Place& p, uint32_t) { x = p.lane; }
  __device__ void step(const Place&) {
    asm volatile("bar.sync 0;" ::: "memory");
    ++x;
  }
  __device__ uint32_t value() const { return x; }
};

constexpr uint32_t kUnroll = 16;  // steps a trip

template <typename Op, uint32_t kChains>
__device__ __forceinline__ void stretch(Record* out, const Place& place, uint32_t trips) {
  Op op[kChains];
#pragma unroll
  for (uint32_t c = 0; c < kChains; ++c) op[c].begin(place, c);
  __syncthreads();
  const uint64_t ns = nanoseconds(), begin = cycles();
#pragma unroll 1
  for (uint32_t t = 0; t < trips; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (uint32_t c = 0; c < kChains; ++c) op[c].step(place);
    }
  }
  uint32_t sum = 0;
#pragma unroll
  for (uint32_t c = 0; c < kChains; ++c) sum += op[c].value();
  const uint64_t end = cycles_after(sum), late = nanoseconds();
  sum = warp_sum(sum);
  if (lane_id() == 0) *out = {begin, end, late - ns, (uint64_t)trips * kUnroll * kChains, sum};
}

// Of the warps in the mask `warps` a dependent chain of trips * 16 steps (one warp: (end - begin) / steps is the latency), then
// kChains of them side by side: (last end - first begin) / steps of all warps is the interval of the sub-cores together.
template <typename Op>
__device__ __forceinline__ void measure(Record* out, uint32_t trips, uint32_t warps, uint32_t a, uint32_t b) {
  __shared__ alignas(1024) uint32_t words[Op::kWords + 1];
  const uint32_t base = shared_address(words);
  if constexpr (Op::kWords > 0) {
    for (uint32_t i = threadIdx.x; i < Op::kWords; i += blockDim.x) words[i] = Op::word(i, base);
  }
  const Place place = {lane_id(), lane_id() == 31 ? 31 : (lane_id() + 1) % 31, a, b, base};
  Record* const mine = out + (blockIdx.x * (blockDim.x / 32) + warp_id()) * 2;
  if (warps >> warp_id() & 1) {
    stretch<Op, 1>(mine, place, trips);
    stretch<Op, Op::kChains>(mine + 1, place, trips);
  } else {
    __syncthreads();
    __syncthreads();
  }
}
#define MEASURE(name, Op)                                                                                                           \
  extern "C" __global__ void __launch_bounds__(512) calibrate_##name(Record* out, uint32_t trips, uint32_t warps, uint32_t a, uint32_t b) { \
    measure<Op>(out, trips, warps, a, b);                                                                                           \
  }
MEASURE(fma, Fma)
MEASURE(half, Half)
MEASURE(permute, Permute)
MEASURE(imad, Imad)
MEASURE(exp2, Exp2)
MEASURE(floor, Floor)
MEASURE(to_half, ToHalf)
MEASURE(fp8, Fp8)
MEASURE(shuffle, Shuffle)
MEASURE(lds, Lds)
MEASURE(ldsm, Ldsm)
MEASURE(hmma, Hmma)
MEASURE(ldc, Ldc)
MEASURE(barrier, Barrier)

// Which warps share a scheduler: warps i and j alone run products side by side, that one scheduler can just issue for one of them.
// A pair of one sub-core takes up to twice what a warp alone (i == j) takes. Record (i * warps + j) * 2 is of i, the next of j.
extern "C" __global__ void __launch_bounds__(512) calibrate_pairs(Record* out, uint32_t trips, uint32_t a, uint32_t b) {
  const uint32_t warps = blockDim.x / 32, warp = warp_id();
  const Place place = {lane_id(), 0, a, b, 0};
  for (uint32_t i = 0; i < warps; ++i) {
    for (uint32_t j = 0; j < warps; ++j) {
      __syncthreads();
      if (warp != i && warp != j) continue;
      Fma op[8];
#pragma unroll
      for (uint32_t c = 0; c < 8; ++c) op[c].begin(place, c);
      const uint64_t ns = nanoseconds(), begin = cycles();
#pragma unroll 1
      for (uint32_t t = 0; t < trips; ++t) {
#pragma unroll
        for (uint32_t s = 0; s < kUnroll * 8; ++s) op[s % 8].step(place);
      }
      uint32_t sum = 0;
#pragma unroll
      for (uint32_t c = 0; c < 8; ++c) sum += op[c].value();
      const uint64_t end = cycles_after(sum), late = nanoseconds();
      sum = warp_sum(sum);
      if (lane_id() == 0) out[(i * warps + j) * 2 + (warp == i ? 0 : 1)] = {begin, end, late - ns, (uint64_t)trips * kUnroll * 8, sum};
    }
  }
}

// How long one warp takes to issue kLoads independent loads from shared memory (record kLoads - 1: the sum of all trips): so many go
// at the rate of issue as wait in front of the memory, the others at the memory's. Trips begin when all loads have come.
template <uint32_t kLoads>
__device__ __forceinline__ void issue_loads(Record* out, uint32_t trips, uint32_t base) {
  uint64_t spent = 0;
  uint32_t sum = 0;
  const uint64_t ns = nanoseconds();
#pragma unroll 1
  for (uint32_t t = 0; t < trips; ++t) {
    uint32_t x[kLoads];
    const uint64_t begin = cycles_after(sum);
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {  // volatile: ptxas moves others in front of the clock
      asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(x[i]) : "r"(base + 128 * i) : "memory");
    }
    spent += cycles() - begin;
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) sum += x[i];
  }
  const uint64_t late = nanoseconds();
  sum = warp_sum(sum);
  if (lane_id() == 0) out[kLoads - 1] = {0, spent, late - ns, trips, sum};
  if constexpr (kLoads > 1) issue_loads<kLoads - 1>(out, trips, base);
}
extern "C" __global__ void __launch_bounds__(32) calibrate_queue(Record* out, uint32_t trips) {
  constexpr uint32_t kMost = 24;
  __shared__ uint32_t words[kMost * 32];
  for (uint32_t i = 0; i < kMost; ++i) words[i * 32 + lane_id()] = i * 32 + lane_id();
  __syncwarp();
  issue_loads<kMost>(out, trips, shared_address(words + lane_id()));
}

// ---------------------------------------------------------------- memory: latency
// One step of a chain of lines, by one thread: the address of the next line.
struct ByLoad {
  __device__ void begin() {}
  __device__ const Line* next(const Line* p) {
    uint64_t x;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return (const Line*)x;
  }
};
__device__ __forceinline__ const Line* loaded_line(uint32_t address) {
  uint64_t x;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  return (const Line*)x;
}
// The line by cp.async, waited for, and read from shared memory.
struct ByCopy {
  uint32_t at;
  __device__ void begin() {
    __shared__ Vector buffer;
    at = shared_address(&buffer);
  }
  __device__ const Line* next(const Line* p) {
    copy_async(at, p);
    copies_done();
    return loaded_line(at);
  }
};
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
  } while (!done);
}
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
// The line by a bulk copy (TMA), waited for at an mbarrier, and read from shared memory.
struct ByBulk {
  uint32_t at, bar, parity;
  __device__ void begin() {
    __shared__ alignas(16) Vector buffer;
    __shared__ uint64_t barrier;
    at = shared_address(&buffer), bar = shared_address(&barrier), parity = 0;
    mbarrier_init(bar, 1);
    mbarriers_ready();
  }
  __device__ const Line* next(const Line* p) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" ::"r"(bar) : "memory");
    bulk_copy(at, p, 16, bar);
    mbarrier_wait(bar, parity);
    parity ^= 1;
    return loaded_line(at);
  }
};
#endif

__device__ __forceinline__ Vector load_vector(const Vector* p) {
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.e[0]), "=r"(v.e[1]), "=r"(v.e[2]), "=r"(v.e[3])
               : "l"(p));
  return v;
}

constexpr uint32_t kSteps = 16, kAhead = 4;

// Thread 0 follows the chain, at most `most` steps, or until the block's other warps have read their part of `stream`: pieces of
// 2 KB each, in flight while they wait for them. (end - begin) / steps is a latency, the streams' bytes over their time a load.
// Record 0 of a block is the chase (sum: the number of the line where it ends), the others those of its streams (sums of words).
template <typename By>
__device__ __forceinline__ void chase(Record* out, const Line* lines, uint32_t count, uint32_t most, const Vector* stream, uint32_t pieces) {
  __shared__ uint32_t done;
  const uint32_t streams = blockDim.x / 32 - 1, warp = warp_id();
  if (threadIdx.x == 0) done = 0;
  __syncthreads();
  Record* const mine = out + blockIdx.x * (streams + 1) + warp;
  const uint64_t ns = nanoseconds(), begin = cycles();
  if (warp > 0) {
    uint32_t sum = 0;
    const uint64_t all = (uint64_t)gridDim.x * streams, first = (uint64_t)blockIdx.x * streams + warp - 1;
#pragma unroll 1
    for (uint32_t p = 0; p < pieces; ++p) {
      Vector v[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) v[i] = load_vector(stream + ((p * all + first) * kAhead + i) * 32 + lane_id());
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) sum += v[i].e[0] + v[i].e[1] + v[i].e[2] + v[i].e[3];
    }
    const uint64_t end = cycles_after(sum), late = nanoseconds();
    sum = warp_sum(sum);
    if (lane_id() == 0) {
      atomicAdd(&done, 1);
      *mine = {begin, end, late - ns, pieces, sum};
    }
  } else if (threadIdx.x == 0) {
    By by;
    by.begin();
    const Line* p = lines + blockIdx.x * (count / gridDim.x);
    uint64_t spent = 0;
    uint32_t steps = 0;
    do {
      const uint64_t t = cycles();
#pragma unroll
      for (uint32_t i = 0; i < kSteps; ++i) p = by.next(p);
      spent += cycles_after((uint32_t)(uint64_t)p) - t;
      steps += kSteps;
    } while (steps < most && (streams == 0 || atomicAdd(&done, 0) < streams));
    *mine = {0, spent, nanoseconds() - ns, steps, p->number};
  }
}
#define CHASE(name, By)                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(1024) calibrate_##name(Record* out, const Line* lines, uint32_t count, uint32_t most, \
                                                                       const Vector* stream, uint32_t pieces) {                        \
    chase<By>(out, lines, count, most, stream, pieces);                                                                              \
  }
CHASE(ldg, ByLoad)
CHASE(ldgsts, ByCopy)
#if __CUDA_ARCH__ >= 900
CHASE(bulk, ByBulk)
#endif

// ---------------------------------------------------------------- memory: rates
// `vectors` vectors in runs of 2^shift that lie apart: run r is at r * odd modulo `runs`, a power of two. Where these are all runs,
// each is read once; where they are fewer, they are what L2 holds. Bytes over the launch's time is the bandwidth of such runs.
extern "C" __global__ void __launch_bounds__(512) calibrate_runs(Record* out, const Vector* from, uint32_t vectors, uint32_t shift, uint32_t runs,
                                                                 uint32_t odd) {
  constexpr uint32_t kLoads = 8;
  const uint32_t inside = (1u << shift) - 1;
  const uint64_t ns = nanoseconds(), begin = cycles();
  uint32_t sum = 0, steps = 0;
#pragma unroll 1
  for (uint64_t at = (uint64_t)blockIdx.x * 512 * kLoads + threadIdx.x; at < vectors; at += (uint64_t)gridDim.x * 512 * kLoads) {
    Vector v[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint64_t vector = at + i * 512;
      const uint32_t run = (uint32_t)(vector >> shift) * odd & (runs - 1);
      v[i] = load_vector(from + (((uint64_t)run << shift) | ((uint32_t)vector & inside)));
    }
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) sum += v[i].e[0] + v[i].e[1] + v[i].e[2] + v[i].e[3];
    steps += kLoads;
  }
  const uint64_t end = cycles_after(sum), late = nanoseconds();
  sum = warp_sum(sum);
  if (lane_id() == 0) out[blockIdx.x * 16 + warp_id()] = {begin, end, late - ns, steps, sum};
}

#if __CUDA_ARCH__ >= 900
// One thread keeps `stages` copies of `box` bytes in flight, from a window of `boxes` boxes that L2 holds after the first round:
// (end - begin) / steps is the interval of a box. The sum is of what the ring holds in the end. `fetch` copies box i.
template <typename Fetch>
__device__ __forceinline__ void ring(Record* out, uint32_t boxes, uint32_t box, uint32_t stages, uint32_t copies, Fetch fetch) {
  alignas(1024) extern __shared__ uint8_t bytes[];
  __shared__ uint64_t ready[64];
  __shared__ uint32_t total;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < stages; ++i) mbarrier_init(shared_address(ready + i), 1);
    mbarriers_ready();
    total = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint64_t ns = nanoseconds(), begin = cycles();
    uint32_t stage = 0, parity = 0;
    for (uint32_t i = 0; i < copies; ++i) {
      const uint32_t bar = shared_address(ready + stage);
      if (i >= stages) mbarrier_wait(bar, parity ^ 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(box) : "memory");
      fetch(shared_address(bytes + stage * box), i & (boxes - 1), bar);
      if (++stage == stages) stage = 0, parity ^= 1;
    }
    for (uint32_t i = 0; i < stages; ++i) mbarrier_wait(shared_address(ready + i), parity ^ 1);  // `copies` is a multiple of `stages`
    *out = {begin, cycles(), nanoseconds() - ns, copies, 0};
  }
  __syncthreads();
  uint32_t sum = 0;
  for (uint32_t i = threadIdx.x; i < stages * box / 4; i += 128) sum += ((const uint32_t*)bytes)[i];
  atomicAdd(&total, sum);
  __syncthreads();
  if (threadIdx.x == 0) out->sum = total;
}
// Bulk copies.
extern "C" __global__ void __launch_bounds__(128) calibrate_boxes(Record* out, const uint8_t* from, uint32_t boxes, uint32_t box, uint32_t stages,
                                                                  uint32_t copies) {
  ring(out, boxes, box, stages, copies, [&](uint32_t to, uint32_t i, uint32_t bar) { bulk_copy(to, from + (uint64_t)i * box, box, bar); });
}
// Tensor copies of rows of 128 bytes, swizzled; `map` is of the memory at `from`.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};
extern "C" __global__ void __launch_bounds__(128) calibrate_tiles(Record* out, const uint8_t* from, uint32_t boxes, uint32_t box, uint32_t stages,
                                                                  uint32_t copies, const __grid_constant__ TensorMap map) {
  ring(out, boxes, box, stages, copies, [&](uint32_t to, uint32_t i, uint32_t bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map),
                 "r"(0), "r"(i * (box / 128)), "r"(bar)
                 : "memory");
  });
}

// From an arrival to the thread that waits: two warps in turn, so that a step is half a round.
extern "C" __global__ void __launch_bounds__(64) calibrate_mbarrier(Record* out, uint32_t rounds) {
  __shared__ uint64_t bars[2];
  __shared__ uint32_t seen;
  const uint32_t me = warp_id(), mine = shared_address(bars + me), other = shared_address(bars + (me ^ 1));
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(bars), 1);
    mbarrier_init(shared_address(bars + 1), 1);
    mbarriers_ready();
  }
  __syncthreads();
  if (lane_id() != 0) return;
  const uint64_t ns = nanoseconds(), begin = cycles();
  for (uint32_t i = 0; i < rounds; ++i) {
    if (me == 1) mbarrier_wait(other, i & 1);
    if (me == 1 && i == rounds - 1) seen = rounds * 3;  // which the other warp may read behind its last wait
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mine) : "memory");
    if (me == 0) mbarrier_wait(other, i & 1);
  }
  const uint64_t end = cycles();
  out[me] = {begin, end, nanoseconds() - ns, (uint64_t)rounds * 2, me == 0 ? seen : rounds};
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
  return x;
}
// A pair of blocks: block 0 follows a chain of 61 words through the shared memory of block 1 (record 0: latency of a load there),
// then both meet at the cluster's barrier (record 1; 2 is block 1's).
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128) calibrate_cluster(Record* out, uint32_t trips) {
  __shared__ uint32_t words[61];
  const uint32_t rank = blockIdx.x % 2, there = in_block(shared_address(words), 1);
  if (threadIdx.x < 61) words[threadIdx.x] = there + (threadIdx.x + 7) % 61 * 4;
  cluster_barrier();
  if (rank == 0 && threadIdx.x == 0) {
    uint32_t x = there;
    const uint64_t ns = nanoseconds(), begin = cycles();
#pragma unroll 1
    for (uint32_t t = 0; t < trips; ++t) {
#pragma unroll
      for (uint32_t i = 0; i < kUnroll; ++i) asm volatile("ld.shared::cluster.u32 %0, [%0];" : "+r"(x)::"memory");
    }
    const uint64_t end = cycles_after(x);
    out[0] = {begin, end, nanoseconds() - ns, (uint64_t)trips * kUnroll, (x - there) / 4};
  }
  cluster_barrier();
  const uint64_t ns = nanoseconds(), begin = cycles();
#pragma unroll 1
  for (uint32_t t = 0; t < trips; ++t) {
#pragma unroll
    for (uint32_t i = 0; i < kUnroll; ++i) cluster_barrier();
  }
  const uint64_t end = cycles();
  if (threadIdx.x == 0) out[1 + rank] = {begin, end, nanoseconds() - ns, (uint64_t)trips * kUnroll, trips};
}
#endif

// ---------------------------------------------------------------- fences
// One thread: a store, a fence over the device and an atomic whose result is the next store (record 0); a store and one atomic that
// releases and acquires (record 1).
extern "C" __global__ void calibrate_atomic(Record* out, uint32_t* words, uint32_t trips) {
  uint32_t sum = 0, x = 0;
  uint64_t ns = nanoseconds(), begin = cycles();
  for (uint32_t t = 0; t < trips; ++t) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(words + 1), "r"(x) : "memory");
    __threadfence();
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(words) : "memory");
    sum += x;
  }
  out[0] = {begin, cycles_after(sum), nanoseconds() - ns, trips, sum};
  ns = nanoseconds(), begin = cycles();
  for (uint32_t t = 0; t < trips; ++t) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(words + 1), "r"(x) : "memory");
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(words) : "memory");
    sum += x;
  }
  out[1] = {begin, cycles_after(sum), nanoseconds() - ns, trips, sum};
}

// A fence of the block in front of asynchronous units, as each tile of a wgmma kernel has one (sm_80: of the block alone): without
// copies in flight (record 0), and behind `copies` cp.async a thread of lines that nobody has read (1); until these have landed (2).
// Times are sums over the trips: the clock behind a fence waits for its MEMBAR. The sums are of what was copied.
extern "C" __global__ void __launch_bounds__(128) calibrate_membar(Record* out, const Line* from, uint32_t trips, uint32_t copies) {
  __shared__ Vector landed[128 * 8];
  uint64_t alone = 0, beside = 0, waited = 0;
  uint32_t sum = 0;
  const uint64_t ns = nanoseconds();
  for (uint32_t t = 0; t < trips; ++t) {
    for (uint32_t flying = 0; flying < 2; ++flying) {
      for (uint32_t c = 0; c < copies * flying; ++c) {
        copy_async(shared_address(landed + threadIdx.x * 8 + c), from + ((uint64_t)t * copies + c) * 128 + threadIdx.x);
      }
      const uint64_t begin = cycles();
#if __CUDA_ARCH__ >= 900
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
      __threadfence_block();
#endif
      const uint64_t end = cycles();
      copies_done();
      const uint64_t all = cycles();
      (flying ? beside : alone) += end - begin;
      if (flying) waited += all - begin;
    }
    for (uint32_t c = 0; c < copies; ++c) sum += landed[threadIdx.x * 8 + c].e[2];  // the line's number
    __syncthreads();
  }
  const uint64_t late = nanoseconds() - ns;
  sum = warp_sum(sum);
  if (lane_id() == 0) {
    Record* const mine = out + warp_id() * 3;
    mine[0] = {0, alone, late, trips, 0};
    mine[1] = {0, beside, late, trips, sum};
    mine[2] = {0, waited, late, trips, sum};
  }
}

// A node of a graph, which does nothing but what each generated kernel begins with.
extern "C" __global__ void calibrate_node() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---------------------------------------------------------------- wgmma
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define R0 "%0, %1, %2, %3"
#define R1 R0 ", %4, %5, %6, %7"
#define R2 R1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R3 R2 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R4 R3 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
              ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R5 R4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
              ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
              ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
              ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D8(i) D4(i), D4(i + 4)
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define D128(i) D64(i), D64(i + 64)

template <uint32_t N>
__device__ __forceinline__ void product(float (&d)[N / 2], uint64_t a, uint64_t b);
#define PRODUCT(N, REGISTERS, SUMS, A, B)                                                                          \
  template <>                                                                                                      \
  __device__ __forceinline__ void product<N>(float (&d)[N / 2], uint64_t a, uint64_t b) {                          \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 " \
                 "{" REGISTERS "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                                                \
                 : SUMS                                                                                            \
                 : "l"(a), "l"(b)                                                                                  \
                 : "memory");                                                                                      \
  }
PRODUCT(8, R0, D4(0), "%4", "%5")
PRODUCT(16, R1, D8(0), "%8", "%9")
PRODUCT(32, R2, D16(0), "%16", "%17")
PRODUCT(64, R3, D32(0), "%32", "%33")
PRODUCT(128, R4, D64(0), "%64", "%65")
PRODUCT(256, R5, D128(0), "%128", "%129")

// Rows of 128 bytes in swizzled tiles of 8 rows, the sum along them.
__device__ __forceinline__ uint64_t tile(const void* p) {
  return (uint64_t)(shared_address(p) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

// Products of 64 x 16 by 16 x N by one warpgroup, both operands in shared memory: trips * 8, each waited for (record 0 of a warp:
// latency), then groups of 8 with one group in flight (record 1: interval). Row m of A holds 1 + m % 2, column n of B 1 + n % 4.
template <uint32_t N>
__device__ __forceinline__ void products(Record* out, uint32_t trips) {
  constexpr uint32_t kProducts = 8;
  __shared__ alignas(1024) uint16_t a[64 * 64], b[N * 64];
  for (uint32_t i = threadIdx.x; i < 64 * 64; i += 128) a[i] = i / 64 % 2 ? 0x4000 : 0x3c00;
  for (uint32_t i = threadIdx.x; i < N * 64; i += 128) b[i] = (uint16_t)(0x4400420040003c00ull >> i / 64 % 4 * 16);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  const uint64_t from_a = tile(a), from_b = tile(b);
  for (uint32_t phase = 0; phase < 2; ++phase) {
    float d[N / 2];
#pragma unroll
    for (uint32_t i = 0; i < N / 2; ++i) d[i] = 0;
    __syncthreads();
    const uint64_t ns = nanoseconds(), begin = cycles();
    if (phase == 0) {
#pragma unroll 1
      for (uint32_t t = 0; t < trips; ++t) {
#pragma unroll
        for (uint32_t i = 0; i < kProducts; ++i) {
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
          product<N>(d, from_a, from_b);
          asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        }
      }
    } else {
#pragma unroll 1
      for (uint32_t t = 0; t < trips; ++t) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (uint32_t i = 0; i < kProducts; ++i) product<N>(d, from_a, from_b);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < N / 2; ++i) {
      asm volatile("" : "+f"(d[i])::"memory");
      sum += (uint32_t)d[i];
    }
    const uint64_t end = cycles_after(sum), late = nanoseconds();
    sum = warp_sum(sum);
    if (lane_id() == 0) out[warp_id() * 2 + phase] = {begin, end, late - ns, (uint64_t)trips * kProducts, sum};
  }
}
#define PRODUCTS(N) \
  extern "C" __global__ void __launch_bounds__(128) calibrate_wgmma_##N(Record* out, uint32_t trips) { products<N>(out, trips); }
PRODUCTS(8)
PRODUCTS(16)
PRODUCTS(32)
PRODUCTS(64)
PRODUCTS(128)
PRODUCTS(256)
#endif
