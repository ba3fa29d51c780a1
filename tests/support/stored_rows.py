"""Operations that change the step's rows where they are stored: everything else stays, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvgen import Block, KernelSet, Latent, Paged, Quant, ops
from kvgen.layout.dtypes import dtype
from kvgen.reference import norm_cache, rotate_cache
from kvgen.runtime import describe
from kvgen.runtime.cpu import machine
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import Op
from kvgen.schema.model import Rope
from kvgen.schema.norm import LayerNorm, RmsNorm
from tests.ops.test_fused import check_q, check_row, fill
from tests.support.append_sets import GEMMA, NEOX, YARN
from tests.support.batches import PLAIN, Batch
from tests.support.cache_matrix import CHOSEN, FEW_BITS, chosen
from tests.support.harness import on_machine, package
from tests.support.memory import rows_array
from tests.support.scenes import Scene

# Which operations each cache has. Both find rows and read and write them in the same way, so that each kind of table, of layout
# and of storing is met by one of them; by both: plain values, codes with scales, with zero points, of half a byte, given scales.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "dense": ("norm_k", "norm_v", "rotate", "rotate_k"),
    "hnd": ("norm_k",),
    "kv_inside": ("rotate",),
    "flashinfer": ("rotate",),
    "per_kv": ("norm_v", "rotate_k"),
    "indirect": ("norm_k",),
    "ring": ("norm_k",),
    "continuous": ("rotate",),
    "continuous_open": ("norm_k",),
    "latent": ("norm_k", "rotate"),
    "k_only": ("rotate",),
    "xpacked": ("norm_v", "norm_plain"),
    "swizzled": ("rotate_k",),
    "heads_outermost": ("norm_v", "rotate_k"),
    "latent_row": ("norm_k",),
    "latent_pool": ("rotate",),
    "fp8": ("norm_k", "norm_layer"),
    "given": ("norm_k", "norm_v", "rotate", "norm_plain"),
    "mixed": ("norm_v", "rotate", "rotate_first"),
    "int8_own_table": ("norm_k", "rotate_k"),
    "int4_in_page": ("norm_k", "rotate"),
    "nvfp4": ("rotate",),
    "nvfp4_swizzled": ("norm_k",),
}

if FEW_BITS:
    OPERATIONS |= {"narrow_rows": ("norm_k", "rotate"), "narrow_pool": ("norm_v", "rotate_k")}


def operations(cache: Cache) -> Sequence[Op]:
    (has,) = (OPERATIONS[name] for name in OPERATIONS if CHOSEN[name] is cache)
    whole = "row" if not cache.rope_part and cache.kv_heads > 1 else "head"
    rope = YARN if cache.rope_part else NEOX
    found: tuple[Op, ...] = (
        ops.NormCache(name="norm_k", norm=RmsNorm(over=whole) if whole == "row" else RmsNorm()),  # type: ignore[arg-type]
        ops.NormCache(name="norm_v", role="v", norm=GEMMA),
        ops.RotateCache(name="rotate", rope=rope),
        ops.RotateCache(name="rotate_k", rope=rope, q_out="none"),
        ops.NormCache(name="norm_layer", norm=LayerNorm(bias=True, per_head=True)),
        ops.NormCache(name="norm_plain", role="v", norm=RmsNorm(over="row", weight=False)),
        ops.RotateCache(name="rotate_first", rope=Rope(style="neox", theta=1e4, dim=8, proportional=True)),
    )
    return [op for op in found if op.name in has]


SETS = chosen("inplace", operations, OPERATIONS)
# Latent rows that are codes throughout: those of the RoPE part are read, and stored anew, without a norm.
SETS["inplace_whole_codes"] = KernelSet(
    name="inplace_whole_codes",
    q_heads=1,
    cache=Latent(
        dtype="f16",
        latent_dim=32,
        rope_dim=16,
        page_size=3,
        quant=Quant(dtype="e4m3", scale_dtype="e8m0", recipe="pow2", block=Block(dim=16)),
        quant_rope=True,
    ),
    ops=[ops.NormCache(name="norm_k")],
    arch=["sm_90a"],
)
# A row is a block's, which has several groups of threads that could look for a row's request.
SETS["inplace_one_row"] = KernelSet(
    name="inplace_one_row",
    q_heads=16,
    cache=Paged(dtype="bf16", kv_heads=8, head_dim=128, page_size=4),
    ops=[ops.RotateCache(name="rotate", rope=NEOX)],
    arch=["sm_90a"],
)


def of_kind(name: str, kind: type[Op]) -> list[Op]:
    """The operations of a kind that a set has."""
    return [op for op in SETS[name].ops if isinstance(op, kind)]


def having(kind: type[Op]) -> list[str]:
    """The sets with operations of a kind."""
    return [name for name in SETS if of_kind(name, kind)]


def run(scene: Scene, name: str, rows: int, offsets: Any) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Launch one of the set's operations; returns the error word, its arguments, and the memory around q_out."""
    generated, kernels = package(scene.kernels), scene.kernels
    launcher, arguments, outer = getattr(generated, name), dict[str, Any](row_offsets=offsets), dict[str, Any]()
    for spec in launcher.KERNEL.arguments:
        if spec.name in ("errors", "row_offsets"):
            continue
        if spec.name == "num_rows":
            arguments["num_rows"] = rows
            continue
        shape = [n if isinstance(n, int) else rows for n in spec.shape]
        array = np.zeros(shape, dtype(spec.dtype).numpy())
        if spec.strided:
            array, outer[spec.name] = rows_array(rows, shape[1:], spec.dtype, strided=scene.batch.strided)
        if spec.access == "in":
            fill(scene, spec.name, array)
        arguments[spec.name] = array
    word = np.zeros(1, np.uint64)
    with on_machine(scene.batch):
        launcher(generated.Cache(**scene.arguments())[scene.layer], **arguments, errors=word)
    assert kernels is scene.kernels
    return int(word[0]), arguments, outer


def check(scene: Scene, name: str) -> int:
    """Run it on a scene whose step is stored, and compare all memory; returns the error word."""
    batch, cache = scene.batch, scene.cache
    op = next(o for o in scene.kernels.ops if o.name == name)
    role = getattr(op, "role", "k")
    rows = batch.leading + sum(batch.new) + batch.padding
    offsets = np.cumsum([batch.leading, *batch.new]).astype(dtype(cache.lengths_dtype).numpy())
    expected = scene.snapshot()
    which = "kv".index(role)
    before = scene.rows()[which]
    latent = before.dim - cache.rope_part if cache.rope_part else 0
    word, arguments, outer = run(scene, name, rows, offsets)
    theirs, q = scene.rows(expected)[which], None
    if isinstance(op, ops.RotateCache):
        assert isinstance(op.rope, Rope)
        found, change, q, wanted = rotate_cache(
            scene.view, theirs, rows, arguments.get("q"), row_offsets=offsets, rope=op.rope, latent=latent
        )
    else:
        assert isinstance(op, ops.NormCache)
        found, change, wanted = norm_cache(
            scene.view,
            theirs,
            which,
            rows,
            row_offsets=offsets,
            norm=op.norm,
            weight=arguments.get(f"{role}_weight"),
            norm_bias=arguments.get(f"{role}_norm_bias"),
            kind=dtype(cache.dtype).numpy(),
            latent=latent,
        )
    mine = scene.rows()[which]
    for row, at in enumerate(found):
        if at.places is None:
            continue
        check_row(mine, theirs, at.places[which], at.token, change, row, f"{role} of row {row}")
    for memory, parts in scene.snapshot().items():
        for part, right in zip(parts, expected[memory], strict=True):
            np.testing.assert_array_equal(part, right, err_msg=memory)
    if q is not None:
        check_q(arguments["q_out"], outer["q_out"], found, q)
    assert word == wanted, f"error word {describe(word)}, not {describe(wanted)}"
    return word


def stored(name: str, batch: Batch) -> Scene:
    """A scene whose step has been appended; lengths are those of the step's start."""
    kernels = SETS[name]
    before = [n - new for n, new in zip(batch.totals, batch.new, strict=True)]
    scene = Scene(kernels, batch, batch.totals if kernels.cache.lengths == "after" else before)
    scene.fill(batch.totals)
    return scene


def one_launch(kind: type[Op]) -> None:
    """Each operation of a kind is one launch."""
    name, step = "inplace_dense", replace(PLAIN, totals=(5, 40, 1), new=(2, 3, 1), padding=1)
    for op in of_kind(name, kind):
        with machine(mode="check") as log:
            scene = stored(name, step)
            generated = package(scene.kernels)
            launcher = getattr(generated, op.name)
            given: dict[str, Any] = {"row_offsets": np.array([0, 2, 5, 6], np.uint32)}
            for spec in launcher.KERNEL.arguments:
                if spec.name not in ("errors", "row_offsets"):
                    shape = [] if spec.name == "num_rows" else [n if isinstance(n, int) else 7 for n in spec.shape]
                    given[spec.name] = 7 if spec.name == "num_rows" else np.ones(shape, dtype(spec.dtype).numpy())
            launcher(generated.Cache(**scene.arguments())[0], **given)
        assert len(log.launches) == 1
