// A libcuda whose launches do nothing (../support/fake_gpu.c), that also refuses the tensor maps a driver would refuse.
#include "../support/fake_gpu.c"

Result cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, uintptr_t address, const uint64_t *dims, const uint64_t *strides,
                              const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
    static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
    static const int spans[] = {0, 32, 64, 128};
    if (type < 0 || type > 9 || rank < 1 || rank > 5 || address % 16 || swizzle > 3) return INVALID_VALUE;
    const uint64_t inner = (uint64_t)box[0] * bytes[type];
    if (inner % 16 || (swizzle && inner > (uint64_t)spans[swizzle])) return INVALID_VALUE;
    for (uint32_t i = 0; i < rank; ++i) {
        if (dims[i] == 0 || dims[i] > (uint64_t)1 << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
        if (i > 0 && (strides[i - 1] % 16 || strides[i - 1] >> 40)) return INVALID_VALUE;  // in any order: heads may lie within tokens
    }
    for (int i = 0; i < 16; ++i) map[i] = i;
    return SUCCESS;
}
