// checker.h - check mode's own state: clocks and knowledge (order.cpp), shadow memory (shadow.cpp).
#pragma once
#include "counters.h"

#if EMU_CHECK
#include <map>
#include <memory>
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
enum : u8 { UNWRITTEN = 0, WRITTEN = 1, IN_FLIGHT = 2, OUTSIDE = 3 };

// ---------------------------------------------------------------- one block
constexpr u32 AGENTS = 64, ROW = MAX_THREADS + AGENTS;  // a row: threads, then agents
struct BlockChecker {
  u32 index, rank;  // of the block in the grid, in its cluster
  u32 base_clock, agent_base[AGENTS];
  std::vector<u32> clocks, rows;
  std::vector<u64> row_groups;  // which groups of 32 of a row are filled in
  std::vector<KnowledgePtr> acquired, pending, released, released_cta;
  KnowledgePtr block_acquired, block_pending;
  std::vector<u32> grid_waits;  // clock at which each thread knew that the kernel before has ended; 0: it does not
  bool any_knowledge;
  u32 barrier_rows[BARRIERS][ROW];
  u64 barrier_groups[BARRIERS];
  KnowledgePtr barrier_acquired[BARRIERS], barrier_pending[BARRIERS];

  struct Visit { u32 clock, site; };
  std::vector<Visit> visits;  // the last access of each fiber of another block

  u32 generation;
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
  KnowledgePtr snapshot(u32 t);                // t's whole past, for others to acquire
  void learn(u32 t, const KnowledgePtr& k);    // t acquires k
  bool knows_grid(u32 t);                      // of the end of the kernel before
  bool knows_block(u32 t, u32 block, u32 thread, u32 clock);
};
struct ClusterOrder { KnowledgePtr arriving, complete; };  // through the cluster's barrier
inline BlockChecker& checker_here() { return *worker->current->block->checker; }
KnowledgePtr join(const KnowledgePtr& a, const KnowledgePtr& b);

struct Range { const char* name; u64 low, high; bool writable, tracked, implicit, settled; };
extern std::vector<Range> ranges;
struct Access {
  u32 me, flags, site, clock;
  bool write;
  const char* buffer;
  const char* space;
};
const char* verb(u32 flags);
void visit_shared(BlockChecker& b, BlockChecker& home, u32 o, u32 bytes, const Access& a, u64 offset);
void visit_global(BlockChecker& b, u64 address, u32 bytes, const Access& a, u64 offset);
extern Locations global_locations;
void synchronise(BlockChecker& b, Locations& locations, u64 address, const Access& a);
void end_shadow();
#endif
