"""Formats of 2026: MX and TurboQuant codes, latent rows of 4 bits, lists of pages."""

from typing import Any

from kvgen import Block, KernelSet, Latent, Paged, Quant, ops, presets

HEADS: dict[str, Any] = {"dtype": "bf16", "kv_heads": 8, "head_dim": 128}
MXFP4 = Quant(dtype="e2m1", scale_dtype="e8m0", recipe="pow2", block=Block(dim=32))
NVFP4 = Quant(dtype="e2m1", scale_dtype="e4m3", block=Block(dim=16), place="row")
MLA_SCALE = (128 + 64) ** -0.5  # of heads as DeepSeek V3 has them
SETS: dict[str, tuple[Paged | Latent, list[Any]]] = {
    "mxfp4": (
        Paged(**HEADS, page_size=16, quant=MXFP4),
        [ops.Append(hadamard="qkv"), ops.Decode(), ops.AttentionOutput(hadamard=True)],
    ),
    "turboquant_k8v4": (presets.vllm_turboquant(**HEADS), [ops.Append(rows="slots"), ops.Decode()]),
    "latent_nvfp4": (
        Latent(dtype="bf16", page_size=64, quant=NVFP4),
        [ops.MlaDecode(scale=MLA_SCALE, split="balanced")],
    ),
    # Of blocks of 128 tokens each kv head sees those that a call lists for it, as MiniMax-M3 picks them.
    "page_lists": (Paged(**HEADS, page_size=128), [ops.Decode(pages="per_head")]),
}

kernels = [
    KernelSet(name=name, q_heads=32, cache=cache, ops=operations, arch=["sm_90a"])
    for name, (cache, operations) in SETS.items()
]
