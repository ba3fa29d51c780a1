"""How attention kernels divide their work, for `kvgen show --plan`: which kernel and why, tiles, teams, rings, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from kvgen.bench.tiles import tile_of
from kvgen.cycles.device import DEVICES
from kvgen.lowering.attention import row_rule
from kvgen.lowering.attention.extend import ExtendContext
from kvgen.lowering.attention.extend_simt import ExtendSimtContext
from kvgen.lowering.attention.extend_wgmma import ExtendWgmmaContext
from kvgen.lowering.attention.mla_pairs import MlaPairsContext
from kvgen.lowering.attention.mla_records import MlaRecordsContext
from kvgen.lowering.attention.mla_warpgroups import WARPGROUPS, MlaWarpgroupsContext
from kvgen.lowering.attention.mla_widened import MlaWidenedContext
from kvgen.lowering.attention.mma import SIZES, Stages, TensorContext
from kvgen.lowering.attention.simt import SimtContext
from kvgen.lowering.attention.wgmma import ARCH as WGMMA_ARCH
from kvgen.lowering.attention.wgmma import MlaWgmmaContext, applies
from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend
from kvgen.ops.mla_decode import MlaDecode, MlaDecodeContext
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op

# Shared memory of a multiprocessor, and what each block is charged beside its own.
MULTIPROCESSOR_SHARED: Final = {
    "sm_80": 164 << 10, "sm_89": 100 << 10, "sm_90a": 228 << 10, "sm_100f": 228 << 10, "sm_120f": 100 << 10,
}  # fmt: skip
BLOCK_CHARGE: Final = 1 << 10
# Products that a sub-core of sm_100 makes in a clk by tcgen05: 2,250 TFLOP/s of 148 multiprocessors at 1.85 GHz (data sheet of
# B200), and of m16n8k16.
_TCGEN05: Final = 1024
_M16N8K16: Final = 16 * 8 * 16


def attention(kernels: KernelSet, op: Op, plan: KernelPlan, archs: Sequence[str]) -> dict[str, Any] | None:
    """The decisions of an attention kernel, which is for `archs`, as JSON values; None for others, planners among them."""
    context = plan.context
    if isinstance(op, Extend) and isinstance(context, ExtendContext | ExtendSimtContext | ExtendWgmmaContext):
        return _extend(kernels, op, plan, context, archs)
    if not isinstance(op, Decode | MlaDecode) or not isinstance(
        context,
        TensorContext
        | SimtContext
        | MlaDecodeContext
        | MlaRecordsContext
        | MlaWidenedContext
        | MlaPairsContext
        | MlaWarpgroupsContext
        | MlaWgmmaContext,
    ):
        return None
    d = context.d
    found: dict[str, Any] = {
        "walk": "tensor cores",
        "why": "16-bit operands, tokens on M",
        "rows": d.rows,
        "columns": d.rows * d.group,
        "tiles_of_columns": d.tiles,
        "kv_heads_of_block": d.heads,
        "split": op.split,
        "chunk": op.chunk if op.split == "invariant" else None,
        "lists": isinstance(op, MlaDecode) and op.sparse,
    }
    if isinstance(op, Decode):
        found["walk"], found["why"] = op.walk(kernels)
    if isinstance(context, SimtContext):
        tokens = 32 // context.lanes
        return found | {
            "block_columns": context.cols,
            "lanes": context.lanes,
            "tile_tokens": tokens,
            "teams": context.warps,
            "team_warps": 1,
            "blocks_per_multiprocessor": context.blocks_per_sm,
        }
    held = 1  # tiles of a ring that are worked on
    if isinstance(context, MlaWgmmaContext):
        found["why"] = f"products of warpgroups, which {WGMMA_ARCH} has, columns on M"
        teams, warps, tokens, stages = 1, context.threads // 32, context.tokens, Stages(context.stages, 0, 0)
        cols, most, nbytes = context.cols, 1, 2 * context.head_dim
        held = 2  # a tile of each warpgroup
    elif isinstance(context, MlaDecodeContext):
        shape, row = context.shape, context.row
        if WGMMA_ARCH in archs:
            found["why"] += (
                f"; no warpgroups on {WGMMA_ARCH}: {applies(kernels, d.rows * d.group, bool(context.lists))}"
            )
        teams, warps, tokens, stages = 1, context.threads // 32, shape.tokens, shape.stages
        cols, most, nbytes = shape.cols, 1, row.latent_bytes + row.rope_bytes + 4 * row.groups
    elif isinstance(context, MlaRecordsContext):
        caches = "one cache" if len(context.lists) <= 1 else f"{len(context.lists)} caches"
        found["why"] = f"rows of {caches}, in {kernels.kv.dtype} on their way to shared memory; tokens on M"
        teams, warps, tokens, stages = 1, context.threads // 32, context.shape.tokens, Stages(2, 2, 2)
        tile = tile_of(kernels, plan)
        assert tile is not None
        cols, most, nbytes = context.shape.cols, 1, int(tile.nbytes) // tokens
        if isinstance(op, MlaDecode):
            found["why"] += f"; not as they are stored: {op.as_stored(kernels)}"
            found["why"] += f"; no pairs of warps: {op.in_pairs(kernels)}" if op.sparse else ""
            found["why"] += f"; no warpgroups on {WGMMA_ARCH}: {op.widened(kernels)}" if WGMMA_ARCH in archs else ""
    elif isinstance(context, MlaWidenedContext):
        found["why"] = (
            f"rows widened by warps of their own, products of warpgroups, which {WGMMA_ARCH} has; columns on M"
        )
        teams, warps, tokens, stages = 1, context.threads // 32, context.tokens, Stages(2, 0, 0)
        tile = tile_of(kernels, plan)
        assert tile is not None
        cols, most, nbytes = context.cols, 1, int(tile.nbytes) // tile.tokens
    elif isinstance(context, MlaPairsContext):
        pairs = context.shape
        found["why"] = f"codes as they are stored, half of {context.head_dim} dims a warp; tokens on M"
        teams, warps, tokens, stages = pairs.pairs, 2, pairs.tokens, pairs.stages
        cols, most, nbytes = pairs.cols, 1, pairs.row_bytes + pairs.scale_bytes * pairs.scales_apart
        held = 2  # one is worked on, one has landed
        if WGMMA_ARCH in archs and isinstance(op, MlaDecode):
            found["why"] += f"; no warpgroups on {WGMMA_ARCH}: {op.by_warpgroups(kernels)}"
    elif isinstance(context, MlaWarpgroupsContext):
        few = context.shape
        found["why"] = f"codes as they are stored, products of warpgroups, which {WGMMA_ARCH} has; tokens on M"
        teams, warps, tokens, stages = WARPGROUPS, 4, few.tokens, Stages(few.stages, 0, 0)
        cols, most, nbytes = few.cols, 1, few.row_bytes + few.scale_bytes
    else:
        teams, warps, tokens, stages = context.teams, context.team_warps, context.tokens, context.stages
        cols, most, nbytes = context.cols, context.blocks_per_sm, context.heads * (context.k_bytes + context.v_bytes)
    rings = {}
    for arch in archs:
        blocks = max(1, min(most, MULTIPROCESSOR_SHARED[arch] // (plan.shared_on(arch) + BLOCK_CHARGE)))
        count = stages_on(stages, arch)
        rings[arch] = {
            "stages": count,
            "blocks": blocks,
            "bytes_in_flight": blocks * (count - held) * teams * tokens * nbytes,
        }
    return found | {
        "block_columns": cols,
        "tile_tokens": tokens,
        "teams": teams,
        "team_warps": warps,
        "blocks_per_multiprocessor": most,
        "rings": rings,
    }


def _extend(
    kernels: KernelSet,
    op: Extend,
    plan: KernelPlan,
    context: ExtendContext | ExtendSimtContext | ExtendWgmmaContext,
    archs: Sequence[str],
) -> dict[str, Any]:
    walk, why = op.walk(kernels)
    rings = {}
    rows = _rows_of_decode(kernels, op)
    if isinstance(context, ExtendWgmmaContext):
        nbytes = 2 * context.tokens * (context.k.size + context.v.size)
        ring = {"stages": context.stages, "blocks": 1, "bytes_in_flight": (context.stages - 1) * nbytes}
        return {
            "walk": walk,
            "why": why,
            "split": op.split,
            "chunk": None,
            "block_columns": context.cols,
            "block_rows": context.cols // context.d.group,
            "tile_tokens": context.tokens,
            "warps": 8,
            "warp_columns": context.cols // 8,
            "query": "shared memory",
            "blocks_per_multiprocessor": 1,
            "rings": dict.fromkeys(archs, ring),
            **rows,
        }
    if isinstance(context, ExtendSimtContext):
        return {
            "walk": walk,
            "why": why,
            "split": op.split,
            "chunk": context.chunk_tokens or None,
            "block_columns": context.cols,
            "block_rows": context.cols // context.d.group,
            "tile_tokens": context.tokens,
            "warps": context.warps,
            "warp_columns": 16 * context.m_tiles,
            "query": "shared memory",
            "blocks_per_multiprocessor": context.blocks_per_sm,
            "rings": {},
            **rows,
        }
    for arch in archs:
        count, room = (
            stages_on(context.stages, arch),
            MULTIPROCESSOR_SHARED[arch] // (plan.shared_on(arch) + BLOCK_CHARGE),
        )
        blocks = max(1, min(context.blocks_per_sm, room))
        nbytes = context.tokens * (context.k_bytes + context.v_bytes)
        rings[arch] = {"stages": count, "blocks": blocks, "bytes_in_flight": blocks * (count - 1) * nbytes}
    return {
        "walk": walk,
        "why": why,
        "split": op.split,
        "chunk": context.chunk_tokens or None,
        "block_columns": context.cols,
        "block_rows": context.cols // context.d.group,
        "tile_tokens": context.tokens,
        "warps": context.warps,
        "warp_columns": 16 * context.m_tiles,
        "query": "registers" if context.query_held else "shared memory",
        "blocks_per_multiprocessor": context.blocks_per_sm,
        "rings": rings,
        **({"mma_share": _mma_share()} if "sm_100f" in archs else {}),
        **rows,
    }


def _mma_share() -> dict[str, float]:
    """Of what sm_100's tensor cores can multiply, what m16n8k16 can. No source has it: Hopper's interval is assumed."""
    interval = DEVICES["H200"].hmma_interval
    cycles = {"value": interval.value, "low": interval.high, "high": interval.low}
    return {name: _M16N8K16 / n / _TCGEN05 for name, n in cycles.items()}


def _mma_text(found: dict[str, Any]) -> list[str]:
    if "mma_share" not in found:
        return []
    value, low, high = (round(100 * found["mma_share"][name]) for name in ("value", "low", "high"))
    return [
        f"         sm_100f: by mma.sync at most {value} % of what tcgen05 can multiply ({low} to {high}; assumed: mma.sync as "
        "fast as Hopper's)"
    ]


def _rows_of_decode(kernels: KernelSet, op: Extend) -> dict[str, Any]:
    """What the rule of rows says, and its arithmetic at the last row of decode's and the next one; nothing without a decode."""
    decode, arch = op.decode_of(kernels), row_rule.arch_of(kernels)
    if decode is None:
        return {}
    if op.split == "invariant":
        return {"decode_rows": 0, "decode_rows_of_any": 0, "token_costs": []}
    found = op.decode_rows(kernels, row_rule.MOST_ROWS)
    if op.walk(kernels)[0] == "CUDA cores":  # which the rule has no costs of
        return {"decode_rows": op.decode_rows(kernels), "decode_rows_of_any": found, "token_costs": []}
    costs = []
    for rows in (max(1, found), found + 1):
        by_decode = row_rule.decode_cost(kernels, rows, arch, asks=op.score is not None or op.mask.tree is not None)
        by_extend = row_rule.extend_cost(
            kernels, rows, arch, narrow_cols=op.narrow_cols(kernels), warpgroups=op.by_warpgroups(kernels)
        )
        costs.append({"rows": rows, "decode": by_decode and asdict(by_decode), "extend": asdict(by_extend)})
    return {"decode_rows": op.decode_rows(kernels), "decode_rows_of_any": found, "token_costs": costs, "arch": arch}


def _rows_text(found: dict[str, Any]) -> list[str]:
    if "decode_rows" not in found:
        return []
    if not found["token_costs"] and found["decode_rows"]:
        return [
            f"rows     requests of up to {found['decode_rows']} are decode's, others extend's: extend on CUDA cores costs more"
        ]
    if not found["token_costs"]:
        return ["rows     all are extend's: a row's bits may not depend on how many come with it"]
    most, any_of = found["decode_rows"], found["decode_rows_of_any"]
    lines = [
        f"rows     requests of up to {most} are decode's, others extend's; of a decode for more rows up to {any_of} "
        f"({found['arch']}; cycles a token and kv head):"
    ]
    for cost in found["token_costs"]:
        said = [
            f"{name} {max(c['memory'], c['work']):.1f} (memory {c['memory']:.1f}, work {c['work']:.1f})"
            for name in ("decode", "extend")
            if (c := cost[name])
        ]
        lines.append(f"         {_rows(cost['rows']).removeprefix('up to ')}: {', '.join(said)}")
    return lines


def _extend_text(found: dict[str, Any]) -> list[str]:
    how = {
        "balanced": "balanced: keys of a tile are cut where tiles do not fill the GPU",
        "invariant": f"invariant: sums begin anew at multiples of {found['chunk']} tokens",
    }
    return [
        f"{found['walk']}: {found['why']}",
        f"columns  {found['block_columns']} a block, {found['block_rows']} rows with all their heads or parts of rows; "
        f"{_warps(found['warps'])} of {found['warp_columns']}, Q in {found['query']}",
        f"tiles    {found['tile_tokens']} tokens, "
        + ("with a ring of tiles in shared memory" if found["rings"] else "K and then V in shared memory as f32"),
        *_rings(found),
        *_mma_text(found),
        f"split    {how[found['split']]}",
        *_rows_text(found),
    ]


def _rings(found: dict[str, Any]) -> list[str]:
    return [
        f"         {arch}: rings of {r['stages']} tiles, {_blocks(r['blocks'])} a multiprocessor, "
        f"{r['bytes_in_flight'] / 1024:.0f} KB in flight there"
        for arch, r in found["rings"].items()
    ]


def stages_on(stages: Stages, arch: str) -> int:
    """Tiles of a ring on an architecture."""
    return int(getattr(stages, SIZES[arch]))


def attention_text(found: dict[str, Any]) -> list[str]:
    """`attention`'s result for a reader, a line a decision."""
    if "block_rows" in found:
        return _extend_text(found)
    rows, columns, tiles = found["rows"], found["columns"], found["tiles_of_columns"]
    heads = f"{columns // rows} query head{'s' if columns > rows else ''}"
    shared = (
        f"{tiles} blocks share a kv head's columns, and each reads its tokens"
        if tiles > 1
        else "one block has them all"
    )
    several = found["kv_heads_of_block"]
    together = f", of {several} neighbouring kv heads, a warp of each team a head" if several > 1 else ""
    lines = [
        f"{found['walk']}: {found['why']}",
        f"columns  {columns}: {_rows(rows)} of {heads}; a block has room for {found['block_columns']}{together}, {shared}",
    ]
    if found.get("percent_of_reachable"):
        least, most = found["percent_of_reachable"]
        lines.append(
            f"speed    by the model {least:.0f} to {most:.0f} % of what an {found['device']} can read (docs/cycles.md)"
        )
    tokens, teams, warps = found["tile_tokens"], found["teams"], found["team_warps"]
    if "lanes" in found:
        lines.append(
            f"tiles    {tokens} token{'s' if tokens > 1 else ''} a warp, {found['lanes']} lanes each, {teams} warps"
        )
    else:
        turns = f"{teams} teams of {_warps(warps)} take tiles in turn" if teams > 1 else f"a team of {_warps(warps)}"
        lines.append(f"tiles    {tokens} tokens; {turns}, with a ring of tiles in shared memory")
        lines += _rings(found)
    whose, what = ("row of q", "listed rows") if found.get("lists") else ("request", "tokens")
    how = {
        "none": f"none: a block for each {whose}",
        "balanced": f"balanced: a planner divides all {what} evenly among the blocks that the GPU holds at once",
        "invariant": f"invariant: a planner cuts requests into chunks of {found['chunk']} tokens",
    }
    return [*lines, f"split    {how[found['split']]}"]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"up to {count} rows"


def _warps(count: int) -> str:
    return f"{count} warp{'' if count == 1 else 's'}"


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"
