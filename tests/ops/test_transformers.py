"""append's norms and RoPE against what transformers' own modules answered, in f32 and with a bf16 cache."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from kvgen import KernelSet, Latent, Model, Paged, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import cache_rows
from kvgen.reference.rope import rotate_error
from kvgen.reference.rounding import ulp
from kvgen.runtime.cpu import machine
from kvgen.schema.model import LongRopeScaling
from tests.reference.golden import Golden, golden
from tests.support.harness import package

LAYER = 1


def kernels_of(found: Golden, element: Any) -> KernelSet:
    """One head's cache with the checkpoint's append; LongRoPE by a table, as transformers chooses its factors."""
    _, heads, dim = found.arrays["x"].shape
    cache: Any
    if found.dims:
        cache = Latent(dtype=element, latent_dim=dim - found.dims, rope_dim=found.dims, page_size=16)
    else:
        layout = "page layer token head dim"
        cache = Paged(dtype=element, kv_heads=heads, head_dim=dim, page_size=16, stores="k", layout=layout)
    # The 512 latent elements are a part of their own here.
    norm = found.norm.model_copy(update={"dim": None}) if found.norm else None
    options: dict[str, Any] = {"k_norm": norm, "q_norm": None if found.dims else norm, "positions": "given"}
    if isinstance(found.rope.scaling, LongRopeScaling):
        options["angles"] = "halves"
    append = ops.Append(rope="local" if found.local else "model", sections=found.sections or (), **options)
    pattern: Any = {"window": 1024, "window_pattern": ("local", "full")} if found.rope.local_theta else {}
    model = Model(rope=found.rope, **pattern)
    # Short and long prompts differ in their table alone: one kernel turns by either.
    name = found.name.removesuffix("_short").removesuffix("_long")
    return KernelSet(name=f"hf_{name}_{element}", q_heads=heads, cache=cache, ops=[append], model=model)


# Rounded to bf16 too: no norm, norms that cast before and after their weights, a part that turns, angles of a table.
ROUNDED = ("llama_3_1_8b", "qwen3_8b", "gemma_3_4b_it_local", "deepseek_v3", "phi_3_5_mini_short", "phi_3_5_mini_long")


# In f32, which is nearest, all of them in the campaign; in every run those that are not rounded.
EXACT = [n for n in golden() if "KVGEN_FAMILY" in os.environ or n not in ROUNDED]


@pytest.mark.parametrize(("name", "element"), [(n, "f32") for n in EXACT] + [(n, "bf16") for n in ROUNDED])
def test_as_transformers(name: str, element: str) -> None:
    found = golden()[name]
    kernels = kernels_of(found, element)
    kind, wanted = dtype(element).numpy(), found.output("both" if found.norm else "rope")
    x = found.arrays["x"].astype(kind)
    rows, _, dim = x.shape
    positions = found.arrays["positions"].astype(np.int64)
    given: dict[str, Any] = {"q": x, "k": x, "q_out": np.zeros_like(x)}
    if found.dims:
        rotated = np.ascontiguousarray(x[..., -found.dims :])
        given |= {"q": rotated, "q_out": np.zeros_like(rotated)}
    if found.norm:
        names = ["k_weight"] if found.dims else ["q_weight", "k_weight"]
        given |= {n: found.arrays["weight"].astype(kind) for n in names}
    if "cos_sin" in {a.name for a in package(kernels).append.KERNEL.arguments}:
        given["cos_sin"] = np.concatenate([found.arrays["cos"], found.arrays["sin"]], axis=1).astype(np.float32)
        positions = np.arange(rows, dtype=np.int64)
    generated = package(kernels)
    pool = np.zeros([{"pages": 1, "layers": 2}.get(n, n) for n in generated.Cache.TENSORS[0].shape], kind)
    tables = {"lengths": np.zeros(1, np.int32), "page_table": np.zeros((1, 1), np.int32)}
    with machine(mode="check") as log:
        cache = generated.Cache(pool, **tables)
        generated.append(cache[LAYER], **given, positions=positions, row_offsets=np.array([0, rows], np.int32))
    assert len(log.launches) == 1
    (stored,) = cache_rows(kernels.cache, {"pool": pool}, LAYER)
    got = np.stack([stored.read(0, t) for t in range(rows)])
    allowed = _allowed(found, x, wanted, kind)
    _hold(got, wanted, allowed)
    part = slice(dim - found.dims, dim) if found.dims else slice(None)
    _hold(given["q_out"], wanted[..., part], allowed[..., part])


def _allowed(found: Golden, x: Any, wanted: Any, kind: Any) -> Any:
    """One ulp of the output's type at the larger of a pair, and what f32 arithmetic loses on either side; where a norm casts
    before its weights, one ulp more for a neighbour of that cast."""
    normed = found.arrays["norm"] if found.norm else found.arrays["x"]
    more: dict[str, Any] = {"dims": found.dims, "part": found.part}
    rounding = rotate_error(normed, found.rope, np.dtype(kind), **more)
    lost = rotate_error(normed, found.rope, np.dtype(np.float32), **more) + 4 * ulp(wanted, np.dtype(np.float32))
    allowed = rounding + lost + ulp(wanted, np.dtype(kind)) * ((normed != found.arrays["x"]) & (rounding == 0))
    if found.norm and found.norm.multiply == "after" and kind != np.float32:
        allowed = allowed + 2 * ulp(wanted, np.dtype(kind)).max(axis=-1, keepdims=True)
    return allowed


def _hold(got: Any, wanted: Any, allowed: Any) -> None:
    off = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    assert (off <= allowed).all(), f"off by {(off / allowed).max():.2f} of what is allowed"
