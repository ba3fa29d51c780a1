"""Integer codes with zero points: lmdeploy's online int8 and int4, and KIVI."""

from __future__ import annotations

import math
import struct
from typing import Final, Literal

from kvgen.schema.cache import Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.quant import Block, Quant
from kvgen.schema.tables import Dense

# Magnitudes of the centroids of N(0, 1) of lmdeploy, after 10 rounds of its solver: within 0.001 of `lloyd_max`.
_OF_3_BITS: Final = (0.2450942, 0.7560052, 1.3439093, 2.1519456)
_OF_2_BITS: Final = (0.4527808, 1.5104176)


@preset
def lmdeploy_int8(*, dtype: Literal["f16", "bf16"], kv_heads: int, head_dim: int, page_size: int = 64) -> Paged:
    """lmdeploy's PyTorch engine with quant_policy 8 (2026-08): u8 codes, a scale and a zero point per token and head.

    Four tensors per layer: K and V u8 `[N, P, H, D]`, and scales `[N, P, H, 2]` (scale, zero point) in the model's dtype;
    in a block each begins at a multiple of 256 bytes: strides `(block bytes, H*D, D, 1)` and, in scales,
    `(block bytes / 2, 2*H, 2, 1)`. Table: `block_offsets` `[B, max_blocks]`, lengths: `kv_seqlens`, this step included; both
    as i32. kvgen reads what lmdeploy wrote, as (code - zero) * scale, and lmdeploy what kvgen wrote, but the
    writers differ: lmdeploy rounds x / scale + zero half up, with the unrounded scale, and a row of equal values gives it
    a scale of 0 and a zero point of NaN or infinity. Its TurboMind engine stores (scale, minimum) instead: no preset.
    Source: lmdeploy/pytorch/engine/cache_engine.py, get_k_cache_desc, get_quant_cache_descs and allocate_caches;
    lmdeploy/pytorch/kernels/cuda/fill_kv_cache.py, _quant_int8; flatten_kv_cache.py.
    """
    return _lmdeploy(dtype, kv_heads, head_dim, page_size, Quant(dtype="i8", scale_dtype=dtype, zero=True))


@preset
def lmdeploy_int4(*, dtype: Literal["f16", "bf16"], kv_heads: int, head_dim: int, page_size: int = 64) -> Paged:
    """lmdeploy's PyTorch engine with quant_policy 4 (2026-08): u4 codes, a scale and a zero point per token and head.

    K and V u8 `[N, P, H, D/2]`, strides `(block bytes, H*D/2, D/2, 1)`; scales `[N, P, H, 2]`, table and lengths as
    `lmdeploy_int8`, whose remarks on writers hold here, too. Byte i has element i of a row in its low and i + D/2 in its high
    nibble, so decode and extend run on CUDA cores. Source: as `lmdeploy_int8`, _quant_int4 and _dequant_int4.
    """
    codes = Quant(dtype="i4", scale_dtype=dtype, zero=True, packing="strided")
    return _lmdeploy(dtype, kv_heads, head_dim, page_size, codes)


@preset
def lmdeploy_turboquant(*, dtype: Literal["f16", "bf16"], kv_heads: int, head_dim: int, page_size: int = 64) -> Paged:
    """lmdeploy's PyTorch engine with quant_policy 42 (its pull request 4510, 2026): 4 bits of K, 2 of V, under norms.

    K u8 `[N, P, H, D/2]` and V u8 `[N, P, H, D/4]`, scales `[N, P, H, 2]` (norm, root mean square of what the centroids leave
    of K / norm) and `[N, P, H, 1]` (norm), all in blocks with strides, table and lengths as `lmdeploy_int8`. Byte i of K
    has elements i and i + D/2, each three bits of a centroid and above them the sign of what it leaves; byte i of V has i,
    i + D/4, i + D/2 and i + 3D/4. D is a power of two, and K, V and q pass through the Hadamard transform: store them with
    `Append(hadamard="qkv")`, and transform the output back, `AttentionOutput(hadamard=True)`. Readers make the same of the bytes;
    lmdeploy's writer adds 1e-8 to the squares of a row, also of what is left, takes the lower of two centroids at a tie, and
    divides V by its norm before that is rounded. Source: lmdeploy/pytorch/kernels/cuda/turbo_quant.py; fill_kv_cache.py,
    _fill_page_quant_turbo_qjl4 and _fill_page_quant_turbo_int2; flatten_kv_cache.py; pagedattention.py.
    """
    keys = Quant(
        dtype="i4",
        scale_dtype=dtype,
        zero=True,
        recipe="signs",
        codebook=_centroids(_OF_3_BITS, head_dim),
        packing="strided",
    )
    values = Quant(
        dtype="i2", scale_dtype=dtype, recipe="norm", codebook=_centroids(_OF_2_BITS, head_dim), packing="strided"
    )
    return _lmdeploy(dtype, kv_heads, head_dim, page_size, keys, values)


@preset
def kivi(
    *,
    dtype: Literal["f16", "bf16"],
    kv_heads: int,
    head_dim: int,
    group_size: int = 32,
    page_size: int = 128,
    bits: Literal[4, 2] = 4,
) -> Paged:
    """KIVI's quantization with 4 or 2 bits (arXiv 2402.02750) in pages: K per channel in groups of tokens, V per token.

    One tensor for all layers of each, row-major with strides as their shapes say: K and V u8 `[N, L, P, H, D*bits/8]`,
    `k_scales` `[N', L, P/g, H, 2*D]` and `v_scales` `[N', L, P, H, 2*D/g]` (scale, zero point) in `dtype`, g =
    `group_size`; `k_tail` `[L, B, g, H, D]`. The newest K tokens, fewer than g, wait in `k_tail` for `ops.Seal()`. Table
    and lengths are MAX's. NOT byte compatible with KIVI's tensors, which have no pages, pack 8 or 16 codes of
    neighbouring tokens (K) or dims (V) into an int32, store minima for zero points, keep the newest V in full precision
    as well, and let the residual be several groups long. Source: quant/new_pack.py, quant_and_pack_kcache and
    quant_and_pack_vcache; models/llama_kivi.py (2025-11).
    """
    axes = "page layer token head dim"
    codes: Literal["i4", "i2"] = "i4" if bits == 4 else "i2"
    keys = Block(token=group_size, head=1, dim=1)
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=Layout(k=axes, v=axes),
        k_quant=Quant(dtype=codes, scale_dtype=dtype, block=keys, zero=True, residual=group_size),
        v_quant=Quant(dtype=codes, scale_dtype=dtype, block=Block(dim=group_size), zero=True),
    )


def _centroids(magnitudes: tuple[float, ...], head_dim: int) -> tuple[float, ...]:
    """lmdeploy's centroids, each an f32 times 1 / sqrt(head_dim), rounded to f32 as PyTorch does."""
    deviation = _single(1 / math.sqrt(head_dim))
    found = [_single(_single(m) * deviation) for m in magnitudes]
    return (*(-m for m in reversed(found)), *found)


def _single(x: float) -> float:
    """The f32 nearest to x."""
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found


def _lmdeploy(
    dtype: Literal["f16", "bf16"],
    kv_heads: int,
    head_dim: int,
    page_size: int,
    keys: Quant,
    values: Quant | None = None,
) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        quant=keys if values is None else None,
        k_quant=None if values is None else keys,
        v_quant=values,
    )
