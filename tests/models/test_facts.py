"""What is read of every published config, one block a config in facts.txt, to be held against the config's values by eye.

Layers by number, heads, head dims, the factor of scores, window or chunk, RoPE, norms, and what else a kind of layers has.
KVGEN_UPDATE_GOLDEN=1 writes the file. GOLDEN in test_models.py has what model cards and papers say, by hand, of a few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvgen import models
from kvgen.models.layers import LayerFacts, Norm
from kvgen.schema.model import Compressed, LinearScaling, Llama3Scaling, LongRopeScaling, Rope, YarnScaling

from .checkpoints import NAMES, config

FACTS = Path(__file__).parent / "facts.txt"


def block(name: str) -> str:
    """A config's lines: the model, then a line for each kind of its layers."""
    found = models.facts(config(name))
    lines = [f"{name}: {found.model.architecture}, {len(found.pattern)} layers, {found.dtype}"]
    for i, kind in enumerate(found.kinds):
        layers = runs([n for n, k in enumerate(found.pattern) if k == i])
        lines.append(f"  {kind.kind}, layers {layers}: " + ("; ".join(_facts(kind)) if kind.cache else "no cache"))
    return "\n".join(lines) + "\n"


def runs(numbers: Sequence[int]) -> str:
    """Numbers as arithmetic sequences: "0-31", "5-59 step 6", "0, 5-47 step 6"."""
    said, at = [], 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        end = at + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - at < 3 and step != 1:  # two numbers far apart are no sequence
            end = at + 1
        first, last = numbers[at], numbers[end - 1]
        said.append(f"{first}" if first == last else f"{first}-{last}" + (f" step {step}" if step != 1 else ""))
        at = end
    return ", ".join(said)


def _facts(kind: LayerFacts) -> Iterator[str]:
    if kind.mla is not None:
        mla = kind.mla
        yield f"{kind.q_heads} heads over latent rows of {mla.kv_lora_rank} + {mla.qk_rope_head_dim}"
        yield f"K without RoPE {mla.qk_nope_head_dim}, V {mla.v_head_dim}, q_lora {mla.q_lora_rank}"
    else:
        values = f", V of {kind.head_dim_v}" if kind.head_dim_v != kind.head_dim_k else ""
        yield f"{kind.q_heads} heads over {kind.kv_heads} of {kind.head_dim_k}{values}"
    yield f"scale {_scale(kind.scale)}" + (f", q times {kind.q_factor:.6g}" if kind.q_factor != 1.0 else "")
    for field in ("window", "chunk", "softcap"):
        if getattr(kind, field) is not None:
            yield f"{field} {getattr(kind, field):g}"
    if kind.indexer is not None:
        yield f"top-k {kind.indexer.topk} of {kind.indexer.heads} heads of {kind.indexer.dim}" + _of(
            kind.indexer.source
        )
    if kind.index_rope is not None and kind.index_norm is not None:
        yield f"indexer's {_rope(kind.index_rope)}, {kind.index_rope.part}; layer norm, eps {kind.index_norm.eps:g}"
    if kind.sinks:
        yield "sinks"
    if kind.compressed is not None:
        yield from _entries(kind.compressed)
    yield "ALiBi" if kind.alibi else "no positions" if kind.rope is None else _rope(kind.rope)
    if kind.mrope:
        yield f"sections {'+'.join(map(str, kind.mrope))} in {kind.mrope_layout}"
    norms: dict[str, str] = {}
    for role in ("q", "k", "v"):
        norm = getattr(kind, f"{role}_norm")
        if norm is not None:
            said = _norm(norm)
            norms[said] = f"{norms[said]}, {role}" if said in norms else role
    yield from (f"norm of {roles}: {said}" for said, roles in norms.items())
    if kind.q_scale is not None:
        by = kind.q_scale
        yield f"q by position: {by.form} {by.coefficient:g} a {by.positions}, shift {by.shift}"
    if kind.kv_source is not None:
        yield f"reads the cache of layer {kind.kv_source}"


def _entries(entries: Compressed) -> Iterator[str]:
    yield f"entries of {entries.rate}" + (" that overlap" if entries.overlap else "") + _of(entries.source)
    index = entries.indexer
    if index is not None:
        yield f"top-k {index.topk} of {index.heads} heads of {index.dim}" + _of(index.source)
        if index.candidate_source is not None:
            yield f"among {index.candidate_blocks} blocks of {index.candidate_block}{_of(index.candidate_source)}"


def _of(layer: int | None) -> str:
    return f" of layer {layer}" if layer is not None else ""


def _scale(scale: float) -> str:
    """As a power of a head dim, where it is one."""
    dim = scale**-2
    power = 1 < dim <= 512 and abs(dim - round(dim)) < 1e-6 * dim
    return f"{scale:.6g}" + (f" = {dim:.0f} ** -0.5" if power else "")


def _rope(rope: Rope) -> str:
    said = f"RoPE {rope.style}, theta {rope.theta:_.0f}"
    said += f", {rope.dim} elements" if rope.dim is not None else ""
    said += ", proportional" if rope.proportional else ""
    match rope.scaling:
        case None:
            return said
        case LongRopeScaling() as by:
            return (
                f"{said}, longrope {by.original_max_positions} to {by.max_positions}, short {by.short_factor[0]:.4g} .. "
                f"{by.short_factor[-1]:.4g}, long {by.long_factor[0]:.4g} .. {by.long_factor[-1]:.4g}, "
                f"cos and sin times {by.cos_sin_factor:.6g}"
            )
        case LinearScaling() as by:
            return f"{said}, linear x {by.factor:g}"
        case Llama3Scaling() as by:
            bounds = f"{by.low_freq_factor:g} .. {by.high_freq_factor:g}"
            return f"{said}, llama3 x {by.factor:g} of {by.original_max_positions}, bounds {bounds}"
        case YarnScaling() as by:
            more = "" if by.truncate else ", not truncated"
            return (
                f"{said}, yarn x {by.factor:g} of {by.original_max_positions}, betas {by.beta_fast:g} and {by.beta_slow:g}"
                f"{more}, cos and sin times {by.cos_sin_factor:.6g}"
            )
    raise AssertionError(rope.scaling)


def _norm(norm: Norm) -> str:
    weights = "no weights" if not norm.weight else "1 + weight" if norm.offset == 1.0 else "weight"
    after = ", after RoPE" if norm.order == "after" else ""
    return (
        f"{norm.kind} of {'heads' if norm.over == 'head' else 'rows'} of {norm.dim}, eps {norm.eps:g}, {weights}{after}"
    )


def _blocks() -> dict[str, str]:
    text = FACTS.read_text(encoding="utf-8")
    return {part.partition(":")[0]: part.rstrip("\n") + "\n" for part in text.split("\n\n")}


def test_facts_are_of_the_configs_that_are_here() -> None:
    if os.environ.get("KVGEN_UPDATE_GOLDEN") == "1":
        FACTS.write_text("\n".join(block(name) for name in NAMES), encoding="utf-8")
    assert sorted(_blocks()) == sorted(NAMES), "KVGEN_UPDATE_GOLDEN=1 writes them; look at each"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read(name: str) -> None:
    assert block(name) == _blocks()[name]


def test_runs_of_layers() -> None:
    assert runs([0, 1, 2, 3]) == "0-3"
    assert runs([5, 11, 17]) == "5-17 step 6"
    assert runs([0, 5, 11, 17]) == "0, 5-17 step 6"
    assert runs([0, 1, 2, 4, 5, 6]) == "0-2, 4-6"
    assert runs([7]) == "7"
    assert runs([3, 12]) == "3, 12"
