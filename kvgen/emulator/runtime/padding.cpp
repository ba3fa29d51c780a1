// padding.cpp - level HARDWARE: reads of shared memory that may find one thing or another, and whether that matters.
//
// A thread's read of bytes that nobody has written, or that race, is only suspected: it may be of padding. A launch with a
// suspicion is run again (padding.py), as a probe, in which such reads find other bytes. What it leaves in memory tells
// whether anybody uses them. A probe follows the launch up to there, so that a read is named by its thread and clock. All
// begin with the same memory: of every page of global memory that a launch writes, the bytes before its first write are kept.
#include "checker.h"
#include <set>
#include <string.h>
#include <tuple>

#if EMU_CHECK
namespace {
typedef std::tuple<u32, u32, u32, u32> ReadName;  // block, thread, site, clock
std::set<ReadName> raced_reads;                   // with a later write; found by the launch, disturbed by its probes
pthread_mutex_t raced_lock = PTHREAD_MUTEX_INITIALIZER;
struct KeptPage {  // the fields of abi.KeptPage
  u64 address;
  u8* bytes;  // before the launch
};
std::map<u64, std::unique_ptr<u8[]>> kept_pages;  // of the launch and its probes; only the block whose turn it is writes
std::vector<KeptPage> kept_list;

bool is_asynchronous(u32 site) {
  const char* op = emu_sites[site].op;
  return !strncmp(op, "wgmma.", 6) || !strncmp(op, "cp.async.bulk", 13) || !strncmp(op, "cp.reduce.async", 15);
}
}  // namespace

// Global memory is the caller's in the end, an atomic uses what it finds, and nothing disturbs an asynchronous read.
bool tolerates_race(const Access& a, u32 other_flags, u32 other_site) {
  if (!hardware_level() || strcmp(a.space, "shared") || a.async || (a.flags | other_flags) & A_ATOMIC) return false;
  return other_flags & A_WRITE || !is_asynchronous(other_site);
}
void suspect_reader(const Reader& r, u32 thread) {
  if (launch->probe) return;
  pthread_mutex_lock(&raced_lock);
  raced_reads.insert({r.block, thread, r.site, r.clock});
  pthread_mutex_unlock(&raced_lock);
}
void suspect_bytes(BlockChecker& home, u32 o, u32 bytes) {
  if (home.undetermined.empty()) home.undetermined.resize(SHARED_CAPACITY);
  memset(&home.undetermined[o], 1, bytes);
}
void determine_bytes(BlockChecker& home, u32 o, u32 bytes) {
  settle_store(checker_here());
  if (!home.undetermined.empty()) memset(&home.undetermined[o], 0, bytes);
}
u8* read_or_probe(BlockChecker& home, u32 o, u8* place, u32 bytes, u32 site) {
  if (!launch->probe) return place;
  constexpr u8 CHANGES[] = {0, 0xFF, 0x3C};
  Fiber& me = *worker->current;
  const bool raced = worker->raced || raced_reads.count({me.block->index, me.linear, site, checker_here().clocks[me.linear]});
  for (u32 i = 0; i < bytes; i++) me.disturbed[i] = place[i] ^ (raced || (!home.undetermined.empty() && home.undetermined[o + i]) ? CHANGES[launch->probe] : 0);
  return me.disturbed;
}
void keep_page(u64 address) {
  std::unique_ptr<u8[]>& page = kept_pages[address];
  if (page) return;  // the launch before this probe has written it
  page.reset(new u8[PAGE_BYTES]);
  memcpy(page.get(), (const u8*)address, PAGE_BYTES);  // whole, since memory is mapped by pages
}
void begin_padding() {
  if (!launch->probe) raced_reads.clear(), kept_pages.clear();
}
extern "C" __attribute__((visibility("default"))) const KeptPage* emu_kept_pages(u64* count) {
  kept_list.clear();
  for (auto& entry : kept_pages) kept_list.push_back({entry.first, entry.second.get()});
  *count = kept_list.size();
  return kept_list.data();
}
extern "C" __attribute__((visibility("default"))) void emu_drop_pages() {
  kept_list.clear();
  kept_pages.clear();
}
#endif
