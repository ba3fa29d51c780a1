// The driver of tests/runtime, and its cuTensorMapEncodeTiled: the CPU machine's 128 bytes of what it is given, so that
// both ways of encoding a plan can be compared. L2 promotion, which those leave out, is written at their end.
#include "../runtime/fake_driver.c"

Result cuTensorMapEncodeTiled(unsigned char *map, int type, unsigned rank, void *address, const uint64_t *dims,
                              const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    memset(map, 0, 128);
    uint64_t *words = (uint64_t *)map;
    words[0] = 0x70616D2D6E65746Bull, words[1] = (uint64_t)(uintptr_t)address;
    uint32_t *last = (uint32_t *)(map + 48);
    uint16_t *extent = (uint16_t *)(map + 68);
    unsigned char *step = map + 78;
    for (unsigned i = 0; i < 5; i++) {
        if (i + 1 < rank) words[2 + i] = strides[i];
        last[i] = i < rank ? (uint32_t)(dims[i] - 1) : 0;
        extent[i] = i < rank ? box[i] : 1, step[i] = i < rank ? steps[i] : 1;
    }
    step[5] = type, step[6] = rank, step[7] = swizzle, step[8] = fill;
    map[127] = promotion;
    record("encode in %zx interleave %d\n", (size_t)current(), interleave);
    return rank == 1 ? INVALID_VALUE : SUCCESS;
}
