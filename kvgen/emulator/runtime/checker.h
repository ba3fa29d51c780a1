// checker.h - check mode's own state: clocks and knowledge (order.cpp), shadow memory (shadow.cpp).
#pragma once
#include "counters.h"

#if EMU_CHECK
#include <map>
#include <memory>
#include <sys/mman.h>
#include <unordered_map>
#include <utility>
#include <vector>

// ---------------------------------------------------------------- clocks and knowledge
constexpr u16 NOBODY = 0xffff;
struct Known {  // how far one block's threads are known
  u32 base = 0;
  std::vector<std::pair<u16, u32>> later;  // (thread, clock) beyond base, by thread
};
typedef std::map<u32, Known> Knowledge;  // by block
typedef std::shared_ptr<const Knowledge> KnowledgePtr;

struct Location {  // what was released through one word
  KnowledgePtr all, cta;
  u32 cta_block = 0;
};
typedef std::unordered_map<u64, Location> Locations;

// ---------------------------------------------------------------- shadow memory
struct Cell {      // last write to one word, and who has read it since
  u32 generation;  // shared: of the last full barrier; global: block of the write, 0 = never
  u32 clock, readers, site;
  u16 thread;  // shared: of the rank's block, rank * ROW + thread
  u8 flags;
  u8 split;  // bytes are tracked one by one
};
struct Reader {
  u32 block, clock, lanes, next, site;
  u8 warp, flags;
};
struct Readers {
  std::vector<Reader> nodes{1};
  u32 free_list = 0;
  u32 add(const Reader& r) {
    if (!free_list) {
      nodes.push_back(r);
      return (u32)nodes.size() - 1;
    }
    u32 i = free_list;
    free_list = nodes[i].next;
    nodes[i] = r;
    return i;
  }
  void release(u32 head) {
    while (head) {
      u32 next = nodes[head].next;
      nodes[head].next = free_list;
      free_list = head;
      head = next;
    }
  }
  u32 copy(u32 head) {
    u32 out = 0;
    for (; head; head = nodes[head].next) {
      Reader r = nodes[head];
      r.next = out;
      out = add(r);
    }
    return out;
  }
  void clear() {
    nodes.resize(1);
    free_list = 0;
  }
};
// Of a byte of shared memory. HELD: an asynchronous operation still reads it.
enum : u8 { UNWRITTEN = 0, WRITTEN = 1, IN_FLIGHT = 2, HELD = 4, MBARRIER = 8, OUTSIDE = 16 };
constexpr u8 ASYNC_WRITE = 16, OVERTAKEN = 32;  // among a cell's flags: written through the async proxy; writes among its readers

struct Access {
  u32 me, flags, site, clock;
  bool write;
  const char* buffer;
  const char* space;
  bool async = false, ordered = false, forgotten = false;  // through the async proxy; known to be in order; not remembered
  u8* place = nullptr;  // of an ordinary store: where its bytes will be, a moment from now
  u32 bytes = 0;
};
struct Write { u32 block, thread, clock; };
struct Twice {  // a store of one lane over that of another of its warp, by one instruction: no race if the bytes are equal
  Access access;
  u32 thread;
  u64 offset;
  u8 before[32];
};

// ---------------------------------------------------------------- one block
constexpr u32 ROW = MAX_THREADS + AGENTS;  // a row: threads, then agents
struct Row {  // what somebody knows beyond what everybody does
  u32 clocks[ROW];
  u64 groups = 0;  // which groups of 32 are filled in
  u64 warps = 0;   // those it may follow on hardware: BlockChecker::followed
  void open(u32 group);
};
struct MbarrierOrder {
  Row arrived, complete;  // what the arrivals so far have released, and what they had when the last phase ended
  KnowledgePtr arrived_acquired, complete_acquired;
  u32 init_thread, init_clock, init_site;
};
enum : u32 { FENCE_KINDS = 3 };  // shared, global, mbarrier init: the bits of PROXY_...
struct ProxyFence {
  u32 thread, clock, covers;
  u32 base;  // it covers what the thread knew: everybody's past up to `base`, ...
  Row known;  // ... and more of some
  KnowledgePtr acquired;
  bool includes(u32 t, u32 c) const { return (t == thread && c <= clock) || (t < MAX_THREADS && c <= base) || ((known.groups >> (t >> 5) & 1) && c <= known.clocks[t]); }
};
struct BlockChecker {
  // Zeros to start with, most of which no kernel touches.
  static void* operator new(size_t bytes) { return map_zeros(bytes); }
  static void operator delete(void* p, size_t bytes) { munmap(p, bytes); }

  u32 index, rank;  // of the block in the grid, in its cluster
  u32 base_clock, agent_base[AGENTS], agent_ticks[AGENTS];
  std::vector<u32> clocks, rows;
  std::vector<u64> row_groups;  // which groups of 32 of a row are filled in
  std::vector<KnowledgePtr> acquired, pending, released, released_cta;
  KnowledgePtr block_acquired, block_pending;
  // Of each warp: which warps' pasts it may follow if aligned instructions order their lanes, bit 32 for agents. A bound from
  // above, since the last barrier of the whole block; it says which races are of level CHECK.
  u64 followed[MAX_WARPS];
  bool aligned;  // there has been such an instruction
  std::vector<u32> init_fences;  // clock of each thread's last fence.mbarrier_init
  std::vector<u32> grid_waits;  // clock at which each thread knew that the kernel before has ended; 0: it does not
  struct LastRead { u32 clock, range, site; };  // clock 0: none
  std::vector<LastRead> last_reads;             // of global memory that kernels may write, by thread and agent
  u32 trigger_site;                             // where the block let the kernel behind start
  bool any_knowledge;
  Row barrier_rows[BARRIERS];
  KnowledgePtr barrier_acquired[BARRIERS], barrier_pending[BARRIERS];

  struct Visit { u32 clock, site; };
  std::vector<Visit> visits;  // the last access of each fiber of another block
  struct AgentVisit { u32 block, agent, clock, site; };
  std::vector<AgentVisit> agent_visits;  // what another block's mbarrier says has been read here
  std::vector<std::unique_ptr<MbarrierOrder>> mbarriers;  // by number
  std::vector<std::vector<ProxyFence>> proxy_fences;      // of each thread, oldest first
  std::vector<u16> fencing;                               // threads that have any
  u32 fenced_base[FENCE_KINDS], fenced[FENCE_KINDS][ROW];  // writes up to here: fenced in everybody's past
  KnowledgePtr fenced_acquired[FENCE_KINDS];
  std::vector<u8> undetermined;                           // padding.cpp; by byte, empty while none is
  std::vector<u16> holds;                                 // of each byte of shared memory; empty while there are none
  std::vector<u32> hold_sites;                            // the latest holder
  u32 stores_under_way;                                   // bulk stores whose bytes are not in global memory yet

  Twice twice;  // while twice.access.bytes
  std::unordered_map<u64, Write> observed;  // by cell and thread: the write that its last strong access left or read
  u32 generation, first_generation;
  Cell shared_words[SHARED_CAPACITY / 4], shared_bytes[SHARED_CAPACITY];
  Readers shared_readers;
  Locations shared_locations;
  u8 shared_state[SHARED_CAPACITY + 16];

  u32* row(u32 t) { return &rows[(size_t)t * ROW]; }
  bool ordered(u32 me, u32 u, u32 clock) {
    if (u < MAX_THREADS ? clock <= base_clock : clock <= agent_base[u - MAX_THREADS]) return true;
    return u == me || ((row_groups[me] >> (u >> 5) & 1) && row(me)[u] >= clock);
  }
  void open_row(u32 t, u32 group);
  void give(u32 t, Row& to);                   // t's past
  void take(u32 t, const Row& from);
  KnowledgePtr snapshot(u32 t);                // t's whole past, for others to acquire
  void learn(u32 t, const KnowledgePtr& k);    // t acquires k
  bool may_follow(u32 t, u32 block, u32 u) const;  // once aligned instructions order memory
  bool knows_block(u32 t, u32 block, u32 thread, u32 clock);
};
struct ClusterOrder {  // through the cluster's barrier; inits: of mbarriers, by their fence and even a relaxed arrival
  KnowledgePtr arriving, complete, arriving_inits, inits;
};
inline BlockChecker& checker_here() { return *worker->current->block->checker; }
KnowledgePtr join(const KnowledgePtr& a, const KnowledgePtr& b);
bool knows(const KnowledgePtr& k, u32 block, u32 thread, u32 clock);

struct Range { const char* name; u64 low, high; bool writable, tracked, implicit, settled; };
extern std::vector<Range> ranges;
const char* verb(u32 flags);
u32 find_range(u64 address, u32 bytes, u32 flags, u32 site);
u32 shared_bounds(u32 address, u32 bytes, u32 flags, u32 site);  // its offset
void shared_not_ready(const BlockChecker& home, u32 o, u32 bytes, u32 flags, u32 site);
void shared_access(BlockChecker& home, u32 o, u32 bytes, u32 flags, u32 site, u8* place = nullptr);
void visit_shared(BlockChecker& b, BlockChecker& home, u32 o, u32 bytes, const Access& a, u64 offset);
void visit_global(BlockChecker& b, u64 address, u32 bytes, const Access& a, u64 offset);
extern Locations global_locations;
void note_visit(Block& home, u32 site);  // the current thread uses its shared memory
void synchronise(BlockChecker& b, Locations& locations, u64 address, const Access& a);
void settle_store(BlockChecker& b);  // the store that `twice` waits for has been made
void end_shadow();
// dependents.cpp
void check_settled(const Range& r, u64 address, u32 flags, u32 site);
void check_landing(const BlockChecker& home, u32 range, u32 site);
void note_read(BlockChecker& b, u32 me, u32 clock, u32 range, u32 flags, u32 site);
void begin_dependents(BlockChecker& b);
// padding.cpp
constexpr u32 PAGE_BYTES = 4096;   // of global memory, whose bytes are kept together: no page of a host's is smaller
void keep_page(u64 address);       // it is about to be written for the first time
bool tolerates_race(const Access& a, u32 other_flags, u32 other_site);  // for now: it is suspected
void suspect_reader(const Reader& r, u32 thread);        // a write raced with what it had read
void suspect_bytes(BlockChecker& home, u32 o, u32 bytes);  // two writes raced
void determine_bytes(BlockChecker& home, u32 o, u32 bytes);
u8* read_or_probe(BlockChecker& home, u32 o, u8* place, u32 bytes, u32 site);
void begin_padding();
// flights.cpp, proxy.cpp
u32 flight_site(const BlockChecker& home, u32 o);  // of what is still to write or to read this byte of shared memory
u32 product_site(const Block& block, u32 o);       // of a wgmma that is still to read it, else NO_SITE
void check_unwritten(u64 address, u32 bytes, u32 flags, u32 site);
bool proxy_fenced(BlockChecker& b, u32 me, u32 kind, u32 block, u32 writer, u32 clock);
void fold_proxy_fences(BlockChecker& b);
void reset_proxy_fences(BlockChecker& b);
void end_proxy_fences();
#endif
