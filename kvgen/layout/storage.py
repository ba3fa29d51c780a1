"""What a cache's memory is made of: the tensors an engine passes, the pointers into a page, and, role by role, where
values and scales lie.

A *segment* is a run of a role's dims that is stored one way: K of an ordinary cache is one, a latent row has two (latent
and RoPE part). Everything that reads or writes a cache goes through segments, so a new variant is a new list of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from kvgen.expr.nodes import Expr
from kvgen.layout.dtypes import DType
from kvgen.layout.regions import Region


class Quantization(Protocol):
    """How codes stand for values, as far as a segment is concerned; `kvgen.Quant` documents it."""

    @property
    def dtype(self) -> str: ...
    @property
    def scale_dtype(self) -> str | None: ...
    @property
    def scale(self) -> str: ...
    @property
    def codes(self) -> DType: ...
    @property
    def computed(self) -> bool: ...
    @property
    def zero(self) -> bool: ...
    @property
    def recipe(self) -> str: ...
    @property
    def codebook(self) -> tuple[float, ...] | None: ...
    @property
    def norm_correction(self) -> bool: ...
    @property
    def strided(self) -> bool: ...
    @property
    def amax_min(self) -> float | None: ...
    @property
    def scale_min(self) -> float | None: ...
    @property
    def residual(self) -> int | None: ...


TableOf = Literal["values", "scales"]


@dataclass(frozen=True)
class PoolTensor:
    """One tensor as `Cache(...)` takes it.

    `dtypes` are the element types its array may have (codes may come as bytes); `axes`, `shape` (numbers, and names of
    extents known at run time) and `strides` (None: brought by the tensor) have an entry a dimension, in elements of the
    array; `align` is the widest access in bytes; `fields` names the spec field behind each dimension. `page_align`: bytes of
    which the stride along page is a multiple.
    """

    name: str
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    shape: tuple[int | str, ...]
    strides: tuple[int | None, ...]
    align: int
    text: str
    fields: tuple[str | None, ...]
    page_align: int = 1

    @property
    def holds_values(self) -> bool:
        """Whether it is a pool of values, and not of scales or newest tokens."""
        return self.name.endswith("pool")

    @property
    def given(self) -> bool:
        """Whether operations only read it: scales of the caller's."""
        return self.name.endswith("_scale")


@dataclass(frozen=True)
class Base:
    """A pointer to a page: where some regions of it begin. `kv` is its index along the tensor's kv axis."""

    name: str
    tensor: str
    element: DType
    kv: int = 0
    table: TableOf = "values"


@dataclass(frozen=True)
class Scales:
    """Where the scale of a block lies, and its zero point one place on.

    In pages: `base` and `region`, whose token, head and dim count blocks (two places a block along dim with a zero
    point). Else a device array `array`, `[heads, groups]`. `pad` places behind a token's are zero.
    """

    dtype: DType
    zero: bool
    block: tuple[int, int, int]
    heads: int
    groups: int
    base: str = ""
    region: Region | None = None
    array: str = ""
    pad: int = 0

    def offset(self, token: Expr, head: Expr, dim: Expr) -> Expr:
        """The place of the scale of an element, in scales, from `base` or in `array`."""
        _, heads, dims = self.block
        group = dim // dims
        if self.region is None:
            return head // heads * self.groups + group
        return self.region.offset(
            {"token": token // self.block[0], "head": head // heads, "dim": group * (1 + self.zero)}
        )


@dataclass(frozen=True)
class Segment:
    """Dims [begin, begin + size) of a role: their elements and, where they have any, their scales."""

    begin: int
    size: int
    base: str
    region: Region
    quant: Quantization | None = None
    scales: Scales | None = None
    global_scale: str = ""

    @property
    def vector(self) -> int:
        """Elements of the widest access: within a run of memory, and of whole blocks of dims or within one."""
        width, block = self.region.vector, self.scales.block[2] if self.scales else self.size
        while self.size % width or (block % width and width % block):
            width //= 2
        return width

    @property
    def span(self) -> int:
        """Elements of which no two share a byte though other dims lie between them: of strided codes, a place's."""
        return self.size // (self.region.dtype.together if self.region.strided else 1)

    @property
    def align(self) -> int:
        """Bytes of which the place of a widest access is a multiple; those of 3-bit elements are three such accesses."""
        nbytes = self.region.bytes_of(self.vector)
        return max(1, nbytes & -nbytes)

    @property
    def scale_vector(self) -> int:
        """Scales and zero points of the widest access: those of the blocks that a vector of elements spans, in a run."""
        scales = self.scales
        if scales is None:
            return 1
        wanted = max(1, self.vector // scales.block[2]) * (1 + scales.zero)
        run = scales.region.vector if scales.region else math.gcd(16 // scales.dtype.bytes, scales.groups)
        return min(wanted, run)


@dataclass(frozen=True)
class Storage:
    """All of it; `roles` maps "k" and, where V is stored, "v" to their segments."""

    tensors: tuple[PoolTensor, ...]
    bases: tuple[Base, ...]
    roles: dict[str, tuple[Segment, ...]]

    def base(self, name: str) -> Base:
        """The base called `name`."""
        return next(b for b in self.bases if b.name == name)

    def tensor(self, name: str) -> PoolTensor:
        """The tensor called `name`."""
        return next(t for t in self.tensors if t.name == name)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those of every role."""
        return tuple(s for segments in self.roles.values() for s in segments)

    @property
    def residual(self) -> int:
        """Tokens of K that are quantized together, the newest of which wait in a tail; 0 without one."""
        return next((s.quant.residual for s in self.roles.get("k", ()) if s.quant is not None and s.quant.residual), 0)

    @property
    def own_table(self) -> bool:
        """Whether scales are found through a page table of their own."""
        return any(b.table == "scales" for b in self.bases)
