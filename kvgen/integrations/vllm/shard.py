"""A layer's attention as one rank of vLLM has it -> the kernel set of it. Knows no version of vLLM, and neither torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from kvgen.architectures import DEFAULT_ARCHS, Arch
from kvgen.errors import ConfigError, SpecError
from kvgen.ops.append import Append
from kvgen.ops.decode import MOST_ROWS, Decode
from kvgen.ops.extend import Extend
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask
from kvgen.schema.presets.quants import KVCacheDType
from kvgen.schema.presets.vllm import PackedOrder, vllm_packed
from kvgen.schema.score import Score

DtypeName = Literal["bf16", "f16", "f32"]

# What vLLM's --kv-cache-dtype says -> the preset's word. A float type stands for a cache of the model's own dtype.
KV_DTYPES: Final[dict[str, KVCacheDType]] = {
    "auto": "auto",
    "float16": "auto",
    "bfloat16": "auto",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
_FLOATS: Final[dict[str, DtypeName]] = {"float16": "f16", "bfloat16": "bf16"}
ORDERS: Final[tuple[PackedOrder, ...]] = get_args(PackedOrder)


MOST_DIMS: Final = 1024  # of a head


@dataclass(frozen=True)
class Shard:
    """What a layer attends with on one tensor-parallel rank, in vLLM's words: the arguments of its AttentionImpl.

    Heads are the rank's own. `window` counts the tokens that a row sees, itself included. `draft_tokens` are those that a
    speculative window has beside the token they follow.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: DtypeName
    scale: float
    kv_cache_dtype: str = "auto"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    draft_tokens: int = 0

    @property
    def codes(self) -> KVCacheDType:
        """The cache's elements in the preset's words: "auto" are those of `dtype`."""
        return KV_DTYPES[self.kv_cache_dtype]

    @property
    def window_rows(self) -> int:
        """Most rows of a request in a step without prompts."""
        return 1 + self.draft_tokens


@dataclass(frozen=True)
class Pages:
    """How a layer's pages lie: tokens of a page, vLLM's KVCacheLayout, pages of the cache, layers of its tensor."""

    size: int
    order: PackedOrder
    count: int
    layers: int = 1


@functools.cache
def check(shard: Shard) -> None:
    """Raise ConfigError, with vLLM's word for it, where kvgen has no kernels for `shard`."""
    if shard.kv_cache_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype: got {shard.kv_cache_dtype!r}; kvgen stores {', '.join(KV_DTYPES)} here; choose one of them"
        )
    if not 1 <= shard.head_dim <= MOST_DIMS:
        raise ConfigError(
            f"head_size: got {shard.head_dim}; a head has 1 to {MOST_DIMS} dims here; choose another --attention-backend"
        )
    stored = _FLOATS.get(shard.kv_cache_dtype, shard.dtype)
    if stored != shard.dtype:
        raise ConfigError(
            f"kv_cache_dtype: got {shard.kv_cache_dtype!r} beside a model of {shard.dtype}; kvgen stores K and V in the model's "
            "dtype or in fp8; pass 'auto'"
        )
    try:
        kernel_set(shard, Pages(16, "LBNHC", 1), arch=DEFAULT_ARCHS[:1])
    except SpecError as error:
        raise ConfigError(f"attention: {error}") from None


def kernel_set(shard: Shard, pages: Pages, arch: Sequence[Arch]) -> KernelSet:
    """Append by slots, a decode of one row a request, one of speculative windows where there are any, and extend for all else.

    Raises SpecError for what kvgen cannot make.
    """
    apart = {"LHBNC": {"total_pages": pages.count}, "BHLNC": {"total_layers": pages.layers}}
    cache = vllm_packed(
        dtype=shard.dtype,
        kv_heads=shard.kv_heads,
        head_dim=shard.head_dim,
        page_size=pages.size,
        kv_cache_dtype=shard.codes,
        order=pages.order,
        **apart.get(pages.order, {}),
    )
    common: dict[str, Any] = {
        "scale": shard.scale,
        "mask": Mask(window=shard.window),
        "score": None if shard.softcap is None else Score(softcap=shard.softcap),
        "sinks": "out" if shard.sinks else None,
    }
    ops: list[Append | Decode | Extend] = [Append(rows="slots"), Decode(split="balanced", **common)]
    if 1 < shard.window_rows <= MOST_ROWS:
        ops.append(Decode(name="verify", rows=shard.window_rows, split="balanced", **common))
    ops.append(Extend(**common))
    return KernelSet(q_heads=shard.q_heads, cache=cache, ops=tuple(ops), arch=tuple(arch))
