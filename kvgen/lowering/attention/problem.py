"""An attention call, worked out once; and a kernel's answer whether it can take the call on an architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from kvgen.architectures import Architecture
from kvgen.expr.nodes import Expr
from kvgen.lowering.attention.masks_scores import AttentionContext
from kvgen.plan.division import Division
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Param, PoolMap
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.cache import Cache

# Names of parameters that say where rows of q and out lie, and how their numbers are scaled; and of the error word.
_ROWS: Final = frozenset(
    ["q", "out", "lse", "sinks", "q_scale", "out_scale", "q_stride", "out_stride", "num_rows", "errors"]
)


@dataclass(frozen=True)
class AttentionCall:
    """The facts of a call that every attention kernel over chunks has, and that attention/chunks.j2 reads.

    `rows` of a request at most, times the `group` query heads of a kv head, are its columns. The LSE is to base 2 if
    `lse_base_two`, counts the sinks if `lse_sinks`, and where a row sees no key it is inf if `lse_inf`, else -inf. `q_scaled`,
    `out_scaled`: q, out are codes, whose scale the call may bring. `lists`: of a request's pages the call lists those that
    count, for each kv head.

    A kernel decides the rest: `tiles` of columns share a kv head, or a block has `heads` neighbouring ones; `vec` dims of the
    output are written by one access. `factored`: sums are still to be multiplied with Values::kFactor. A workspace whose plan
    has another `plan_digest` is refused (0: nothing is planned). `maps`: tensor maps stand behind all other parameters.
    """

    entry: str
    params: tuple[str, ...]
    attend: AttentionContext
    elem: str
    out_elem: str
    kv_heads: int
    group: int
    rows: int
    v_size: int
    planned: bool
    sinks: bool
    new_in_length: bool
    lse_inf: bool
    lse_sinks: bool
    lse_base_two: bool
    q_scaled: bool = False
    out_scaled: bool = False
    lists: bool = False
    tiles: int = 1
    heads: int = 1
    vec: int = 4
    factored: bool = False
    plan_digest: int = 0
    maps: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The parameters that every function of the kernel may read: all but tensor maps."""
        return tuple(p for p in self.params if "TensorMap" not in p)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `arguments`."""
        return tuple(p.rpartition(" ")[2] for p in self.arguments)

    @property
    def row_arguments(self) -> tuple[str, ...]:
        """The parameters that functions of decode read: rows, their scales and strides, and the error word.

        The kernel itself reads the plan, lists and offsets.
        """
        return tuple(p for p in self.arguments if p.rpartition(" ")[2] in _ROWS)

    @property
    def row_names(self) -> tuple[str, ...]:
        """The names of `row_arguments`."""
        return tuple(p.rpartition(" ")[2] for p in self.row_arguments)

    @property
    def column_blocks(self) -> int:
        """Blocks that share a chunk."""
        return self.kv_heads // self.heads * self.tiles

    @property
    def columns(self) -> int:
        """Columns of a request and kv head."""
        return self.rows * self.group


@dataclass(frozen=True)
class WhyNot:
    """Why a kernel does not take a call on an architecture: a clause without a capital and a full stop."""

    text: str


@dataclass(frozen=True)
class Fit:
    """A kernel that takes a call on an architecture.

    `how` says for people what is special about it. `context` makes what its template reads of the call, once that is whole.
    `tile` tokens are the planner's unit. `partial_bytes` are those of a partial result of one block. q and out are read and
    written `q_align` and `out_align` elements at a time, `vec` dims of out by one access. `maps` are tensor maps that the
    kernel takes behind all else. `persistent`: a block a multiprocessor takes work until none is left. An entry of up to
    `narrow_columns` columns takes half the time of others.
    """

    how: str
    context: Callable[[AttentionCall], object]
    division: Division
    threads: int
    shared: int
    tile: int
    partial_bytes: int
    q_align: int
    out_align: int
    vec: int = 4
    factored: bool = False
    maps: tuple[PoolMap, ...] = ()
    persistent: bool = False
    narrow_columns: int = 0


class Problem(Protocol):
    """The questions of `choose` and `kernel_plans` to a call of any operation."""

    @property
    def name(self) -> str:
        """The operation's."""

    @property
    def cache(self) -> Cache:
        """The set's cache."""

    @property
    def call(self) -> AttentionCall:
        """The call, without what a kernel decides."""

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters of a call, in the order of the kernel's signature; q and out aligned to one element."""

    @property
    def reads_tables(self) -> bool:
        """Page tables or lengths are read."""

    def grid(self, fit: Fit, call: AttentionCall) -> Expr:
        """Blocks of a launch."""

    def split_plan(self, fit: Fit) -> SplitPlan | None:
        """How the workspace is divided; None without one."""

    def digest(self, fit: Fit, split: SplitPlan | None) -> int:
        """64 bits by which the kernel knows plans that are its own; 0 without a workspace."""

    def planner(self, fit: Fit, call: AttentionCall) -> KernelPlan:
        """The kernel that plans a step, of a call with a workspace."""


P = TypeVar("P", contravariant=True)


class Candidate(Protocol[P]):
    """A kernel for a kind of call: one module of this room and one template of the same name."""

    @property
    def NAME(self) -> str:
        """Module and template."""

    def fit(self, problem: P, arch: Architecture) -> Fit | WhyNot:
        """How it takes the call on this architecture, or why it does not."""
