// counters.h - check mode: what warps ask of memory, by instruction and buffer (counters.cpp).
#pragma once
#include "runtime.h"

#if EMU_CHECK
constexpr u32 SHARED_MEMORY = ~0u;  // in place of a buffer

// The current thread's part of its warp's request; `address` is an offset in shared memory. ldmatrix and stmatrix count
// the 16 bytes of every lane that gives a row.
void count_request(u32 range, u64 address, u32 bytes, u32 flags, u32 site);
// One row of a copy that one thread asks for as a whole; `first` begins the request. Rows come in order of address.
void count_bulk(u32 range, u64 address, u64 bytes, u32 flags, u32 site, bool first);
// Bytes of an asynchronous copy: > 0 when `issuer` starts it, < 0 when it has been waited for.
void note_in_flight(const Fiber& issuer, s64 bytes);

void begin_launch_counts();
void end_launch_counts();
void begin_counting();
void end_counting();
void end_block_counts(const Block& b);
#endif
