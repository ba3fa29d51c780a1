"""Modular MAX."""

from __future__ import annotations

from kvgen.layout.dtypes import FloatName
from kvgen.schema.cache import Continuous, Latent, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.quant import Block, Quant
from kvgen.schema.tables import Dense, IndexName

# K only: MAX keeps the K/V axis, with extent 1.
MLA = Layout(kv="page kv layer token head dim")

# MAX's tables and lengths are u32; kvgen's own default is i32.
INDEX: IndexName = "u32"
TABLE = Dense(dtype=INDEX)


@preset
def max_paged(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 128) -> Paged:
    """Modular MAX's PagedKVCacheCollection, as in its 2025 and 2026 sources: kvgen's default layout.

    One tensor for all layers, `[N, 2, L, P, H, D]`, row-major: strides `(2*L*P*H*D, L*P*H*D, P*H*D, H*D, D, 1)`.
    Table: `lookup_table` u32 `[B, max_pages]`, whose tail may hold the sentinel N; give the pool its N + 1 pages.
    Lengths: u32, tokens before this step. Source: max/kernels/src/kv_cache/types.mojo.
    """
    return Paged(
        dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size, table=TABLE, lengths_dtype=INDEX
    )


@preset
def max_continuous(*, dtype: FloatName, kv_heads: int, head_dim: int, max_tokens: int | None = None) -> Continuous:
    """Modular MAX's ContinuousBatchingKVCacheCollection, as in its 2025 sources: a block per request.

    One tensor for all layers, `[N, 2, L, S, H, D]` with S = `max_tokens` (None: the pool says), row-major: strides
    `(2*L*S*H*D, L*S*H*D, S*H*D, H*D, D, 1)`. Table: `lookup_table` u32 `[B]`, request to block. Lengths: u32, tokens
    before this step. Source: max/kernels/src/kv_cache/types.mojo.
    """
    return Continuous(
        dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, max_tokens=max_tokens, table_dtype=INDEX, lengths_dtype=INDEX
    )


@preset
def max_paged_fp8(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 128) -> Paged:
    """Modular MAX's paged cache as e4m3 without scales (2026): a saturating cast; otherwise as `max_paged`.

    `[N, 2, L, P, H, D]` e4m3: strides `(2*L*P*H*D, L*P*H*D, P*H*D, H*D, D, 1)`. Source: types.mojo, PagedKVCache with
    dtype float8_e4m3fn and no scale_dtype.
    """
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        quant=Quant(dtype="e4m3"),
        table=TABLE,
        lengths_dtype=INDEX,
    )


@preset
def max_paged_scaled(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    granularity: int | None = None,
    page_size: int = 128,
    own_table: bool = False,
) -> Paged:
    """Modular MAX's paged cache as e4m3 with scales (2026): an f32 scale per token, head and `granularity` dims.

    Values `[N, 2, L, P, H, D]` e4m3, strides `(2*L*P*H*D, L*P*H*D, P*H*D, H*D, D, 1)`; scales `[N', 2, L, P, H, Dg]` f32
    with Dg = ceil(D / granularity), strides `(2*L*P*H*Dg, L*P*H*Dg, P*H*Dg, H*Dg, Dg, 1)`. `granularity` None is the
    whole head. With `own_table` scale pages have ids of their own (`scales_lookup_table`). Source: types.mojo,
    PagedKVCache's `scales`, `quantization_granularity`, `scales_lookup_table` and `scales_page_stride`.
    """
    quant = Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=granularity), own_table=own_table)
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        quant=quant,
        table=TABLE,
        lengths_dtype=INDEX,
    )


@preset
def max_nvfp4(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 128) -> Paged:
    """Modular MAX's nvfp4 cache (2026 nightlies, read through its Python tests): codes u8, scales e4m3 per 16 dims.

    Values u8 `[N, 2, L, P, H, D/2]`, element 2i in the low half of a byte: strides `(2*L*P*H*D/2, L*P*H*D/2, P*H*D/2,
    H*D/2, D/2, 1)`; scales e4m3 `[N', 2, L, P, H, D/16]`, row-major. Dequantized values are e4m3 (recipe "max"). Table
    and lengths as `max_paged`.
    """
    quant = Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max")
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        quant=quant,
        table=TABLE,
        lengths_dtype=INDEX,
    )


@preset
def max_mla(*, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64, page_size: int = 128) -> Latent:
    """Modular MAX's latent cache (`is_mla`, 2025 and 2026): rows of 512 + 64, K only.

    `[N, 1, L, P, 1, 576]`: strides `(L*P*576, L*P*576, P*576, 576, 576, 1)`. Table and lengths as `max_paged`. Source:
    types.mojo, KVCacheStaticParams.is_mla; mla.decode.ragged.paged reads V as the row's first 512 elements.
    """
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=page_size,
        layout=MLA,
        table=TABLE,
        lengths_dtype=INDEX,
    )


@preset
def max_mla_fp8(
    *, dtype: FloatName = "bf16", latent_dim: int = 512, rope_dim: int = 64, page_size: int = 128
) -> Latent:
    """Modular MAX's "rope-aware" latent rows (2026): 512 e4m3, then 64 bf16, and an f32 scale a token.

    Rows u8 `[N, 1, L, P, 1, 640]`: strides in bytes `(L*P*640, L*P*640, P*640, 640, 640, 1)`; scales f32
    `[N', 1, L, P, 1, 1]`, for the latent part. Table and lengths as `max_paged`. Source: types.mojo,
    create_rope_tma_tile; mla.decode.scaled with per_token_scale_rope_aware, whose granularity is the row's 640.
    """
    quant = Quant(dtype="e4m3", scale_dtype="f32")
    return Latent(
        dtype=dtype,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        page_size=page_size,
        layout=MLA,
        quant=quant,
        table=TABLE,
        lengths_dtype=INDEX,
    )


@preset
def max_indexer(*, dtype: FloatName = "bf16", head_dim: int = 128, page_size: int = 128) -> Paged:
    """Modular MAX's K cache of DeepSeek-V3.2's indexer (2026): e4m3 with a scale per token and 128 dims, K only.

    Values `[N, 1, L, P, 1, 128]` e4m3: strides `(L*P*128, L*P*128, P*128, 128, 128, 1)`; scales f32
    `[N', 1, L, P, 1, 1]`. Table and lengths as `max_paged`. Source: mla.indexer.ragged.float8.paged; types.mojo,
    create_index_scale_tma_tile.
    """
    quant = Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=min(128, head_dim)))
    return Paged(
        dtype=dtype,
        kv_heads=1,
        head_dim=head_dim,
        page_size=page_size,
        layout=MLA,
        stores="k",
        quant=quant,
        table=TABLE,
        lengths_dtype=INDEX,
    )
