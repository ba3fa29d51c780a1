"""Each fact of a model is taken over by the operations of its set, or the set is refused: none is passed over."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvgen import KernelSet, Kind, Mask, Model, Paged, RmsNorm, Rope, Score, ops
from kvgen.errors import SpecError
from kvgen.schema.kernel_set import Op

CACHE = Paged(dtype="bf16", kv_heads=2, head_dim=64, page_size=16)
ROPE = Rope(style="neox", theta=1e6)
# Facts of attention, and the fields with which decode and extend have them.
ATTENTION: dict[str, tuple[Any, dict[str, Any]]] = {
    "alibi": (True, {"score": Score(alibi=True)}),
    "window": (128, {"mask": Mask(window=128)}),
    "sinks": (True, {"sinks": "lse"}),
    "logit_softcap": (30.0, {"score": Score(softcap=30.0)}),
}
SCALES = {"scale": 0.5, "query_pre_attn_scalar": 4.0}
ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rope": (ROPE, {"rope": "model"}),
    "qk_norm": ("head", {"q_norm": RmsNorm(), "k_norm": RmsNorm()}),
}
# Facts of the cache or of other sets' operations (kvgen/schema/cache_facts.py), and names.
OTHERS = {"architecture", "layers", "window_pattern", "mla", "indexer", "kinds", "pattern"}
OF_KINDS = {"name", "cache", "q_heads", "kv_heads", "head_dim", "v_head_dim", "kv_source", "compressed", "indexer"}


def with_facts(op: Op, **facts: Any) -> KernelSet:
    return KernelSet(name="facts", q_heads=8, cache=CACHE, ops=[op], model=Model(**facts) if facts else None)


def text(kernels: KernelSet) -> object:
    """The operation's context: all that its template reads."""
    return kernels.ops[0].plan(kernels)[0].context


def test_no_fact_is_forgotten_here() -> None:
    assert set(Model.model_fields) == ATTENTION.keys() | SCALES.keys() | ROWS.keys() | OTHERS
    assert set(Kind.model_fields) == (ATTENTION.keys() - {"alibi"}) | {"scale", "chunk"} | ROWS.keys() | OF_KINDS


@pytest.mark.parametrize("kind", [ops.Decode, ops.Extend])
def test_attention_takes_a_scale_and_refuses_what_it_does_not_say(kind: type[Op]) -> None:
    plain = text(with_facts(kind()))
    for name, value in SCALES.items():
        assert text(with_facts(kind(), **{name: value})) == text(with_facts(kind(scale=0.5))) != plain
    for name, (value, fields) in ATTENTION.items():
        with pytest.raises(SpecError, match=f"and the set's model has {name}={value}"):
            with_facts(kind(), **{name: value})
        assert text(with_facts(kind(**fields), **{name: value})) == text(with_facts(kind(**fields))) != plain
    decided = {"mask": Mask(window=None), "score": None, "sinks": None}
    assert text(with_facts(kind(**decided), window=128, sinks=True, logit_softcap=30.0)) == plain
    own = Score(function=lambda s, at: s * 0.5)
    assert text(with_facts(kind(score=own), alibi=True)) == text(with_facts(kind(score=own)))


def test_append_takes_the_model_s_rope_and_norms_or_is_refused() -> None:
    plain = text(with_facts(ops.Append()))
    for name, (value, fields) in ROWS.items():
        with pytest.raises(SpecError, match="in append, and the set's model has "):
            with_facts(ops.Append(), **{name: value})
        assert text(with_facts(ops.Append(**fields), **{name: value})) != plain
        decided = dict.fromkeys(fields)
        assert text(with_facts(ops.Append(**decided), **{name: value})) == plain
    with_facts(ops.Append(inputs="q", q_norm=RmsNorm()), qk_norm="head")  # a layer that stores no K


def test_kinds_of_layers_are_served_by_one_that_agrees() -> None:
    kinds = (Kind(name="full", scale=0.5), Kind(name="local", scale=0.25, window=64))
    both: list[Op] = [ops.Decode(scale=0.5), ops.Decode(name="decode_local", mask=Mask(window=64), scale=0.25)]

    def made(ops_: list[Op], layers: dict[str, tuple[str, ...]]) -> KernelSet:
        model = Model(kinds=kinds, pattern=("full", "local"))
        return KernelSet(name="kinds", q_heads=8, cache=CACHE, ops=ops_, model=model, layers=layers)

    made(both, {})
    uses = {"full": ("decode",), "local": ("decode_local",)}
    taken = made([ops.Decode(), ops.Decode(name="decode_local", mask=Mask(window=64))], uses)
    assert [op.softmax_scale(taken) for op in taken.ops if isinstance(op, ops.Decode)] == [0.5, 0.25]
    with pytest.raises(SpecError, match=r"mask\.window: got none in decode_local, .* window=64 on its 'local' layers"):
        made([ops.Decode(), ops.Decode(name="decode_local")], uses)
    with pytest.raises(SpecError, match=r"scale: got 0\.5 in decode, .* a scale of 0\.25 on its 'local' layers"):
        made([ops.Decode(scale=0.5, mask=Mask(window=64))], {"local": ("decode",)})


def test_a_scale_that_nobody_states_is_of_the_head() -> None:
    op = ops.Extend()
    assert op.softmax_scale(with_facts(op, rope=ROPE)) == 1 / math.sqrt(64)
