"""How KV is stored: what `--kv-dtype` means, and what a quantized checkpoint's config.json says of it.

Read are `quantization_config.kv_cache_scheme` (compressed-tensors, and ModelOpt's newer exports) and
`quantization_config.kv_cache_quant_algo` (ModelOpt). Quantized weights alone say nothing of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from kvgen.errors import ConfigError, SpecError
from kvgen.json_file import shown
from kvgen.models.fields import Fields
from kvgen.models.layers import CacheDtype, Checkpoint
from kvgen.spec.cache import Latent, Paged
from kvgen.spec.model import Mla
from kvgen.spec.quant import Block, Quant

AUTO: Final = "auto"
_TYPES: Final[dict[str, CacheDtype]] = {"bf16": "bf16", "f16": "f16", "f32": "f32"}
_TENSOR: Final = Block(token=None, head=None)
_QUANTS: Final = {
    "fp8": Quant(dtype="e4m3"),
    "fp8-static": Quant(dtype="e4m3", scale_dtype="f32", block=_TENSOR, scale="given"),
    "fp8-scaled": Quant(dtype="e4m3", scale_dtype="f32"),
    "int8": Quant(dtype="i8", scale_dtype="f32"),
    "int8-static": Quant(dtype="i8", scale_dtype="f32", block=_TENSOR, scale="given"),
    "int4": Quant(dtype="i4", scale_dtype="f16", block=Block(dim=32), zero=True),
    "nvfp4": Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global"),
    "fp8_ds_mla": Quant(dtype="e4m3", scale_dtype="f32", block=Block(dim=128), place="row"),
}
# Engines cast whole latent rows; scales per block are the latent part's, whose RoPE part keeps the checkpoint's type.
_WHOLE_ROWS: Final = ("fp8", "fp8-static", "int8-static")
_LATENT_ONLY: Final = "fp8_ds_mla"
KV_DTYPES: Final = (AUTO, *_TYPES, *_QUANTS)
_ALGORITHMS: Final = {"FP8": "fp8-static", "INT8": "int8-static", "NVFP4": "nvfp4"}


@dataclass(frozen=True)
class Stored:
    """The cache's `dtype`, its quantization (None: stored in `dtype`), whether a latent row is quantized whole, and
    which field of the config says so ("": none does)."""

    dtype: CacheDtype
    quant: Quant | None = None
    quant_rope: bool = False
    source: str = ""


def stored_by_kind(fields: Fields, facts: Checkpoint, kv_dtype: str) -> dict[str, Stored]:
    """How `--kv-dtype` stores the KV of each kind of layers: one word for all, or "full=fp8,local=bf16" and so on."""
    if "=" not in kv_dtype:
        return _for_each(facts, {kind.kind: kv_dtype for kind in facts.cached}, fields)
    given: dict[str, str] = {}
    names = [kind.kind for kind in facts.cached]
    for part in kv_dtype.split(","):
        kind, _, word = (piece.strip() for piece in part.partition("="))
        if kind not in names or kind in given:
            twice = " twice" if kind in given else ""
            raise ConfigError(
                f"--kv-dtype: got {shown(kind)}{twice} in {shown(kv_dtype)}; {facts.model.architecture}'s layers with a cache "
                f"are {', '.join(names)}; name each once, as in {names[0]}=fp8"
            )
        given[kind] = word
    return _for_each(facts, {name: given.get(name, AUTO) for name in names}, fields)


def _for_each(facts: Checkpoint, asked: Mapping[str, str], fields: Fields) -> dict[str, Stored]:
    found = {}
    for kind in facts.cached:
        own = replace(facts, q_heads=kind.q_heads, kv_heads=kind.kv_heads, head_dim=kind.head_dim_k)
        found[kind.kind] = stored(fields, own, asked[kind.kind])
    return found


def stored(fields: Fields, facts: Checkpoint, kv_dtype: str) -> Stored:
    """How `--kv-dtype` stores a checkpoint's KV; "auto" asks its config. ConfigError where that is not possible."""
    name, quant, source = kv_dtype, _QUANTS.get(kv_dtype), ""
    if name == AUTO:
        name, quant, source = _from_config(fields)
    elif name not in KV_DTYPES:
        raise ConfigError(f"--kv-dtype: got {shown(name)}; it must be one of {', '.join(KV_DTYPES)}")
    if name == _LATENT_ONLY and not facts.model.mla:
        usual = ", ".join(n for n in KV_DTYPES if n != _LATENT_ONLY)
        raise ConfigError(
            f"--kv-dtype: got {name!r}, which is for latent rows; {facts.model.architecture} caches K and V; valid: {usual}"
        )
    if quant is None:
        return Stored(_TYPES.get(name, facts.dtype))
    found = Stored(facts.dtype, quant, facts.model.mla is not None and name in _WHOLE_ROWS, source)
    _check(facts, found, source or f"--kv-dtype: got {name!r}")
    return found


def _check(facts: Checkpoint, found: Stored, blamed: str) -> None:
    """Raise ConfigError unless there is such a cache."""
    try:
        if facts.model.mla is not None:
            latent(facts.model.mla, found, page_size=16)
        else:
            Paged(dtype=found.dtype, kv_heads=facts.kv_heads, head_dim=facts.head_dim, page_size=16, quant=found.quant)
    except SpecError as error:
        wrong = str(error).replace("\n", "; ")
        raise ConfigError(f"{blamed}; {wrong}; --kv-dtype {found.dtype} stores it as it is") from None


def latent(mla: Mla, found: Stored, *, page_size: int) -> Latent:
    """The cache of a model's latent rows."""
    return Latent(
        dtype=found.dtype,
        latent_dim=mla.kv_lora_rank,
        rope_dim=mla.qk_rope_head_dim,
        page_size=page_size,
        quant=found.quant,
        quant_rope=found.quant_rope,
    )


# The checkpoint's own word --------------------------------------------------------------------------------------------


def _from_config(fields: Fields) -> tuple[str, Quant | None, str]:
    """(name, quantization, field that says so): "auto" and None where the config says nothing of KV."""
    config = fields.object("quantization_config")
    if config is None:
        return AUTO, None, ""
    if config.has("kv_cache_scheme"):
        scheme = config.object("kv_cache_scheme")
        assert scheme is not None
        return (*_scheme(scheme), config.name("kv_cache_scheme"))
    if config.has("kv_cache_quant_algo"):
        key = "kv_cache_quant_algo"
        algorithm = config.values[key]
        if algorithm in ("", "none", "None"):
            return AUTO, None, ""
        if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
            config.fail(key, f"kvgen knows {', '.join(_ALGORITHMS)}; {_CHOOSE}")
        return _ALGORITHMS[algorithm], _QUANTS[_ALGORITHMS[algorithm]], config.name(key)
    return AUTO, None, ""


_CHOOSE: Final = "say with --kv-dtype how kvgen shall store KV"


def _scheme(scheme: Fields) -> tuple[str, Quant]:
    """compressed-tensors' QuantizationArgs: 8 bits, symmetric, a static scale a tensor or head, or a dynamic one."""
    bits = scheme.integer("num_bits", default=8, high=64)
    kind = scheme.choice("type", {"float": "fp8", "int": "int8"}, default="int8")
    if bits != 8:
        scheme.fail("num_bits", f"KV of 8 bits is what kvgen reads from a config; {_CHOOSE}")
    if not scheme.flag("symmetric", default=True):
        scheme.fail("symmetric", f"given scales have no zero points; {_CHOOSE}")
    if scheme.flag("dynamic", default=False):
        name = "fp8-scaled" if kind == "fp8" else "int8"  # a scale per token and head is what a write can compute
        return name, _QUANTS[name]
    strategies = {"tensor": "tensor", "attn_head": "attn_head"}
    strategy = scheme.choice("strategy", strategies, default="tensor")
    name = f"{kind}-static"
    if strategy == "tensor":
        return name, _QUANTS[name]
    return name, _QUANTS[name].model_copy(update={"block": Block(token=None)})


# Words ----------------------------------------------------------------------------------------------------------------


def words(found: Stored) -> str:
    """How KV is stored, for a reader: "e4m3 codes with an f32 scale per token and head"."""
    quant = found.quant
    if quant is None:
        return found.dtype
    if quant.scale_dtype is None:
        return f"{quant.dtype} codes without scales"
    scale = f"{quant.scale_dtype} scale{' and zero point' if quant.zero else ''}"
    article = "an" if quant.scale_dtype[0] in "ef" else "a"
    if quant.scale == "given":
        whose = "layer and head" if quant.block.head else "layer"
        return f"{quant.dtype} codes with a given {scale} per {whose}, K's and V's"
    per = f"token, head and {quant.block.dim} dims" if quant.block.dim else "token and head"
    extra = ", in the row" if quant.place == "row" else ""
    extra += ", times a given f32 scale" if quant.recipe == "global" else ""
    return f"{quant.dtype} codes with {article} {scale} per {per}{extra}"
