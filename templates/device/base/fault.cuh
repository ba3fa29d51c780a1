// Faults of device data, and the error word that reports them.
//
// The error word is 0 if there was no fault. Otherwise it is the largest ~(position << 32 | request << 8 | fault) of all reports:
// the fault at the smallest position, whatever the order of the blocks. The request is a row for operations on slots or lists, a
// GivenScale for `scale`. The position is, by fault:
//   page_id, position, table: the token, or 0 for a whole request       length: the length or count, or 0 for a whole request
//   stale: the tokens that the request has now (of lists: entries, in whole tiles)       row_offsets: the row of the call
//   slot: the row       lora_end: the row or token       pair, overlap: the pair       scale: place in its layer       plan: 0
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
  scale = 12,       // a scale of the caller's that is 0, negative or not finite
};

// Reports a fault to the error word, which is sticky; null: no report is wanted.
__device__ __forceinline__ void report(uint64_t* errors, Fault fault, uint32_t request, uint32_t position) {
  if (errors == nullptr) return;
  const uint32_t low = (request < 0xffffffu ? request : 0xffffffu) << 8 | (uint32_t)fault;
  atomicMax(errors, ~((uint64_t)position << 32 | low));
}

// The caller's scale, as a factor or divisor: NaN if it is 0, negative or not finite.
__device__ __forceinline__ float usable_scale(float scale) { return scale > 0.0f && scale < __uint_as_float(0x7f800000u) ? scale : nan_f32(); }

// The caller's scale of the codes of q or out: 1 if the call has none.
__device__ __forceinline__ float given_scale(const float* scale) { return scale == nullptr ? 1.0f : usable_scale(*scale); }

// The scale that a report is about, in place of a request.
enum class GivenScale : uint32_t { k = 0, v = 1, q = 2, out = 3, k_global = 4, v_global = 5 };

// Reports a scale of q or out that is 0, negative or not finite. The first thread of a launch checks it.
__device__ __forceinline__ void report_scale(const float* scale, GivenScale which, uint64_t* errors) {
  if (blockIdx.x > 0 || blockIdx.y > 0 || blockIdx.z > 0 || threadIdx.x > 0) return;
  const float value = given_scale(scale);
  if (value != value) report(errors, Fault::scale, (uint32_t)which, 0);
}
