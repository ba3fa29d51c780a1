"""Rows that have their scales: K's and V's bytes of a token's head, in one row or one each, through the operations that read and
write them."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgen import Block, KernelSet, Layout, Paged, Quant, ops
from tests.ops.test_decode import decode_scene
from tests.support.batches import batches
from tests.support.extend_steps import steps
from tests.support.harness import check_append, check_decode, check_gather, index_name, offsets_of
from tests.support.scenes import Scene

INT8: Final = Quant(dtype="i8", scale_dtype="f32", place="row")


def rows(name: str, layout: Layout, *, head_dim: int = 32, extend: bool = False, **fields: Any) -> KernelSet:
    cache = Paged(dtype="bf16", kv_heads=2, head_dim=head_dim, page_size=16, layout=layout, lengths="after", **fields)
    more = (ops.Extend(),) if extend else ()
    return KernelSet(
        name=f"scaled_{name}",
        q_heads=8,
        cache=cache,
        ops=(ops.Append(), ops.Gather(), ops.Decode(split="none"), *more),
        arch=("sm_90a",),
    )


JOINT = Layout(kv="page head token kv dim", layers="pointers")
SETS: Final = {
    # vLLM's int8_per_token_head: 32 codes, an f32 of K; the same of V.
    "int8": rows("int8", JOINT, quant=INT8, extend=True),
    # K cast to fp8, V in 4 bits with scale and zero point: 32 + 16 + 4 bytes, padded to 56.
    "unlike": rows(
        "unlike",
        Layout(kv="page layer token head kv dim", row_align=8),
        k_quant=Quant(dtype="e4m3"),
        v_quant=Quant(dtype="i4", scale_dtype="f16", zero=True, place="row"),
    ),
    # nvfp4 on two levels: 16 bytes of codes, 2 of scales, a tensor each.
    "apart": rows(
        "apart",
        Layout(k="page layer head token dim", v="page layer token head dim"),
        quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", place="row"),
    ),
    "kv_axis": rows(
        "kv_axis",
        Layout(kv="page kv layer token head dim"),
        quant=Quant(dtype="e4m3", scale_dtype="f16", block=Block(dim=16), place="row"),
    ),
}


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_append_and_gather(name: str, data: Any) -> None:
    """Every byte of the pool is the oracle's, padding and other rows untouched; and is read back."""
    kernels = SETS[name]
    batch = data.draw(batches(kernels))
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(before)
    index = index_name(kernels, "append")
    check_append(
        scene, batch.leading + sum(batch.new) + batch.padding, row_offsets=offsets_of(batch.new, index, batch.leading)
    )
    scene = Scene(kernels, batch, batch.totals)
    scene.fill(batch.totals)
    check_gather(
        scene,
        batch.leading + sum(batch.totals) + batch.padding,
        row_offsets=offsets_of(batch.totals, index, batch.leading),
        starts=None,
    )


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=4)
@given(data=st.data())
def test_decode(name: str, data: Any) -> None:
    batch = data.draw(batches(SETS[name], least=0))
    scene, q = decode_scene(SETS[name], batch, len(batch.totals) + batch.padding)
    check_decode(scene, q, lse=data.draw(st.booleans()))


@settings(max_examples=3)
@given(data=st.data())
def test_extend(data: Any) -> None:
    data.draw(steps(SETS["int8"])).check()
