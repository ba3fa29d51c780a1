"""What quantization asks of the cache around it: every rule, and the words it is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgen.schema.cache import Continuous, Latent, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.quant import Block, Quant
from kvgen.schema.tables import CSR, Indirect, Mapped, PerKV, Ring
from tests.schema.test_quant_validation import GIVEN, Case, fp8, groups, int4, nvfp4
from tests.schema.test_validation import continuous, mistakes, paged

KEYS = "page layer token head dim"
APART = Layout(k=KEYS, v=KEYS)
JOINT = "page layer token head kv dim"


def latent(**fields: Any) -> Latent:
    return Latent(**{"dtype": "bf16", "page_size": 64, "layout": Layout(k=KEYS), **fields})


CASES: list[Case] = [
    (
        paged,
        {"quant": fp8(), "k_quant": fp8()},
        "k_quant: got a value beside quant, which is for both; give quant, or k_quant and v_quant",
    ),
    (paged, {"quant": fp8(), "v_quant": fp8()}, "v_quant: got a value beside quant, which is for both; give quant, or"),
    (
        paged,
        {"stores": "k", "v_quant": fp8()},
        "v_quant: got a value for a cache that stores K only; use quant",
    ),
    (latent, {"v_quant": fp8()}, "v_quant: got a value for a cache that stores K only; use quant"),
    (
        paged,
        {"k_quant": fp8()},
        "k_quant: got K as e4m3 and V as bf16 in one tensor, whose elements have one width; give them one each with "
        "Layout(k='...', v='...')",
    ),
    (
        paged,
        {"v_quant": fp8()},
        "v_quant: got K as bf16 and V as e4m3 in one tensor, whose elements have one width; give",
    ),
    (
        paged,
        {"k_quant": int4(), "v_quant": int4(zero=True)},
        "k_quant: K and V share a tensor as i4 and u4; give them one each with Layout(k='...', v='...')",
    ),
    (
        latent,
        {"layout": Layout(k=KEYS, rope=KEYS), "quant": fp8(place="row")},
        "quant: got place='row' with layout.rope='page layer token head dim'; scales lie between the latent and the RoPE part",
    ),
    (
        paged,
        {"k_quant": fp8(place="row"), "v_quant": fp8()},
        "k_quant: got scales in pool and row; where rows have their scales, those of K and V both lie there; give both",
    ),
    (
        paged,
        {"quant": fp8(place="row"), "layout": Layout(kv="page kv layer token head dim", swizzle=(1, 2, 1))},
        "layout: got swizzle=(1, 2, 1) with place='row', rows of bytes whose elements differ in size; leave it out",
    ),
    (
        paged,
        {"quant": fp8(place="row", block=Block(head=2))},
        "quant: got block.head=2 with place='row'; scales of several heads are in no head's row; use block.head=1, or",
    ),
    (
        paged,
        {"quant": fp8(place="row"), "layout": Layout(kv="page kv layer token dim/8 head dim%8")},
        "layout: got axes ending in dim%8; rows of bytes (codes, scales, RoPE part) end in a whole dim",
    ),
    (
        paged,
        {"k_quant": fp8(place="row"), "v_quant": int4(place="row")},
        "layout: got 'page kv layer token head dim' with rows of 132 bytes for K and 66 for V, which have one step in one "
        "tensor; write kv before dim ('... kv dim')",
    ),
    (
        paged,
        {"k_quant": fp8(place="row"), "v_quant": int4(place="row"), "head_dim": 5, "layout": Layout(kv=JOINT)},
        "layout: got rows of 5 i4 codes, which are no whole bytes; use a head_dim that is a multiple of 2",
    ),
    (
        paged,
        {"quant": fp8(place="row"), "head_dim": 6},
        "quant: the scales of K would begin at byte 6 of rows of 10 bytes, no multiple of f32; choose a block and dims",
    ),
    (
        paged,
        {"quant": fp8(), "layout": Layout(kv="page kv layer token head dim", row_align=16)},
        "layout: got row_align=16 for rows without scales in them; it pads rows of place='row'; leave it out",
    ),
    (
        paged,
        {"quant": int4(codebook=tuple(range(16)), recipe="norm", norm_correction=True, block=Block(head=None))},
        "quant: got norm_correction=True with blocks of 1024 elements; readers add up the squares of 1023 at most; use "
        "block=Block(), a norm a token and head, or recipe='unit'",
    ),
    (
        paged,
        {"quant": Quant(dtype="i3", scale_dtype="f16", zero=True), "head_dim": 20},
        "layout: got 'page kv layer token head dim' with 3-bit elements, eight in three bytes; dim must be innermost and a "
        "multiple of 8, so that a byte belongs to one row (and a block of scales to whole bytes)",
    ),
    (
        paged,
        {"quant": Quant(dtype="i2", scale_dtype="f16", zero=True, block=Block(dim=6)), "head_dim": 24},
        "quant: got block.dim=6 with u2 codes, four a byte; codes that share bytes share a scale, or whole blocks do: a multiple "
        "of 4 dims, or a divisor of it",
    ),
    (
        paged,
        {
            "quant": Quant(dtype="i4", scale_dtype="f16", zero=True, packing="strided"),
            "layout": "page kv layer token dim head",
        },
        "layout: got 'page kv layer token dim head' with 128 4-bit elements a row, 2 a byte that are no neighbours; dim must be "
        "innermost, whole, and a multiple of 2, without a swizzle; or use packing='neighbours'",
    ),
    (
        latent,
        {"quant": Quant(dtype="i4", scale_dtype="f16", zero=True, packing="strided")},
        "quant: got packing='strided' for latent rows; it is for the keys and values of heads; use 'neighbours'",
    ),
    (
        paged,
        {"quant": Quant(dtype="i3", scale_dtype="f32", zero=True, place="row"), "head_dim": 24},
        "quant: the scales of K would begin at byte 9 of rows of 17 bytes, no multiple of f32; choose a block and dims",
    ),
    (
        paged,
        {
            "quant": Quant(dtype="i3", scale_dtype="f32", zero=True),
            "layout": Layout(kv="page kv layer token head dim", swizzle=(1, 2, 1)),
        },
        "swizzle: got one for 3-bit elements, eight in three bytes; a swizzle moves elements that lie within a byte each; leave",
    ),
    (
        paged,
        {"quant": int4(codebook=tuple(range(16)), recipe="norm", block=Block(dim=48))},
        "quant: got block.dim=48 with recipe='norm' for rows of 128; norms are of whole blocks; use one of its divisors",
    ),
    (
        paged,
        {"quant": fp8(block=Block(head=3))},
        "quant: got block.head=3 with kv_heads=8; blocks of heads divide them",
    ),
    (
        paged,
        {"quant": fp8(block=Block(dim=256))},
        "quant: got block.dim=256 for rows of 128; a block lies within a row's quantized dims",
    ),
    (
        latent,
        {"quant": fp8(block=Block(dim=576))},
        "quant: got block.dim=576 for rows of 512; a block lies within a row's",
    ),
    (
        paged,
        {"quant": fp8(block=Block(head=2, dim=16))},
        "quant: got block.head=2 and block.dim=16; a block is part of one head, or whole rows of several",
    ),
    (
        paged,
        {"quant": fp8(block=Block(head=None, dim=16))},
        "quant: got block.head=None and block.dim=16; a block is part of",
    ),
    (
        paged,
        {"quant": fp8(own_table=True), "table": CSR()},
        "quant: got own_table=True with table=CSR(); only Dense() may have a second page table, for scales",
    ),
    (
        paged,
        {"quant": fp8(own_table=True), "table": Ring(window=8)},
        "quant: got own_table=True with table=Ring(); only Dense() may",
    ),
    (
        paged,
        {"quant": fp8(own_table=True), "table": Indirect(), "page_size": 1},
        "quant: got own_table=True with table=Indirect(); only Dense() may have a second page table, for scales",
    ),
    (
        paged,
        {"quant": fp8(own_table=True), "table": Mapped()},
        "quant: got own_table=True with table=Mapped(); only Dense() may have a second page table, for scales",
    ),
    (
        paged,
        {"v_quant": groups(8), "layout": APART},
        "v_quant: got residual=8; V is quantized per token; give residual to K only, with k_quant",
    ),
    (
        paged,
        {"k_quant": groups(32), "layout": APART},
        "k_quant: got residual=32 with pages of 16 tokens; a sealed group lies in one page, so the page "
        "size must be a multiple of residual",
    ),
    (
        continuous,
        {"quant": groups(8), "stores": "k"},
        "quant: got residual=8 with pages of None tokens; a sealed group lies",
    ),
    (
        paged,
        {"quant": nvfp4(order="swizzled")},
        "quant: got order='swizzled' with pages of 16 tokens and 8 scales a row; tiles are 128 tokens x 4 scales: page_size a "
        "multiple of 128, scales a row of 4, per token and head",
    ),
    (
        paged,
        {"quant": nvfp4(order="swizzled"), "page_size": 128, "head_dim": 96},
        "quant: got order='swizzled' with pages of 128 tokens and 6 scales a row; tiles are 128 tokens x 4 scales:",
    ),
    (
        continuous,
        {"quant": nvfp4(order="swizzled")},
        "quant: got order='swizzled' with pages of None tokens and 8 scales",
    ),
    (
        paged,
        {"quant": fp8(place="page"), "layout": APART},
        "quant: got place='page' with table=Dense(), pages of 16 tokens and scales in page; a page of bytes is the values, "
        "then the scales, of both: one tensor (layout kv='...'), a known page size, one page id for K and V, the same place",
    ),
    (
        paged,
        {"quant": fp8(place="page"), "layout": KEYS, "table": PerKV()},
        "quant: got place='page' with table=PerKV(), pages of 16 tokens and scales in page; a page of bytes is the values,",
    ),
    (
        paged,
        {"k_quant": fp8(place="page"), "v_quant": fp8()},
        "k_quant: got place='page' with table=Dense(), pages of 16 tokens and scales in page and pool; a page of bytes is",
    ),
    (
        continuous,
        {"quant": fp8(place="page")},
        "quant: got place='page' with table=Dense(), pages of None tokens and scales",
    ),
    (
        paged,
        {"quant": fp8(place="page"), "layout": "page token kv layer head dim"},
        "layout: got 'page token kv layer head dim' with place='page'; token, head and dim come last, so that a page's bytes "
        "are neighbours, and nothing is swizzled",
    ),
    (
        paged,
        {"quant": fp8(place="page"), "layout": Layout(kv="page kv layer token head dim", swizzle=(3, 3, 3))},
        "layout: got 'page kv layer token head dim' with place='page'; token, head and dim come last,",
    ),
    (
        latent,
        {"quant": fp8(place="page"), "layout": Layout(kv=KEYS, rope=KEYS)},
        f"layout: got rope={KEYS!r} with place='page'; a page of bytes has rows with both parts, then their scales;",
    ),
    # What nobody would read.
    (
        paged,
        {"layout": Layout(kv="page kv layer token head dim", rope=KEYS)},
        "layout: got rope='page layer token head dim' for rows without a RoPE part; it is for Latent with rope_dim; leave it out",
    ),
    (
        latent,
        {"rope_dim": 0, "layout": Layout(k=KEYS, rope=KEYS)},
        "layout: got rope='page layer token head dim' for rows",
    ),
    (
        latent,
        {"quant": fp8(place="row"), "layout": Layout(k=KEYS, swizzle=(3, 3, 3))},
        "layout: got swizzle=(3, 3, 3) with latent rows of bytes, whose elements differ in size; leave it out",
    ),
    (
        paged,
        {"layout": Layout(kv="page kv layer token head dim", scales="page kv layer token head dim")},
        "layout: got scales='page kv layer token head dim', but no computed scales lie in a pool of their own; leave it out",
    ),
    (
        paged,
        {"quant": fp8(scale="given", block=GIVEN), "layout": Layout(k=KEYS, v=KEYS, scales=KEYS)},
        "layout: got scales='page layer token head dim', but no computed scales lie in a pool of their own; leave it out",
    ),
    (
        paged,
        {"k_quant": fp8(), "layout": Layout(k=KEYS, v=KEYS, v_scales=KEYS)},
        "layout: got v_scales='page layer token head dim', but no computed scales of V lie in a pool of their own; leave it out",
    ),
    (
        paged,
        {"quant": nvfp4(order="swizzled"), "page_size": 128, "layout": Layout(k=KEYS, v=KEYS, scales=KEYS)},
        "layout: got scales='page layer token head dim' beside order='swizzled', which is an order itself; give one",
    ),
    (
        paged,
        {"quant": fp8(), "layout": Layout(kv="page kv layer token head dim", v_scales="page kv layer token head dim")},
        "layout: got v_scales='page kv layer token head dim'; V's scales are a tensor of their own; drop the kv axis",
    ),
    (
        paged,
        {"quant": fp8(), "layout": Layout(kv="page kv layer token head dim", scales=KEYS)},
        "layout: got scales='page layer token head dim' without a kv axis, but the scales of K and V share a tensor; add it",
    ),
    (
        paged,
        {"quant": int4(zero=True), "layout": Layout(k=KEYS, v=KEYS, scales="page layer dim head token")},
        "layout: got 'page layer dim head token' for scales with zero points; a zero point follows its scale: dim innermost, "
        "split by even numbers if at all",
    ),
    (
        Layout,
        {"k": KEYS, "v": KEYS, "v_scales": "page token head dim"},
        "layout: 'page token head dim' has no layer axis, but layers='axis'; layers='axis' needs one,",
    ),
    # Bytes.
    (
        paged,
        {"quant": int4(), "layout": "page kv layer head dim token"},
        "layout: got 'page kv layer head dim token' with 4-bit elements, two a byte; dim must be innermost and a multiple of 2, "
        "so that a byte belongs to one row (and a block of scales to whole bytes)",
    ),
    (
        paged,
        {"quant": int4(), "head_dim": 33},
        "layout: got 'page kv layer token head dim' with 4-bit elements, two a byte;",
    ),
    (
        paged,
        {"quant": int4(place="page"), "head_dim": 33},
        "layout: got 'page token head dim' with 4-bit elements, two a byte; dim must be innermost and a multiple of 2,",
    ),
    (
        paged,
        {"quant": int4(block=Block(dim=3)), "head_dim": 24},
        "quant: got block.dim=3 with i4 codes, two a byte; codes that share bytes share a scale, or whole blocks do: a "
        "multiple of 2 dims, or a divisor of it",
    ),
    (
        latent,
        {"quant": fp8(place="row"), "layout": Layout(k="page layer token dim head")},
        "layout: got axes ending in head; rows of bytes (codes, scales, RoPE part) end in a whole dim",
    ),
    (
        latent,
        {"quant": fp8(place="row"), "latent_dim": 33},
        "quant: the scales would begin at byte 33 of rows of 165 bytes, no multiple of f32; choose a block and dims that keep",
    ),
    (
        latent,
        {"quant": Quant(dtype="e4m3"), "latent_dim": 33},
        "quant: the RoPE part would begin at byte 33 of rows of 161",
    ),
    # Latent rows.
    (
        latent,
        {"head_dim": 640},
        "head_dim: got 640 with latent_dim=512 and rope_dim=64; a row is both; leave head_dim out",
    ),
    (latent, {"latent_dim": 1024}, "latent_dim: got 1024 with rope_dim=64; a row is both, at most 1024 dims"),
    (latent, {"latent_dim": 0}, "Latent.latent_dim: got 0; input should be greater than or equal to 1"),
    (latent, {"rope_dim": -1}, "Latent.rope_dim: got -1; input should be greater than or equal to 0"),
    (latent, {"kv_heads": 2}, "Latent.kv_heads: got 2; input should be 1"),
    (latent, {"stores": "kv"}, "Latent.stores: got 'kv'; input should be 'k'"),
    (latent, {"v_head_dim": 512}, "stores: got 'k' beside a V layout or v_head_dim; a cache without V has neither"),
    (
        latent,
        {"quant_rope": True},
        "quant_rope: got True, which stores the RoPE part as codes in the latent's row; it takes a quant, and no layout.rope",
    ),
    (
        latent,
        {"quant_rope": True, "quant": fp8(), "layout": Layout(k=KEYS, rope=KEYS)},
        "quant_rope: got True, which stores the RoPE part as codes in the latent's row; it takes a quant, and no layout.rope",
    ),
]


@pytest.mark.parametrize(("make", "fields", "message"), CASES, ids=[f"{i}-{c[2][:40]}" for i, c in enumerate(CASES)])
def test_refused(make: Callable[..., object], fields: dict[str, Any], message: str) -> None:
    found = mistakes(make, **fields)
    assert any(line.startswith(message) for line in found), "\n".join(found)


def test_what_is_accepted() -> None:
    assert paged(k_quant=fp8(), layout=APART).quants["v"] is None
    assert paged(k_quant=fp8(), v_quant=Quant(dtype="i8", scale_dtype="f32")).storage.tensor("pool").dtypes == ("u8",)
    assert paged(quant=fp8(block=Block(dim=48))).storage.tensor("scales").shape[-1] == 3
    assert paged(quant=fp8(block=Block(head=None))).storage.tensor("scales").shape[-2:] == (1, 1)
    assert paged(quant=nvfp4(order="swizzled"), page_size=256).storage.tensor("scales").shape[-5:] == (2, 2, 32, 4, 4)
    assert latent().storage.tensor("k_pool").shape[-1] == 576
    assert latent(quant=Quant(dtype="e4m3")).storage.tensor("pool").shape[-1] == 640
    assert latent(quant=fp8(place="row", block=Block(dim=128))).storage.tensor("pool").shape[-1] == 656
    assert latent(quant=fp8(place="page"), quant_rope=True, layout=Layout(kv=KEYS)).storage.tensor("pool").shape[-1] > 0
    assert isinstance(continuous(quant=fp8()), Continuous)
    assert isinstance(paged(quant=fp8(), table=PerKV(), layout=KEYS), Paged)
