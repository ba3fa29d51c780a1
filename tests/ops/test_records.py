"""Records of the formats of 2026 against the oracle: append byte for byte, gather exactly, decode within its bound."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Latent, Layout, Paged, Quant, ops
from tests.ops.test_append import scene_before
from tests.ops.test_decode import decode_scene
from tests.support.batches import batches
from tests.support.harness import check_append, check_decode, check_gather, index_name, offsets_of


def record(name: str, cache: Any, *operations: Any) -> KernelSet:
    """A set of one architecture; without operations it writes a cache's rows and reads them back."""
    return KernelSet(
        name=f"record_{name}",
        q_heads=2 * cache.kv_heads,
        cache=cache,
        ops=operations or (ops.Append(), ops.Gather()),
        arch=("sm_90a",),
    )


def having(op: str) -> list[str]:
    """The sets that have this operation."""
    return [name for name, kernels in SETS.items() if any(o.name == op for o in kernels.ops)]


def powers(dtype: Any, dim: int, **more: Any) -> Quant:
    """Codes with e8m0 scales of so many dims."""
    return Quant(dtype=dtype, scale_dtype="e8m0", block=Block(dim=dim), recipe="pow2", **more)


ROWS: Final = Layout(kv="page token head dim", layers="pointers")
ALIGNED: Final = Layout(kv="page token head dim", layers="pointers", page_align=576)
ALIGNED_256: Final = Layout(kv="page token head dim", layers="pointers", page_align=256)


def latent(page: int, quant: Quant, layout: Layout = ROWS, **more: Any) -> Latent:
    """DeepSeek V4's rows: 448 dims and a RoPE part of 64, all of them V."""
    return Latent(
        dtype="bf16", latent_dim=448, rope_dim=64, page_size=page, quant=quant, layout=layout, values="row", **more
    )


NVFP4: Final[dict[str, Any]] = {"dtype": "e2m1", "scale_dtype": "e4m3", "block": Block(dim=16)}
LATENT: Final = {
    # DeepSeek V4: rows of 448 codes | 64 bf16, then 7 e8m0 and a zero a token; pages of whole 576 bytes.
    "v4": latent(3, powers("e4m3", 64, amax_min=1e-4, place="page", scale_pad=8), ALIGNED),
    # V4.1: 512 codes, RoPE part included, and 16 e8m0: behind all rows, or behind each.
    "v41_footer": latent(2, powers("e4m3", 32, amax_min=1e-4, place="page"), quant_rope=True),
    "v41_inline": latent(3, powers("e4m3", 32, scale_min=1e-4, place="row"), quant_rope=True),
    # V4.1's entries in 288 bytes: 256 of codes, RoPE part included, and 32 e4m3 of at least 2^-9.
    "v41_fp4_footer": latent(3, Quant(**NVFP4, scale_min=2.0**-9, place="page"), ALIGNED_256, quant_rope=True),
    "v41_fp4_inline": latent(2, Quant(**NVFP4, scale_min=2.0**-9, place="row"), quant_rope=True),
    # FlashInfer's V4 in nvfp4: 224 bytes of codes | 64 bf16, then 28 e4m3 and 4 zeros a token.
    "v4_nvfp4": latent(2, Quant(**NVFP4, place="page", scale_pad=32)),
    # SGLang's MXFP4: 224 bytes of codes | 14 e8m0 and 2 zeros | 64 bf16.
    "v4_mxfp4": latent(2, powers("e2m1", 32, place="row", scale_pad=16)),
}

SETS: Final = {
    **{name: record(name, cache) for name, cache in LATENT.items()},
    "mxfp8": record(
        "mxfp8",
        Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=4, quant=powers("e4m3", 32, amax_min=1e-4)),
        ops.Append(),
        ops.Decode(),
    ),
    # Scales of whole rows multiply sums of products: on tensor cores.
    "whole": record(
        "whole", Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16, quant=powers("e5m2", 64)), ops.Decode()
    ),
    # nvfp4 without a scale above those of the blocks; V as FlashInfer has it, without a floor.
    "nvfp4": record(
        "nvfp4",
        Paged(
            dtype="bf16",
            kv_heads=2,
            head_dim=64,
            page_size=16,
            k_quant=Quant(dtype="e2m1", scale_dtype="e4m3", block=Block(dim=16), scale_min=2.0**-9),
            v_quant=Quant(dtype="e2m1", scale_dtype="e4m3", block=Block(dim=16)),
        ),
        ops.Append(),
        ops.Decode(),
    ),
    "mxfp4": record(
        "mxfp4",
        Paged(
            dtype="f16",
            kv_heads=2,
            head_dim=64,
            page_size=3,
            k_quant=powers("e2m1", 32, place="page"),
            v_quant=powers("e2m1", 32, amax_min=6 * 2.0**-126, place="page"),
        ),
    ),
}


@pytest.mark.parametrize("name", having("append"))
@settings(max_examples=3)
@given(data=st.data())
def test_append_and_gather(name: str, data: Any) -> None:
    """A step's rows, and then everything that the cache holds."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    scene = scene_before(kernels, batch)
    index = index_name(kernels, "append")
    offsets = offsets_of(batch.new, index, batch.leading)
    check_append(scene, batch.leading + sum(batch.new) + batch.padding, row_offsets=offsets)
    if name not in having("gather"):
        return
    everything = offsets_of(batch.totals, index, batch.leading)
    check_gather(scene, batch.leading + sum(batch.totals) + batch.padding, row_offsets=everything, starts=None)


@pytest.mark.parametrize("name", having("decode"))
@settings(max_examples=2)
@given(data=st.data())
def test_decode(name: str, data: Any) -> None:
    """Groups of 32 dims on CUDA cores, nvfp4 and scales of whole rows on tensor cores."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels, least=1))
    scene, q = decode_scene(kernels, batch, len(batch.totals) + batch.padding)
    check_decode(scene, q, lse=data.draw(st.booleans()))
