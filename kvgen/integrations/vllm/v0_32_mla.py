"""The MLA attention backend of vLLM 0.32: its backend, metadata builder and implementation classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    MLACommonPrefillMetadata,
    QueryLenSupport,
)
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf

from kvgen.errors import ArgumentError, ConfigError
from kvgen.integrations.vllm import mla
from kvgen.integrations.vllm.device import archs_of, name_of, stream_of
from kvgen.integrations.vllm.faults import faults_of
from kvgen.integrations.vllm.mla_shard import MLA_KV_DTYPES, WINDOW_ROWS, MlaShard, absorbed_rows, check_mla
from kvgen.integrations.vllm.refusals import in_sentences
from kvgen.integrations.vllm.shard import DtypeName
from kvgen.integrations.vllm.step import Batch
from kvgen.integrations.vllm.v0_32 import _PAGE_MULTIPLE

NAME: Final = "KVGEN_MLA"
_DTYPES: Final[dict[torch.dtype, DtypeName]] = {torch.bfloat16: "bf16", torch.float16: "f16"}


class KvgenMLABackend(MLACommonBackend):  # type: ignore[misc]
    """kvgen's kernels under the name KVGEN_MLA: attention over latent rows in vLLM's pages."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(MLA_KV_DTYPES)

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[KvgenMLAImpl]:
        return KvgenMLAImpl

    @staticmethod
    def get_builder_cls() -> type[KvgenMLAMetadataBuilder]:
        return KvgenMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Rows of any size; the implementation names what kernels do not take."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(_PAGE_MULTIPLE)]

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        """Why the layers of a model cannot be attended to, in sentences; vLLM asks before it loads the model."""
        return in_sentences(
            super().validate_configuration(*args, **asked),
            asked,
            name=cls.get_name(),
            kv_dtypes=cls.supported_kv_cache_dtypes,
            page_multiple=_PAGE_MULTIPLE,
            dtypes="bfloat16 or float16, on tensor cores",
        )


@dataclass
class KvgenMLAMetadata(MLACommonMetadata):  # type: ignore[misc]
    """vLLM's metadata of MLA layers, and the step as kvgen has planned it."""

    step: mla.MlaStep | None = None

    def __post_init__(self) -> None:
        """Rows of any size."""


class KvgenMLAMetadataBuilder(MLACommonMetadataBuilder[KvgenMLAMetadata]):  # type: ignore[misc]
    """Plans each step of one group of MLA layers, on the device."""

    # What tests_vllm/test_mla_graphs.py shows, and no more.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, KvgenMLAMetadata)
        # vLLM puts requests of up to so many rows first; it has set it to a speculative window's.
        layers = vllm_config.compilation_config.static_forward_context
        fewest = min(absorbed_rows(layers[name].impl.shard) for name in layer_names)
        window: int = self.reorder_batch_threshold
        self.reorder_batch_threshold = max(window, fewest)
        scheduler = vllm_config.scheduler_config
        self._layers = layer_names
        self._max_requests = scheduler.max_num_seqs
        # A drafter's steps have a few rows more than the scheduler hands out.
        self._max_rows = scheduler.max_num_batched_tokens + 2 * self._max_requests * window
        self._group: mla.MlaGroup | None = None
        self._memory: tuple[torch.Tensor, ...] = ()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Speculative windows that `mla_window` does not take whole are cut into several, under new tables in every step."""
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
        if 1 + drafts > WINDOW_ROWS:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KvgenMLAMetadata:
        given = common_attn_metadata
        if given.causal is not True:
            raise ArgumentError(
                f"causal: got {given.causal!r}; {NAME} attends to earlier tokens only; choose another attention backend"
            )
        metadata: KvgenMLAMetadata = super().build(common_prefix_len, given, fast_build)
        group = self._opened()
        metadata.step = group.begin(self._decodes(metadata, given), _prompts(metadata, given), stream_of(self.device))
        return metadata

    def _decodes(self, metadata: KvgenMLAMetadata, given: CommonAttentionMetadata) -> Batch | None:
        """The requests of few rows, which come first, in the absorbed form."""
        count = metadata.num_decodes
        if not count:
            return None
        ends = given.query_start_loc_cpu[: count + 1]
        counts = (ends[1:] - ends[:-1]).tolist()
        batch = Batch(
            query_start_loc=given.query_start_loc[: count + 1],
            seq_lens=metadata.decode.seq_lens,
            block_table=metadata.decode.block_table,
            rows=metadata.num_decode_tokens,
            most_rows=max(counts),
        )
        return mla.in_windows(batch, counts, self._numbers)

    def _opened(self) -> mla.MlaGroup:
        """The group over the memory that its layers are bound to; opened anew where vLLM has bound other memory."""
        layers = self.vllm_config.compilation_config.static_forward_context
        memory = tuple(layers[name].kv_cache for name in self._layers)
        if self._group is None or any(a is not b for a, b in zip(memory, self._memory, strict=True)):
            for name in self._layers:
                layers[name].impl.layer_name = name
            self._group = mla.MlaGroup(
                {name: _pool(layers[name].impl, layers[name].kv_cache, layers[name]._k_scale) for name in self._layers},
                faults_of(name_of(self.device)),
                max_rows=self._max_rows,
                max_requests=self._max_requests,
                arch=archs_of(self.device),
                allocate=self._bytes,
            )
            self._memory = memory
        return self._group

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return async_tensor_h2d(values, device=self.device, dtype=torch.int32)


def _prompts(metadata: KvgenMLAMetadata, given: CommonAttentionMetadata) -> mla.Prompts | None:
    """The others, and the chunks that vLLM has cut their cached tokens into."""
    prefill = metadata.prefill
    if prefill is None:
        return None
    seq_lens = given.seq_lens[metadata.num_decodes :]
    chunks = prefill.chunked_context.chunks if prefill.chunked_context is not None else ()
    return mla.Prompts(
        row_offsets=prefill.query_start_loc,
        rows=given.num_actual_tokens - metadata.num_decode_tokens,
        context=tuple(_chunk(chunk, seq_lens, prefill.block_table) for chunk in chunks),
    )


def _chunk(
    chunk: MLACommonPrefillMetadata.ContextChunk, seq_lens: torch.Tensor, block_table: torch.Tensor
) -> mla.ContextChunk:
    requests, rows = chunk.request_slice, chunk.token_slice
    return mla.ContextChunk(
        seq_lens=seq_lens[requests],
        block_table=block_table[requests],
        starts=chunk.starts,
        kv_offsets=chunk.cu_seq_lens,
        tokens=chunk.num_context_tokens,
        row_offsets=chunk.query_start_loc,
        first_row=rows.start,
        rows=rows.stop - rows.start,
    )


class KvgenMLAImpl(MLACommonImpl[KvgenMLAMetadata]):  # type: ignore[misc]
    """One MLA layer on one rank. Raises ConfigError, before weights are loaded, for attention that kvgen does not have.

    Prompts run by kvgen's kernels too, unless the user names one of vLLM's (attention_config.mla_prefill_backend).
    """

    can_return_lse_for_decode: bool = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        from vllm.config import get_current_vllm_config

        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "indexer": mla_args.get("indexer"),
            "attn_type": None if attn_type == AttentionType.DECODER else str(attn_type),
        }
        for name, got in refused.items():
            if got is not None:
                raise ConfigError(
                    f"{name}: got {_shown(got)}; {NAME} attends to all of a decoder's own tokens; choose another attention "
                    "backend"
                )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        if self.dcp_world_size > 1:
            raise ConfigError(
                f"decode_context_parallel_size: got {self.dcp_world_size}; {NAME} wants a request's tokens on every rank; pass 1"
            )
        dtype = torch.get_default_dtype()
        if dtype not in _DTYPES:
            raise ConfigError(
                f"dtype: got {dtype}; {NAME} attends over latent rows on tensor cores, in bfloat16 or float16; pass one of them"
            )
        self.supports_quant_query_input = False
        self.shard = MlaShard(
            num_heads,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            self.qk_nope_head_dim,
            self.v_head_dim,
            _DTYPES[dtype],
            self.scale,
            kv_cache_dtype,
        )
        check_mla(self.shard)
        self.layer_name = ""  # by the builder of the layer's group
        self._theirs = get_current_vllm_config().attention_config.mla_prefill_backend is not None
        self._opened: tuple[torch.Tensor, mla.MlaModules, Any] | None = None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store a step's latent rows by their slots. `skip_scale`, of later versions, says that k_scale is 1."""
        if kv_cache.numel() == 0:  # a run that measures memory, before there is a cache
            return
        modules, cache = self._open(kv_cache, k_scale)
        errors = faults_of(cache.device).word
        rope = k_pe.reshape(k_pe.shape[0], -1)
        mla.append_latent(modules, cache[0], kv_c_normed, rope, slot_mapping, errors, stream_of(kv_cache.device))

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: KvgenMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed q `[T, heads, kv_lora_rank]` and its RoPE part over everything cached: latent rows of out, and their lse."""
        assert attn_metadata.step is not None
        step, number = attn_metadata.step.of(layer.layer_name)
        rows = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        scaled = self.shard.scaled and layer._k_scale_float != 1.0
        if scaled:  # codes times k_scale: q times it, and out
            rows = rows * layer._k_scale.to(rows.dtype)
        out = rows.new_empty(*rows.shape[:2], self.kv_lora_rank)
        lse = rows.new_empty(rows.shape[:2], dtype=torch.float32)
        step.decode(number, rows, out, lse, stream_of(rows.device))
        return (out.mul_(layer._k_scale.to(out.dtype)) if scaled else out), lse

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: KvgenMLAMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prompts' rows q `[T, heads, nope + RoPE]` over their own rows and the cached ones before them, into output."""
        if self._theirs:
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        assert attn_metadata.step is not None and output_scale is None
        step, number = attn_metadata.step.of(self.layer_name)
        k, v = self._project(kv_c_normed, k_pe)
        step.attend_prompts(
            number,
            q,
            k,
            v,
            output.view(-1, self.num_heads, self.v_head_dim),
            project=lambda rows: self._project(rows[:, : self.kv_lora_rank], rows[:, None, self.kv_lora_rank :]),
            empty=lambda shape, single: q.new_empty(shape, dtype=torch.float32 if single else q.dtype),
            stream=stream_of(q.device),
        )

    def _project(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[T, heads, nope + RoPE]` and V `[T, heads, v_head_dim]` of latent rows, each without gaps."""
        up = self.kv_b_proj(latent)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = up.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return self._concat_k_nope_k_pe(k_nope, rope), v.contiguous()

    def _open(self, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> tuple[mla.MlaModules, Any]:
        """The layer's kernels, and its memory as their cache, without tables."""
        if self._opened is None or self._opened[0] is not kv_cache:
            pool = _pool(self, kv_cache, k_scale)
            modules = mla.MlaModules.of(self.shard, kv_cache.shape[1], archs_of(kv_cache.device))
            self._opened = (kv_cache, modules, modules.open_stored([pool]))
        return self._opened[1:]


def _pool(impl: KvgenMLAImpl, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> mla.LatentPool:
    """What vLLM bound a layer to."""
    return mla.LatentPool(impl.shard, kv_cache, k_scale.view(1, 1) if impl.shard.scaled else None)


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__
