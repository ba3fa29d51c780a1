// What device data can get wrong, and how a kernel says so.
#pragma once

// The codes of the error word; kvgen.runtime.faults decodes them.
enum class Fault : uint32_t {
  none = 0,
  page_id = 1,      // an id outside the pool
  position = 2,     // a token past the request's page table
  length = 3,       // a length that this step cannot have, or more tokens than the page table holds
  slot = 4,         // a slot outside the pool
  row_offsets = 5,  // offsets that decrease, pass the rows, or give a request more rows than the kernel takes
  table = 6,        // an index into the page table that leaves it
  lora_end = 7,     // a lora_end_idx that counts tokens which the step or its rows do not have
  pair = 8,         // a pair of pages, one of them outside its pool
  overlap = 9,      // a pair that writes to a page which another one reads or writes
  plan = 10,        // a workspace that has no plan for this call, or one that was overwritten
  stale = 11,       // a request that has not the length any more that its step was planned with
};

// The sticky error word, 0 where nothing happened, keeps the smallest (position, request, code) as the complement of these
// bits: the same one whatever the order of the blocks.
__device__ __forceinline__ void report(uint64_t* errors, Fault fault, uint32_t request, uint32_t position) {
  if (errors == nullptr) return;
  const uint32_t low = (request < 0xffffffu ? request : 0xffffffu) << 8 | (uint32_t)fault;
  atomicMax(errors, ~((uint64_t)position << 32 | low));
}
