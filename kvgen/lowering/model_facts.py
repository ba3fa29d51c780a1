"""Facts of a set's model beside the fields of its operations: scales are taken over, everything else must agree.

A field that is given, as None too, is a decision; a field that is left out is none. So an operation that leaves out a fact of
the model is refused, and so is one that states another. A model with kinds of layers is served where one kind agrees:
`KernelSet.layers` says which kinds call the operation, without it any may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvgen.schema.base import as_written
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.mask import Mask
from kvgen.schema.model import Kind, Model, Rope
from kvgen.schema.norm import Norm
from kvgen.schema.score import Score

_TOLERANCE: Final = 1e-6  # between two ways to write one scale
_ROPE_FIELDS: Final = ("style", "theta", "scaling", "dim", "proportional")


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """Facts of a model's layers of one kind. `where` names the layers in a message; `stated` the field that says the scale, ""
    where none does."""

    where: str
    scale: float
    stated: str
    logit_softcap: float | None
    sinks: bool
    alibi: bool
    window: int | None
    chunk: int | None
    qk_norm: Literal["head", "row"] | None
    rope: Rope | None


def layer_facts(kernels: KernelSet, op: str) -> tuple[LayerFacts, ...]:
    """Facts of the layers that may call the operation, by kind; () without a model."""
    model = kernels.model
    if model is None:
        return ()
    if model.kinds:
        having = [kind for kind in model.kinds if kind.cache and kind.head_dim in (None, kernels.kv.head_dim)]
        served = [kind for kind in having if op in kernels.layers.get(kind.name, ())] or having
        return tuple(_of_kind(model, kind, kernels.kv.head_dim) for kind in served)
    names = model.kind_names
    served_names = [name for name in names if op in kernels.layers.get(name, ())] or list(names)
    return tuple(_of_layers(model, name, kernels.kv.head_dim, alike=len(names) == 1) for name in served_names)


def _of_kind(model: Model, kind: Kind, head_dim: int) -> LayerFacts:
    named = "scale" if kind.scale is not None else "mla" if model.mla is not None else ""
    scale = kind.scale if kind.scale is not None else model.softmax_scale(head_dim)
    return LayerFacts(
        f" on its {kind.name!r} layers", scale, named, kind.logit_softcap, kind.sinks, model.alibi, kind.window, kind.chunk,
        kind.qk_norm, kind.rope,
    )  # fmt: skip


def _of_layers(model: Model, name: str, head_dim: int, *, alike: bool) -> LayerFacts:
    fields = ("scale", "mla", "query_pre_attn_scalar")
    named = next((field for field in fields if getattr(model, field) is not None), "")
    return LayerFacts(
        "" if alike else f" on its {name!r} layers", model.softmax_scale(head_dim), named, model.logit_softcap, model.sinks,
        model.alibi, model.window if name == "local" else None, None, model.qk_norm, _rope_of(model, name),
    )  # fmt: skip


def _rope_of(model: Model, name: str) -> Rope | None:
    """The rope of local or full layers: local ones may have a base of their own, and are then not scaled."""
    rope = model.rope
    if rope is None or rope.local_theta is None or name != "local":
        return rope
    return rope.model_copy(update={"theta": rope.local_theta, "local_theta": None, "scaling": None})


def softmax_scale(op: str, scale: float | None, kernels: KernelSet) -> float:
    """Factor of q . k: the operation's, else the model's, else head_dim ** -0.5.

    Raises ValueError where the layers that the operation may serve have different ones.
    """
    if scale is not None:
        return scale
    facts = layer_facts(kernels, op)
    scales = [one.scale for one in facts]
    if scales and max(scales) - min(scales) > _TOLERANCE * max(scales):
        kinds = ", ".join(f"{one.scale:.6g}{one.where}" for one in facts)
        raise ValueError(
            f"scale: got none in {op}, and the set's model has {kinds}; give scale, or say with KernelSet.layers which layers "
            f"call {op}"
        )
    return next((one.scale for one in facts if one.stated), 1 / math.sqrt(kernels.kv.head_dim))


def scale_source(op: str, scale: float | None, kernels: KernelSet) -> str:
    """Where the scale comes from: "spec", "model: <field>" or "head_dim ** -0.5"."""
    if scale is not None:
        return "spec"
    stated = next((one.stated for one in layer_facts(kernels, op) if one.stated), "")
    return f"model: {stated}" if stated else "head_dim ** -0.5"


@dataclass(frozen=True, slots=True)
class Attention:
    """Fields of an operation that attends. `mask` None: rows are listed, or are no tokens of the cache."""

    op: Op
    scale: float | None
    sinks: str | None
    mask: Mask | None = None
    score: Score | None = None

    def differences(self, one: LayerFacts, facts: Sequence[LayerFacts]) -> Iterator[str]:
        """A message for each fact of one kind of layers, of all that `facts` are of, that the operation does not have."""
        if self.scale is not None and one.stated and abs(self.scale - one.scale) > _TOLERANCE * one.scale:
            has = f"{one.stated}, a scale of {one.scale:.6g}"
            yield _differs(self.op, "scale", self.scale, has, one, "leave scale out of one of them")
        if self.sinks is None and one.sinks and "sinks" not in self.op.model_fields_set:
            valid = 'give sinks="out" or "lse", or sinks=None where they are added later'
            yield _differs(self.op, "sinks", None, "sinks=True", one, valid)
        yield from self._scores(one, facts)
        if self.mask is not None and self.mask.tree != "mask":
            yield from self._windows(self.mask, one, facts)

    def _scores(self, one: LayerFacts, facts: Sequence[LayerFacts]) -> Iterator[str]:
        """Soft caps and ALiBi; a function or a bias of the user's may be either."""
        score, said = self.score, {"softcap", "alibi"} if "score" in self.op.model_fields_set else set()
        if score is not None:
            if score.function is not None or score.bias or score.relative is not None:
                return
            said = score.model_fields_set
        cap = score.softcap if score is not None else None
        fact = one.logit_softcap
        if (
            cap != fact
            and (cap is not None or "softcap" not in said)
            and any(o.logit_softcap is not None for o in facts)
        ):
            valid = f"give score=Score(softcap={fact}), or Score(softcap=None) where there is no cap on purpose"
            yield _differs(self.op, "score.softcap", cap, f"logit_softcap={as_written(fact)}", one, valid)
        if one.alibi and "alibi" not in said and not (score is not None and score.alibi):
            valid = "give score=Score(alibi=True), or Score(alibi=False) where positions are said otherwise"
            yield _differs(self.op, "score.alibi", False, "alibi=True", one, valid)

    def _windows(self, mask: Mask, one: LayerFacts, facts: Sequence[LayerFacts]) -> Iterator[str]:
        """Windows and chunks."""
        for field in ("window", "chunk"):
            value, fact = getattr(mask, field), getattr(one, field)
            decided = value is None and field in mask.model_fields_set
            if decided or value == fact or all(getattr(other, field) is None for other in facts):
                continue
            has, valid = f"no {field}", "leave it out"
            if fact is not None:
                has = f"{field}={fact}"
                valid = f"give mask=Mask({has}), or Mask({field}=None) where all tokens are meant"
            yield _differs(self.op, f"mask.{field}", value, has, one, valid)


def check_attention(attention: Attention, kernels: KernelSet) -> None:
    """Raise ValueError where attention is not what the set's model states."""
    facts = sorted(layer_facts(kernels, attention.op.name), key=lambda one: one.window is None and one.chunk is None)
    found = [list(attention.differences(one, facts)) for one in facts]
    softmax_scale(attention.op.name, attention.scale, kernels)
    if found and all(found):
        raise ValueError(min(found, key=len)[0])


def check_listed_window(op: Op, window: int | None, kernels: KernelSet) -> None:
    """Raise ValueError where lists have a window that no layers of the set's model have."""
    windows = {one.window for one in layer_facts(kernels, op.name)} - {None}
    if window is not None and windows and window not in windows:
        has = ", ".join(str(one) for one in sorted(filter(None, windows)))
        raise ValueError(
            f"window: got {window} in {op.name}, and the set's model has layers with window={has}; give that one, or leave it "
            "out of the model"
        )


def rope_source(rope: Rope | str | None) -> str:
    """Where an operation's RoPE comes from: "spec", or "model: rope" of "model" and "local"."""
    return "model: rope" if isinstance(rope, str) else "spec"


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Fields of an operation that changes new rows of q and k; `norms` has those of the rows that it takes."""

    op: Op
    norms: Mapping[str, Norm | None]
    rope: Rope | str | None

    def differences(self, kernels: KernelSet, one: LayerFacts) -> Iterator[str]:
        """A message for each fact of one kind of layers that the operation does not have."""
        if self.rope is None and one.rope is not None and "rope" not in self.op.model_fields_set:
            valid = 'give rope="model" or a Rope, or rope=None where rows come rotated'
            yield _differs(self.op, "rope", None, "a rope", one, valid)
        if isinstance(self.rope, Rope) and one.rope is not None:
            dims = kernels.kv.rope_part or kernels.kv.head_dim
            for field, mine, its in zip(
                _ROPE_FIELDS, _rope_fields(self.rope, dims), _rope_fields(one.rope, dims), strict=True
            ):
                if mine != its:
                    has, valid = f"rope.{field}={as_written(its)}", 'give rope="model", or one rope in both places'
                    yield _differs(self.op, f"rope.{field}", mine, has, one, valid)
        for field, norm in self.norms.items():
            if one.qk_norm is None or (norm is None and field in self.op.model_fields_set):
                continue
            over = None if norm is None else "row" if norm.whole_row else "head"
            heads = kernels.q_heads if field == "q_norm" else kernels.kv.kv_heads
            if over != one.qk_norm and (over is None or heads > 1):
                valid = f'give {field}=RmsNorm(over="{one.qk_norm}"), or {field}=None where rows come normed'
                got = over and f"a norm over each {over}"
                yield _differs(self.op, field, got, f'qk_norm="{one.qk_norm}"', one, valid)


def check_rows(rows: StoredRows, kernels: KernelSet) -> None:
    """Raise ValueError where new rows are not normed and rotated as the set's model states."""
    found = [list(rows.differences(kernels, one)) for one in layer_facts(kernels, rows.op.name)]
    if found and all(found):
        raise ValueError(min(found, key=len)[0])


def _rope_fields(rope: Rope, dims: int) -> tuple[object, ...]:
    """Fields of a rope that say how rows of `dims` elements rotate."""
    return rope.style, rope.theta, rope.scaling, rope.dim or dims, rope.proportional


def _differs(op: Op, field: str, got: object, fact: str, one: LayerFacts, valid: str) -> str:
    shown = got if isinstance(got, str) else as_written(got)
    if field.partition(".")[0] not in type(op).model_fields:
        valid = f"{op.name} has no such field; leave it out of the model where attention is meant without it"
    return f"{field}: got {shown} in {op.name}, and the set's model has {fact}{one.where}; {valid}"
