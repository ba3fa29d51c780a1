"""What a kernel of the user's takes behind the cache: the vocabulary of `ops.Custom(params=...)`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from typing import Final, Literal

from pydantic import Field, field_validator, model_validator

from kvgen.expr.rules import FUNCTIONS
from kvgen.plan.params import Access
from kvgen.schema.base import Spec

ArrayDType = Literal["f32", "f16", "bf16", "e4m3", "e5m2", "i8", "u8", "i32", "u32", "i64", "u64"]
ScalarDType = Literal["f32", "i32", "u32", "i64", "u64"]
SizeDType = Literal["u32", "i64"]

# What launchers take, and what their methods are made of.
_RESERVED: Final = ("cache", "stream", "self", "errors", "workspace", "object")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")
_DIM: Final = re.compile(r"([A-Za-z]\w*)(?:\s*\+\s*(\d+))?", re.ASCII)


class Argument(Spec):
    """One parameter behind the cache. `name` is the launcher's argument and names it in messages."""

    name: str
    """Name of the launcher's argument."""
    doc: str = ""
    """One line for the launcher's docstring."""

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value) or keyword.iskeyword(value) or value in _RESERVED:
            raise ValueError(
                f"name: got {value!r}; it is an argument of a Python function: letters, digits and _, a letter first, at "
                f"most 40 characters, no Python keyword, and none of {', '.join(_RESERVED)}"
            )
        return value

    @field_validator("doc")
    @classmethod
    def _valid_doc(cls, value: str) -> str:
        return one_line(value)


def one_line(text: str) -> str:
    """`text`, which goes into a docstring as one line; raises ValueError for control characters."""
    if not text.isprintable():
        raise ValueError(f"doc: got {text!r}; it is one line of a docstring, without control characters")
    return text


class Array(Argument):
    """A pointer, `T*` or for access "in" `const T*`, to an array that the call brings.

    `shape` has whole numbers; names such as "T", which take their size from the first array that has them and must agree
    everywhere, with "B" the cache's requests and "B+1" one more; and words of the spec: "kv_heads", "q_heads", "group",
    "head_dim", "v_head_dim", "page_size". Arrays are contiguous; `strided` leaves the stride of the first axis free, which
    `Size("k_stride", "k.stride")` passes on. `align` is what the address (and such a stride) is a multiple of, in bytes.
    It is at least the element's own size. `optional` ones may be left out: the kernel gets a null pointer. `untrusted` says,
    in the plan, that the kernel does not trust its contents. An array that is written may lie in no other array's memory, but
    for the arrays and tables of the cache that `in_place` names: it may be one of them, element for element, because the
    kernel reads each element before it writes it, and no other thread reads it.
    """

    dtype: ArrayDType
    """Element type of the array."""
    shape: tuple[int | str, ...] = Field(min_length=1, max_length=8, strict=False)
    """Extents, slowest first: whole numbers; names such as "T", whose size comes from the call; "B" and "B+1"; words of
    the spec such as "head_dim".
    """
    access: Access = "in"
    """"in": the kernel reads it, `const T*`. "out" and "inout": the kernel writes it, `T*`."""
    optional: bool = False
    """True: the call may leave it out, and the kernel gets a null pointer."""
    strided: bool = False
    """True: the stride of the first axis is free. False: the array is contiguous."""
    align: int = Field(default=1, ge=1, le=256)
    """Bytes that the address is a multiple of, and so is a free stride: a power of two. 1: the element's own size."""
    untrusted: bool = False
    """True: the kernel checks the contents itself; recorded in the plan."""
    in_place: tuple[str, ...] = Field(default=(), strict=False)
    """Arrays of the call, or tables of the cache, whose memory this written array may be, element for element."""

    def __init__(
        self,
        name: str,
        dtype: ArrayDType,
        shape: Sequence[int | str],
        access: Access = "in",
        *,
        optional: bool = False,
        strided: bool = False,
        align: int = 1,
        untrusted: bool = False,
        in_place: Sequence[str] = (),
        doc: str = "",
    ) -> None:
        self._fill(name=name, dtype=dtype, shape=shape, access=access, optional=optional, strided=strided, align=align,
            untrusted=untrusted, in_place=in_place, doc=doc,
        )  # fmt: skip

    @field_validator("align")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"align: got {value}; alignments are powers of two")
        return value

    @model_validator(mode="after")
    def _written_in_place(self) -> Array:
        if self.in_place and self.access == "in":
            raise ValueError(
                f"in_place: got {', '.join(self.in_place)} for {self.name}, which is only read; arrays that are read may overlap "
                "anyway; leave it out, or say access='out'"
            )
        return self

    @field_validator("shape")
    @classmethod
    def _axes(cls, value: tuple[int | str, ...]) -> tuple[int | str, ...]:
        return tuple(_axis(axis) for axis in value)


def _axis(axis: int | str) -> int | str:
    if isinstance(axis, int):
        if not 1 <= axis < 2**31:
            raise ValueError(f"shape: got {axis}; a dimension is at least 1 and below 2^31")
        return axis
    match = _DIM.fullmatch(axis.strip())
    if match is None or match[1] in FUNCTIONS:
        raise ValueError(f"shape: got {axis!r}; a dimension is a whole number, a name such as 'T', or 'B+1'")
    return f"{match[1]}+{int(match[2])}" if int(match[2] or 0) else match[1]


class Scalar(Argument):
    """A number that the call brings: `float`, `int32_t`, `uint32_t`, `int64_t`, `uint64_t`."""

    dtype: ScalarDType
    """Type of the number: "f32", "i32", "u32", "i64" or "u64"."""

    def __init__(self, name: str, dtype: ScalarDType, *, doc: str = "") -> None:
        self._fill(name=name, dtype=dtype, doc=doc)


class Size(Argument):
    """A number that follows from the arguments and that the launcher passes by itself.

    `value` is a name of a shape ("T", "B", the cache's "M"), or "k.stride": the stride of a strided array's first axis in
    elements. Strides are i64, the others u32 unless `dtype` says otherwise.
    """

    value: str
    """What the launcher passes: a name of a shape ("T", "B"), or "k.stride", the stride of the strided array k in
    elements.
    """
    dtype: SizeDType
    """Type of the number. Default: "i64" for strides, "u32" for others."""

    def __init__(self, name: str, value: str, dtype: SizeDType | None = None, *, doc: str = "") -> None:
        kind = dtype or ("i64" if isinstance(value, str) and "." in value else "u32")
        self._fill(name=name, value=value, dtype=kind, doc=doc)


class TensorMap(Argument):
    """A tensor map, `const __grid_constant__ TensorMap`: 128 bytes that the call brings, for tensor copies (TMA).

    The call passes bytes, as `kvgen.runtime.tensor_map.encode` makes them, or an object that has them as `data`. Memory
    that the map leads to belongs to the cache or to another argument.
    """

    def __init__(self, name: str, *, doc: str = "") -> None:
        self._fill(name=name, doc=doc)
