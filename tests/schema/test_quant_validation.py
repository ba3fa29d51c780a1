"""What a quantization cannot be: every rule, and the words it is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgen.schema.quant import Block, Quant
from tests.schema.test_validation import mistakes

GIVEN = Block(token=None, head=None)


def fp8(**fields: Any) -> Quant:
    return Quant(**{"dtype": "e4m3", "scale_dtype": "f32", **fields})


def int4(**fields: Any) -> Quant:
    return Quant(**{"dtype": "i4", "scale_dtype": "f16", **fields})


def nvfp4(**fields: Any) -> Quant:
    return Quant(**{"dtype": "e2m1", "scale_dtype": "e4m3", "recipe": "max", **fields})


def groups(tokens: int, **fields: Any) -> Quant:
    return fp8(**{"residual": tokens, "block": Block(token=tokens, dim=1), **fields})


Case = tuple[Callable[..., object], dict[str, Any], str]

BOOK = tuple(range(-8, 8))
CASES: list[Case] = [
    (Quant, {"dtype": "f8"}, "Quant.dtype: got 'f8'; input should be 'e4m3', 'e5m2', 'i8', 'i4', 'i3', 'i2' or 'e2m1'"),
    (
        Quant,
        {"dtype": "e4m3", "scale_dtype": "e5m2"},
        "Quant.scale_dtype: got 'e5m2'; input should be 'f32', 'f16', 'bf16', 'e4m3' or 'e8m0'",
    ),
    (
        Quant,
        {"dtype": "e4m3", "group": 16},
        "Quant.group: unknown field; Quant has dtype, packing, scale_dtype, block, scale, zero,",
    ),
    (fp8, {"scale": "static"}, "Quant.scale: got 'static'; input should be 'computed' or 'given'"),
    (
        fp8,
        {"recipe": "mean"},
        "Quant.recipe: got 'mean'; input should be 'amax', 'pow2', 'min', 'norm', 'unit', 'signs', 'max' or 'global'",
    ),
    (fp8, {"place": "block"}, "Quant.place: got 'block'; input should be 'pool', 'page' or 'row'"),
    (fp8, {"order": "tiled"}, "Quant.order: got 'tiled'; input should be 'linear' or 'swizzled'"),
    (fp8, {"residual": 1}, "Quant.residual: got 1; input should be greater than or equal to 2"),
    (fp8, {"residual": 1025}, "Quant.residual: got 1025; input should be less than or equal to 1024"),
    (
        Quant,
        {"dtype": "i4"},
        "scale_dtype: got none with dtype='i4', whose codes mean nothing without a scale; give 'f32', 'f16' or 'bf16' "
        "('e4m3' for e2m1), or store e4m3 or e5m2",
    ),
    (
        Quant,
        {"dtype": "e5m2", "recipe": "pow2"},
        "recipe: got a value without scale_dtype; a scale-free cast has no scales to describe; give scale_dtype, or leave it",
    ),
    (
        fp8,
        {"scale_dtype": "e4m3"},
        "recipe: got 'amax' with dtype='e4m3' and scale_dtype='e4m3'; e4m3 scales are nvfp4's: dtype='e2m1' with recipe='max', "
        "'global' or 'amax'; other codes have f32, f16 or bf16 scales",
    ),
    (
        int4,
        {"recipe": "min"},
        "recipe: got 'min' with dtype='i4' and scale_dtype='f16'; least values stand in the place of",
    ),
    (
        int4,
        {"recipe": "signs", "codebook": BOOK[:8]},
        "recipe: got 'signs' with dtype='i4' and scale_dtype='f16'; root mean squares of what is left stand in the place of zero",
    ),
    (int4, {"recipe": "signs", "zero": True}, "recipe: got 'signs' without a codebook, whose codes norms scale"),
    (
        int4,
        {"recipe": "signs", "zero": True, "codebook": BOOK},
        "codebook: got 16 numbers from -8.0 on; codes of 3 bits beside a sign stand for 8 numbers, ascending and finite in f32; "
        "sort them, or use lloyd_max(3, dim)",
    ),
    (int4, {"recipe": "norm"}, "recipe: got 'norm' without a codebook, whose codes norms scale; give codebook=(...)"),
    (
        fp8,
        {"codebook": BOOK},
        "codebook: got one with dtype='e4m3', zero=False, scale='computed', residual=None; its codes",
    ),
    (int4, {"codebook": BOOK, "zero": True}, "codebook: got one with dtype='i4', zero=True"),
    (
        int4,
        {"codebook": BOOK, "recipe": "min"},
        "recipe: got 'min' with dtype='i4' and scale_dtype='f16'; least values",
    ),
    (
        int4,
        {"codebook": BOOK[:8]},
        "codebook: got 8 numbers from -8.0 on; codes of 4 bits stand for 16 numbers, ascending",
    ),
    (
        Quant,
        {"dtype": "i3", "scale_dtype": "f16", "codebook": BOOK},
        "codebook: got 16 numbers from -8.0 on; codes of 3 bits stand for 8 numbers, ascending and finite in f32; sort them, or "
        "use lloyd_max(3, dim)",
    ),
    (
        Quant,
        {"dtype": "i2", "scale_dtype": "f16", "codebook": BOOK[:3], "recipe": "unit"},
        "codebook: got 3 numbers from -8.0 on; codes of 2 bits stand for 4 numbers, ascending",
    ),
    (
        Quant,
        {"dtype": "i3", "scale_dtype": "f32"},
        "dtype: got 'i3' without a zero point and without a codebook; codes of so few bits are unsigned; give zero=True or "
        "codebook=(...), or use 'i4'",
    ),
    (
        Quant,
        {"dtype": "i3", "scale_dtype": "f32", "zero": True, "packing": "strided"},
        "packing: got 'strided' with dtype='i3', zero=True, scale='computed', residual=None and Block(token=1, head=1, "
        "dim=None); codes of a byte that are no neighbours are written with their row: 'i4' or 'i2' with zero or a codebook, "
        "computed scales, a scale a token and head; use 'neighbours'",
    ),
    (int4, {"packing": "strided"}, "packing: got 'strided' with dtype='i4', zero=False"),
    (
        int4,
        {"packing": "strided", "zero": True, "block": Block(dim=32)},
        "packing: got 'strided' with dtype='i4', zero=True",
    ),
    (
        Quant,
        {"dtype": "i2", "scale_dtype": "f32", "scale": "given", "block": GIVEN},
        "dtype: got 'i2' without a zero point and without a codebook; codes of so few bits are",
    ),
    (
        int4,
        {"norm_correction": True},
        "norm_correction: got True with recipe='amax'; readers correct norms that are stored: recipe='norm' with a codebook; "
        "recipe='unit' stores corrected ones",
    ),
    (
        int4,
        {"codebook": BOOK, "recipe": "unit", "norm_correction": True},
        "norm_correction: got True with recipe='unit'",
    ),
    (
        int4,
        {"codebook": tuple(2.0**40 * v for v in BOOK), "recipe": "norm", "norm_correction": True},
        "norm_correction: got True with a codebook up to 8796093022208.0 in magnitude; squares of its numbers are counted in "
        "units, which magnitudes from 2^-32 to 2^32 have; scale the codebook",
    ),
    (
        int4,
        {"codebook": BOOK[::-1]},
        "codebook: got 16 numbers from 7.0 on; codes of 4 bits stand for 16 numbers, ascending",
    ),
    (fp8, {"recipe": "max"}, "recipe: got 'max' with dtype='e4m3' and scale_dtype='f32'; e4m3 scales are nvfp4's:"),
    (
        int4,
        {"recipe": "global"},
        "recipe: got 'global' with dtype='i4' and scale_dtype='f16'; e4m3 scales are nvfp4's:",
    ),
    (
        nvfp4,
        {"block": Block(dim=32)},
        "block: got Block(token=1, head=1, dim=32) for nvfp4; its scales are per token, head and 16 dims",
    ),
    (
        nvfp4,
        {"block": Block()},
        "block: got Block(token=1, head=1, dim=None) for nvfp4; its scales are per token, head and",
    ),
    (
        int4,
        {"recipe": "pow2"},
        "recipe: got 'pow2' with dtype='i4' and scale_dtype='f16'; powers of two are for e4m3, e5m2 and e2m1 with f32 "
        "or e8m0 scales",
    ),
    (
        fp8,
        {"recipe": "pow2", "scale_dtype": "bf16"},
        "recipe: got 'pow2' with dtype='e4m3' and scale_dtype='bf16'; powers of",
    ),
    (
        fp8,
        {"scale_dtype": "e8m0"},
        "recipe: got 'amax' with dtype='e4m3' and scale_dtype='e8m0'; e8m0 scales are powers of two; use recipe='pow2'",
    ),
    (
        Quant,
        {"dtype": "e2m1", "scale_dtype": "e4m3", "scale": "given", "block": GIVEN},
        "scale: got 'given' with scale_dtype='e4m3'; given scales are f32, f16 or bf16; use 'f32'",
    ),
    (
        fp8,
        {"amax_min": 1e-4, "scale_min": 1e-4},
        "scale_min: got 0.0001 beside amax_min=0.0001; one floor says how small",
    ),
    (
        nvfp4,
        {"scale_min": 2.0**-9},
        "scale_min: got 0.001953125 with scale='computed', zero=False, recipe='max', residual=None; a floor is for scales",
    ),
    (fp8, {"amax_min": 1e-4, "scale": "given", "block": GIVEN}, "amax_min: got 0.0001 with scale='given', zero=False,"),
    (
        fp8,
        {"scale_min": 0.0},
        "scale_min: got 0.0 with scale_dtype='f32', of which 1.1754943508222875e-38 to 3.4028234663852886e+38 make scales; "
        "give one of these, e.g. 1e-4 with f32 scales, or leave it out",
    ),
    (fp8, {"amax_min": float("nan")}, "amax_min: got nan with scale_dtype='f32', of which"),
    (
        Quant,
        {"dtype": "e2m1", "scale_dtype": "e4m3", "amax_min": 1e-4},
        "amax_min: got 0.0001 with scale_dtype='e4m3', of which 0.01171875 to 2688.0 make scales",
    ),
    (fp8, {"zero": True}, "zero: got True with dtype='e4m3'; only i8, i4, i3 and i2 codes have a zero point"),
    (
        fp8,
        {"scale": "given", "recipe": "pow2", "block": GIVEN},
        "scale: got 'given' with recipe='pow2', which computes scales; use 'computed'",
    ),
    (nvfp4, {"scale": "given"}, "scale: got 'given' with recipe='max', which computes scales; use 'computed'"),
    (
        int4,
        {"scale": "given", "zero": True, "block": GIVEN},
        "zero: got True with given scales, an array that has no zero points; use scale='computed', or codes without a zero",
    ),
    (
        fp8,
        {"residual": 32},
        "residual: got 32 with block.token=1 and scale='computed'; a sealed group computes one scale over its tokens: "
        "block=Block(token=32, dim=1), scale='computed'",
    ),
    (
        groups,
        {"tokens": 32, "scale": "given"},
        "residual: got 32 with block.token=32 and scale='given'; a sealed group",
    ),
    (
        groups,
        {"tokens": 32, "block": Block(token=32)},
        "residual: got Block(token=32, head=1, dim=None) and recipe='amax'; a sealed group has a scale per channel: "
        "block=Block(token=32, head=1, dim=1), recipe='amax'",
    ),
    (
        groups,
        {"tokens": 4, "recipe": "pow2"},
        "residual: got Block(token=4, head=1, dim=1) and recipe='pow2'; a sealed group",
    ),
    (
        groups,
        {"tokens": 4, "place": "row"},
        "residual: got 4 with place='row'; a scale of several tokens is in no token's row; use 'pool' or 'page'",
    ),
    (
        fp8,
        {"block": Block(token=16)},
        "block: got token=16 with computed scales; a new token would change the scale of older ones; use token=1, "
        "scale='given', or residual=R, which quantizes R tokens once they are complete",
    ),
    (
        fp8,
        {"block": GIVEN},
        "block: got token=None with computed scales; a new token would change the scale of older ones;",
    ),
    (
        fp8,
        {"scale": "given"},
        "block: got token=1 with given scales, which are the same for every token; use token=None",
    ),
    (
        fp8,
        {"scale": "given", "block": GIVEN, "place": "page"},
        "scale: got 'given' with place, order or own_table, which are for computed scales",
    ),
    (
        fp8,
        {"scale": "given", "block": GIVEN, "own_table": True},
        "scale: got 'given' with place, order or own_table, which",
    ),
    (
        fp8,
        {"scale": "given", "block": GIVEN, "order": "swizzled"},
        "scale: got 'given' with place, order or own_table, which",
    ),
    (
        fp8,
        {"own_table": True, "place": "page"},
        "own_table: got True with place='page'; only a pool of scales has a table of its own",
    ),
    (
        nvfp4,
        {"order": "swizzled", "place": "row"},
        "order: got 'swizzled' with place='row'; only a pool of scales is stored in tiles",
    ),
]


@pytest.mark.parametrize(("make", "fields", "message"), CASES, ids=[f"{i}-{c[2][:40]}" for i, c in enumerate(CASES)])
def test_refused(make: Callable[..., object], fields: dict[str, Any], message: str) -> None:
    found = mistakes(make, **fields)
    assert any(line.startswith(message) for line in found), "\n".join(found)


def test_what_is_accepted() -> None:
    assert nvfp4().block == Block(dim=16)
    assert Quant(dtype="e5m2").codes.name == "e5m2"
    assert (int4(zero=True).codes.name, Quant(dtype="i8", scale_dtype="f32", zero=True).codes.name) == ("u4", "u8")
    assert not fp8(scale="given", block=GIVEN).computed
