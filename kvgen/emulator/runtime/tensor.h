// tensor.h - the matrix instructions as a translated kernel calls them. Included by device.h.
#pragma once

EMU_ENUM(u8) { ELEMENT_F16, ELEMENT_BF16, ELEMENT_TF32, ELEMENT_E4M3, ELEMENT_E5M2, ELEMENT_S8, ELEMENT_U8, ELEMENT_S4, ELEMENT_U4, ELEMENT_B1, ELEMENT_F64, ELEMENT_F32, ELEMENT_S32 };
typedef u8 Element;
typedef struct MatrixForm {  // what of a matrix instruction is known at translation
  u16 m, n, k;
  Element a, b, d;
  bool saturate;
  s8 sign;                      // of every product
  bool a_mn_major, b_mn_major;  // in shared memory
} MatrixForm;
// A register that holds no result yet, but the name of one: a signalling NaN with the operation's and element's number.
#define TOKEN 0x7fa00000u
#define TOKEN_MASK 0xfff00000u
EMU_ENUM(u32) { TOKEN_OPERATIONS = 1 << 13, TOKEN_ELEMENTS = 1 << 7 };

typedef struct Matrices {  // of 8 x 8
  u32* registers;
  u8* row;  // in shared memory; lane i has that of row i % 8 of matrix i / 8
  u32 count, transposed;
} Matrices;
typedef struct Mma {
  u32* d;
  const u32 *a, *b;
  const MatrixForm* form;
} Mma;

#pragma GCC visibility push(default)
EMU_BEGIN
void emu_load_matrices(void** lanes, u32);
void emu_multiply(void** lanes, u32);
void emu_stmatrix(const u32* in, u32 count, u32 transposed, u32 address, u32 site);
u32 emu_movmatrix(u32 in, u32 site);
void emu_mma_f64(double* d, const double* a, const double* b, const MatrixForm* form, u32 site);
void emu_mma_b1(u32* d, const u32* a, const u32* b, const MatrixForm* form, u32 exclusive, u32 site);
void emu_wgmma(u32* d, u32 count, const u32* a, u64 a_descriptor, u64 b_descriptor, u32 accumulates, const MatrixForm* form, u32 site);
void emu_wgmma_fence(u32 site);
void emu_wgmma_commit(u32 site);
void emu_wgmma_wait(u32 keep, u32* late, u32 count, u32 site);
void emu_wgmma_use(u32 token, u32 site);  // returns if no operation of this warp is that late
void emu_setmaxnreg(u32 count, u32 takes, u32 site);
EMU_END
#pragma GCC visibility pop

EMU_INLINE void emu_ldmatrix(const Thread* self, u32* out, u32 count, u32 transposed, u32 address, u32 site) {
  Matrices m;
  m.registers = out, m.row = (u8*)nullptr, m.count = count, m.transposed = transposed;
  if (self->lane < 8 * count) m.row = at_shared(self, address, 16, A_READ, site);
  emu_warp_operation(~0u, emu_load_matrices, &m, site, false, true);
}
EMU_INLINE void emu_mma(u32* d, const u32* a, const u32* b, const MatrixForm* form, u32 site) {
  Mma m;
  m.d = d, m.a = a, m.b = b, m.form = form;
  emu_warp_operation(~0u, emu_multiply, &m, site, false, true);
}

// A register in which a result of wgmma may still be late, read by something other than a move.
#if EMU_CHECK
EMU_INLINE u32 arrived(u32 word, u32 site) {
  if ((word & TOKEN_MASK) == TOKEN) emu_wgmma_use(word, site);
  return word;
}
#else
EMU_INLINE u32 arrived(u32 word, u32 site) { return word; }
#endif
