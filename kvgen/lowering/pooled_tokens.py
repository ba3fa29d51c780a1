"""Tokens that are pooled into entries: how threads share an entry's tokens and channels, and where rows wait between steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from kvgen.expr.nodes import const, var
from kvgen.layout.dtypes import dtype
from kvgen.lowering.cache_struct import ERRORS, entry_name
from kvgen.lowering.new_rows import NewRows
from kvgen.lowering.rope_norm import HeadContext, NormContext, PartContext, RopeContext, norm_context
from kvgen.lowering.row_kernel import parameter_lines, rope_contexts
from kvgen.lowering.row_parts import RowParts
from kvgen.lowering.row_tiling import WriteContext
from kvgen.plan.kernel import KernelPlan
from kvgen.plan.params import Array, Param, Size
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.norm import RmsNorm

VECTOR: Final = 4  # channels of a thread: 16 bytes of f32
MOST_THREADS: Final = 512  # of a block; each then has 128 registers
LEAST_THREADS: Final = 128
BATCH: Final = 4  # tokens whose loads a thread has in flight
MOST_PAGES: Final = 32  # of the state that a token may need: its first warp looks them up, a lane each


@dataclass(frozen=True)
class PooledTokens:
    """Which tokens make an entry of `dim` channels: `rate` of them, with `overlap` those of the entry before as well.

    The call brings kv and the gate's scores, "fused" in one array or "separate", of element type `kind`; rate 1 has no gate and
    no state. Rows wait in rings, one a request, or in pages of a table, `state_tokens` rows each, kv and scores in one array or
    in two (`buffers`). The last `drafts` tokens of a step may be taken back.
    """

    rate: int
    dim: int
    overlap: bool
    ape: bool
    inputs: Literal["fused", "separate"]
    kind: str
    paged: bool
    state_tokens: int
    buffers: Literal[1, 2]
    drafts: int

    @property
    def gated(self) -> bool:
        """True: there is something to choose by: more tokens than one."""
        return self.rate > 1

    @property
    def span(self) -> int:
        """Tokens of an entry's softmax."""
        return self.rate * (1 + self.overlap)

    @property
    def columns(self) -> int:
        """Elements of a row of kv, and of one of scores."""
        return self.dim * (1 + self.overlap)

    @property
    def pair(self) -> bool:
        """True: a block may emit two entries: in a ring, where groups overlap, both may read rows that the step replaces."""
        return self.gated and self.overlap and not self.paged

    @property
    def row_stride(self) -> int:
        """f32 from a token's row of the state to the next one's."""
        return self.columns * (2 // self.buffers)

    @property
    def pages(self) -> int:
        """State pages that the tokens of an entry may lie in."""
        return (self.span - 1) // self.state_tokens + 2 if self.paged else 1

    @property
    def threads_each(self) -> int:
        """Threads of a group: all channels of a token."""
        return self.dim // VECTOR

    @property
    def groups(self) -> int:
        """Groups of threads that share an entry's tokens: as many as leave each a batch, while the block is not too large."""
        found, most = 1, max(1, MOST_THREADS // self.threads_each)
        while (
            self.gated
            and 2 * found <= most
            and self.span % (2 * found) == 0
            and (self.span // (2 * found) >= BATCH or 2 * found * self.threads_each <= LEAST_THREADS)
        ):
            found *= 2
        return found

    @property
    def batch(self) -> int:
        """Tokens whose loads a thread has in flight: the most that divide what it has."""
        each = self.span // self.groups
        return next(n for n in range(BATCH, 0, -1) if each % n == 0)

    @property
    def threads(self) -> int:
        """Threads of a block, whole warps."""
        return -(-self.groups * self.threads_each // 32) * 32

    def arrays(self, index: str) -> tuple[tuple[Array, ...], tuple[Size, ...]]:
        """(what the call brings: new rows, positions, the state; their strides and counts)."""
        c = self.columns
        fused = self.gated and self.inputs == "fused"
        align = VECTOR * dtype(self.kind).bytes
        doc = "new rows kv | gate" if fused else "new rows of kv"
        found = [
            Array("x", self.kind, ("T", 2 * c if fused else c), align=align, strided=True, doc=doc, field="input_dtype")
        ]
        if not self.gated:
            return tuple(found), (_stride(found[0]),)
        if not fused:
            doc = "new rows of the gate"
            found.append(Array("gate", self.kind, ("T", c), align=align, strided=True, doc=doc, field="input_dtype"))
        strided = list(found)
        if self.ape:
            doc = "what is added to the gate, by a token's place in its entry"
            found.append(Array("ape", "f32", (self.rate, c), align=16, doc=doc, field="ape", fields=("rate", None)))
        states = ("state",) if self.buffers == 1 else ("kv_state", "score_state")
        for name in states:
            doc = {"state": "rows kv | score", "kv_state": "rows of kv", "score_state": "rows of scores"}[name]
            shape = ("N", self.state_tokens, self.row_stride)
            fields = (None, "state_tokens", "overlap")
            state = Array(
                name, "f32", shape, "inout", align=16, strided=True, doc=f"{doc} of earlier tokens", fields=fields
            )
            found.append(state)
            strided.append(state)
        sizes = [*map(_stride, strided), Size("num_state_pages", "u32", "N")]
        if self.paged:
            doc = "state page of each run of state_tokens tokens"
            found.append(
                Array("state_table", index, ("B", "C"), strided=True, untrusted=True, doc=doc, field="index_dtype")
            )
            sizes += [Size("state_table_stride", "i64", "state_table.stride"), Size("state_columns", "u32", "C")]
        else:
            doc = "state of each request"
            found.append(Array("state_ids", index, ("B",), untrusted=True, doc=doc, field="index_dtype"))
        return tuple(found), tuple(sizes)


def _stride(array: Array) -> Size:
    return Size(f"{array.name}_stride", "i64", f"{array.name}.stride")


@dataclass(frozen=True)
class PoolTokensContext:
    """Everything ops/pool_tokens.cu.j2 reads: a block of `threads` has a token, and `rows` entries at most: one, or two (`pair`).

    Tokens, channels and state are those of PooledTokens; `type` is the C type of new rows. Pooled rows wait in k_tile, `tile` f32
    apart, from where `parts` rotate (`rotated`: in the tile) and `writes` store them. Before the `norm`, whose sums `norm_warps`
    warps have, they are rounded to `pooled_type`, after it the first `rounded` channels to `normed_type`, after RoPE to
    `rotated_type`; an empty name: not at all.
    """

    entry: str
    params: tuple[str, ...]
    headers: tuple[str, ...]
    threads: int
    threads_each: int
    after: bool
    gated: bool
    pair: bool
    rows: int
    rate: int
    overlap: bool
    dim: int
    span: int
    groups: int
    batch: int
    state_tokens: int
    row_stride: int
    drafts: int
    paged: bool
    ring: bool
    buffers: int
    fused: bool
    type: str
    ape: bool
    pooled_type: str
    normed_type: str
    rotated_type: str
    rounded: int
    latent_out: bool
    norm: tuple[NormContext, ...]
    norm_warps: int
    tile: int
    rope: tuple[RopeContext, ...]
    head_structs: tuple[HeadContext, ...]
    parts: tuple[PartContext, ...]
    rotated: bool
    writes: tuple[WriteContext, ...]


@dataclass(frozen=True)
class Roundings:
    """Types that rows are rounded to: C types, empty for not at all; `normed` only in the first `dims` channels."""

    pooled: str
    normed: str
    rotated: str
    dims: int


def pool_kernel(
    new: NewRows,
    pooled: PooledTokens,
    norm: RmsNorm | None,
    roundings: Roundings,
    *,
    latent_out: bool,
    kernels: KernelSet,
) -> KernelPlan:
    """The kernel that pools a step's tokens; `new` says whose they are and how entries rotate."""
    cache = kernels.kv
    parts = RowParts(new, kernels, pooled.threads)
    kind = dtype(cache.dtype)
    norms = () if norm is None else (replace(norm_context(norm, cache.dtype, pooled.dim, 1), name="KNorm", roles="K"),)
    arrays, sizes = pooled.arrays(new.index(cache).name)
    extra: list[Param] = []
    for applied in (n for n in norms if not n.plain):
        weight = dtype("f32" if norm is not None and norm.weight_dtype == "f32" else cache.dtype)
        doc = "weights of the norm"
        align = VECTOR * weight.bytes
        extra.append(Array("k_weight", weight.name, (applied.count,), align=align, doc=doc, field="norm.weight_dtype"))
    if latent_out:
        doc = "entries before RoPE, in the rows of the tokens that emit them"
        align = VECTOR * kind.bytes
        extra.append(
            Array("latent_out", kind.name, ("T", pooled.dim), "out", align=align, strided=True, doc=doc, field="dtype")
        )
        sizes = (*sizes, Size("latent_out_stride", "i64", "latent_out.stride"))
    params = (*arrays, *extra, *parts.params, new.places_param(cache), *sizes, *parts.sizes, ERRORS)
    headers = {
        "angles": new.rope is not None,
        "hadamard": bool(new.hadamard),
        "entries": pooled.gated,
        "store_heads": bool(parts.parts),
        "write_rows": bool(parts.writes),
        "pool_tokens": True,
    }
    context = PoolTokensContext(
        entry=entry_name(kernels, new.name),
        params=parameter_lines(tuple(p.declaration for p in params)),
        headers=tuple(name for name, used in headers.items() if used),
        threads=pooled.threads,
        threads_each=pooled.threads_each,
        after=new.after(cache),
        gated=pooled.gated,
        pair=pooled.pair,
        rows=new.tiled,
        rate=pooled.rate,
        overlap=pooled.overlap,
        dim=pooled.dim,
        span=pooled.span,
        groups=pooled.groups,
        batch=pooled.batch,
        state_tokens=pooled.state_tokens,
        row_stride=pooled.row_stride,
        drafts=pooled.drafts,
        paged=pooled.paged,
        ring=not pooled.paged,
        buffers=pooled.buffers,
        fused=pooled.inputs == "fused",
        type=dtype(pooled.kind).c,
        ape=pooled.ape,
        pooled_type=roundings.pooled,
        normed_type=roundings.normed,
        rotated_type=roundings.rotated,
        rounded=roundings.dims,
        latent_out=latent_out,
        norm=norms,
        norm_warps=-(-pooled.threads_each // 32),
        tile=parts.tiles[0].stride,
        rope=rope_contexts(new, parts),
        head_structs=tuple({p.head.name: p.head for p in parts.parts}.values()),
        parts=parts.parts,
        rotated=any(p.tile for p in parts.parts),
        writes=parts.writes,
    )
    grid = (var("T"), const(1), const(1))
    template = "ops/pool_tokens.cu.j2"
    return KernelPlan(new.name, context.entry, template, context, params, grid, pooled.threads, writes_pool=True)
