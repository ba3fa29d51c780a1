"""Quantization: which codes a cache stores, which elements share a scale, how a scale is chosen and where it lies.

One convention everywhere: the dequantized value is `(code - zero) * scale`; recipe "min" alone says otherwise.
docs/quantization.md has the whole of it, rounding, zero blocks, NaN and infinity included.
"""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.layout.dtypes import DType, dtype
from kvgen.schema.base import Spec

CodeName = Literal["e4m3", "e5m2", "i8", "i4", "i3", "i2", "e2m1"]
ScaleName = Literal["f32", "f16", "bf16", "e4m3", "e8m0"]
Recipe = Literal["amax", "pow2", "min", "norm", "unit", "signs", "max", "global"]
# Scales that are norms of blocks.
NORMS: Final = ("norm", "unit", "signs")
# The block of both nvfp4 recipes, along dim.
NVFP4_GROUP: Final = 16
_POWERS: Final = ("e4m3", "e5m2", "e2m1")
_UNSIGNED: Final = {"i8": "u8", "i4": "u4", "i3": "u3", "i2": "u2"}
_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "i8": 127.0, "i4": 7.0, "i3": 7.0, "i2": 3.0}
# The least and the largest scale of each type, f32's of the normal numbers.
_SCALES: Final = {
    "f32": (2.0**-126, 3.4028234663852886e38),
    "bf16": (2.0**-126, 3.3895313892515355e38),
    "f16": (2.0**-24, 65504.0),
    "e4m3": (2.0**-9, 448.0),
    "e8m0": (2.0**-126, 2.0**127),
}


class Block(Spec):
    """Which elements share a scale: extents along token, head and dim."""

    token: int | None = Field(default=1, ge=1)
    """Tokens that share a scale. None: all tokens."""
    head: int | None = Field(default=1, ge=1)
    """Heads that share a scale; divides kv_heads. None: all heads."""
    dim: int | None = Field(default=None, ge=1)
    """Elements of a head's row that share a scale; the last group may be shorter. None: the whole row."""


class Quant(Spec):
    """How K or V is stored in fewer bits: codes, and a scale for every `block` of elements.

    Without `scale_dtype` (fp8 only) values are cast, saturating. docs/quantization.md has the rules of rounding, NaN and
    infinity, and where scales lie.
    """

    dtype: CodeName
    """Codes that are stored: "e4m3" and "e5m2" (fp8), "i8", "i4" and "e2m1" (4 bits, two codes a byte), "i3" (eight codes in
    three bytes) and "i2" (four a byte), both with `zero` or a `codebook`.
    """
    packing: Literal["neighbours", "strided"] = "neighbours"
    """Which dims of a row share a byte, the first in its lowest bits. "neighbours": 2i and 2i + 1 of 4 bits, 4i to 4i + 3 of 2
    bits. "strided", of "i4" and "i2" with a scale a row: i and i + D/2 of 4 bits, i, i + D/4, i + D/2 and i + 3D/4 of 2 bits.
    """
    scale_dtype: ScaleName | None = None
    """Element type of scales; "e8m0" are powers of two in a byte. None: no scales, values are cast and saturate (fp8
    only).
    """
    block: Block = Block()
    """Which elements share a scale. Default: one scale a token and head, for nvfp4 one per 16 dims."""
    scale: Literal["computed", "given"] = "computed"
    """"computed": a write chooses the scale from the block's values. "given": the caller brings `k_scale` and
    `v_scale`, `[layers, heads / block.head, dims / block.dim]`, rounded up.
    """
    zero: bool = False
    """True: a block has a zero point beside its scale, and codes are unsigned (integer codes only); values are
    (code - zero) * scale, with recipe "min" code * scale + zero, with "signs" (codebook[code] +- zero) * scale.
    """
    recipe: Recipe = "amax"
    """How a scale is computed: "amax", largest magnitude / largest code; "pow2", the same rounded up to a power of two;
    "norm", of a codebook's codes, the block's Euclidean norm; "unit", the same over the norm of what its codes stand for;
    "min", with `zero`, the block's range / largest code, its least value in the zero point's place; "signs", with `zero` and
    a codebook, the norm, in the zero point's place the root mean square of what the codebook leaves, whose sign is a code's
    highest bit; "max" and "global", the two nvfp4 recipes (docs/quantization.md).
    """
    codebook: tuple[float, ...] | None = None
    """What the codes 0, 1, ... stand for, ascending: 16 numbers for "i4", 8 for "i3", 4 for "i2", half as many with recipe
    "signs", such as `kvgen.schema.codebooks.lloyd_max` gives. None: codes are numbers.
    """
    norm_correction: bool = False
    """True, with recipe "norm": readers multiply what codes stand for by the norm over its own norm, so that values have the
    stored norm (vLLM's "_nc" caches); writes divide by the norm before it is rounded.
    """
    amax_min: float | None = None
    """What a block's largest magnitude counts as at least (recipes "amax" and "pow2"). None: no floor."""
    scale_min: float | None = None
    """What largest magnitude / largest code counts as at least, before it is rounded (recipes "amax" and "pow2"). None: no
    floor.
    """
    place: Literal["pool", "page", "row"] = "pool"
    """Where computed scales lie: "pool", in tensors of their own; "page", behind the rows of their page; "row",
    inside each token's row, behind the codes of its head (Latent: between the latent and the RoPE part).
    """
    scale_pad: int | None = Field(default=None, ge=1, le=4096)
    """Bytes that the scales of a token take with zeros behind them (place "page" or "row", of one head). None: just
    theirs.
    """
    order: Literal["linear", "swizzled"] = "linear"
    """Order of a page's scales: "linear", as `Layout.scales` says; "swizzled", in tiles of 128 tokens x 4 scales, as
    block-scaled tensor-core instructions read them.
    """
    own_table: bool = False
    """True: pages of scales have ids of their own, in `scales_page_table`. False: a page's scales have the page's id.
    """
    residual: int | None = Field(default=None, ge=2, le=1024)
    """Tokens that are quantized together (KIVI's keys). The newest tokens, fewer than that, wait unquantized in
    `k_tail` until ops.Seal(). None: every token is quantized as it is written.
    """

    @property
    def codes(self) -> DType:
        """The element type of the codes: with a zero point or a codebook they are unsigned."""
        unsigned = self.zero or self.codebook is not None
        return dtype(_UNSIGNED.get(self.dtype, self.dtype) if unsigned else self.dtype)

    @property
    def strided(self) -> bool:
        """Whether the codes of a byte are no neighbours."""
        return self.packing == "strided"

    @property
    def computed(self) -> bool:
        """Whether a write chooses scales."""
        return self.scale_dtype is not None and self.scale == "computed"

    def padding(self, groups: int) -> int:
        """Places of zeros behind the scales of a token, of one head with so many blocks."""
        if self.scale_pad is None or self.scale_dtype is None:
            return 0
        return self.scale_pad // dtype(self.scale_dtype).bytes - groups * (1 + self.zero)

    def model_post_init(self, context: Any) -> None:
        """nvfp4's block is part of its recipe."""
        if self.recipe in ("max", "global") and "block" not in self.model_fields_set:
            object.__setattr__(self, "block", Block(dim=NVFP4_GROUP))

    @field_validator("codebook")
    @classmethod
    def _singles(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """Kernels hold f32: two codebooks are equal where these are, and numbers ascend as these do."""
        return None if value is None else tuple(_single(x) for x in value)

    @model_validator(mode="after")
    def _consistent(self) -> Quant:
        if self.scale_dtype is None:
            self._check_scale_free()
        else:
            self._check_recipe()
            self._check_codebook()
            self._check_packing()
            self._check_floors()
            self._check_scales()
        return self

    def _check_scale_free(self) -> None:
        if self.dtype not in ("e4m3", "e5m2"):
            raise ValueError(
                f"scale_dtype: got none with dtype={self.dtype!r}, whose codes mean nothing without a scale; give 'f32', "
                "'f16' or 'bf16' ('e4m3' for e2m1), or store e4m3 or e5m2"
            )
        extra = self.model_fields_set - {"dtype", "scale_dtype"}
        if extra:
            raise ValueError(
                f"{min(extra)}: got a value without scale_dtype; a scale-free cast has no scales to describe; give "
                "scale_dtype, or leave it out"
            )

    def _check_recipe(self) -> None:
        nvfp4, pow2 = self.recipe in ("max", "global"), self.recipe == "pow2"
        got = f"recipe: got {self.recipe!r} with dtype={self.dtype!r} and scale_dtype={self.scale_dtype!r}"
        if (nvfp4 and self.scale_dtype != "e4m3") or (self.scale_dtype == "e4m3" and (pow2 or self.dtype != "e2m1")):
            raise ValueError(
                f"{got}; e4m3 scales are nvfp4's: dtype='e2m1' with recipe='max', 'global' or 'amax'; other codes have f32, f16 "
                "or bf16 scales"
            )
        if self.scale_dtype == "e8m0" and not pow2:
            raise ValueError(f"{got}; e8m0 scales are powers of two; use recipe='pow2'")
        if nvfp4 and self.block != Block(dim=NVFP4_GROUP):
            raise ValueError(f"block: got {_text(self.block)} for nvfp4; its scales are per token, head and 16 dims")
        if pow2 and (self.scale_dtype not in ("f32", "e8m0") or self.dtype not in _POWERS):
            raise ValueError(f"{got}; powers of two are for e4m3, e5m2 and e2m1 with f32 or e8m0 scales")
        if self.recipe in ("min", "signs") and not self.zero:
            what = "least values stand" if self.recipe == "min" else "root mean squares of what is left stand"
            raise ValueError(f"{got}; {what} in the place of zero points; give zero=True")
        if self.zero and self.dtype not in _UNSIGNED:
            raise ValueError(
                f"zero: got True with dtype={self.dtype!r}; only i8, i4, i3 and i2 codes have a zero point"
            )
        if self.dtype in ("i3", "i2") and not self.zero and self.codebook is None:
            raise ValueError(
                f"dtype: got {self.dtype!r} without a zero point and without a codebook; codes of so few bits are unsigned; "
                "give zero=True or codebook=(...), or use 'i4'"
            )
        if self.scale == "given" and self.recipe != "amax":
            raise ValueError(f"scale: got 'given' with recipe={self.recipe!r}, which computes scales; use 'computed'")
        if self.scale == "given" and self.scale_dtype == "e4m3":
            raise ValueError("scale: got 'given' with scale_dtype='e4m3'; given scales are f32, f16 or bf16; use 'f32'")

    def _check_codebook(self) -> None:
        book, norms, signs = self.codebook, self.recipe in NORMS, self.recipe == "signs"
        if self.norm_correction and self.recipe != "norm":
            raise ValueError(
                f"norm_correction: got True with recipe={self.recipe!r}; readers correct norms that are stored: recipe='norm' "
                "with a codebook; recipe='unit' stores corrected ones"
            )
        if self.norm_correction and book is not None and not 2.0**-32 <= max(map(abs, book)) <= 2.0**32:
            raise ValueError(
                f"norm_correction: got True with a codebook up to {max(map(abs, book))} in magnitude; squares of its numbers are "
                "counted in units, which magnitudes from 2^-32 to 2^32 have; scale the codebook"
            )
        if book is None:
            if norms:
                raise ValueError(
                    f"recipe: got {self.recipe!r} without a codebook, whose codes norms scale; give codebook=(...), or use 'amax'"
                )
            return
        given = self.scale == "given" or self.residual is not None
        if self.dtype not in ("i4", "i3", "i2") or self.zero != signs or given:
            others = f"dtype={self.dtype!r}, zero={self.zero}, scale={self.scale!r}, residual={self.residual}"
            raise ValueError(
                f"codebook: got one with {others}; its codes are 'i4', 'i3' or 'i2' with computed scales, without residual, and "
                "with zero only where recipe='signs'"
            )
        if self.recipe not in ("amax", *NORMS):
            raise ValueError(
                f"recipe: got {self.recipe!r} with a codebook, of which codes are no multiples; use 'amax', 'norm', 'unit' or "
                "'signs'"
            )
        bits = self.codes.bits - signs
        equal = next(((i, a) for i, (a, b) in enumerate(pairwise(book)) if a == b), None)
        if len(book) == 2**bits and equal is not None:
            raise ValueError(
                f"codebook: got numbers {equal[0]} and {equal[0] + 1} that are both {equal[1]!r} in f32, which kernels hold; "
                "codes stand for numbers that ascend in f32; move them apart"
            )
        if len(book) != 2**bits or not all(a < b for a, b in pairwise(book)) or max(map(abs, book)) > 2**64:
            raise ValueError(
                f"codebook: got {len(book)} numbers from {book[0] if book else None} on; codes of {bits} bits"
                f"{' beside a sign' if signs else ''} stand for {2**bits} numbers, ascending and finite in f32; sort them, or "
                f"use lloyd_max({bits}, dim)"
            )

    def _check_packing(self) -> None:
        unsigned = self.zero or self.codebook is not None
        if not self.strided or (
            self.dtype in ("i4", "i2")
            and unsigned
            and self.scale == "computed"
            and self.residual is None
            and self.block == Block()
        ):
            return
        others = f"dtype={self.dtype!r}, zero={self.zero}, scale={self.scale!r}, residual={self.residual}"
        raise ValueError(
            f"packing: got 'strided' with {others} and {_text(self.block)}; codes of a byte that are no neighbours are written "
            "with their row: 'i4' or 'i2' with zero or a codebook, computed scales, a scale a token and head; use 'neighbours'"
        )

    def _check_floors(self) -> None:
        floors = {"amax_min": self.amax_min, "scale_min": self.scale_min}
        given = {name: value for name, value in floors.items() if value is not None}
        if len(given) > 1:
            raise ValueError(
                f"scale_min: got {self.scale_min} beside amax_min={self.amax_min}; one floor says how small a scale may be; "
                f"leave one out"
            )
        for name, value in given.items():
            self._check_floor(name, value)

    def _check_floor(self, name: str, value: float) -> None:
        """A floor is of scales that are computed by "amax" or "pow2", and has a scale of `scale_dtype`."""
        if self.scale == "given" or self.zero or self.recipe not in ("amax", "pow2") or self.residual is not None:
            others = f"scale={self.scale!r}, zero={self.zero}, recipe={self.recipe!r}, residual={self.residual}"
            raise ValueError(
                f"{name}: got {value} with {others}; a floor is for scales that are computed from the largest magnitude: "
                "scale='computed' and recipe='amax' or 'pow2', without zero and residual"
            )
        assert self.scale_dtype is not None
        code = _LARGEST[self.dtype] if self.codebook is None else max(map(abs, self.codebook))
        least, largest = (n * (code if name == "amax_min" else 1) for n in _SCALES[self.scale_dtype])
        if not least <= value <= min(largest, _SCALES["f32"][1]):
            raise ValueError(
                f"{name}: got {value} with scale_dtype={self.scale_dtype!r}, of which {least} to {largest} make scales; give "
                "one of these, e.g. 1e-4 with f32 scales, or leave it out"
            )

    def _check_scales(self) -> None:
        tokens = self.block.token
        if self.residual is not None:
            if self.scale != "computed" or tokens != self.residual:
                raise ValueError(
                    f"residual: got {self.residual} with block.token={tokens} and scale={self.scale!r}; a sealed group "
                    f"computes one scale over its tokens: block=Block(token={self.residual}, dim=1), scale='computed'"
                )
            if self.block.dim != 1 or self.block.head != 1 or self.recipe != "amax":
                raise ValueError(
                    f"residual: got {_text(self.block)} and recipe={self.recipe!r}; a sealed group has a scale per channel: "
                    f"block=Block(token={self.residual}, head=1, dim=1), recipe='amax'"
                )
            if self.place == "row":
                raise ValueError(
                    f"residual: got {self.residual} with place='row'; a scale of several tokens is in no token's row; use "
                    "'pool' or 'page'"
                )
        elif self.scale == "computed" and tokens != 1:
            raise ValueError(
                f"block: got token={tokens} with computed scales; a new token would change the scale of older ones; use "
                "token=1, scale='given', or residual=R, which quantizes R tokens once they are complete"
            )
        if self.scale == "given":
            if self.zero:
                raise ValueError(
                    "zero: got True with given scales, an array that has no zero points; use scale='computed', or codes "
                    "without a zero point"
                )
            if tokens is not None:
                raise ValueError(
                    f"block: got token={tokens} with given scales, which are the same for every token; use token=None"
                )
            if self.place != "pool" or self.own_table or self.order != "linear":
                raise ValueError("scale: got 'given' with place, order or own_table, which are for computed scales")
        if self.scale_pad is not None and (self.place == "pool" or self.scale == "given"):
            raise ValueError(
                f"scale_pad: got {self.scale_pad} with place={self.place!r} and scale={self.scale!r}; zeros follow scales that a "
                "write computes, in pages or rows of bytes; use place='page' or 'row', or leave it out"
            )
        if self.own_table and self.place != "pool":
            raise ValueError(
                f"own_table: got True with place={self.place!r}; only a pool of scales has a table of its own"
            )
        if self.order == "swizzled" and self.place != "pool":
            raise ValueError(
                f"order: got 'swizzled' with place={self.place!r}; only a pool of scales is stored in tiles"
            )


def _text(block: Block) -> str:
    return f"Block(token={block.token}, head={block.head}, dim={block.dim})"


def _single(x: float) -> float:
    """The nearest number of f32; infinite where there is none."""
    try:
        return float(struct.unpack("f", struct.pack("f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)
