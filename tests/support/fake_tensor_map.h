// cuTensorMapEncodeTiled of the fake libcudas, under the rules of cuda.h: what they break is refused, with the rule on stderr and in
// the log. The 128 bytes are the CPU machine's of the same arguments, so that both ways of encoding a plan can be compared; L2
// promotion, which those leave out, is the last of them. It is included behind runtime/fake_driver.c.
//
// The destination: cuda.h's text asks for a multiple of 64, its type for 128 since CUDA 13. A driver may store by the type's alignment,
// so the fake asks for 128, which satisfies both.
//
// Strides are in any order here, as on GPUs, where the text of cuda.h makes each a multiple of the one before: maps that break this
// are encoded, and counted by fake_strides_out_of_order.

static int out_of_order;
int fake_strides_out_of_order(void) { return out_of_order; }

static Result refused(const char *rule, unsigned long long got) {
    record("no tensor map: %s, got %llu\n", rule, got);
    fprintf(stderr, "fake libcuda: cuTensorMapEncodeTiled: %s, got %llu\n", rule, got);
    return INVALID_VALUE;
}

Result cuTensorMapEncodeTiled(unsigned char *map, int type, unsigned rank, uintptr_t address, const uint64_t *dims,
                              const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                              int swizzle, int promotion, int fill) {
    static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2}, floats[] = {0, 0, 0, 0, 0, 0, 1, 1, 1, 1};
    static const unsigned spans[] = {0, 32, 64, 128};
    if (!current()) return INVALID_CONTEXT;
    if ((uintptr_t)map % 128) return refused("the map lies at a multiple of 128", (uintptr_t)map % 128);
    if (type < 0 || type > 9) return refused("the type is one of 10 that need no unpacking", (unsigned)type);
    if (rank < 1 || rank > 5) return refused("the rank is 1 to 5", rank);
    if (!address || address % 16) return refused("the address is a multiple of 16", address);
    if (!dims || !strides || !box || !steps) return refused("no array is null", 0);
    if (interleave) return refused("nothing interleaves here", (unsigned)interleave);
    if (swizzle < 0 || swizzle > 3) return refused("the swizzle is 0 to 3", (unsigned)swizzle);
    if (promotion < 0 || promotion > 3) return refused("the L2 promotion is 0 to 3", (unsigned)promotion);
    if (fill < 0 || fill > 1 || (fill && !floats[type])) return refused("NaN fills floating-point elements", (unsigned)fill);
    for (unsigned i = 0; i < rank; i++) {
        if (!dims[i] || dims[i] > (uint64_t)1 << 31) return refused("a dimension is 1 to 2^31", dims[i]);
        if (!box[i] || box[i] > 256) return refused("a box is 1 to 256", box[i]);
        if (i && (!steps[i] || steps[i] > 8)) return refused("an element stride is 1 to 8", steps[i]);
        if (i && strides[i - 1] % 16) return refused("a stride is a multiple of 16", strides[i - 1]);
        if (i && strides[i - 1] >> 40) return refused("a stride is below 2^40", strides[i - 1]);
    }
    const unsigned inner = box[0] * (unsigned)sizes[type];
    if (inner % 16) return refused("the box's innermost bytes are a multiple of 16", inner);
    if (swizzle && inner > spans[swizzle]) return refused("the box's innermost bytes fit the swizzle", inner);

    int ordered = 1;
    for (unsigned i = 1; i + 1 < rank; i++) ordered &= strides[i - 1] && strides[i] % strides[i - 1] == 0;
    out_of_order += !ordered;
    memset(map, 0, 128);
    uint64_t *words = (uint64_t *)map;
    words[0] = 0x70616D2D6E65746Bull, words[1] = address;
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
    record("encode in %zx%s\n", (size_t)current(), ordered ? "" : ", strides in no order");
    return SUCCESS;
}
