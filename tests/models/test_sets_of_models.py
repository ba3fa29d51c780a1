"""Sets of specs/ that `kvgen init` wrote: what it writes today, and the models that share one; states beside a cache."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from docpages.models import MOST_USED
from kvgen import Kind, Model, Paged, Rope, State, models, ops
from kvgen.errors import SpecError
from kvgen.schema.kernel_set import KernelSet, Op

from .checkpoints import ROOT, config


def checked_in(stem: str) -> list[KernelSet]:
    """The sets of a file of specs/."""
    kernels = runpy.run_path(str(ROOT / "specs" / f"{stem}.py"))["kernels"]
    return list(kernels) if isinstance(kernels, list) else [kernels]


def written(name: str, stem: str) -> list[KernelSet]:
    """The sets that init writes for a published config."""
    scope: dict[str, Any] = {}
    exec(models.spec_text(config(name), source="config.json", name=stem), scope)
    kernels = scope["kernels"]
    return list(kernels) if isinstance(kernels, list) else [kernels]


def op(kernels: KernelSet, name: str) -> Op:
    return next(one for one in kernels.ops if one.name == name)


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("qwen3_8b", "qwen3_8b"),
        ("qwen3_6_27b", "qwen3_6_27b"),
        ("qwen3_6_27b", "qwen3_5_27b"),
        ("qwen3_6_35b_a3b", "qwen3_6_35b_a3b"),
        ("qwen3_6_35b_a3b", "qwen3_5_35b_a3b"),
        ("gemma_4_26b_a4b", "gemma_4_26b_a4b"),
        ("gemma_4_31b", "gemma_4_31b"),
    ],
)
def test_a_set_is_what_init_writes_for_each_of_its_models(stem: str, name: str) -> None:
    assert checked_in(stem) == written(name, stem)


def test_models_of_one_geometry_share_a_set() -> None:
    """Qwen3-VL-2B and Qwen3-0.6B: one cache, one gather, one decode, an append each."""
    (shared,) = checked_in("qwen3_vl_2b")
    for name, append in (("qwen3_vl_2b", "append"), ("qwen3_0_6b", "append_text")):
        (alone,) = written(name, "qwen3_vl_2b")
        assert (alone.q_heads, alone.cache) == (shared.q_heads, shared.cache)
        assert op(alone, "gather") == op(shared, "gather") and op(alone, "decode") == op(shared, "decode")
        theirs, ours = op(alone, "append"), op(shared, append)
        rope = alone.model.rope if alone.model is not None else None
        assert theirs.model_copy(update={"name": append, "rope": rope}) == ours.model_copy(
            update={"rope": rope if ours.rope == "model" else ours.rope}
        )


def test_each_of_the_most_used_models_has_a_spec() -> None:
    assert len(MOST_USED) == 10
    for _, files, _ in MOST_USED:
        for file in files:
            assert (ROOT / "specs" / f"{file}.py").is_file()
            assert all((ROOT / "generated" / str(one.name or file)).is_dir() for one in checked_in(file))


# States beside a cache ------------------------------------------------------------------------------------------------

HYBRID = Model(
    architecture="Qwen3NextForCausalLM",
    layers=8,
    kinds=(
        Kind(name="linear", cache=False),
        Kind(name="full", q_heads=16, kv_heads=2, head_dim=256, rope=Rope(style="neox", theta=10_000_000.0, dim=64)),
    ),
    pattern=("linear", "linear", "linear", "full"),
)


def test_the_layers_of_a_hybrid_name_the_set_of_their_cache_or_their_states() -> None:
    attention = KernelSet(
        q_heads=16,
        cache=Paged(dtype="bf16", kv_heads=2, head_dim=256, page_size=544),
        ops=[ops.Append(rope=Rope(style="neox", theta=10_000_000.0, dim=64)), ops.Decode(), ops.CopyPages()],
        model=HYBRID,
        layers={"full": ["append", "decode", "copy_pages"]},
    )
    states = KernelSet(
        cache=State(bytes=1_097_728),
        ops=[ops.CopyPages(), ops.ZeroPages()],
        model=HYBRID,
        layers={"linear": ("copy_pages", "zero_pages")},
    )
    served = {kind: kernels for kernels in (attention, states) for kind in kernels.layers}
    assert HYBRID.kind_names == ("linear", "full") and set(served) == set(HYBRID.kind_names)
    used = [served[HYBRID.layer_name(layer)].layers[HYBRID.layer_name(layer)] for layer in range(8)]
    assert used == [("copy_pages", "zero_pages")] * 3 + [("append", "decode", "copy_pages")] + used[4:]
    assert used[4:] == used[:4]


def test_a_set_of_states_has_no_append_for_its_layers() -> None:
    with pytest.raises(SpecError, match=r"layers: got 'append' for 'linear' layers, which is no operation of the set"):
        KernelSet(
            cache=State(bytes=1024), ops=[ops.CopyPages()], model=HYBRID, layers={"linear": ("append", "copy_pages")}
        )
