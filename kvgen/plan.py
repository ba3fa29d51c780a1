"""Plans: every decision about one kernel, taken in Python before a template writes any text.

Every kernel's first parameter is the cache, one struct. The table of the others is the single source of a kernel's C
signature, its launcher's signature and docstring, the argument checks, and the CPU machine's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvgen.dtypes import DType
from kvgen.expr import Expr

Access = Literal["in", "out", "inout"]
Brought = Literal["", "scalar", "count", "tensor_map", "pages", "cache"]
_STRUCTS: Final = {"tensor_map": "TensorMap", "pages": "PagePool", "cache": "source::Cache"}


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel, or one field of the cache's struct.

    An array has a `shape` of numbers and dimension names ("T" rows, "B" requests ...); a scalar has none and takes the
    run-time quantity called `value`, or is `brought` by the call: a number, a count that sizes the grid (an int or a host
    array of one), a tensor map, the pages of another pool, another cache. `align` is the pointer's
    alignment in bytes; `strided` leaves the first axis's stride free. `untrusted` marks device data that may hold
    anything. `field` names the spec field behind the dtype and `fields` those behind the axes, for error messages. A field
    of shape ("pool",) is the layer's own memory of a role. `in_place` names arguments and tables of the cache that an array
    which is written may be, element for element: the kernel has read each element before it writes it, and nobody else reads
    it. Any other overlap is refused. A count of `each` rows a unit is at most what the dimensions `most` have; an argument
    with `rows` is not looked at where that dimension is 0.
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...] | None = None
    access: Access = "in"
    value: str = ""
    align: int = 1
    strided: bool = False
    optional: bool = False
    untrusted: bool = False
    doc: str = ""
    field: str = ""
    fields: tuple[str | None, ...] = ()
    brought: Brought = ""
    in_place: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    each: int = 1
    rows: str = ""

    @property
    def declaration(self) -> str:
        """The parameter in the kernel's C signature, the field in the struct."""
        if self.brought in _STRUCTS:
            return f"const __grid_constant__ {_STRUCTS[self.brought]} {self.name}"
        if self.shape is None:
            return f"{self.dtype.c} {self.name}"
        qualifier = "const " if self.access == "in" else ""
        return f"{qualifier}{self.dtype.c}* {self.name}"


@dataclass(frozen=True)
class Work:
    """How an operation's workspace is divided: see kvgen.runtime.workspace.Work, whose fields these are.

    `columns` are kv heads times tiles of columns, the blocks that share a piece; `partial_bytes` are those of a slot, for
    all of them. `chunk` tokens make a piece, 0 where the planner balances. `most` tokens of a request are seen at most, by a
    window or in a ring; 0: all.
    """

    columns: int
    blocks_per_sm: int
    partial_bytes: int
    chunk: int
    most: int = 0


@dataclass(frozen=True)
class Source:
    """CUDA that the user wrote: its text, and the path by which messages name it ("<name>" where it has no file)."""

    path: str
    text: str


@dataclass(frozen=True)
class KernelPlan:
    """One kernel of one operation: its template and everything the template reads, or the user's own text.

    `context` is a frozen dataclass whose fields are exactly the template's variables. `params` follow the cache in the
    signature: what the call brings. `grid` is evaluated by the launcher over the dimension names of `params` and of the
    cache's fields; `shared` is dynamic shared memory in bytes, `shared_by_arch` that of architectures that differ.
    `writes_pool`: the kernel stores to the cache's memory. `whole`: the launcher takes the cache with all its layers; the
    struct is then the first one's.
    A kernel with a `source` has neither template nor context.
    """

    name: str
    entry: str
    template: str
    context: object
    params: tuple[Param, ...]
    grid: tuple[Expr, Expr, Expr]
    threads: int
    shared: int = 0
    shared_by_arch: tuple[tuple[str, int], ...] = ()
    writes_pool: bool = False
    whole: bool = False
    source: Source | None = None

    def shared_on(self, arch: str) -> int:
        """Dynamic shared memory of a block on this architecture, in bytes."""
        return dict(self.shared_by_arch).get(arch, self.shared)
