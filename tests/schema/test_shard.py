"""Sets as GPUs share them: the heads of one, what goes with them, and the sets that cannot be shared so."""

from __future__ import annotations

from typing import Any

import pytest

import kvgen
from kvgen import Block, KernelSet, Kind, Latent, Model, Paged, Quant, RmsNorm, Score, State, ops, presets
from kvgen.errors import SpecError
from kvgen.schema.kernel_set import Op
from kvgen.schema.score import Tensor
from kvgen.schema.shard import shard, shares

HEADS: dict[str, Any] = {"dtype": "bf16", "kv_heads": 8, "head_dim": 128}


def made(*operations: Op, **fields: Any) -> KernelSet:
    """A set of 32 query heads over 8 KV heads, called llama."""
    own: dict[str, Any] = {"name": "llama", "q_heads": 32, "cache": Paged(**HEADS, page_size=16), "ops": operations}
    return KernelSet(**(own | {"ops": operations or (ops.Append(), ops.Decode())} | fields))


@pytest.mark.parametrize(("tp", "heads"), [(2, (16, 4)), (4, (8, 2)), (8, (4, 1)), (16, (2, 1)), (32, (1, 1))])
def test_heads_are_divided_and_kv_heads_copied(tp: int, heads: tuple[int, int]) -> None:
    whole = made()
    part = shard(whole, tp)
    assert (part.name, part.q_heads, part.kv.kv_heads) == (f"llama_tp{tp}", *heads)
    assert part == made(
        name=f"llama_tp{tp}", q_heads=heads[0], cache=Paged(**{**HEADS, "kv_heads": heads[1]}, page_size=16)
    )
    assert shard(whole, 1) is whole


@pytest.mark.parametrize("q_heads", [1, 6, 12, 40])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4])
def test_shards_hold_every_head_and_the_kv_head_that_it_reads(q_heads: int, kv_heads: int) -> None:
    """By the definition: GPU g has query heads g * q ... and KV heads g * kv // tp ..., and its groups are as in the model."""
    if q_heads % kv_heads:
        return
    group = q_heads // kv_heads
    for tp in range(1, q_heads + 1):
        if not shares(q_heads, kv_heads, tp):
            continue
        part = shard(made(q_heads=q_heads, cache=Paged(**{**HEADS, "kv_heads": kv_heads}, page_size=16)), tp)
        seen = []
        for gpu in range(tp):
            first = gpu * kv_heads // tp
            for head in range(part.q_heads):
                seen.append(gpu * part.q_heads + head)
                assert seen[-1] // group == first + head // part.group
        assert seen == list(range(q_heads))


def test_latent_rows_are_on_every_gpu() -> None:
    cache = Latent(dtype="bf16", latent_dim=512, rope_dim=64, page_size=64)
    part = shard(KernelSet(q_heads=128, cache=cache, ops=[ops.MlaDecode(scale=0.1)]), 8)
    assert (part.name, part.q_heads, part.cache) == ("", 16, cache)


def test_what_goes_with_the_heads() -> None:
    """Caches that operations read, kinds of layers, blocks of scales; an engine's layout stays."""
    other = Paged(**HEADS, page_size=64)
    kinds = (
        Kind(name="full", q_heads=32, kv_heads=8),
        Kind(name="wide", q_heads=64, kv_heads=2),
        Kind(name="state", cache=False),
    )
    model = Model(kinds=kinds, pattern=("full", "wide", "state"))
    whole = made(
        ops.Append(),
        ops.Convert(source=other),
        cache=presets.vllm(**HEADS, kv_cache_dtype="fp8_e4m3"),
        model=model,
        layers={"full": ("append",)},
    )
    part = shard(whole, 4)
    convert = part.ops[1]
    assert isinstance(convert, ops.Convert) and convert.source == other.model_copy(update={"kv_heads": 2})
    assert part.cache == presets.vllm(**{**HEADS, "kv_heads": 2}, kv_cache_dtype="fp8_e4m3")
    assert part.model is not None
    assert [(k.q_heads, k.kv_heads) for k in part.model.kinds] == [(8, 2), (16, 1), (None, None)]
    assert part.layers == whole.layers and part.arch == whole.arch
    quant = Quant(dtype="e4m3", scale_dtype="f32", block=Block(token=1, head=2))
    assert shard(made(cache=Paged(**HEADS, page_size=16, quant=quant)), 4).kv.kv_heads == 2


def test_norms_of_whole_rows() -> None:
    """Norms whose mean square is given, and that of a head that every GPU has, stay as they were."""
    given = ops.Append(q_norm=RmsNorm(over="row", mean_square="given"), k_norm=RmsNorm(over="row", mean_square="given"))
    part = shard(made(given), 4)
    assert (part.q_heads, part.kv.kv_heads, part.ops[0]) == (8, 2, given)
    alone = ops.Append(k_norm=RmsNorm(over="row"))
    assert shard(made(alone, cache=Paged(**{**HEADS, "kv_heads": 1}, page_size=16)), 4).ops[0] == alone


def slope_of_the_head(s: Any, at: Any, slopes: Any) -> Any:
    return s + slopes[at.q_head] * (at.token - at.position)


def bias_of_the_kv_head(s: Any, at: Any, table: Any) -> Any:
    return s + table[at.kv_head, at.token]


def number_of_the_head(s: Any, at: Any) -> Any:
    return s * (1.0 + at.q_head)


def element_by_the_number(s: Any, at: Any, slopes: Any) -> Any:
    return s + slopes[at.q_head + 1]


def head_of_another_axis(s: Any, at: Any, table: Any) -> Any:
    return s + table[at.kv_head]


def test_scores_that_read_a_tensor_of_heads() -> None:
    """The caller hands the shard's part of the tensor, as of `alibi_slopes`."""
    slopes = Score(function=slope_of_the_head, tensors={"slopes": Tensor("f32", ["q_heads"])})
    table = Score(function=bias_of_the_kv_head, tensors={"table": Tensor("f32", ["kv_heads", "n"])})
    for score in (Score(alibi=True), slopes, table):
        assert score.numbered is None
        part = shard(made(ops.Decode(score=score)), 2)
        assert part.q_heads == 16 and part.ops[0] == ops.Decode(score=score)


EVERY = "every GPU has the same number of query heads and whole KV heads; valid: 2, 4, 8, 16, 32"
ROW = "is over all heads of a token, which no GPU has"


def by_number(function: Any, **tensors: Tensor) -> KernelSet:
    return made(ops.Decode(score=Score(function=function, tensors=tensors)))


@pytest.mark.parametrize(
    ("whole", "tp", "said"),
    [
        (made(), 3, f"tp: got 3 for llama, of 32 query heads and 8 KV heads; {EVERY}"),
        (made(name=""), 12, f"tp: got 12 for the set, of 32 query heads and 8 KV heads; {EVERY}"),
        (made(), 0, "tp: got 0 for llama"),
        (made(), 64, "valid: 2, 4, 8, 16, 32"),
        (made(q_heads=8), 16, "valid: 2, 4, 8"),
        (made(q_heads=7, cache=Paged(**{**HEADS, "kv_heads": 7}, page_size=16)), 2, "valid: 7"),
        (made(model=Model(kinds=(Kind(name="full", q_heads=24, kv_heads=3),))), 4, "of 24 query heads and 3 KV heads; every"),
        (made(model=Model(kinds=(Kind(name="full", q_heads=24, kv_heads=3),))), 4, "valid: none"),
        (made(ops.Append(q_norm=RmsNorm(over="row"))), 2, f"tp: got 2 for llama; q_norm of append {ROW}"),
        (made(ops.Append(q_norm=RmsNorm(over="row"))), 2, "give the norm of ops.Append mean_square='given', and the call the"),
        (made(ops.NormCache(norm=RmsNorm(over="row"))), 2, f"norm of norm_cache {ROW}"),
        (by_number(number_of_the_head), 2, "the score function of decode computes with at.q_head, the number of a head on its"),
        (by_number(element_by_the_number, slopes=Tensor("f32", ["q_heads"])), 2, "tensor with the axis q_heads"),
        (by_number(head_of_another_axis, table=Tensor("f32", [8])), 2, "at.kv_head, the number"),
        (made(ops.SlicedAdd(columns=4096)), 2, "tp: got 2 for llama; sliced_add has columns=4096, of which kvgen"),
        (KernelSet(cache=State(bytes=4096), ops=[ops.CopyPages()], name="mamba"), 2, "got 2 for mamba, whose cache has states"),
        (
            made(cache=Paged(**HEADS, page_size=16, quant=Quant(dtype="e4m3", scale_dtype="f32", block=Block(token=1, head=4)))),
            8,
            "tp: got 8 for llama, whose shard would be no valid set: quant: got block.head=4 with kv_heads=1; blocks",
        ),
        (made(name="a" * 38), 2, "whose shard would be no valid set: name: got"),
        (made(), True, "tp: got True; it is how many GPUs share the heads: a whole number from 1 on"),
        (made(), "2", "tp: got '2'; it is how many GPUs"),
    ],
)  # fmt: skip
def test_sets_that_cannot_be_shared_so(whole: KernelSet, tp: Any, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        shard(whole, tp)
    assert said in str(caught.value)


def test_load_takes_the_shard() -> None:
    spec = KernelSet(q_heads=4, cache=Paged(dtype="f16", kv_heads=2, head_dim=16, page_size=4), ops=[ops.Gather()])
    assert kvgen.load(spec, tp=2) is kvgen.load(shard(spec, 2))
    assert repr(kvgen.load(spec, name="mine", tp=2).gather) == "mine_tp2.gather"
    with pytest.raises(SpecError, match="tp: got 3 for the set, of 4 query heads and 2 KV heads"):
        kvgen.load(spec, tp=3)
