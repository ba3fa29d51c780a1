"""append against transformers' attention layers: what q, K and V are when a layer attends, in f32 (make_rows.py recorded it)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgen import KernelSet, LayerNorm, Paged, PositionScale, RmsNorm, Rope, YarnScaling, ops
from kvgen.lowering.frequencies import inverse_frequencies
from kvgen.reference import cache_rows
from kvgen.reference.append import Change, changed
from kvgen.reference.rounding import ulp
from kvgen.runtime.cpu import machine
from tests.reference.golden import load
from tests.support.harness import package

F32: Final = np.dtype(np.float32)
L2: Final = RmsNorm(eps=1e-5, weight=False)
COHERE: Final = LayerNorm(per_head=True)
YARN: Final = YarnScaling(factor=16.0, original_max_positions=16384, mscale=1.0, mscale_all_dim=1.0)


@dataclass(frozen=True)
class Layer:
    """A layer of a model: the options of its append."""

    rope: Rope | None = None
    options: dict[str, Any] = field(default_factory=dict)


LAYERS: Final = {
    "llama4": Layer(Rope(style="interleaved", theta=500_000.0), {"q_norm": L2, "k_norm": L2, "norm_order": "after"}),
    "llama4_nope": Layer(None, {"position_scale": PositionScale(scale=0.1, period=3, offset=1)}),
    "qwen3_vl": Layer(
        Rope(style="neox", theta=5e6),
        {"q_norm": RmsNorm(), "k_norm": RmsNorm(), "sections": (24, 20, 20), "sections_order": "interleaved"},
    ),
    "gemma4": Layer(
        Rope(style="neox", theta=1e6, dim=128, proportional=True),
        {"q_norm": RmsNorm(multiply="before"), "k_norm": RmsNorm(multiply="before"), "v_norm": RmsNorm(weight=False)},
    ),
    "cohere": Layer(Rope(style="interleaved", theta=500_000.0), {"q_norm": COHERE, "k_norm": COHERE}),
    "phi": Layer(
        Rope(style="neox", theta=10_000.0, dim=16), {"q_norm": LayerNorm(bias=True), "k_norm": LayerNorm(bias=True)}
    ),
    "stablelm": Layer(Rope(style="neox", theta=10_000.0, dim=8), {"q_norm": COHERE, "k_norm": COHERE}),
    "hunyuan": Layer(
        Rope(style="neox", theta=10_000.0),
        {"q_norm": RmsNorm(eps=1e-5), "k_norm": RmsNorm(eps=1e-5), "norm_order": "after"},
    ),
    "ministral3": Layer(
        Rope(style="neox", theta=1e6, scaling=YARN), {"position_scale": PositionScale(scale=0.1, period=16384)}
    ),
}


@cache
def recorded(name: str) -> dict[str, NDArray[Any]]:
    """The arrays of a layer."""
    return {key.partition("/")[2]: a for key, a in load("rows").items() if key.startswith(f"{name}/")}


def test_all_layers_are_here() -> None:
    assert set(LAYERS) == {key.partition("/")[0] for key in load("rows")}


@pytest.mark.parametrize("name", [n for n, layer in LAYERS.items() if layer.rope])
def test_frequencies(name: str) -> None:
    """Bit for bit; of proportional RoPE those that are not 0."""
    rope, wanted = LAYERS[name].rope, recorded(name)["inv_freq"]
    assert rope is not None
    dim = recorded(name)["q"].shape[2]
    found = np.array(inverse_frequencies(rope, dim if rope.proportional else rope.dim or dim), np.float32)
    np.testing.assert_array_equal(found.view(np.int32), wanted[: len(found)].view(np.int32))
    assert not wanted[len(found) :].any()


def allowed(name: str, role: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """What the oracle makes of a role's rows, and how far f32 may be from it, transformers' own and the kernel's."""
    layer, arrays = LAYERS[name], recorded(name)
    options = {k: v for k, v in layer.options.items() if k in ("norm_order", "sections", "sections_order")}
    do = Change(
        norm=layer.options.get(f"{role}_norm"),
        weight=arrays.get(f"{role}_weight"),
        norm_bias=arrays.get(f"{role}_norm_bias"),
        rope=layer.rope if role != "v" else None,
        positions=arrays["positions"],
        position_scale=layer.options.get("position_scale") if role == "q" else None,
        **options,
    )
    change = changed(arrays[role], do)
    return change.rows, 2 * change.lost + 4 * ulp(np.abs(change.rows).max(axis=2, keepdims=True), F32)


@pytest.mark.parametrize("name", LAYERS)
def test_the_oracle_does_what_the_layer_does(name: str) -> None:
    for role in "qkv":
        wanted, lost = allowed(name, role)
        off = np.abs(recorded(name)[f"{role}_out"] - wanted)
        assert (off <= lost).all(), f"{role}: off by {(off / lost).max():.2f} of what f32 loses"
        assert (lost <= 2e-5 * max(1.0, np.abs(wanted).max())).all()  # so that another order of norm and RoPE is seen


# q alone turns as q beside K does: every layer in a campaign, in every run those with norms and scales of their own kind.
ALONE = tuple(LAYERS) if "KVGEN_FAMILY" in os.environ else ("llama4", "gemma4", "cohere", "phi", "ministral3")


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        pytest.param(n, alone, id=f"{n}-{how}")
        for n in LAYERS
        for alone, how in ((False, "stored"), (True, "q_alone"))
        if not alone or n in ALONE
    ],
)
def test_append_does_what_the_layer_does(name: str, alone: bool) -> None:
    """q, K and V of one request; and q alone, as a layer takes it that reads another layer's K and V."""
    layer, arrays = LAYERS[name], recorded(name)
    rows, heads, dim = arrays["k"].shape
    options = dict(layer.options)
    if alone:
        options = {key: value for key, value in options.items() if key not in ("k_norm", "v_norm")} | {"inputs": "q"}
    kernels = KernelSet(
        name=f"hf_rows_{name}{'_q' if alone else ''}",
        q_heads=arrays["q"].shape[1],
        cache=Paged(dtype="f32", kv_heads=heads, head_dim=dim, page_size=16),
        ops=[ops.Append(rope=layer.rope, positions="given", **options)],
    )
    generated = package(kernels)
    names = [a.name for a in generated.append.KERNEL.arguments]
    given = {n: arrays[n].copy() for n in names if n in arrays}
    given["positions"] = arrays["positions"].astype(np.int64)
    given |= {"q_out": np.zeros_like(arrays["q"]), "row_offsets": np.array([0, rows], np.int32)}
    pool = np.full([{"pages": 1, "layers": 1}.get(n, n) for n in generated.Cache.TENSORS[0].shape], 7, F32)
    with machine(mode="check") as log:
        cache = generated.Cache(pool, lengths=np.zeros(1, np.int32), page_table=np.zeros((1, 1), np.int32))
        generated.append(cache[0], **given)
    assert len(log.launches) == 1
    outputs = {"q": given["q_out"]}
    if alone:
        assert (pool == 7).all() and not {"k", "v", "k_weight"} & set(names)
    else:
        k, v = cache_rows(kernels.cache, {"pool": pool}, 0)
        outputs |= {role: np.stack([r.read(0, t) for t in range(rows)]) for role, r in (("k", k), ("v", v))}
    for role, got in outputs.items():
        _, lost = allowed(name, role)
        off = np.abs(got.astype(np.float64) - recorded(name)[f"{role}_out"])
        assert (off <= 2 * lost).all(), f"{role}: off by {(off / lost).max():.2f} of what f32 loses"
