"""A set for every way to store a cache, small, as a spec file's text: what the tools must cope with.

The ways to find a token are dealt out over them: every kind of page table belongs to one of the sets that always run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NAMES: Final = (
    *("cast", "given", "channels", "per_head", "per_token", "groups", "own", "nv", "tiles", "mixed", "kivi", "blocks"),
    *("latent", "latent_cast", "latent_row", "latent_rope"),
)
# Those whose kernels are compiled and run: one of every kind of tensor, codes, scales and operation
# (tests/verify/test_families.py counts them); in a campaign all.
FEWER: Final = ("cast", "given", "groups", "own", "tiles", "kivi", "blocks", "latent_row", "latent_rope")
RUN: Final = NAMES if "KVGEN_FAMILY" in os.environ else FEWER
SPEC: Final = '''"""Every way to store a cache."""

from typing import Any

from kvgen import CSR, Block, Continuous, KernelSet, Latent, Layout, Paged, PerKV, Quant, Ring, ops
from kvgen.schema.tables import Indirect, Mapped

SIZES: dict[str, Any] = {"dtype": "bf16", "kv_heads": 2, "head_dim": 32}
ALL = [ops.Append(), ops.Gather(), ops.Decode()]
LATENT: dict[str, Any] = {"dtype": "bf16", "latent_dim": 64, "rope_dim": 16, "page_size": 8}
ROWS = Layout(k="page token dim", layers="pointers")
KEYS = Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(token=8, dim=1), residual=8)
PER_TOKEN = Quant(dtype="i4", scale_dtype="f16", zero=True)
FP8 = {"dtype": "e4m3", "scale_dtype": "f32"}


def paged(name: str, page_size: int = 8, **quant: Any) -> KernelSet:
    return one(name, Paged(**SIZES, page_size=page_size, **quant), ALL)


def one(name: str, cache: Any, operations: Any) -> KernelSet:
    return KernelSet(name=name, q_heads=4, cache=cache, ops=operations, arch=["sm_80", "sm_90a"])


kernels = [
    paged("cast", quant=Quant(dtype="e4m3"), table=CSR(last_page_len=True), lengths="after"),
    paged(
        "given",
        quant=Quant(dtype="e5m2", scale_dtype="f32", scale="given", block=Block(token=None, head=None)),
        table=PerKV(dtype="i32", id_multiplier=2),
        layout=Layout(kv="page layer head token dim"),
    ),
    paged("channels", quant=Quant(dtype="i8", scale_dtype="f32", scale="given", block=Block(token=None, dim=1))),
    paged("per_head", quant=Quant(**FP8)),
    paged("per_token", quant=Quant(dtype="i8", scale_dtype="f16", block=Block(head=None))),
    paged(
        "groups",
        quant=Quant(dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=16), place="page"),
        table=Ring(window=20),
    ),
    paged("own", quant=Quant(dtype="i8", scale_dtype="bf16", zero=True, own_table=True)),
    paged("nv", quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="max")),
    one(
        "tiles",
        Paged(
            **(SIZES | {"head_dim": 64}),
            page_size=128,
            quant=Quant(dtype="e2m1", scale_dtype="e4m3", recipe="global", order="swizzled"),
            table=Mapped(),
        ),
        ALL,
    ),
    paged("mixed", k_quant=Quant(dtype="i8", scale_dtype="f32"), v_quant=Quant(dtype="e4m3")),
    one("kivi", Paged(**SIZES, page_size=16, k_quant=KEYS, v_quant=PER_TOKEN), [*ALL, ops.Seal()]),
    one("blocks", Continuous(**(SIZES | {"dtype": "f16"}), quant=Quant(dtype="i8", scale_dtype="f32")), ALL),
    one("latent", Latent(**LATENT), ALL[:2]),
    one("latent_cast", Latent(**LATENT, quant=Quant(dtype="e4m3")), ALL[:2]),
    one(
        "latent_row",
        Latent(**LATENT, quant=Quant(**FP8, block=Block(dim=32), place="row", recipe="pow2"), layout=ROWS),
        ALL[:2],
    ),
    one(
        "latent_rope",
        Latent(
            **(LATENT | {"page_size": 1}),
            table=Indirect(),
            layout=Layout(k="page token dim", rope="page token dim", layers="pointers"),
        ),
        ALL[:2],
    ),
]
'''


def write_project(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    """The spec of these sets in a project of its own, not built."""
    (folder / "specs").mkdir(parents=True)
    (folder / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    (folder / "specs" / "family.py").write_text(
        f"{SPEC}\nkernels = [k for k in kernels if k.name in {names}]\n", encoding="utf-8"
    )
