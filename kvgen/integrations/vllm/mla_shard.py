"""An MLA layer as one rank of vLLM has it -> the kernel sets of it. Knows no version of vLLM, and neither torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvgen.architectures import DEFAULT_ARCHS, Arch
from kvgen.errors import ConfigError, SpecError
from kvgen.integrations.vllm.shard import DtypeName
from kvgen.ops.append import Append
from kvgen.ops.extend import Extend
from kvgen.ops.gather import Gather
from kvgen.ops.merge_states import MergeStates
from kvgen.ops.mla_decode import MlaDecode
from kvgen.schema.cache import Latent
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask
from kvgen.schema.presets.vllm import vllm_mla, vllm_mla_fp8
from kvgen.schema.quant import Quant
from kvgen.schema.ragged import Ragged

# What vLLM's --kv-cache-dtype says -> rows of the model's dtype, of codes with one scale a layer, or of 656 bytes.
MlaCacheDtype = Literal["auto", "fp8_e4m3", "fp8_ds_mla"]
MLA_KV_DTYPES: Final[dict[str, MlaCacheDtype]] = {
    "auto": "auto",
    "float16": "auto",
    "bfloat16": "auto",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_ds_mla": "fp8_ds_mla",
}
_FLOATS: Final[dict[str, DtypeName]] = {"float16": "f16", "bfloat16": "bf16"}
# Query rows of a request that `mla_window` takes: the most of MlaDecode.
WINDOW_ROWS: Final = 8


@dataclass(frozen=True)
class MlaShard:
    """What an MLA layer attends with on one tensor-parallel rank, in vLLM's words: the arguments of its MLAAttentionImpl.

    `heads` are the rank's own; the latent rows are every rank's. `latent_dim` is kv_lora_rank, `rope_dim` and `nope_dim` are
    qk_rope_head_dim and qk_nope_head_dim.
    """

    heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    dtype: DtypeName
    scale: float
    kv_cache_dtype: str = "auto"

    @property
    def codes(self) -> MlaCacheDtype:
        """How rows are stored."""
        return MLA_KV_DTYPES[self.kv_cache_dtype]

    @property
    def scaled(self) -> bool:
        """Whether rows are codes with one scale a layer, which the caller brings."""
        return self.codes == "fp8_e4m3"

    @property
    def row_dim(self) -> int:
        """Elements of a latent row."""
        return self.latent_dim + self.rope_dim


def absorbed_rows(shard: MlaShard) -> int:
    """Rows of a request up to which the absorbed form takes fewer products, however many tokens are before them.

    The fewer of two counts: a row has 2 latent_dim + rope_dim products with a token, or nope_dim + rope_dim + v_dim, and every
    token's latent_dim (nope_dim + v_dim) of its projection besides. 170 for DeepSeek V3's dims.
    """
    each = 2 * shard.latent_dim + shard.rope_dim - (shard.nope_dim + shard.rope_dim + shard.v_dim)
    return shard.latent_dim * (shard.nope_dim + shard.v_dim) // max(each, 1)


def check_mla(shard: MlaShard) -> None:
    """Raise ConfigError, with vLLM's word for it, where kvgen has no kernels for `shard`."""
    if shard.kv_cache_dtype not in MLA_KV_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype: got {shard.kv_cache_dtype!r}; kvgen stores latent rows as {', '.join(MLA_KV_DTYPES)}; choose one "
            "of them"
        )
    if shard.dtype == "f32":
        raise ConfigError(
            "dtype: got f32; attention over latent rows is for tensor cores, in f16 or bf16; pass --dtype bfloat16 or float16"
        )
    if _FLOATS.get(shard.kv_cache_dtype, shard.dtype) != shard.dtype:
        raise ConfigError(
            f"kv_cache_dtype: got {shard.kv_cache_dtype!r} beside a model of {shard.dtype}; kvgen stores latent rows in the "
            "model's dtype or in fp8; pass 'auto'"
        )
    if shard.codes == "fp8_ds_mla" and (shard.latent_dim, shard.rope_dim) != (512, 64):
        raise ConfigError(
            f"kv_cache_dtype: got 'fp8_ds_mla' for rows of {shard.latent_dim} + {shard.rope_dim} dims; its rows of 656 bytes "
            "have 512 + 64; pass 'fp8' or 'auto'"
        )
    try:
        for kernels in (attended_set, heads_set):
            kernels(shard, arch=DEFAULT_ARCHS[:1])
        stored_set(shard, arch=DEFAULT_ARCHS[:1])
    except SpecError as error:
        raise ConfigError(f"attention: {error}") from None


def stored_set(shard: MlaShard, page_size: int = 64, arch: Sequence[Arch] = ()) -> KernelSet:
    """Append of the latent and RoPE parts by slots, and gather; attention besides, where `attended_set` is the same cache.

    Raises SpecError for what kvgen cannot make.
    """
    dims: dict[str, Any] = {
        "dtype": shard.dtype,
        "latent_dim": shard.latent_dim,
        "rope_dim": shard.rope_dim,
        "page_size": page_size,
    }
    match shard.codes:
        case "fp8_ds_mla":
            cache = vllm_mla_fp8(**dims)
        case codes:
            cache = vllm_mla(kv_cache_dtype=codes, **dims)
    attention = () if shard.scaled else _decodes(shard)
    return _set(shard, cache, (Append(rows="slots", inputs="parts"), Gather(), *attention), arch)


def attended_set(shard: MlaShard, page_size: int = 64, arch: Sequence[Arch] = ()) -> KernelSet:
    """Attention in the absorbed form: `mla_decode`, a row a request, and `mla_window`, up to 8 of them.

    Codes with one scale a layer are read without it, which multiplies q and the output: a kernel has no other use for it.
    Raises SpecError for what kvgen cannot make.
    """
    stored = stored_set(shard, page_size, arch)
    if not shard.scaled:
        return stored
    fields = {name: getattr(stored.kv, name) for name in stored.kv.model_fields_set}
    cache = Latent(**(fields | {"quant": Quant(dtype="e4m3")}))
    return _set(shard, cache, _decodes(shard), arch)


def heads_set(shard: MlaShard, page_size: int = 64, arch: Sequence[Arch] = ()) -> KernelSet:
    """Attention of prompts, over K and V of heads that latent rows are projected up to: `extend` over a prompt's own rows,
    `extend_context` over a chunk of the tokens before, `merge_states` of the two.

    Raises SpecError for what kvgen cannot make.
    """
    cache = Ragged(
        dtype=shard.dtype,
        kv_heads=shard.heads,
        head_dim=shard.nope_dim + shard.rope_dim,
        v_head_dim=shard.v_dim,
        lengths_dtype="i32",
    )
    context = Extend(name="extend_context", scale=shard.scale, mask=Mask(causal=False), cross=True)
    return _set(shard, cache, (Extend(scale=shard.scale), context, MergeStates()), arch)


def _decodes(shard: MlaShard) -> tuple[MlaDecode, ...]:
    common: dict[str, Any] = {"scale": shard.scale, "split": "balanced"}
    return MlaDecode(**common), MlaDecode(name="mla_window", rows=WINDOW_ROWS, **common)


def _set(shard: MlaShard, cache: Any, ops: Sequence[Any], arch: Sequence[Arch]) -> KernelSet:
    return KernelSet(q_heads=shard.heads, cache=cache, ops=tuple(ops), arch=tuple(arch) or DEFAULT_ARCHS[:1])
