"""Qwen3-Next-80B-A3B: states of its 36 gated delta net layers in bf16, as vLLM keeps them in pages of 544 tokens of KV.

Bytes by transformers' Qwen3NextConfig: 16 key heads of 128, 32 value heads of 128, a convolution of 4 tokens. The
convolution keeps its last 3 inputs of 2 * 2048 + 4096 channels, 49,152 bytes; the delta rule 32 matrices of 128 x 128,
1,048,576 bytes. An attention layer has 2 KV heads of 256, 2,048 bytes a token: 536 tokens are as large as a state, 544 the
next multiple of 16. So states lie 1,114,112 bytes apart in such a pool, which is its page stride.
"""

from kvgen import KernelSet, State, ops

KEYS, VALUES, KERNEL, HEADS, KEY_DIM, VALUE_DIM = 16 * 128, 32 * 128, 4, 32, 128, 128
CONVOLUTION = (2 * KEYS + VALUES) * (KERNEL - 1)
RECURRENT = HEADS * KEY_DIM * VALUE_DIM

kernels = KernelSet(
    cache=State(bytes=2 * (CONVOLUTION + RECURRENT)),
    ops=[
        ops.CopyPages(),
        ops.SwapPages(direction="out"),
        ops.SwapPages(direction="in"),
        ops.ZeroPages(),
        ops.Compact(),
        ops.Reorder(),
        ops.GatherStates(),
        ops.ScatterStates(),
    ],
)
