"""The attention backend of vLLM 0.32: its backend, metadata builder and implementation classes."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvgen.errors import ArgumentError, ConfigError
from kvgen.integrations.vllm import attention, pools, step
from kvgen.integrations.vllm.device import archs_of, compile_for, name_of, runs_on, stream_of
from kvgen.integrations.vllm.faults import faults_of
from kvgen.integrations.vllm.refusals import in_sentences
from kvgen.integrations.vllm.shard import KV_DTYPES, DtypeName, Shard, check

NAME: Final = "KVGEN"
_DTYPES: Final[dict[torch.dtype, DtypeName]] = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_PAGE_MULTIPLE: Final = 16


class KvgenBackend(AttentionBackend):  # type: ignore[misc]
    """kvgen's kernels under the name KVGEN: decoder attention over K and V in vLLM's pages."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = list(_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_DTYPES)

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[KvgenImpl]:
        return KvgenImpl

    @staticmethod
    def get_builder_cls() -> type[KvgenMetadataBuilder]:
        return KvgenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(_PAGE_MULTIPLE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (
            KVCacheLayout.LBHNC,
            KVCacheLayout.LBNHC,
            KVCacheLayout.BLHNC,
            KVCacheLayout.BLNHC,
            KVCacheLayout.LHBNC,
            KVCacheLayout.BHLNC,
        )

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or runs_on((capability.major, capability.minor))

    @classmethod
    def validate_configuration(cls, *args: Any, **asked: Any) -> list[str]:
        """Why the layers of a model cannot be attended to, in sentences; vLLM asks before it loads the model."""
        return in_sentences(
            super().validate_configuration(*args, **asked),
            asked,
            name=cls.get_name(),
            kv_dtypes=cls.supported_kv_cache_dtypes,
            page_multiple=_PAGE_MULTIPLE,
        )

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        *args: Any,
        **kwargs: Any,
    ) -> str | None:
        """Why kvgen has no kernels for such heads; None where it has them."""
        if dtype not in _DTYPES or (kv_cache_dtype or "auto") not in KV_DTYPES:
            return None  # said by the checks of these
        try:
            check(Shard(1, 1, head_size, _DTYPES[dtype], 1.0, kv_cache_dtype or "auto"))
        except ConfigError as error:
            return str(error)
        return None


class KvgenMetadataBuilder(AttentionMetadataBuilder[step.GroupStep]):  # type: ignore[misc]
    """Plans each step of one group of layers, on the device."""

    # What tests/integrations/test_vllm_graphs.py shows, and no more.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        head_size = kv_cache_spec.head_size
        if getattr(kv_cache_spec, "head_size_v", head_size) != head_size:
            raise ConfigError(
                f"head_size_v: got {kv_cache_spec.head_size_v} beside a head_size of {head_size}; {NAME}'s heads of K and V have "
                "as many dims; choose another --attention-backend"
            )
        scheduler = vllm_config.scheduler_config
        drafts = _draft_tokens(vllm_config)
        # A drafter's steps have a few rows more than the scheduler hands out; a CUDA graph's are padded to its size.
        rows = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * (1 + 2 * drafts)
        self._max_rows = max(rows, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        self._group: step.Group | None = None
        self._memory: tuple[torch.Tensor, ...] = ()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> step.GroupStep:
        given = common_attn_metadata
        if given.causal is not True:
            raise ArgumentError(
                f"causal: got {given.causal!r}; {NAME} attends to earlier tokens only; choose another --attention-backend"
            )
        batch = step.Batch(
            query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens,
            block_table=given.block_table_tensor,
            rows=given.num_actual_tokens,
            most_rows=given.max_query_len,
        )
        return self._opened().begin(batch, stream_of(self.device))

    def update_draft_decode_metadata(self, metadata: step.GroupStep) -> None:
        """Plan the next draft's step inside the drafter's CUDA graph."""
        metadata.plan_again(stream_of(self.device))

    def _opened(self) -> step.Group:
        """The group over the memory that its layers are bound to; opened anew where vLLM has bound other memory."""
        layers = self.vllm_config.compilation_config.static_forward_context
        memory = tuple(layers[name].kv_cache for name in self.layer_names)
        if self._group is None or any(a is not b for a, b in zip(memory, self._memory, strict=True)):
            held = {name: _pool(layers[name]) for name in self.layer_names}
            self._group = step.Group(
                held,
                self.vllm_config.cache_config.get_resolved_kv_cache_layout().name,
                max_rows=self._max_rows,
                arch=archs_of(self.device),
                allocate=self._bytes,
                device=name_of(self.device),
            )
            for layers_alike in self._group.kinds:
                compile_for(layers_alike.module, self.device)
            self._memory = memory
        return self._group

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)


class KvgenImpl(AttentionImpl[step.GroupStep]):  # type: ignore[misc]
    """One layer on one rank. Raises ConfigError, before weights are loaded, for attention that kvgen does not have."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        from vllm.config import get_current_vllm_config

        if alibi_slopes is not None:
            raise ConfigError(
                f"alibi_slopes: {NAME} has no ALiBi for vLLM's layers; choose another --attention-backend"
            )
        if attn_type != AttentionType.DECODER:
            raise ConfigError(
                f"attn_type: got {str(attn_type)!r}; {NAME} attends over a decoder's own tokens; choose another "
                "--attention-backend"
            )
        dtype = torch.get_default_dtype()
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype: got {dtype}; {NAME} computes in bfloat16, float16 or float32")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        config = get_current_vllm_config()
        self._cache_config = config.cache_config
        self.shard = Shard(
            num_heads,
            self.num_kv_heads,
            head_size,
            _DTYPES[dtype],
            self.scale,
            kv_cache_dtype,
            sliding_window,
            logits_soft_cap or None,
            sinks is not None,
            _draft_tokens(config),
        )
        check(self.shard)
        self._sinks: torch.Tensor | None = None
        self._opened: tuple[torch.Tensor, Any, Any] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the sinks as kernels read them: f32."""
        if self.sinks is not None:
            self._sinks = self.sinks.detach().float().contiguous()

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store a step's K and V by their slots."""
        module, cache = self._open(layer, kv_cache)
        errors = faults_of(cache.device).word
        attention.append(module, cache[0], key, value, slot_mapping, errors, stream_of(kv_cache.device))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: step.GroupStep | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query `[>= T, heads, head_size]` over everything cached, into `output` of the same shape."""
        if output_scale is not None or output_block_scale is not None:
            raise ArgumentError(f"output_scale: {NAME} writes its output in the model's dtype; it is None")
        if attn_metadata is None:  # a run that measures memory, before there is a cache
            return output.fill_(0)
        attention.attend(attn_metadata, layer.layer_name, query, output, self._sinks, stream_of(kv_cache.device))
        return output

    def _open(self, layer: Any, kv_cache: torch.Tensor) -> tuple[Any, Any]:
        """The layer's kernels, and its memory as their cache, without tables."""
        if self._opened is None or self._opened[0] is not kv_cache:
            order = self._cache_config.get_resolved_kv_cache_layout().name
            pool = _pool(layer)
            module = pools.module_of(self.shard, pool.memory, order, archs_of(kv_cache.device))
            self._opened = (kv_cache, module, pools.open_cache(module, self.shard, [pool], order))
        return self._opened[1:]


def _pool(layer: Any) -> pools.LayerPool:
    """What vLLM bound a layer to."""
    shard = layer.impl.shard
    scales = () if shard.codes == "auto" else (layer._k_scale.view(1, 1), layer._v_scale.view(1, 1))
    return pools.LayerPool(shard, layer.kv_cache, *scales)


def _draft_tokens(vllm_config: Any) -> int:
    """Tokens of a speculative window behind the one they follow."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens or 0
