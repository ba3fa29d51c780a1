"""Scales on their way to decode's products: every size of copy, words that other scales share, pages where no copy can begin."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np
import pytest

from benchmarks.decode_static import compiled
from kvgen import Block, KernelSet, Layout, Paged, Quant, ops
from kvgen.compile import default_cache
from kvgen.compile.sass import sass
from kvgen.cycles.facts import awaited_loads, work_loop
from kvgen.cycles.flow import blocks
from kvgen.layout.storage import PoolTensor
from kvgen.lowering.attention.decode_mma import DecodeMma
from tests.compile.test_sass import needs_tool
from tests.ops.test_decode import decode_scene
from tests.support.batches import PLAIN
from tests.support.harness import check_decode, index_name, offsets_of
from tests.support.memory import Raw, Tensor, aligned
from tests.support.scenes import Scene


def scaled(
    name: str, page: int, heads: int, dim: int, runs: tuple[int, int], **quant: Any
) -> tuple[KernelSet, tuple[int, int]]:
    """A set with decode alone, and how many scales of K and of V a copy brings."""
    rows, arch, kind = quant.pop("rows", 1), quant.pop("arch", "sm_90a"), quant.pop("kind", "bf16")
    own: dict[str, Any] = {"quant": Quant(**quant)} if "dtype" in quant else quant
    if (len(own) == 1 and "quant" not in own) or kind == "f16":  # K and V are no neighbours
        own["layout"] = Layout(k="page layer token head dim", v="page layer token head dim")
    cache = Paged(dtype=kind, kv_heads=heads, head_dim=dim, page_size=page, **own)
    decode = ops.Decode(rows=rows)
    return KernelSet(name=f"scales_{name}", q_heads=2 * heads, cache=cache, ops=(decode,), arch=(arch,)), runs


E8M0: Final[dict[str, Any]] = {"scale_dtype": "e8m0", "recipe": "pow2"}
I8: Final[dict[str, Any]] = {"dtype": "i8", "scale_dtype": "f16"}
MIXED: Final[dict[str, Any]] = {
    "k_quant": Quant(dtype="i8", scale_dtype="bf16"),
    "v_quant": Quant(dtype="e4m3", scale_dtype="f32"),
}


def kivi(tokens: int, codes: Literal["i4", "i8"], zero: bool) -> dict[str, Any]:
    """K with a scale a channel over `tokens`, the newest of which wait; V with one a group of 32 dims."""
    keys = Block(token=tokens, dim=1)
    return {
        "k_quant": Quant(dtype=codes, scale_dtype="f16", zero=zero, block=keys, residual=tokens),
        "v_quant": Quant(dtype=codes, scale_dtype="f16", zero=True, block=Block(dim=32)),
    }


SETS: Final = dict(
    words=scaled("words", 16, 4, 64, (2, 2), **I8),  # a word has the scales of the block's two heads
    odd=scaled("odd", 16, 3, 64, (1, 1), **I8),  # or those of one and a neighbour's
    lonely=scaled("lonely", 1, 1, 64, (0, 0), **I8),  # no word in a page
    two_stages=scaled("two_stages", 16, 1, 64, (1, 1), arch="sm_89", **I8),  # a tile's scales are stored in its own trip
    mixed=scaled("mixed", 16, 2, 64, (2, 1), **MIXED),
    zeros_rows=scaled("zeros_rows", 16, 2, 128, (2, 2), dtype="i8", scale_dtype="bf16", zero=True, rows=5),
    bytes=scaled("bytes", 16, 1, 64, (4, 4), dtype="i8", scale_dtype="f16", block=Block(dim=16), rows=1),
    nvfp4=scaled("nvfp4", 32, 2, 64, (4, 4), dtype="e2m1", scale_dtype="e4m3", recipe="global", block=Block(dim=16)),
    max=scaled("max", 16, 2, 64, (4, 4), dtype="e2m1", scale_dtype="e4m3", recipe="max"),
    max_short=scaled("max_short", 8, 1, 40, (1, 1), arch="sm_80", dtype="e2m1", scale_dtype="e4m3", recipe="max"),
    # Words of two heads' scales that have the end of one's and the begin of the other's.
    thirds=scaled("thirds", 16, 2, 96, (2, 2), dtype="i4", scale_dtype="f16", block=Block(dim=32)),
    kivi=scaled("kivi", 64, 2, 64, (1, 2), kind="f16", **kivi(32, "i4", True)),
    mxfp8=scaled("mxfp8", 16, 2, 64, (4, 4), arch="sm_80", dtype="e4m3", block=Block(dim=32), **E8M0),
    mxfp4=scaled("mxfp4", 16, 2, 128, (4, 4), dtype="e2m1", block=Block(dim=32), **E8M0),
    mxfp8_rows=scaled("mxfp8_rows", 16, 2, 64, (4, 4), dtype="e4m3", block=Block(dim=32), rows=5, **E8M0),
    mxfp4_rows=scaled("mxfp4_rows", 16, 2, 128, (4, 4), dtype="e2m1", block=Block(dim=32), rows=5, **E8M0),
    nvfp4_rows=scaled("nvfp4_rows", 1, 1, 128, (8, 8), dtype="e2m1", scale_dtype="e4m3", recipe="global", block=Block(dim=16)),
)  # fmt: skip
# What a campaign has besides.
MORE: Final = dict(
    one_head=scaled("one_head", 8, 1, 64, (1, 1), **I8),  # a word has the scales of two tokens
    many_rows=scaled("many_rows", 16, 2, 64, (2, 2), dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=32), rows=20),
    max_swizzled=scaled("max_swizzled", 128, 2, 128, (4, 4), dtype="e2m1", scale_dtype="e4m3", recipe="max", order="swizzled"),
    kivi_signed=scaled("kivi_signed", 32, 1, 96, (1, 2), kind="f16", arch="sm_80", **kivi(16, "i4", False)),
    zeros=scaled("zeros", 16, 2, 64, (2, 2), dtype="i8", scale_dtype="f32", zero=True),
    groups=scaled("groups", 16, 1, 128, (1, 1), dtype="i4", scale_dtype="f32", block=Block(dim=64), rows=4),
    codes_of_k=scaled("codes_of_k", 16, 2, 64, (1, 1), k_quant=Quant(dtype="e5m2")),  # V is bf16
    codes_of_v=scaled("codes_of_v", 16, 2, 64, (1, 1), v_quant=Quant(dtype="e4m3", scale_dtype="f32")),  # K is
    sixths=scaled("sixths", 16, 2, 96, (4, 4), dtype="e2m1", scale_dtype="e4m3", recipe="global", block=Block(dim=16)),
    max_sixths=scaled("max_sixths", 16, 2, 96, (4, 4), dtype="e2m1", scale_dtype="e4m3", recipe="max"),
    kivi_bytes=scaled("kivi_bytes", 64, 2, 64, (1, 2), kind="f16", **kivi(64, "i8", True)),
    kivi_plain=scaled("kivi_plain", 16, 1, 32, (1, 2), kind="f16", **kivi(16, "i8", False)),
    pairs=scaled("pairs", 16, 2, 64, (2, 2), dtype="i4", scale_dtype="f16", zero=True, block=Block(dim=64)),
    mxfp4_sixteens=scaled("mxfp4_sixteens", 16, 2, 64, (4, 4), dtype="e2m1", block=Block(dim=16), **E8M0),
    mxfp8_whole=scaled("mxfp8_whole", 16, 2, 64, (2, 2), dtype="e4m3", **E8M0),
    mxfp8_sixteens=scaled("mxfp8_sixteens", 16, 2, 64, (4, 4), dtype="e4m3", block=Block(dim=16), **E8M0),
    mxfp8_halves=scaled("mxfp8_halves", 16, 2, 128, (4, 4), dtype="e4m3", block=Block(dim=64), **E8M0),
    mxfp8_wide=scaled("mxfp8_wide", 16, 1, 256, (8, 8), dtype="e4m3", block=Block(dim=32), **E8M0),
    mx_e5m2=scaled("mx_e5m2", 16, 2, 64, (4, 4), dtype="e5m2", block=Block(dim=32), **E8M0),
    mx_short=scaled("mx_short", 8, 1, 40, (1, 1), arch="sm_80", dtype="e4m3", block=Block(dim=16), **E8M0),
    mxfp4_short=scaled("mxfp4_short", 8, 1, 40, (1, 1), arch="sm_80", dtype="e2m1", block=Block(dim=16), **E8M0),
    mx_lonely=scaled("mx_lonely", 1, 1, 64, (0, 0), dtype="e2m1", block=Block(dim=32), **E8M0),
    mx_thirds=scaled("mx_thirds", 16, 2, 96, (2, 2), dtype="e4m3", block=Block(dim=32), **E8M0),
)  # fmt: skip
CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
DRAWN: Final = SETS | MORE if CAMPAIGN else SETS

_F32: Final[dict[str, Any]] = {"scale_dtype": "f32"}
FAR: Final = {
    "far": scaled("far", 16, 2, 64, (1, 1), dtype="e4m3", **_F32)[0],
    "far_rows": scaled("far_rows", 16, 2, 64, (1, 1), dtype="i8", rows=3, **_F32)[0],
    "far_zeros": scaled("far_zeros", 16, 2, 64, (2, 2), dtype="i8", zero=True, **_F32)[0],
}
# Whose blocks have two heads, because their scales share sectors.
TWO_HEADS: Final = (
    "words",
    "mixed",
    "pairs",
    "zeros",
    "zeros_rows",
    "nvfp4",
    "codes_of_v",
    "max",
    "thirds",
    "sixths",
    "max_sixths",
    "mxfp8",
    "mxfp4",
    "mxfp8_rows",
    "mxfp4_rows",
    "mxfp4_sixteens",
    "mxfp8_sixteens",
    "mxfp8_halves",
    "mxfp8_whole",
    "mx_e5m2",
    "mx_thirds",
)


def laid(name: str, move: Literal["", "aligned", "unaligned"], schedule: Any = "ascending") -> tuple[Scene, Any]:
    """A scene with requests that end inside tiles; where it is to be, pools of scales whose addresses are as little aligned as
    they may be, or whose addresses and page strides are, so that copies bring all scales."""
    kernels, _ = DRAWN[name]
    batch = replace(PLAIN, totals=(70, 33, 1, 129), new=(1, 1, 1, 1), schedule=schedule)
    if not move:
        return decode_scene(kernels, batch, 4)
    if move == "aligned":
        of = Tensor.of

        def wide(tensor: PoolTensor, *rest: Any) -> Tensor:
            return of(replace(tensor, align=16) if tensor.name.endswith("scales") else tensor, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "of", wide)
            return decode_scene(kernels, batch, 4)
    place = Scene._lay_tensors

    def elsewhere(scene: Scene) -> None:
        place(scene)
        by = {t.name: t.align for t in scene.cache.storage.tensors if t.name.endswith("scales")}
        for tensor_name, step in by.items():
            for tensor in scene.tensors[tensor_name]:
                moved = aligned(len(tensor.memory) + step)[step:]
                moved[...] = tensor.memory
                tensor.memory = moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scene, "_lay_tensors", elsewhere)
        return decode_scene(kernels, batch, 4)


def one_row_each(scene: Scene) -> Raw:
    """Offsets of rows, one a request."""
    return offsets_of((1,) * len(scene.batch.totals), index_name(scene.kernels, "decode"))


@pytest.mark.parametrize("name", SETS | MORE)
def test_copies(name: str) -> None:
    """What a copy brings is what the set is for."""
    kernels, runs = (SETS | MORE)[name]
    context = kernels.ops[0].plan(kernels)[0].context
    assert isinstance(context, DecodeMma) and context.shape.heads == (2 if name in TWO_HEADS else 1)
    assert (context.key.scale_run, context.value.scale_run) == runs


@pytest.mark.parametrize("rows", [1, 5])
def test_f16_caches_do_not_go_with_bf16(rows: int) -> None:
    """Weights of V would be rounded to fewer bits, and q beside K."""
    kernels, _ = scaled("mx_f16", 16, 2, 128, (0, 0), kind="f16", rows=rows, dtype="e4m3", block=Block(dim=32), **E8M0)
    why = "e8m0 scales of groups of dims fit bf16 operands alone, and q and weights of f16 have more bits"
    role = "V" if rows == 1 else "K"  # scales of K multiply sums where columns are few
    op = kernels.ops[0]
    assert isinstance(op, ops.Decode)
    assert {(c.name, c.why_not) for c in op.choices(kernels).values()} == {
        ("decode_simt", (("decode_mma", f"{role}: {why}"),))
    }


@pytest.mark.parametrize("move", ["", "aligned", "unaligned"])
@pytest.mark.parametrize("name", DRAWN)
def test_oracle(name: str, move: Any) -> None:
    """Wherever pools begin; two orders of the threads leave the same bits, in the campaign three and of every pool."""
    found = []
    orders = ("descending", "ascending", 7)
    for schedule in orders if CAMPAIGN else orders[2:] if move else orders[1:]:
        scene, q = laid(name, move, schedule)
        out, lse, _ = check_decode(scene, q, row_offsets=one_row_each(scene))
        assert lse is not None
        found.append((out.tobytes(), lse.tobytes()))
    assert len(set(found)) == 1


# Scales of K and V that a thread loads; where a word has those of two heads half the threads load them.
LOADED: Final = dict(words=4, odd=2, one_head=2, lonely=2, mixed=2, nvfp4=8, nvfp4_rows=16)


@needs_tool
@pytest.mark.parametrize("name", LOADED if CAMPAIGN else ("words", "odd", "lonely", "nvfp4"))
def test_no_trip_waits_for_its_own_loads(name: str) -> None:
    """Neither where scales are copied nor where they are loaded, a way round that has no copies of whole tiles."""
    image = compiled((SETS | MORE)[name][0], "sm_90a", default_cache())[0][0]
    loop = work_loop(blocks(sass(image.data, cache=default_cache(), encodings=True)))
    assert loop is not None
    if name not in ("lonely", "nvfp4_rows"):  # whose pages have one token
        whole = [x for x in loop.text if x.base == "LDGSTS" and not x.operands[-1].lstrip("!").startswith("P")]
        copied = {n for n in loop.members if set(whole) & set(loop.graph[n].code)}
        assert awaited_loads(loop.usual) == 0 and sum(x.base == "LDG" for x in loop.usual) == 1
        loop = replace(loop, members=loop.members - copied)
    assert sum(x.base == "LDG" for x in loop.usual) == 1 + LOADED[name]
    assert awaited_loads(loop.usual) == 0


@pytest.mark.parametrize("name", ["words", "two_stages", "nvfp4"])
def test_unaligned_pools_change_no_bit(name: str) -> None:
    """Copies and loads leave the same in shared memory."""
    results = []
    for move in ("aligned", "unaligned"):
        scene, q = laid(name, move)  # type: ignore[arg-type]
        scales = [a for n, a in scene.arrays().items() if n.endswith("scales")]
        places = [at % 4 for a in scales for at in (a.ctypes.data, *a.strides[:3])]  # of pages, layers, K and V
        assert any(places) == (move == "unaligned")
        out, _, _ = check_decode(scene, q, row_offsets=one_row_each(scene))
        results.append(np.array(out))
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("exponents", [(-100, -90), (-20, 20), (-90, 90), (60, 100), (100, 101)], ids=str)
@pytest.mark.parametrize("name", FAR if CAMPAIGN else ["far_rows", "far_zeros"])
def test_scales_far_apart(name: str, exponents: tuple[int, int]) -> None:
    """Scales of V that differ from token to token by more than f16 weights have room for: sums follow what counts."""
    batch = replace(PLAIN, totals=(150, 33, 64), new=(1, 1, 1))
    scene, q = decode_scene(FAR[name], batch, 3)
    (scales,) = (a for n, a in scene.arrays().items() if n.endswith("scales"))
    of_values = scales[:, 1, ..., 0]
    of_values *= np.exp2(np.random.default_rng(3).integers(*exponents, of_values.shape)).astype(np.float32)
    check_decode(scene, q, row_offsets=one_row_each(scene))
