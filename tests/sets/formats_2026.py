"""More formats of 2026: MX, TurboQuant and rotated codes, scales in rows, latent rows of 8 bits, masks of blocks, ranks."""

from typing import Any

from kvgen import Block, Interleave, KernelSet, Latent, Layout, Mapped, Mask, Paged, Quant, ops, presets
from kvgen.schema.codebooks import lloyd_max

HEADS: dict[str, Any] = {"dtype": "bf16", "kv_heads": 8, "head_dim": 128}
MX: dict[str, Any] = {"scale_dtype": "e8m0", "recipe": "pow2", "block": Block(dim=32)}
ROTATED = Paged(
    **HEADS,
    page_size=16,
    layout=Layout(kv="page layer token head kv dim"),
    k_quant=Quant(dtype="i4", codebook=lloyd_max(4, 128), recipe="unit", scale_dtype="f16", place="row"),
    v_quant=Quant(dtype="i4", scale_dtype="f16", zero=True, recipe="min", place="row"),
)
# Keys are codes of directions that the Hadamard transform has turned, q alike.
CODED = [ops.Append(rows="slots", hadamard="qk"), ops.Decode()]
NVFP4: dict[str, Any] = {"dtype": "e2m1", "scale_dtype": "e4m3", "block": Block(dim=16), "place": "row"}
MLA_SCALE = (128 + 64) ** -0.5  # of heads as DeepSeek V3 has them
INT8 = Quant(dtype="i8", scale_dtype="f32", block=Block(dim=128), place="row")
SETS: dict[str, tuple[Paged | Latent, list[Any]]] = {
    "mxfp8": (Paged(**HEADS, page_size=16, quant=Quant(dtype="e4m3", **MX)), [ops.Append(), ops.Decode()]),
    "rotated_4bit": (ROTATED, [ops.Append(hadamard="qk"), ops.Decode()]),
    "turboquant_4bit_nc": (presets.vllm_turboquant(**HEADS, kv_cache_dtype="turboquant_4bit_nc"), CODED),
    "turboquant_k3v4_nc": (presets.vllm_turboquant(**HEADS, kv_cache_dtype="turboquant_k3v4_nc"), CODED),
    # Prompts are gathered for attention in bf16.
    "turboquant_3bit_nc": (
        presets.vllm_turboquant(**HEADS, kv_cache_dtype="turboquant_3bit_nc"),
        [*CODED, ops.Gather()],
    ),
    "lmdeploy_turboquant": (
        presets.lmdeploy_turboquant(**HEADS),
        [ops.Append(hadamard="qkv"), ops.Decode(), ops.AttentionOutput(hadamard=True)],
    ),
    "int8_per_token_head": (
        presets.vllm_packed(**HEADS, kv_cache_dtype="int8_per_token_head"),
        [ops.Append(rows="slots"), ops.Decode()],
    ),
    # 64 bytes of codes, then 8 scales, of K and of V.
    "nvfp4_rows": (
        Paged(**HEADS, page_size=16, quant=Quant(**NVFP4, recipe="global"), layout="page layer kv head token dim"),
        [ops.Append(), ops.Decode()],
    ),
    "latent_int8": (
        Latent(dtype="bf16", page_size=64, quant=INT8),
        [ops.Append(), ops.MlaDecode(scale=MLA_SCALE, split="balanced")],
    ),
    # A row sees its block of 32 tokens whole, and all before it.
    "diffusion_blocks": (Paged(**HEADS, page_size=16), [ops.Extend(mask=Mask(block=32))]),
    # A rank of four has every fourth token; decode's LSE is merged among them.
    "context_parallel": (
        Paged(**HEADS, page_size=1, table=Mapped(), lengths="after"),
        [ops.SlotMapping(interleave=Interleave(ranks=4)), ops.Append(rows="slots"), ops.Decode(), ops.MergeStates()],
    ),
}

kernels = [
    KernelSet(name=name, q_heads=32, cache=cache, ops=operations, arch=["sm_90a"])
    for name, (cache, operations) in SETS.items()
]
