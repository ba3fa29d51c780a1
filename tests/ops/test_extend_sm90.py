"""extend by warpgroups (sm_90a) against the oracle in float64, on the CPU machine in check mode."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import (
    Block,
    Continuous,
    Dense,
    KernelSet,
    Layout,
    Mask,
    Paged,
    PerKV,
    Quant,
    Ragged,
    Ring,
    Score,
    ops,
    presets,
)
from kvgen.cli.attention_cycles import kernel_of
from kvgen.codegen.emit import render_device, render_set, units_of
from kvgen.compile import Unit, compile_many, default_cache
from kvgen.compile.sass import count, histogram
from kvgen.cycles.kernel import Kernel, reference
from kvgen.errors import CompileError
from kvgen.lowering.attention.extend_sm90 import ExtendSm90, by_rows
from kvgen.schema.loader import LoadedSet
from tests.compile.test_sass import needs_tool
from tests.support.batches import PLAIN
from tests.support.decode_steps import step as decode_step
from tests.support.extend_steps import hold_bits_of_rows, step, steps


def hides(s: Any, at: Any) -> Any:
    """Every eleventh token is hidden, for one query head by another count."""
    from kvgen import score

    return score.where((at.token + at.q_head) % 11 == 5, float("-inf"), s * 0.5)


def _set(name: str, cache: Any, group: int, **fields: Any) -> KernelSet:
    return KernelSet(
        name=f"extend_wg_{name}",
        q_heads=cache.kv_heads * group,
        cache=cache,
        ops=(ops.Extend(**fields),),
        arch=("sm_90a",),
    )


def _paged(kind: str, heads: int, dim: int, page: int, **fields: Any) -> Paged:
    return Paged(dtype=kind, kv_heads=heads, head_dim=dim, page_size=page, **fields)


def _codes(
    name: str, kind: str, dim: int, quant: Quant | None = None, *, group: int = 4, page: int = 16, **fields: Any
) -> KernelSet:
    """A set of two kv heads whose K and V are of codes."""
    of_cache = {n: fields.pop(n) for n in ("layout", "k_quant", "v_quant") if n in fields}
    return _set(name, _paged(kind, 2, dim, page, quant=quant, **of_cache), group, **fields)


E8M0: Final[dict[str, Any]] = {"scale_dtype": "e8m0", "recipe": "pow2"}
_APART = Layout(k="page layer token head dim", v="page layer token head dim")
_POINTERS = Layout(k="page token head dim", v="page token head dim", layers="pointers")


def _nvfp4(recipe: str, dim: int, **fields: Any) -> KernelSet:
    """A set with a decode beside its extend."""
    quant = Quant(dtype="e2m1", scale_dtype="e4m3", recipe=recipe)  # type: ignore[arg-type]
    given = {"k_quant": quant, "layout": _APART} | fields if fields else {"quant": quant}
    alone = _codes(f"nvfp4_{recipe}_{dim}", "bf16", dim, group=2, **given)
    return KernelSet(**{**dict(alone), "ops": (*alone.ops, ops.Decode())})


# Both recipes, of one table of scales and of two. Every run has the one whose codes are rounded once more, of K, beside V with
# zero points of several groups.
_ZEROS = Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=32))
NVFP4: Final = {
    s.name: s
    for s in (
        _nvfp4("max", 128, v_quant=_ZEROS),
        *(_nvfp4(recipe, dim) for recipe, dim in (("max", 64), ("global", 128), ("global", 64))),
    )
}

# What every run has, and what a campaign has besides.
SETS: Final[dict[str, KernelSet]] = {
    "llama": _set("llama", _paged("bf16", 2, 128, 16), 4),
    "window": _set(
        "window",
        _paged("f16", 1, 64, 64),
        7,
        mask=Mask(window=33),
        sinks="lse",
        lse_empty="inf",
        q_dtype="e4m3",
        out_dtype="e4m3",
    ),
    "wide": _set(
        "wide",
        presets.vllm_hnd(dtype="bf16", kv_heads=2, head_dim=256, page_size=64),
        3,
        mask=Mask(causal=False, ahead=3),
        sinks="out",
        out_dtype="f32",
    ),
}
SETS |= {
    "fp8": _codes("fp8", "bf16", 64, Quant(dtype="e4m3", scale_dtype="f32")),
}
SETS["mxfp4"] = _codes("mxfp4", "bf16", 64, Quant(dtype="e2m1", **E8M0, block=Block(dim=32)))
MORE: Final = {
    "rows": _set("rows", presets.sglang(dtype="bf16", kv_heads=2, head_dim=128), 3),
    "int4": _codes("int4", "bf16", 128, Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=32))),
    "mxfp8": _codes("mxfp8", "bf16", 128, Quant(dtype="e4m3", **E8M0, block=Block(dim=32)), mask=Mask(window=70)),
    "mxfp4_sixteens": _codes("mxfp4_sixteens", "bf16", 128, Quant(dtype="e2m1", **E8M0, block=Block(dim=16)), group=3),
    "mxfp8_halves": _codes(
        "mxfp8_halves", "bf16", 128, Quant(dtype="e5m2", **E8M0, block=Block(dim=64)), split="invariant", chunk=256
    ),
    "fp8_plain": _codes("fp8_plain", "bf16", 128, Quant(dtype="e4m3", scale_dtype=None), split="invariant", chunk=256),
    "fp8_given": _codes(
        "fp8_given", "f16", 64, Quant(dtype="e5m2", scale="given", scale_dtype="f32", block=Block(token=None)), q_dtype="e4m3"
    ),
    "int8": _codes("int8", "f16", 128, Quant(dtype="i8", scale_dtype="f16"), sinks="out"),
    "int8_zero": _codes("int8_zero", "bf16", 128, Quant(dtype="i8", scale_dtype="f16", zero=True), mask=Mask(window=50)),
    "nvfp4": _codes(
        "nvfp4",
        "bf16",
        64,
        Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", block=Block(dim=16)),
        page=8,
    ),
    "codes_of_both": _codes(
        "codes_of_both",
        "bf16",
        128,
        None,
        layout=_APART,
        k_quant=Quant(dtype="i8", scale_dtype="f32"),
        v_quant=Quant(dtype="i4", scale_dtype="f32"),
    ),
    "invariant": _set("invariant", _paged("bf16", 1, 64, 16), 4, split="invariant", chunk=256),
    "mla": _set("mla", _paged("bf16", 1, 192, 64, v_head_dim=128, layout=_APART), 1),
    "tree": _set("tree", _paged("bf16", 2, 64, 8), 4, mask=Mask(tree="packed"), score=Score(softcap=8.0)),
    "function": _set("function", _paged("f16", 2, 64, 16), 4, mask=Mask(causal=False, padding=True), score=Score(function=hides)),
    "full": _set("full", _paged("bf16", 2, 64, 256), 4, mask=Mask(causal=False), cross=True),
    "ragged": _set("ragged", Ragged(dtype="bf16", kv_heads=2, head_dim=192, v_head_dim=128), 1),
    "ragged_half": _set("ragged_half", Ragged(dtype="f16", kv_heads=2, head_dim=64), 4, mask=Mask(causal=False)),
    "block": _set("block", Continuous(dtype="f16", kv_heads=2, head_dim=128, max_tokens=310, table_dtype="i64"), 4),
    "page_4": _set(
        "page_4", _paged("f16", 2, 64, 4, table=Dense(id_multiplier=2), lengths="after"), 4
    ),
    "ring": _set("ring", _paged("bf16", 2, 64, 1, table=Ring(window=40, dtype="i64"), lengths="after"), 4),
    "wide_rows": _set("wide_rows", presets.sglang(dtype="bf16", kv_heads=1, head_dim=256), 4, sinks="out"),
    "mask": _set("mask", _paged("bf16", 1, 64, 16), 12, mask=Mask(tree="mask")),
    "bias": _set("bias", _paged("f16", 2, 128, 16), 2, score=Score(bias=True, alibi=True)),
    "falcon": _set("falcon", _paged("bf16", 1, 64, 16, layout="page kv layer token dim", lengths="after"), 71),
    "per_kv": _set(
        "per_kv", _paged("f16", 2, 64, 16, v_head_dim=128, layout=_POINTERS, table=PerKV(dtype="u32", id_multiplier=2)), 2
    ),
}  # fmt: skip
CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
DRAWN: Final = SETS | MORE if CAMPAIGN else SETS


@pytest.mark.parametrize("name", SETS | MORE | NVFP4)
def test_kernel_has_warpgroups(name: str) -> None:
    kernels = (SETS | MORE | NVFP4)[name]
    plan, _ = kernels.ops[0].plan(kernels)
    assert plan.template == "ops/extend_sm90.cu.j2"


def test_tokens_that_wait_to_be_quantized_have_none() -> None:
    """Neither the newest tokens of a group nor scales of channels are read by the warps that widen."""
    waiting = Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(token=32, dim=1), residual=32)
    kernels = _codes("waiting", "f16", 128, page=64, layout=_APART, k_quant=waiting, v_quant=_ZEROS)
    assert {plan.template for plan in kernels.ops[0].plan(kernels)} == {"ops/extend_mma.cu.j2", "ops/extend_plan.cu.j2"}
    assert not any(plan.by_arch for plan in kernels.ops[0].plan(kernels))


def test_without_turns_stages_are_even() -> None:
    """Else both warpgroups of a narrow entry would have tiles in the same stage: the compiler refuses an odd ring."""
    found = {name: kernels.ops[0].plan(kernels)[0].context for name, kernels in (SETS | MORE).items()}
    free = {name: c.stages for name, c in found.items() if isinstance(c, ExtendSm90) and not c.ping_pong}
    assert free and all(n % 2 == 0 for n in free.values())
    unit, stages = unit_of(SETS["window"]), free["window"]
    odd = unit.text.replace(f"kStages = {stages}", f"kStages = {stages - 1}")
    assert odd != unit.text
    with pytest.raises(CompileError, match="without turns"):
        compile_many([(replace(unit, text=odd), "sm_90a", "cubin")], cache=None)


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=4 if "KVGEN_FAMILY" in os.environ else 2)
@given(data=st.data())
def test_drawn_steps(name: str, data: Any) -> None:
    data.draw(steps(DRAWN[name], most=300 if CAMPAIGN else 180)).check(lse=data.draw(st.booleans()))


@pytest.mark.parametrize("name", NVFP4 if "KVGEN_FAMILY" in os.environ else list(NVFP4)[:1])
def test_extend_and_decode_of_nvfp4(name: str) -> None:
    """Rows of prompts, and the last row of each by decode: the oracle's."""
    batch = replace(PLAIN, totals=(150, 40, 9), new=(0, 0, 0), fill="nan", schedule=7, padding=1)
    step(NVFP4[name], batch, (33, 1, 9)).check()
    decode_step(NVFP4[name], batch).check()


def unit_of(kernels: KernelSet) -> Unit:
    """The set's extend."""
    loaded = LoadedSet(kernels, "tests/ops/test_extend_sm90.py", "")
    files = render_device() | {f.path: f for f in render_set(loaded).values()}
    return next(u for u in units_of(loaded, files, "generated") if u.name.endswith("/extend"))


def machine_code(kernels: KernelSet) -> Kernel:
    """The unit of the set's extend on sm_90a, as it ships."""
    unit = unit_of(kernels)
    (image,) = compile_many([(unit, "sm_90a", "cubin")], cache=default_cache())
    return kernel_of(image, kernels.ops[0].plan(kernels)[0], unit.text)


@needs_tool
@pytest.mark.parametrize("name", DRAWN | NVFP4 if "KVGEN_FAMILY" in os.environ else ["llama", "fp8"])
def test_machine_code(name: str) -> None:
    """Products of a warpgroup are one chain, registers move, nothing spills. Where tokens have 128 dims or more, a trip takes no
    more than 1.15 of what its products take."""
    kernels = (DRAWN | NVFP4)[name]
    kernel = machine_code(kernels)
    facts = kernel.facts
    assert (facts.serialised_products, facts.setmaxnreg_dropped, facts.local_accesses) == (0, 0, 0)
    found = histogram(kernel.listing)
    assert count(found, "USETMAXREG") == 2 and count(found, "HGMMA") > 0
    # Tensor copies of K and of V, of codes those of the first tile ahead of the loop too; or rows that arrive at mbarriers.
    codes = kernels.kv.quants["k"] is not None
    copies = 4 if codes else 2
    assert (count(found, "UTMALDG"), count(found, "ARRIVES")) == ((0, 2) if by_rows(kernels.kv) else (copies, 0))
    device = reference("sm_90a")
    assert device is not None
    if kernels.kv.head_dim >= 128 and name != "bias" and not codes:
        run = kernel.replay(device)
        assert run is not None
        assert run.trip().cycles <= 1.15 * kernel.product_cycles(device)


@pytest.mark.parametrize("rows", [150, 14])
def test_a_garbage_value_is_that_of_rows_that_see_it(rows: int) -> None:
    """NaN and infinities in single dims of V, in tokens that some rows of a tile see: these rows have them there, all else keeps
    its bits. 14 rows have few columns, and every other tile of keys a warpgroup."""
    outs = []
    planted = {60: (3, np.nan), 61: (70, np.inf), 140: (127, -np.inf)}
    for garbage in (False, True):
        one = step(SETS["llama"], replace(PLAIN, totals=(150,), new=(0,), schedule=7), (rows,))
        for token, (dim, value) in planted.items():
            k, v = (one.scene.values(r.heads, r.dim) for r in one.scene.rows())
            if garbage:
                v[0, dim] = value
            one.scene.write(0, token, [k, v])
        out, lse, word = one.run()
        assert word == 0
        outs.append((out.astype(np.float32), lse))
    (was, was_lse), (out, lse) = outs
    assert was_lse.tobytes() == lse.tobytes()
    for token, (dim, value) in planted.items():
        first = max(0, token - (150 - rows))
        seen = out[first:, :4, dim]  # of kv head 0
        assert (np.isnan(seen) if np.isnan(value) else seen == value).all()
        out[first:, :4, dim] = was[first:, :4, dim]
    assert out.tobytes() == was.tobytes()


STEPS: Final = [((2500, 40), (3, 40), 16), ((300, 170, 5), (170, 100, 5) if CAMPAIGN else (90, 50, 5), 1)]


@pytest.mark.parametrize(("totals", "counts", "multiprocessors"), STEPS)
def test_blocks_and_schedules_agree(totals: tuple[int, ...], counts: tuple[int, ...], multiprocessors: int) -> None:
    """Keys of few rows that several blocks share, and blocks with several entries each: the oracle's, and the same bits whatever
    the order of the threads."""
    found = []
    for schedule in ("ascending", "descending", 7) if CAMPAIGN else ("ascending", 7):
        batch = replace(
            PLAIN, totals=totals, new=(0,) * len(totals), fill="inf", schedule=schedule, padding=1, leading=1
        )
        out, lse = step(SETS["llama"], batch, counts).check(multiprocessors=multiprocessors)
        found.append((out.tobytes(), lse.tobytes()))
    assert len(set(found)) == 1


# Requests of 4 to 68 columns over 1 to 5 tiles of keys; those of 64 and fewer are narrow.
NARROW: Final = ((1, 40), (1, 129), (15, 300), (16, 385), (17, 260), (0, 7), (3, 600))


@pytest.mark.parametrize(("multiprocessors", "bad_tile"), [(1, 1), (40, 0)])
def test_entries_of_few_columns(multiprocessors: int, bad_tile: int) -> None:
    """By blocks that have several, beside a prompt, or that share one: the oracle's. A page that is not there makes NaN of its
    request alone, whichever warpgroup reads it."""
    counts, totals = (*(n for n, _ in NARROW), 40), (*(n for _, n in NARROW), 90)
    found = []
    for bad in (False, True):
        batch = replace(PLAIN, totals=totals, new=(0,) * len(totals), fill="nan", schedule="ascending", padding=1)
        one = step(SETS["llama"], batch, counts)
        if bad:
            one.scene.tables["page_table"][2, 8 * bad_tile] = 10**6
        found.append(one.check(multiprocessors=multiprocessors))
    (right, right_lse), (out, lse) = found
    assert np.isnan(out[2:17].astype(np.float32)).all() and np.isnan(lse[2:17]).all()
    for rows in (slice(2), slice(17, None)):
        assert (out[rows].tobytes(), lse[rows].tobytes()) == (right[rows].tobytes(), right_lse[rows].tobytes())


def test_bits_of_a_row_are_its_own() -> None:
    """With fixed cuts: the same bits alone and as a decoding row, by parts, beside others, behind padding, and however many
    blocks share a tile of columns."""
    tries: list[tuple[int, int, tuple[int, ...]]] = [(430, 8, (1, 90)), (1, 1, (40,)), (1, 64, ()), (17, 4, (1,))]
    if "KVGEN_FAMILY" in os.environ:
        tries += [(rows, n, others) for rows in (2, 16, 33, 400) for n in (1, 7, 64) for others in ((), (1,), (300, 5))]
    hold_bits_of_rows(MORE["invariant"], 700, 430, tries)
