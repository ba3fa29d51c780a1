"""What kernels take, at run time: the parameters of a launch and the fields of the cache's struct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvgen.errors import ArgumentError
from kvgen.runtime.arrays import ArrayView, Dims, check
from kvgen.runtime.packing import ParamKind


@dataclass(frozen=True, slots=True)
class Array:
    """An array: see kvgen.plan.Param, whose run-time half this is."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    access: Literal["in", "out", "inout"] = "in"
    align: int = 1
    strided: bool = False
    optional: bool = False
    field: str | None = None
    fields: tuple[str | None, ...] = ()

    def check(self, array: ArrayView, dims: Dims, device: str) -> None:
        """Raise ArgumentError unless `array` fits; binds the dimension names."""
        check(
            array,
            self.name,
            dtype=self.dtype,
            shape=self.shape,
            dims=dims,
            field=self.field,
            fields=self.fields or (None,) * len(self.shape),
            packed=len(self.shape) - 1 if self.strided else None,
            writable=self.access != "in",
            align=self.align,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """The address of the layer's memory of a role ("k", "v"); a field of the cache's struct only."""

    name: str


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number that follows from the arguments: a size, a stride."""

    name: str
    dtype: Literal["u32", "i64"]
    value: str

    def number(self, dims: Dims) -> int:
        """Its value; raises ArgumentError where it is too large for the kernel."""
        number = dims[self.value]
        if self.dtype == "u32" and number >= 2**32:
            raise ArgumentError(
                f"{dims.origin.get(self.value, 'cache')}: got {self.value} = {number}; kernels count it in 32 bits; "
                "pass less than 2^32"
            )
        return number


def kinds_of(params: Sequence[Array | Pool | Scalar]) -> tuple[ParamKind, ...]:
    """How each of them is packed."""
    return tuple(p.dtype if isinstance(p, Scalar) else "ptr" for p in params)
