"""DeepSeek V3's prompts: attention over decompressed keys and values, 192 / 128 dims, and over a prefix in chunks."""

import math

from kvgen import KernelSet, Mask, Ragged, ops

# YaRN's factor squared: 40 times the context, mscale_all_dim 1.
SCALE = (128 + 64) ** -0.5 * (0.1 * math.log(40.0) + 1.0) ** 2

kernels = KernelSet(
    q_heads=128,
    cache=Ragged(dtype="bf16", kv_heads=128, head_dim=192, v_head_dim=128),
    ops=[
        # The new rows among themselves; before them, a chunk of the prefix at a time, merged.
        ops.Extend(scale=SCALE),
        ops.Extend(name="extend_prefix", scale=SCALE, mask=Mask(causal=False), cross=True),
        ops.MergeStates(),
    ],
    arch=["sm_80", "sm_90a"],
)
