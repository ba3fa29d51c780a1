// warpgroup.h - four warps that multiply matrices together: their asynchronous products, and descriptors of operands.
#pragma once
#include "elements.h"
#include <deque>
#include <vector>

constexpr u32 GROUP_WARPS = 4, GROUP_LANES = 128;
constexpr u32 LEAST_REGISTERS = 24;  // that setmaxnreg leaves a thread

struct Arrival {  // one lane at an instruction that its whole warpgroup executes
  u32 site;
  u32* d;         // accumulators
  u32 registers;  // of them
  const u32* a;   // nullptr: A is in shared memory
  u64 a_descriptor, b_descriptor;
  u32 accumulates;
  const MatrixForm* form;  // nullptr: setmaxnreg
  bool waiting;
  u32 count;   // setmaxnreg: registers a thread
  bool takes;  // .inc
};
struct Piece { u32 address, bytes; };
struct Product {  // one wgmma.mma_async
  const MatrixForm* form;
  u64 a, b;  // descriptors
  u32 site, registers, clock;
  bool a_in_registers, accumulates, done;
  u8 awaited;                // warps that have waited for it
  u32 fences[GROUP_WARPS];   // of each warp before it
  std::vector<u32> fragments, sums;  // by lane; sums: accumulators or tokens before, results after
  std::vector<Piece> pieces;         // of shared memory that it reads
};
struct GroupWarp {
  u32 fences, fences_waited;  // wgmma.fence so far, and at the last wait
  u32 awaited;                // products before this one are waited for
  std::deque<u32> groups;     // for each committed group, the product behind it
};
struct Warpgroup {
  std::deque<Product> products;
  u32 first;  // number of products[0]
  u32 arrived, site;
  u32 registers, wanted;  // a thread's; 0: those of the launch, and none
  Arrival* lanes[GROUP_LANES];
  GroupWarp warps[GROUP_WARPS];
  std::vector<double> a, b, sums;  // room to compute in

  u32 next() const { return first + (u32)products.size(); }
  u32 number(u32 token) const { return first + ((token / TOKEN_ELEMENTS - first) & (TOKEN_OPERATIONS - 1)); }
  Product* find(u32 token) {  // the product that a token names, if there is one
    const u32 i = number(token) - first;
    return i < products.size() ? &products[i] : nullptr;
  }
  Product* find_pending(u32 word, u32 warp) {  // the product that a register's value comes from, if the warp has not waited for it
    Product* p = (word & TOKEN_MASK) == TOKEN ? find(word) : nullptr;
    return p && word % TOKEN_ELEMENTS < p->registers && !(p->awaited >> warp & 1) ? p : nullptr;
  }
};

// An operand in shared memory, as 16-byte chunks of lines. A line is a row of the matrix where k is the direction of
// neighbours in memory ("K-major"), else a step along k. Eight lines lie `width` bytes apart and repeat; chunks of a
// line are neighbours in a swizzled pattern. Swizzling exchanges chunks by the bits of the shared address.
struct Operand {
  u32 start, leading, stride, width;  // bytes; a width of 16 is no swizzle
  bool mn_major;
  u32 lines, chunks;
  Operand(u64 descriptor, bool mn, u32 extent, u32 k) : mn_major(mn), lines(mn ? k : extent), chunks(mn ? extent / 8 : 2) {
    static const u8 widths[] = {16, 128, 64, 32};
    start = (u32)descriptor << 4 & 0x3fff0, leading = (u32)(descriptor >> 16) << 4 & 0x3fff0, stride = (u32)(descriptor >> 32) << 4 & 0x3fff0;
    width = widths[descriptor >> 62];
  }
  u32 chunk(u32 line, u32 i) const {
    const bool plain = width == 16;
    const u32 across = width / 16;
    u32 at = start + line % 8 * width + line / 8 * (mn_major && plain ? leading : stride);
    if (mn_major) at += i % across * 16 + i / across * (plain ? stride : leading);
    else at += i * (plain ? leading : 16);
    return at ^ (at >> 7 & (across - 1)) << 4;
  }
};

bool set_registers(Block& block, Warpgroup& group, u32 index, u32 count, bool takes, u32 site);  // false: they have to wait

#if EMU_CHECK
void check_product(Block& block, Warpgroup& group, u32 index, Product& p);   // about to be issued
void check_product_done(Block& block, u32 index, Product& p);                // has been computed
void check_product_awaited(Block& block, u32 warp, const Product& p);        // the warp's wait covers it
#else
inline void check_product(Block&, Warpgroup&, u32, Product&) {}
inline void check_product_done(Block&, u32, Product&) {}
inline void check_product_awaited(Block&, u32, const Product&) {}
#endif
