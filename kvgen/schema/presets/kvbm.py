"""Dynamo's KV block manager (KVBM)."""

from __future__ import annotations

from typing import Literal

from kvgen.layout.dtypes import FloatName
from kvgen.schema.cache import Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.preset_call import preset
from kvgen.schema.presets.quants import KVCacheDType, per_tensor
from kvgen.schema.tables import Dense


@preset
def kvbm_universal(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    total_layers: int,
    page_size: int = 16,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """KVBM's universal blocks (2026), the form in which they are stored: heads outermost, all layers of a head together.

    A block is `[nh, nl, no, nt, hd]`, `no` being K and V; one tensor of all blocks, `[N, H, L, 2, P, D]` with L =
    `total_layers`: strides `(H*L*2*P*D, L*2*P*D, 2*P*D, P*D, D, 1)`. So the heads of a rank are one slice of a block, whatever
    its tensor-parallel size: `Convert(source=..., heads=...)` takes them to and from an engine's cache. The order for
    pipeline parallelism, `[nl, nh, no, nt, hd]`, is `Layout(kv="page layer head kv token dim")`. Table and lengths as `vllm`,
    with KVBM's block ids; fp8 as `vllm`. Source: ai-dynamo/dynamo, lib/kvbm-physical, KvBlockLayout::UniversalTP;
    lib/kvbm-kernels, universal_from_block.
    """
    layout = Layout(kv="page head layer kv token dim")
    return _kvbm(dtype, kv_heads, head_dim, page_size, layout, kv_cache_dtype, total_layers)


@preset
def kvbm_operational(
    *,
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    order: Literal["NHD", "HND"] = "NHD",
    kv_cache_dtype: KVCacheDType = "auto",
) -> Paged:
    """KVBM's operational blocks in its fully contiguous layout (2026): a block is `[nl, no, inner]`, as the engine has a page.

    One tensor of all blocks, NHD `[N, L, 2, P, H, D]`: strides `(L*2*P*H*D, 2*P*H*D, P*H*D, H*D, D, 1)`; HND has H before P.
    Table, lengths and fp8 as `kvbm_universal`. Blocks of its layer-separate layout are the engine's own tensors:
    `vllm_interleaved`, or `vllm` where K's blocks come before V's. Source: ai-dynamo/dynamo, lib/kvbm-physical,
    KvBlockLayout::OperationalNHD and OperationalHND.
    """
    inner = "token head" if order == "NHD" else "head token"
    return _kvbm(dtype, kv_heads, head_dim, page_size, Layout(kv=f"page layer kv {inner} dim"), kv_cache_dtype, None)


def _kvbm(
    dtype: FloatName,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    layout: Layout,
    kv_cache_dtype: KVCacheDType,
    total_layers: int | None,
) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=layout,
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        quant=per_tensor(kv_cache_dtype),
        total_layers=total_layers,
    )
