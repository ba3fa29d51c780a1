"""The parts of a row: dims stored as they are, and dims stored as codes with a scale a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgen.reference.elements import Elements, Raw
from kvgen.reference.faults import FaultLog
from kvgen.reference.quant import choose, corrected, dequantize, norms, quantize
from kvgen.reference.tables import Place
from kvgen.runtime.faults import Fault
from kvgen.schema.quant import Quant

# Scales and zeros `[blocks of heads, blocks of dims]`; None where there are none.
Chosen = tuple[Raw | None, Raw | None]


@dataclass(frozen=True)
class Plain:
    """Dims in the cache's dtype, copied bit for bit."""

    elements: Elements

    @property
    def heads(self) -> int:
        return self.elements.heads

    @property
    def dim(self) -> int:
        return self.elements.dim

    @property
    def pages(self) -> int:
        return self.elements.pages

    @property
    def tokens(self) -> int:
        return self.elements.tokens

    def read(self, place: Place, token: int) -> Raw:
        """`[heads, dim]` in the cache's dtype."""
        return self.elements.read(place.page, token)

    def numbers(self, place: Place, token: int) -> NDArray[np.float64]:
        """`[heads, dim]`, exactly."""
        return self.read(place, token).astype(np.float64)

    def numbers_run(self, place: Place, first: int, count: int) -> NDArray[np.float64]:
        """`[T, heads, dim]` of `count` tokens from `first`, exactly."""
        return self.elements.read_run(place.page, first, count).astype(np.float64)

    @property
    def together(self) -> int | None:
        """How many tokens are written at once; None: as many as there are."""
        return None

    def write(self, place: Place, first: int, rows: Raw) -> None:
        """`rows` `[T, heads, dim]` are the tokens from `first`."""
        self.elements.write_run(place.page, first, rows)


def usable(scales: Raw) -> Raw:
    """Scales of the caller's: NaN where they are 0, negative or not finite."""
    values = scales.astype(np.float64)
    return np.where(np.isfinite(values) & (values > 0), scales, np.array(np.nan, scales.dtype))


@dataclass(frozen=True)
class Coded:
    """Dims stored as codes.

    `codes` are bytes, or nibbles where the type is packed. `block` says how many tokens, heads and dims share a scale; the
    last block along dim is shorter where it does not divide. Computed scales lie in `scales`, rows of
    `[blocks of heads, blocks of dims]` a block of tokens, two places a block with a zero point: scale, zero. Given ones are
    the array `given` `[blocks of heads, blocks of dims]`. `global_scale` is the f32 factor of recipe "global", `kind` the
    cache's dtype.
    """

    quant: Quant
    block: tuple[int, int, int]
    codes: Elements
    scales: Elements | None
    given: Raw | None
    global_scale: float | None
    kind: np.dtype[Any]

    @property
    def heads(self) -> int:
        return self.codes.heads

    @property
    def dim(self) -> int:
        return self.codes.dim

    @property
    def pages(self) -> int:
        return self.codes.pages

    @property
    def tokens(self) -> int:
        return self.codes.tokens

    def numbers(self, place: Place, token: int) -> NDArray[np.float64]:
        """`[heads, dim]` dequantized, rounded to f32 and no further."""
        scales = self.scales.read(place.scales, token // self.block[0]) if self.scales else None
        scale, zero = self._stored(scales)
        codes, quant = self.codes.read(place.page, token), self.quant
        if quant.norm_correction:
            assert scale is not None and quant.codebook is not None
            scale = corrected(scale, self._blocks_of(codes[None]), quant.codebook)
        found = dequantize(
            codes[..., None],
            self._spread(scale),
            self._spread(zero),
            quant.dtype,
            quant.recipe,
            "f32",
            self._factor,
            codebook=quant.codebook,
        )
        return found[..., 0].astype(np.float64)

    def numbers_run(self, place: Place, first: int, count: int) -> NDArray[np.float64]:
        """`[T, heads, dim]` of `count` tokens from `first`, dequantized, rounded to f32 and no further."""
        return np.stack([self.numbers(place, token) for token in range(first, first + count)])

    def report_scales(self, role: int, faults: FaultLog) -> None:
        """Report the first given scale that is none, as of K (0) or V (1), and the scale above all blocks (4, 5)."""
        given, _ = self._stored(None) if self.given is not None else (None, None)
        bad = np.isnan(given.astype(np.float64)).reshape(-1) if given is not None else np.zeros(1, bool)
        if bad.any():
            faults.add(Fault.SCALE, role, int(bad.argmax()))
        if self._factor is not None and np.isnan(self._factor):
            faults.add(Fault.SCALE, 4 + role, 0)

    @property
    def _factor(self) -> float | None:
        """The scale above all blocks as values are multiplied and divided by it."""
        scale = self.global_scale
        return scale if scale is None else float(usable(np.array(scale, np.float32)))

    @property
    def together(self) -> int | None:
        """How many tokens are written at once: those that share computed scales; None: as many as there are."""
        return self.block[0] if self.scales is not None else None

    def read(self, place: Place, token: int) -> Raw:
        """`[heads, dim]` in the cache's dtype: dequantized in f32, then rounded once."""
        with np.errstate(over="ignore"):
            return self.numbers(place, token).astype(np.float32).astype(self.kind)

    def write(self, place: Place, first: int, rows: Raw) -> None:
        """`rows` `[T, heads, dim]` are the tokens from `first`; where scales are computed, all that share them."""
        x, quant = rows.astype(np.float32), self.quant
        tokens, scales = self.block[0], None
        if self.scales is None:
            scale, zero = self._stored(None)
        else:
            if len(rows) != tokens or first % tokens:
                raise ValueError(f"rows: got {len(rows)} from token {first} on where {tokens} tokens share a scale")
            scale, zero = self._chosen(x)
            scales = self.scales.read(place.scales, first // tokens)
            at_scale, at_zero = self._stored(scales)
            assert at_scale is not None
            at_scale[:] = scale
            if zero is not None:
                assert at_zero is not None
                at_zero[:] = zero
        unrounded = quant.recipe in ("unit", "signs") or quant.norm_correction
        divisor = self._blocks_norms(x) if unrounded else scale
        codes = quantize(
            x[..., None],
            self._spread(divisor),
            self._spread(zero),
            quant.dtype,
            quant.recipe,
            self._factor,
            codebook=quant.codebook,
        )[..., 0]
        self.codes.write_run(place.page, first, codes)
        if self.scales is not None and scales is not None:
            self.scales.write(place.scales, first // tokens, scales)

    def _stored(self, scales: Raw | None) -> Chosen:
        """Scales and zeros as they lie in memory, views of a row of scales."""
        _, heads, dims = self.block
        rows, columns = -(-self.heads // heads), -(-self.dim // dims)
        if self.given is not None:
            return usable(self.given[:rows, :columns]), None
        if scales is None:
            return None, None
        if self.quant.zero:
            return scales[:rows, 0 : 2 * columns : 2], scales[:rows, 1 : 2 * columns : 2]
        return scales[:rows, :columns], None

    def _chosen(self, x: NDArray[np.float32]) -> Chosen:
        """Scales and zeros of rows `[T, heads, dim]` that share them."""
        quant, blocks = self.quant, self._blocks_of(x)
        assert quant.scale_dtype is not None
        return choose(
            blocks,
            quant.dtype,
            quant.scale_dtype,
            quant.recipe,
            quant.zero,
            self._factor,
            amax_min=quant.amax_min,
            scale_min=quant.scale_min,
            codebook=quant.codebook,
        )

    def _blocks_norms(self, x: NDArray[np.float32]) -> Raw:
        return norms(self._blocks_of(x))

    def _blocks_of(self, x: NDArray[Any]) -> NDArray[Any]:
        """Rows `[T, heads, dim]` as `[blocks of heads, blocks of dims, numbers of a block]`."""
        _, heads, dims = self.block
        # What a shorter block lacks repeats its last numbers: neither the least nor the largest of them changes.
        short = (-self.heads % heads, -self.dim % dims)
        full = np.pad(x, ((0, 0), (0, short[0]), (0, short[1])), mode="edge") if any(short) else x
        rows, columns = full.shape[1] // heads, full.shape[2] // dims
        return full.reshape(len(x), rows, heads, columns, dims).transpose(1, 3, 0, 2, 4).reshape(rows, columns, -1)

    def _spread(self, blocks: Raw | None) -> Raw | None:
        """What each block has, `[heads, dim]`: for every number of a row."""
        if blocks is None:
            return None
        _, heads, dims = self.block
        return blocks.repeat(heads, axis=0)[: self.heads].repeat(dims, axis=1)[:, : self.dim]


Part = Plain | Coded
