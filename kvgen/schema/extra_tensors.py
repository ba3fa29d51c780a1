"""The tensors beside the pools: scales that the caller gives, and the newest tokens of keys that are quantized in groups."""

from __future__ import annotations

import math

from kvgen.layout.dtypes import DType, dtype
from kvgen.layout.storage import PoolTensor, Segment
from kvgen.schema.cache_fields import CacheFields

Roles = dict[str, tuple[Segment, ...]]


def given_tensors(cache: CacheFields, roles: Roles) -> list[PoolTensor]:
    """The scales that the caller brings: those of every layer."""
    found = []
    for role, segments in roles.items():
        for segment in segments:
            scales = segment.scales
            if scales is not None and scales.array:
                shape = (scales.heads, scales.groups)
                text = f"{role}: heads, groups of dims"
                width = segment.scale_vector
                found.append(_array(cache, scales.array, scales.dtype, ("head", "dim"), shape, text, width))
            if segment.global_scale:
                found.append(_array(cache, segment.global_scale, dtype("f32"), ("one",), (1,), f"{role}: one number"))
    return found


def _array(
    cache: CacheFields, name: str, kind: DType, axes: tuple[str, ...], shape: tuple[int, ...], text: str, width: int = 1
) -> PoolTensor:
    """A contiguous array a layer, read in accesses of `width` elements."""
    each = cache.layout.layers == "axis"
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return PoolTensor(
        name,
        (kind.name,),
        (*(("layer",) if each else ()), *axes),
        (*(("layers",) if each else ()), *shape),
        (*((None,) if each else ()), *strides),
        width * kind.bytes,
        f"{'layer, ' if each else ''}{text}",
        (*((None,) if each else ()), *("quant.block" for _ in axes)),
    )


def tail_tensor(cache: CacheFields, roles: Roles) -> list[PoolTensor]:
    """The newest tokens of K, where groups of tokens are quantized together; else nothing."""
    quant = cache.quants["k"]
    if quant is None or quant.residual is None:
        return []
    elem, tokens, heads, dims = dtype(cache.dtype), quant.residual, cache.kv_heads, roles["k"][0].size
    each = cache.layout.layers == "axis"
    width = min(roles["k"][0].vector, 16 // elem.bytes)
    return [
        PoolTensor(
            "k_tail",
            (cache.dtype,),
            (*(("layer",) if each else ()), "request", "token", "head", "dim"),
            (*(("layers",) if each else ()), "B", tokens, heads, dims),
            (*((None,) if each else ()), None, heads * dims, dims, 1),
            width * elem.bytes,
            ("layer " if each else "") + "request token head dim",
            (*((None,) if each else ()), None, "quant.residual", "kv_heads", "head_dim"),
        )
    ]
