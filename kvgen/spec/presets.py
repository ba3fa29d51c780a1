"""Other engines' caches as specs: one function an engine's layout, named after it.

Each returns a `Paged` or `Continuous` whose axes, page table and lengths are that engine's, so that kvgen's kernels
run on the engine's own memory. In the shapes below, N is the number of pages (or blocks), L of layers, P of tokens a
page, H of kv heads and D the head dim; strides are in elements of a packed pool. Page, K/V and layer strides are read
from the tensors at run time, so padded pages work too.
"""

from __future__ import annotations

from kvgen.dtypes import FloatName
from kvgen.dtypes import dtype as element
from kvgen.spec.cache import Continuous, Layout, Paged
from kvgen.spec.table import CSR, Dense, Indirect, PerKV


def max_paged(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 128) -> Paged:
    """Modular MAX's PagedKVCacheCollection, as in its 2025 and 2026 sources: kvgen's default.

    One tensor for all layers, `[N, 2, L, P, H, D]`, row-major: strides `(2*L*P*H*D, L*P*H*D, P*H*D, H*D, D, 1)`.
    Table: `lookup_table` u32 `[B, max_pages]`, whose tail may hold the sentinel N; give the pool its N + 1 pages.
    Lengths: u32, tokens before this step. Source: max/kernels/src/kv_cache/types.mojo.
    """
    return Paged(dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, page_size=page_size)


def max_continuous(*, dtype: FloatName, kv_heads: int, head_dim: int, max_tokens: int | None = None) -> Continuous:
    """Modular MAX's ContinuousBatchingKVCacheCollection, as in its 2025 sources: a block per request.

    One tensor for all layers, `[N, 2, L, S, H, D]` with S = `max_tokens` (None: the pool says), row-major: strides
    `(2*L*S*H*D, L*S*H*D, S*H*D, H*D, D, 1)`. Table: `lookup_table` u32 `[B]`, request to block. Lengths: u32, tokens
    before this step. Source: max/kernels/src/kv_cache/types.mojo.
    """
    return Continuous(dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, max_tokens=max_tokens)


def vllm(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 16) -> Paged:
    """vLLM V1, FlashAttention backend, NHD: releases before its pull request 44455 (2026) packed K beside V.

    A tensor per layer, `[2, N, P, H, D]`: strides `(N*P*H*D, P*H*D, H*D, D, 1)`. Table: `block_table` i32
    `[B, max_blocks]`; `slot_mapping` i64 `[T]` for `Append(rows="slots")`. Lengths: `seq_lens` i32, this step included.
    Source: vllm/v1/attention/backends/flash_attn.py, FlashAttentionBackend.get_kv_cache_shape and
    get_kv_cache_stride_order; vllm/v1/worker/block_table.py, BlockTable.
    """
    return _vllm(dtype, kv_heads, head_dim, page_size, Layout(kv="kv page token head dim", layers="pointers"))


def vllm_hnd(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 16) -> Paged:
    """vLLM V1, FlashAttention backend with its cache layout set to HND; otherwise as `vllm`.

    A tensor per layer: vLLM's view is `[2, N, P, H, D]`, memory is `[2, N, H, P, D]`: pass
    `cache.permute(0, 1, 3, 2, 4)`, strides `(N*H*P*D, H*P*D, P*D, D, 1)`. Source: the same file, stride order
    (0, 1, 3, 2, 4).
    """
    return _vllm(dtype, kv_heads, head_dim, page_size, Layout(kv="kv page head token dim", layers="pointers"))


def vllm_interleaved(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 16) -> Paged:
    """vLLM V1, FlashInfer backend, NHD, before pull request 44455: K and V of a block side by side.

    A tensor per layer, `[N, 2, P, H, D]`: strides `(2*P*H*D, P*H*D, H*D, D, 1)`. Table and lengths as `vllm`. Source:
    vllm/v1/attention/backends/flashinfer.py, FlashInferBackend.get_kv_cache_shape.
    """
    return _vllm(dtype, kv_heads, head_dim, page_size, Layout(kv="page kv token head dim", layers="pointers"))


def vllm_packed(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 16) -> Paged:
    """vLLM V1, NHD, since its pull request 44455 (2026): a head's V follows its K in one row of 2*D.

    A tensor per layer: vLLM's view is `[N, H, P, 2*D]`, memory is `[N, P, H, 2, D]`: pass
    `cache.permute(0, 2, 1, 3).unflatten(-1, (2, D))`, strides `(P*H*2*D, H*2*D, 2*D, D, 1)`. Table and lengths as
    `vllm`. Source: that pull request; get_kv_cache_shape `(N, H, P, 2*D)` with stride order (0, 2, 1, 3) for NHD.
    """
    return _vllm(dtype, kv_heads, head_dim, page_size, Layout(kv="page token head kv dim", layers="pointers"))


def vllm_xpacked(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 16) -> Paged:
    """vLLM's own paged_attention_v1 and v2 kernels: K in groups of x = 16 bytes, V transposed.

    Two tensors per layer: K `[N, H, D/x, P, x]`, strides `(H*D*P, D*P, P*x, x, 1)`; V `[N, H, D, P]`, strides
    `(H*D*P, D*P, P, 1)`. Table: `block_tables` i32 `[B, max_blocks]`. Lengths: `seq_lens` i32, this step included.
    Source: vllm/attention/ops/paged_attn.py, PagedAttention.split_kv_cache; csrc/attention/attention_kernels.
    """
    x = 16 // element(dtype).bytes
    layout = Layout(k=f"page head dim/{x} token dim%{x}", v="page head dim token", layers="pointers")
    return _vllm(dtype, kv_heads, head_dim, page_size, layout)


def flashinfer_nhd(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 16) -> Paged:
    """FlashInfer, `kv_layout="NHD"`, as of 0.7: one tensor per layer.

    `[N, 2, P, H, D]`: strides `(2*P*H*D, P*H*D, H*D, D, 1)`. Table: `kv_indices` i32 and `kv_indptr` i32 `[B + 1]`.
    Lengths: `kv_last_page_len` i32, this step included. Source: flashinfer/page.py, append_paged_kv_cache;
    include/flashinfer/page.cuh, paged_kv_t::get_length. Its form with K and V in two tensors is `flash_attention`'s
    layout.
    """
    return _flashinfer(dtype, kv_heads, head_dim, page_size, "page kv token head dim")


def flashinfer_hnd(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 16) -> Paged:
    """FlashInfer, `kv_layout="HND"`, as of 0.7: one tensor per layer; otherwise as `flashinfer_nhd`.

    `[N, 2, H, P, D]`: strides `(2*H*P*D, H*P*D, P*D, D, 1)`.
    """
    return _flashinfer(dtype, kv_heads, head_dim, page_size, "page kv head token dim")


def tensorrt_llm(*, dtype: FloatName, kv_heads: int, head_dim: int, page_size: int = 32) -> Paged:
    """TensorRT-LLM's KVBlockArray (main branch, 2025 and 2026): HND blocks, with offsets of their own for K and V.

    A view per layer of the primary pool, `[blocks, H, P, D]`: strides `(H*P*D, P*D, D, 1)`. The pool is `[N, L, 2,
    H*P*D]`: layer l's view begins at its element 2*l*H*P*D, and a block has the offsets `block * L * 2` (K) and
    `block * L * 2 + 1` (V). Table: block offsets i32 `[B, 2, max_blocks]` (beam width 1; the bit that marks the
    secondary pool must be clear). TensorRT-LLM wants a power of 2 for `page_size`. Lengths: i32, this step included
    (its `sequence_length`, by convention). Source: cpp/tensorrt_llm/kernels/kvCacheUtils.h, KVBlockArray::getRowPtr
    and getKVLocalIdx; cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, getKOrVBlockIndex.
    """
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=Layout(kv="page head token dim", layers="pointers"),
        table=PerKV(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
    )


def sglang(*, dtype: FloatName, kv_heads: int, head_dim: int) -> Paged:
    """SGLang's MHATokenToKVPool (2025): a slot a token, found through `req_to_token`.

    Two tensors per layer, K and V `[slots, H, D]`, strides `(H*D, D, 1)`; slot 0 takes the writes of padded tokens.
    The spec's tensors have a token axis of extent 1: pass `buffer.unsqueeze(1)`. Table: `req_to_token` i32
    `[requests, max_context]`, read at row `req_pool_indices` i64 `[B]`. Lengths: `seq_lens` i64, this step included.
    Source: python/sglang/srt/mem_cache/memory_pool.py, ReqToTokenPool and MHATokenToKVPool._create_buffers;
    ScheduleBatch, whose prepare_for_extend makes the last two.
    """
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=1,
        layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
        table=Indirect(dtype="i32", request_dtype="i64"),
        lengths="after",
        lengths_dtype="i64",
    )


def flashmla(*, dtype: FloatName = "bf16", kv_heads: int = 1, head_dim: int = 576, page_size: int = 64) -> Paged:
    """FlashMLA's dense decode (2026): latent rows of 576 in pages of 64, K only.

    A tensor per layer, `[N, 64, 1, 576]`: strides `(64*576, 576, 576, 1)`; V is the row's first 512 elements. Table:
    `block_table` i32 `[B, max_blocks]`. Lengths: `cache_seqlens` i32, this step included. Source:
    flash_mla/flash_mla_interface.py, flash_mla_with_kvcache; csrc/api/dense_decode.h (a page holds 64 tokens).
    """
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=Layout(k="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
        stores="k",
    )


def flash_attention(
    *, dtype: FloatName, kv_heads: int, head_dim: int, v_head_dim: int | None = None, page_size: int = 256
) -> Paged:
    """FlashAttention's flash_attn_with_kvcache with a page table (2 and 3): K and V in tensors of their own.

    Two tensors per layer, K `[N, P, H, D]` and V `[N, P, H, Dv]` (3 only: Dv != D), strides `(P*H*D, H*D, D, 1)`.
    FlashAttention 2 wants a `page_size` that is a multiple of 256, 3 takes any. Table: `page_table` (2:
    `block_table`) i32 `[B, max_blocks]`. Lengths: `cache_seqlens` i32, tokens before this step, which is what the
    function takes where it also appends k and v. Source: hopper/flash_attn_interface.py and
    flash_attn/flash_attn_interface.py.
    """
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        layout=Layout(k="page token head dim", v="page token head dim", layers="pointers"),
        table=Dense(dtype="i32"),
        lengths_dtype="i32",
    )


def _vllm(dtype: FloatName, kv_heads: int, head_dim: int, page_size: int, layout: Layout) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=layout,
        table=Dense(dtype="i32"),
        lengths="after",
        lengths_dtype="i32",
    )


def _flashinfer(dtype: FloatName, kv_heads: int, head_dim: int, page_size: int, axes: str) -> Paged:
    return Paged(
        dtype=dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        layout=Layout(kv=axes, layers="pointers"),
        table=CSR(dtype="i32", last_page_len=True),
        lengths="after",
        lengths_dtype="i32",
    )
