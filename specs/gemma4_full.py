"""The full layers of Gemma 4 by the defaults of transformers' Gemma4TextConfig: 8 query heads over 4 KV heads of 512, bf16.

A quarter of the pairs of a head turns (`rope_type: proportional`), V has an RMS norm without weights, and layers that share
the K and V of an earlier one take q alone (`append_q`). The window layers, whose heads have 256 elements, are another set.
"""

from kvgen import KernelSet, Model, Paged, RmsNorm, Rope, ops

kernels = KernelSet(
    q_heads=8,
    cache=Paged(dtype="bf16", kv_heads=4, head_dim=512, page_size=16),
    ops=[
        ops.Append(
            rope="model",
            q_norm=RmsNorm(multiply="before"),
            k_norm=RmsNorm(multiply="before"),
            v_norm=RmsNorm(weight=False),
        ),
        ops.Append(name="append_q", inputs="q", rope="model", q_norm=RmsNorm(multiply="before")),
        ops.Gather(),
    ],
    arch=["sm_80", "sm_90a"],
    model=Model(
        architecture="Gemma4ForConditionalGeneration",
        rope=Rope(style="neox", theta=1_000_000.0, dim=128, proportional=True),
        qk_norm="head",
    ),
)
