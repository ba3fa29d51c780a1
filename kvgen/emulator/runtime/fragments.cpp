// fragments.cpp - what a warp does with matrices in its registers: ldmatrix, stmatrix, movmatrix, mma.
//
// Fragments follow the PTX ISA. An 8 x 8 matrix of 16-bit elements: lane l holds row l / 4, columns 2 * (l % 4) and the
// next. A and B of mma: a register holds 32 bits of neighbours along k; the registers of one row lie 4 apart in these
// units of 32 bits, starting at l % 4; the row of A is l / 4, for every other register the one 8 below.
#include "elements.h"

namespace {
// ---------------------------------------------------------------- 8 x 8 matrices of 16-bit elements
void collect(void** a, u32 count, u32 transposed, u16 m[4][8][8]) {
  for (u32 l = 0; l < 32; l++)
    for (u32 j = 0; j < count; j++) {
      const u32 r = l >> 2, c = (l & 3) * 2, pair = ((Matrices*)a[l])->registers[j];
      if (transposed) m[j][c][r] = (u16)pair, m[j][c + 1][r] = (u16)(pair >> 16);
      else m[j][r][c] = (u16)pair, m[j][r][c + 1] = (u16)(pair >> 16);
    }
}
void store_op(void** a, u32) {
  const Matrices* first = (Matrices*)a[0];
  u16 m[4][8][8];
  collect(a, first->count, first->transposed, m);
  for (u32 i = 0; i < 8 * first->count; i++) memcpy(((Matrices*)a[i])->row, m[i >> 3][i & 7], 16);
}
void move_op(void** a, u32) {
  u16 m[4][8][8];
  collect(a, 1, true, m);
  for (u32 l = 0; l < 32; l++) *((Matrices*)a[l])->registers = load<u32>((const u8*)&m[0][l >> 2][(l & 3) * 2]);
}

// ---------------------------------------------------------------- mma
// One lane's fragments: Mma of tensor.h, or of mma.f64 the same of doubles.
template <class Word> struct Lane {
  Word* d;
  const Word *a, *b;
  const MatrixForm* form;
};
static_assert(sizeof(Lane<u32>) == sizeof(Mma), "kernels hand over an Mma");
// Rows of A and columns of B, each of `words` words along k.
template <class Word> void collect(void** lanes, u32 m, u32 words, Word* rows, Word* columns) {
  for (u32 l = 0; l < 32; l++) {
    const Lane<Word>& x = *(Lane<Word>*)lanes[l];
    const u32 g = l >> 2, t = l & 3;
    const Word* next = x.a;
    for (u32 i = 0; i < words; i += 4)
      for (u32 row = g; row < m; row += 8) rows[row * words + t + i] = *next++;
    for (u32 i = 0; i < words / 4; i++) columns[g * words + t + i * 4] = x.b[i];
  }
}
constexpr u32 MOST_WORDS = 16, MOST_K = 64;
// A as numbers, [m][k], and B, [k][8].
template <Element E> void rows(void** lanes, u32 m, u32 k, double* to) {
  constexpr u32 BITS = bits_of(E), COUNT = 32 / BITS;
  for (u32 l = 0; l < 32; l++) {
    const u32* next = ((Lane<u32>*)lanes[l])->a;
    for (double* first = to + (l >> 2) * k + (l & 3) * COUNT; first < to + ((l >> 2) + 1) * k; first += 4 * COUNT)
      for (double* p = first; p < to + m * k; p += 8 * k) {
        const u32 word = *next++;
        for (u32 j = 0; j < COUNT; j++) p[j] = number<E>(word >> j * BITS);
      }
  }
}
template <Element E> void columns(void** lanes, u32 k, double* to) {
  constexpr u32 BITS = bits_of(E), COUNT = 32 / BITS;
  for (u32 l = 0; l < 32; l++) {
    const u32* next = ((Lane<u32>*)lanes[l])->b;
    for (double* p = to + (l & 3) * COUNT * 8 + (l >> 2); p < to + k * 8; p += 4 * COUNT * 8) {
      const u32 word = *next++;
      for (u32 j = 0; j < COUNT; j++) p[j * 8] = number<E>(word >> j * BITS);
    }
  }
}
struct Spread {
  void (*rows)(void** lanes, u32 m, u32 k, double* to);
  void (*columns)(void** lanes, u32 k, double* to);
};
Spread spread_of(Element e) {
  switch (e) {
    case ELEMENT_F16: return {rows<ELEMENT_F16>, columns<ELEMENT_F16>};
    case ELEMENT_BF16: return {rows<ELEMENT_BF16>, columns<ELEMENT_BF16>};
    case ELEMENT_TF32: return {rows<ELEMENT_TF32>, columns<ELEMENT_TF32>};
    case ELEMENT_E4M3: return {rows<ELEMENT_E4M3>, columns<ELEMENT_E4M3>};
    case ELEMENT_E5M2: return {rows<ELEMENT_E5M2>, columns<ELEMENT_E5M2>};
    case ELEMENT_S8: return {rows<ELEMENT_S8>, columns<ELEMENT_S8>};
    case ELEMENT_U8: return {rows<ELEMENT_U8>, columns<ELEMENT_U8>};
    case ELEMENT_S4: return {rows<ELEMENT_S4>, columns<ELEMENT_S4>};
    default: return {rows<ELEMENT_U4>, columns<ELEMENT_U4>};
  }
}
// f64 is no approximation: a chain of fused multiply-adds along k.
void mma_f64_op(void** lanes, u32) {
  const MatrixForm& form = *((Lane<double>*)lanes[0])->form;
  double rows[16 * MOST_WORDS], columns[8 * MOST_WORDS];
  collect(lanes, form.m, form.k, rows, columns);
  for (u32 l = 0; l < 32; l++)
    for (u32 i = 0; i < form.m / 4u; i++) {
      double& sum = ((Lane<double>*)lanes[l])->d[i];
      const double *row = rows + ((l >> 2) + (i >> 1) * 8) * form.k, *column = columns + ((l & 3) * 2 + (i & 1)) * form.k;
      for (u32 x = 0; x < form.k; x++) sum = canonical(__builtin_fma(row[x], column[x], sum));
    }
}
template <bool EXCLUSIVE> void mma_b1_op(void** lanes, u32) {
  const MatrixForm& form = *((Lane<u32>*)lanes[0])->form;
  u32 rows[16 * MOST_WORDS], columns[8 * MOST_WORDS];
  const u32 words = form.k / 32;
  collect(lanes, form.m, words, rows, columns);
  for (u32 l = 0; l < 32; l++)
    for (u32 i = 0; i < form.m / 4u; i++) {
      const u32 *row = rows + ((l >> 2) + (i >> 1) * 8) * words, *column = columns + ((l & 3) * 2 + (i & 1)) * words;
      for (u32 x = 0; x < words; x++) ((Lane<u32>*)lanes[l])->d[i] += (u32)__builtin_popcount(EXCLUSIVE ? row[x] ^ column[x] : row[x] & column[x]);
    }
}
}  // namespace

// One register of a lane holds a pair of one row; transposed, a pair of one column.
void emu_load_matrices(void** a, u32) {
  const u32 count = ((Matrices*)a[0])->count;
  const bool transposed = ((Matrices*)a[0])->transposed;
  for (u32 j = 0; j < count; j++) {
    const u8* rows[8];
    for (u32 i = 0; i < 8; i++) rows[i] = ((Matrices*)a[j * 8 + i])->row;
    for (u32 l = 0; l < 32; l++) {
      const u32 r = l >> 2, c = (l & 3) * 2;
      ((Matrices*)a[l])->registers[j] = transposed ? load<u16>(rows[c] + 2 * r) | (u32)load<u16>(rows[c + 1] + 2 * r) << 16 : load<u32>(rows[r] + 2 * c);
    }
  }
}
void emu_multiply(void** lanes, u32) {
  const MatrixForm& form = *((Lane<u32>*)lanes[0])->form;
  double a[16 * MOST_K], b[MOST_K * 8], sums[16 * 8];
  spread_of(form.a).rows(lanes, form.m, form.k, a);
  spread_of(form.b).columns(lanes, form.k, b);
  for (u32 l = 0; l < 32; l++) take_sums(form, l, ((Lane<u32>*)lanes[l])->d, sums);
  multiply(form.m, 8, form.k, a, b, sums);
  for (u32 l = 0; l < 32; l++) give_sums(form, l, sums, ((Lane<u32>*)lanes[l])->d);
}
void emu_stmatrix(const u32* in, u32 count, u32 transposed, u32 address, u32 site) {
  Matrices m{const_cast<u32*>(in), nullptr, count, transposed};
  if (worker->current->lane < 8 * count) m.row = at_shared(worker->current, address, 16, A_WRITE, site);
  warp_operation(~0u, store_op, &m, site, false, true);
}
u32 emu_movmatrix(u32 in, u32 site) {
  Matrices m{&in, nullptr, 1, 1};
  warp_operation(~0u, move_op, &m, site, false, true);
  return in;
}
void emu_mma_f64(double* d, const double* a, const double* b, const MatrixForm* form, u32 site) {
  Lane<double> m{d, a, b, form};
  warp_operation(~0u, mma_f64_op, &m, site, false, true);
}
void emu_mma_b1(u32* d, const u32* a, const u32* b, const MatrixForm* form, u32 exclusive, u32 site) {
  Lane<u32> m{d, a, b, form};
  warp_operation(~0u, exclusive ? mma_b1_op<true> : mma_b1_op<false>, &m, site, false, true);
}
