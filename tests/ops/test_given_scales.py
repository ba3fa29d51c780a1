"""Scales of the caller that are 0, negative, NaN or infinite: what is stored or read by one is NaN, and the scale is reported."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen import Block, ErrorWord, KernelSet, Paged, Quant, ops
from kvgen.architectures import Arch
from kvgen.layout.dtypes import FloatName, dtype
from kvgen.runtime.cpu import machine
from kvgen.runtime.faults import Fault
from kvgen.schema.kernel_set import Op
from kvgen.schema.quant import CodeName
from tests.support.harness import package

HEADS, GROUP, DIM, TOKENS = 2, 2, 64, 20
BF16, E4M3 = dtype("bf16").numpy(), dtype("e4m3").numpy()


def made(name: str, kind: FloatName, codes: CodeName, arch: Arch, *operations: Op) -> KernelSet:
    quant = Quant(dtype=codes, scale_dtype="f32", block=Block(token=None), scale="given")
    cache = Paged(dtype=kind, kv_heads=HEADS, head_dim=DIM, page_size=16, quant=quant, lengths="after")
    return KernelSet(name=name, q_heads=HEADS * GROUP, cache=cache, ops=operations, arch=[arch])


CODES = ops.Decode(q_dtype="e4m3", out_dtype="e4m3")
STORES = (ops.Append(), ops.Scatter(), ops.Gather())
# Tensor cores, products of warpgroups, CUDA cores.
SETS = [
    made("given_mma", "bf16", "e4m3", "sm_80", *STORES, CODES, ops.Extend()),
    made("given_wgmma", "bf16", "e4m3", "sm_90a", ops.Extend()),
    made("given_simt", "f32", "i8", "sm_80", *STORES, ops.Decode(), ops.Extend()),
]
BAD = [0.0, -1.0, math.nan, math.inf]


class Step:
    """One request of 20 tokens in two pages; a scale of `bad` at head `head` of `role`."""

    def __init__(self, kernels: KernelSet, role: str, head: int, bad: float) -> None:
        self.module, cache = package(kernels), kernels.kv
        rng = np.random.default_rng(7)
        self.kind: np.dtype[Any] = dtype(cache.dtype).numpy()
        code = dtype("e4m3" if cache.dtype == "bf16" else "i8").numpy()
        self.scales = {name: np.array([[[0.5], [0.25]]], np.float32) for name in "kv"}
        self.pool = np.zeros((2, 2, 1, 16, HEADS, DIM), code)
        self.pool[...] = rng.integers(-4, 5, self.pool.shape).astype(np.float32).astype(code)
        self.scales[role][0, head] = bad
        arguments = {f"{name}_scale": scale for name, scale in self.scales.items()}
        lengths, table = np.array([TOKENS], np.int32), np.array([[0, 1]], np.int32)
        self.cache = self.module.Cache(self.pool, lengths=lengths, page_table=table, **arguments)[0]
        self.offsets = np.array([0, TOKENS], np.int32)
        self.errors = ErrorWord("cpu")
        self.rng = rng

    def rows(self, count: int, heads: int = HEADS) -> NDArray[Any]:
        return self.rng.standard_normal((count, heads, DIM)).astype(self.kind)

    def query(self, kind: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """A row of q, and one of out."""
        q = self.rng.standard_normal((1, HEADS * GROUP, DIM)).astype(np.float32).astype(kind)
        return q, np.zeros_like(q)

    def reported(self) -> tuple[Fault, int, int] | None:
        found = self.errors.poll()
        return None if found is None else (found.code, found.request, found.position)


def finite(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Which heads of `[T, heads, dim]` are numbers throughout; the others are NaN throughout."""
    numbers = np.isfinite(x.astype(np.float64))
    heads = numbers.all(axis=(0, 2))
    assert not numbers[:, ~heads].any(), "in part"
    return np.asarray(heads)


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: kernels.name)
def test_a_scale_that_is_none_is_loud_in_writers_and_readers(kernels: KernelSet) -> None:
    for role, head, bad in [("k", 1, bad) for bad in BAD] + [("v", 0, 0.0), ("v", 1, -math.inf)]:
        step = Step(kernels, role, head, bad)
        word, wanted = step.errors, (Fault.SCALE, "kv".index(role), head)
        attended = np.arange(HEADS) != head
        others = np.ones(HEADS, bool)
        with machine(mode="check"):
            for name in [op.name for op in kernels.ops if op.name in ("decode", "extend")]:
                word.clear()
                q, out = step.query(E4M3 if name == "decode" and step.pool.dtype == E4M3 else step.kind)
                lse = np.zeros((1, HEADS * GROUP), np.float32)
                op, more = getattr(step.module, name), dict[str, Any]()
                if name == "extend":
                    more["workspace"] = op.workspace(max_rows=1, multiprocessors=2)
                    op.plan(step.cache, more["workspace"], row_offsets=np.array([0, 1], np.int32))
                op(step.cache, q, out, lse=lse, errors=word, **more)
                assert (finite(out) == np.repeat(attended, GROUP)).all(), (name, role, bad)
                assert (np.isfinite(lse[0]) == np.repeat(attended if role == "k" else others, GROUP)).all(), (name, bad)
                assert step.reported() == wanted, (name, role, bad)
            if "gather" not in [op.name for op in kernels.ops]:
                continue
            word.clear()
            k, v = np.zeros((TOKENS, HEADS, DIM), step.kind), np.zeros((TOKENS, HEADS, DIM), step.kind)
            step.module.gather(step.cache, step.offsets, k, v, errors=word)
            assert [*finite(k)] == [*(attended if role == "k" else others)], bad
            assert [*finite(v)] == [*(attended if role == "v" else others)], bad
            assert step.reported() == wanted
            for name in ("append", "scatter"):
                word.clear()
                before = step.pool.copy()
                getattr(step.module, name)(step.cache, step.rows(TOKENS), step.rows(TOKENS), step.offsets, errors=word)
                assert step.reported() == wanted, name
                codes = step.pool[:, "kv".index(role), 0, :, head].reshape(32, DIM)[:TOKENS]
                good = step.pool[:, "kv".index(role), 0, :, 1 - head].reshape(32, DIM)[:TOKENS]
                assert np.isfinite(good.astype(np.float32)).all()
                if step.pool.dtype == E4M3:  # codes that have a NaN
                    assert np.isnan(codes.astype(np.float32)).all(), name
                step.pool[...] = before


@pytest.mark.parametrize(("name", "request_of"), [("q_scale", 2), ("out_scale", 3)])
def test_scales_of_codes_of_q_and_out_are_held_to_the_same(name: str, request_of: int) -> None:
    for bad in BAD:
        step = Step(SETS[0], "k", 0, 0.5)
        q, out = step.query(E4M3)
        scale = {name: np.array([bad], np.float32)}
        with machine(mode="check"):
            step.module.decode(step.cache, q, out, row_offsets=np.array([0, 1], np.int32), errors=step.errors, **scale)
        assert np.isnan(out.astype(np.float32)).all(), bad
        assert step.reported() == (Fault.SCALE, request_of, 0)
        assert f"SCALE: {name} is 0, negative or not finite" in str(step.errors.poll())


def test_a_scale_above_all_blocks_is_held_to_the_same() -> None:
    quant = Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global")
    cache = Paged(dtype="bf16", kv_heads=HEADS, head_dim=DIM, page_size=16, quant=quant, lengths="after")
    kernels = KernelSet(name="given_global", q_heads=HEADS, cache=cache, ops=[ops.Gather()], arch=["sm_80"])
    pool = np.full((1, 2, 1, 16, HEADS, DIM // 2), 0x22, np.uint8)
    scales = np.ones((1, 2, 1, 16, HEADS, DIM // 16), E4M3)
    given = {"k_global_scale": np.array([[0.0]], np.float32), "v_global_scale": np.array([[0.5]], np.float32)}
    lengths, table = np.array([3], np.int32), np.array([[0]], np.int32)
    module, errors = package(kernels), ErrorWord("cpu")
    k, v = np.zeros((3, HEADS, DIM), BF16), np.zeros((3, HEADS, DIM), BF16)
    with machine(mode="check"):
        layer = module.Cache(pool, scales=scales, lengths=lengths, page_table=table, **given)[0]
        module.gather(layer, np.array([0, 3], np.int32), k, v, errors=errors)
    found = errors.poll()
    assert np.isnan(k.astype(np.float32)).all() and (v.astype(np.float32) == 0.5).all()
    assert found is not None and (found.code, found.request) == (Fault.SCALE, 4)


def test_good_scales_are_not_reported() -> None:
    step = Step(SETS[0], "k", 0, 1e-30)
    with machine(mode="check"):
        k, v = step.rows(TOKENS), step.rows(TOKENS)
        step.module.gather(step.cache, step.offsets, k, v, errors=step.errors)
    assert step.reported() is None and np.isfinite(k.astype(np.float32)).all()


@pytest.mark.parametrize("kernels", SETS[:2], ids=lambda kernels: kernels.name)
def test_a_scale_of_all_dims_rounds_no_element_of_q(kernels: KernelSet) -> None:
    """e4m3 codes, and q of few bits: scores are exact but for sums in f32, whatever the scale."""
    step = Step(kernels, "k", 0, 0.3)
    step.scales["k"][0, 1] = 0.7
    q, out = step.query(step.kind)
    lse = np.zeros((1, HEADS * GROUP), np.float32)
    extend = step.module.extend
    with machine(mode="check"):
        workspace = extend.workspace(max_rows=1, multiprocessors=2)
        extend.plan(step.cache, workspace, row_offsets=np.array([0, 1], np.int32))
        extend(step.cache, q, out, workspace, lse=lse)
    k = (
        step.pool[:, 0, 0].reshape(32, HEADS, DIM)[:TOKENS].astype(np.float64)
        * step.scales["k"][0, :, 0].astype(np.float64)[:, None]
    )
    scores = np.einsum("hd,nhd->hn", q[0].astype(np.float64), np.repeat(k, GROUP, axis=1)) / math.sqrt(DIM)
    assert np.abs(np.log(np.exp(scores).sum(axis=1)) - lse[0]).max() < 3e-6
