"""How attention kernels divide their work: chunks of requests, the planner that lists them, and the workspace for both."""

from __future__ import annotations

import hashlib
import math
from dataclasses import astuple, dataclass
from typing import Final, Literal

from kvgen.expr.nodes import const
from kvgen.lowering.attention.masks_scores import AttentionContext
from kvgen.lowering.cache_struct import entry_name
from kvgen.lowering.lowered import lower
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.plan.split_plan import SplitPlan
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.mask import Mask

Split = Literal["none", "balanced", "invariant"]

PLAN_THREADS: Final = 256
# What a chunk costs besides its tiles, in tiles: Q, the merge, and a pipeline that fills.
OVERHEAD: Final = 2
# An SM part has at least so many tiles more: less is not worth a block.
LEAST_TILES: Final = 2

WORKSPACE: Final = Array(
    "workspace", "u8", ("W",), access="inout", align=16, doc="from `workspace()`, planned for this step by `plan()`"
)
# Scales of e4m3 codes; append has the same q_scale.
Q_SCALE: Final = Array("q_scale", "f32", (1,), optional=True, doc="what q's codes are multiplied with; None: 1")
OUT_SCALE: Final = Array(
    "out_scale", "f32", (1,), optional=True, doc="what out's codes are to be multiplied with; None: 1"
)
# Sizes of the workspace, which the launcher takes from it.
SIZES: Final = tuple(Size(name, "u32", name) for name in ("num_sm_parts", "max_rows", "max_chunks", "max_slots"))


@dataclass(frozen=True)
class PlanContext:
    """Everything ops/decode_plan.cu.j2 reads.

    `counters` are those of a slot: kv heads times tiles of columns. `chunk_tokens` make a chunk where bits must not depend
    on the batch, 0 where chunks are as long as balance asks. `lists` are the lengths of a row's lists, where those are its
    tokens, in whole tiles of `list_tile`.
    """

    entry: str
    attends: str
    params: tuple[str, ...]
    attend: AttentionContext
    threads: int
    tile: int
    chunk_tokens: int
    overhead: int
    least_tiles: int
    rows: int
    counters: int
    new_in_length: bool
    digest: int
    lists: tuple[str, ...] = ()
    list_tile: int = 0


def partial_bytes(cols: int, dim: int) -> int:
    """Bytes of a partial result of `cols` columns: Partial of device/attention/common/merge.cuh."""
    head = -(-2 * cols // 4) * 4
    return -(-(head + cols * dim) // 4) * 16


def row_offsets(index: str) -> Param:
    """The optional offsets that say whose query rows are."""
    return Array(
        "row_offsets",
        index,
        ("B+1",),
        optional=True,
        untrusted=True,
        doc="first row of each request",
        field="index_dtype",
    )


def most_seen(kernels: KernelSet, rows: int, mask: Mask) -> int:
    """The most tokens of a request that its rows see together, by a ring or by the mask; 0: all."""
    window = lower(kernels.kv).table.window
    found = [window] if window else []
    found += [mask.window + rows] if mask.window and not mask.later else []
    found += [mask.chunk + rows] if mask.chunk and not mask.later else []
    return min(found, default=0)


def new_in_length(kernels: KernelSet, cross: bool = False) -> bool:
    """Lengths count all tokens that there are: rows' own are counted, or rows have none (`cross`)."""
    return cross or kernels.kv.lengths == "after"


def check_cross(mask: Mask) -> None:
    """Raise ValueError where a mask asks for positions of rows that are no tokens."""
    for name, value in (
        ("causal", mask.causal),
        ("window", mask.window),
        ("ahead", mask.ahead),
        ("chunk", mask.chunk),
        ("block", mask.block),
    ):
        if value:
            raise ValueError(
                f"cross: got True beside a mask with {name}={value}; rows that are no tokens of the cache have no position among "
                "them; use Mask(causal=False), with padding or tree='mask' if need be"
            )


def plan_digest(
    kernels: KernelSet,
    name: str,
    split: SplitPlan | None,
    attend: AttentionContext,
    rows: int,
    tile: int,
    cross: bool = False,
) -> int:
    """64 bits by which a kernel knows the plans that are its own: of the operation, how its workspace is divided, how its
    requests are cut and which of their tokens its rows see. 0 without a workspace."""
    if split is None:
        return 0
    sees = (attend.causal, attend.later, attend.window, attend.chunk, attend.padding)
    ahead = (
        *((attend.ahead,) if attend.ahead else ()),
        *(("rate", attend.rate) if attend.rate > 1 else ()),
        *(("block", attend.block) if attend.block else ()),
    )
    window, lengths = lower(kernels.kv).table.window, "cross" if cross else kernels.kv.lengths
    divided = astuple(split)[: None if split.tiles_a_row > 1 else -1]
    fields = (entry_name(kernels, name), *divided, rows, tile, *sees, *ahead, window, lengths)
    return int.from_bytes(hashlib.sha256(repr(fields).encode()).digest()[:8], "little")


def planner(
    kernels: KernelSet,
    name: str,
    *,
    attend: AttentionContext,
    rows: int,
    tile: int,
    chunk_tokens: int,
    columns: int,
    index: str,
    digest: int,
    cross: bool = False,
    lengths: tuple[Param, ...] = (),
    list_tile: int = 0,
) -> KernelPlan:
    """The planner of operation `name`: one block, once a step. Where rows have lists, `lengths` are those of the lists, each of
    which takes whole tiles of `list_tile` entries."""
    padding = tuple(p for p in attend.params if p.name == "valid_tokens")
    params = (
        WORKSPACE,
        *(lengths or (row_offsets(index),)),
        *padding,
        Size("num_rows", "u32", "planned_rows"),
        *SIZES,
    )
    context = PlanContext(
        entry=entry_name(kernels, f"{name}_plan"),
        attends=entry_name(kernels, name),
        params=tuple(p.declaration for p in params),
        attend=attend,
        threads=PLAN_THREADS,
        # A chunk is a whole number of tiles, also where a block's are longer.
        tile=math.gcd(tile, chunk_tokens),
        chunk_tokens=chunk_tokens,
        overhead=OVERHEAD,
        least_tiles=LEAST_TILES,
        rows=rows,
        counters=columns,
        new_in_length=new_in_length(kernels, cross),
        digest=digest,
        lists=tuple(p.name for p in lengths),
        list_tile=list_tile,
    )
    one = const(1)
    return KernelPlan(
        f"{name}_plan",
        context.entry,
        "ops/decode_plan.cu.j2",
        context,
        params,
        (one, one, one),
        PLAN_THREADS,
        reads_tables=not lengths,
    )
