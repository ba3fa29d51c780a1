// PTX wrappers that the tests of asynchronous memory share. Barriers are named by address.
typedef unsigned u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { unsigned char bytes[128]; };
#define DEVICE static __device__ __forceinline__
DEVICE u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---------------------------------------------------------------- mbarriers
DEVICE void init(u64* b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(b)), "r"(n) : "memory"); }
DEVICE void invalidate(u64* b) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared(b)) : "memory"); }
DEVICE void arrive(u64* b) { asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared(b)) : "memory"); }
DEVICE void arrive(u64* b, u32 n) { asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared(b)), "r"(n) : "memory"); }
DEVICE void arrive_relaxed(u64* b) { asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" ::"r"(shared(b)) : "memory"); }
DEVICE void drop(u64* b) { asm volatile("mbarrier.arrive_drop.shared.b64 _, [%0];" ::"r"(shared(b)) : "memory"); }
DEVICE u64 arrive_state(u64* b) { u64 s; asm volatile("mbarrier.arrive.b64 %0, [%1];" : "=l"(s) : "l"(b) : "memory"); return s; }
DEVICE u64 arrive_inside(u64* b, u32 n) { u64 s; asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], %2;" : "=l"(s) : "r"(shared(b)), "r"(n) : "memory"); return s; }
DEVICE u32 pending(u64 state) { u32 n; asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(n) : "l"(state)); return n; }
DEVICE void expect(u64* b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(shared(b)), "r"(n) : "memory"); }
DEVICE void expect_more(u64* b, u32 n) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared(b)), "r"(n) : "memory"); }
DEVICE void complete(u64* b, u32 n) { asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared(b)), "r"(n) : "memory"); }
DEVICE bool try_wait(u64* b, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, 1000; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared(b)), "r"(parity) : "memory");
  return done;
}
DEVICE bool test_wait(u64* b, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared(b)), "r"(parity) : "memory");
  return done;
}
DEVICE bool test_state(u64* b, u64 state) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "l"(b), "l"(state) : "memory");
  return done;
}
DEVICE bool wait_relaxed(u64* b, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(shared(b)), "r"(parity) : "memory");
  return done;
}
DEVICE void wait(u64* b, u32 parity) { while (!try_wait(b, parity)); }

// ---------------------------------------------------------------- fences
DEVICE void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
DEVICE void fence_threads() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// ---------------------------------------------------------------- copies
DEVICE void copy4(void* to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared(to)), "l"(from) : "memory"); }
DEVICE void copies_arrive(u64* b) { asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared(b)) : "memory"); }
DEVICE void copies_arrive_extra(u64* b) { asm volatile("cp.async.mbarrier.arrive.b64 [%0];" ::"l"(b) : "memory"); }
DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEVICE void load(void* to, const void* from, u32 n, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared(to)), "l"(from), "r"(n), "r"(shared(b)) : "memory");
}
DEVICE void store(void* to, const void* from, u32 n) { asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared(from)), "r"(n) : "memory"); }
DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_group() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
template <int N> DEVICE void wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }

// ---------------------------------------------------------------- clusters
#define SYNC asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory")
#define RELAXED_SYNC asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;" ::: "memory")
DEVICE void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
DEVICE u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE u32 at(const void* p, u32 r) { u32 a; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared(p)), "r"(r)); return a; }
DEVICE void put(u32 a, int v) { asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
DEVICE void arrive_remote(u32 a) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(a) : "memory"); }
DEVICE void arrive_loosely(u32 a) { asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(a) : "memory"); }
DEVICE void expect_remote(u32 a, u32 n) { asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(a), "r"(n) : "memory"); }
DEVICE bool try_remote(u32 a) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 1; selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(a) : "memory");
  return done;
}
DEVICE void multicast(void* to, const void* from, u32 n, u64* b, short blocks) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(shared(to)), "l"(from), "r"(n), "r"(shared(b)), "h"(blocks)
               : "memory");
}
DEVICE void send(u32 to, const void* from, u32 n, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "r"(shared(from)), "r"(n), "r"(b) : "memory");
}
DEVICE void send_max(u32 to, const void* from, u32 n, u32 b) {
  asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.max.s32 [%0], [%1], %2, [%3];" ::"r"(to), "r"(shared(from)), "r"(n), "r"(b) : "memory");
}
DEVICE void send_value(u32 to, int v, u32 b) { asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(v), "r"(b) : "memory"); }
