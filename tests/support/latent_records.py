"""Latent caches as tests of mla_decode list and read them: rows of every form, in pages of a few tokens."""

from __future__ import annotations

from typing import Any, Final

from kvgen import Block, Latent, Layout, Quant, presets
from kvgen.schema.codebooks import lloyd_max

SMALL: dict[str, Any] = {"latent_dim": 64, "rope_dim": 16}
BF16 = presets.max_mla(**SMALL, page_size=4)
SLOTS = presets.sglang_mla(**SMALL)  # a page a token
INTS = Latent(dtype="bf16", **SMALL, page_size=2, quant=Quant(dtype="i8", scale_dtype="f32"), quant_rope=True)
POOL = presets.max_mla_fp8(**SMALL, page_size=8)


def footers(page_size: int, **fields: Any) -> Latent:
    """DeepSeek V4's 584 bytes: 448 e4m3 and 64 bf16, then 7 e8m0 and a zero a token behind the rows of a page."""
    return Latent(
        **({"dtype": "bf16", "latent_dim": 448, "page_size": page_size, "values": "row"} | fields),
        layout=Layout(kv="page token head dim", layers="pointers", page_align=576),
        quant=Quant(
            dtype="e4m3",
            scale_dtype="e8m0",
            block=Block(dim=64),
            recipe="pow2",
            place="page",
            scale_pad=8,
            amax_min=1e-4,
        ),
    )


# The same with f16, and fewer codes.
HALVES: dict[str, Any] = {"dtype": "f16", "latent_dim": 384, "rope_dim": 128}


def inline(page_size: int) -> Latent:
    """528 bytes: 512 e4m3, then an e8m0 each 32 of them."""
    quant = Quant(dtype="e4m3", scale_dtype="e8m0", block=Block(dim=32), recipe="pow2", place="row")
    layout = Layout(kv="page token head dim", layers="pointers")
    return Latent(
        dtype="bf16", latent_dim=448, page_size=page_size, values="row", quant_rope=True, quant=quant, layout=layout
    )


def plain(page_size: int) -> Latent:
    """1,024 bytes: 512 bf16, which are copied to shared memory beside codes that are widened."""
    return Latent(
        dtype="bf16",
        latent_dim=448,
        page_size=page_size,
        values="row",
        layout=Layout(kv="page token head dim", layers="pointers"),
    )


_FP4: Final[dict[str, Any]] = {"dtype": "e2m1", "scale_dtype": "e4m3"}
NVFP4: Final = Quant(**_FP4, block=Block(dim=16), place="row")
# Of every other code.
CODES: Final = {
    "nvfp4": NVFP4,
    "nvfp4_global": Quant(**_FP4, recipe="global"),
    "mxfp4": Quant(dtype="e2m1", scale_dtype="e8m0", recipe="pow2", block=Block(dim=32), place="row"),
    "book": Quant(dtype="i4", scale_dtype="f16", codebook=lloyd_max(4, 64), recipe="unit", place="row"),
    "least": Quant(dtype="i4", scale_dtype="f16", zero=True, recipe="min", block=Block(dim=32), place="row"),
    "i8_row": Quant(dtype="i8", scale_dtype="f32", place="row"),
    "of_3_bits": Quant(dtype="i3", scale_dtype="f16", zero=True, recipe="min", place="row"),
    "signs": Quant(dtype="i4", scale_dtype="f16", zero=True, recipe="signs", codebook=lloyd_max(3, 64), place="row"),
    "of_2_bits": Quant(dtype="i2", scale_dtype="f16", codebook=lloyd_max(2, 64), recipe="unit", block=Block(dim=16)),
}


def whole_rows(quant: Quant, page_size: int = 4, **fields: Any) -> Latent:
    """512 dims that are key and value and have codes throughout."""
    return Latent(
        **({"dtype": "bf16", "latent_dim": 448, "page_size": page_size, "values": "row", "quant_rope": True} | fields),
        quant=quant,
    )
