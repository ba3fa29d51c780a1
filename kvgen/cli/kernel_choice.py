"""Which kernel an attention call takes on each architecture, why, and how its blocks divide the work: `kvgen show --plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from kvgen.architectures import BLOCK_CHARGE, architecture
from kvgen.cycles.device import DEVICES
from kvgen.lowering.attention import row_rule
from kvgen.lowering.attention.choose import Choice
from kvgen.ops.decode import Decode
from kvgen.ops.extend import Extend
from kvgen.ops.mla_decode import MlaDecode
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.kernel_set import KernelSet, Op

# Products that a sub-core of sm_100 makes in a clk by tcgen05: 2,250 TFLOP/s of 148 multiprocessors at 1.85 GHz (data sheet of
# B200), and of m16n8k16.
_TCGEN05: Final = 1024
_M16N8K16: Final = 16 * 8 * 16


def attention(kernels: KernelSet, op: Op, plan: KernelPlan, archs: Sequence[str]) -> dict[str, Any] | None:
    """The choice of an attention kernel, whose file is for `archs`, as JSON values; None for other kernels, planners among
    them."""
    if plan.division is None or not archs or not isinstance(op, Decode | Extend | MlaDecode):
        return None
    choices, d = op.choices(kernels), plan.division
    first = choices[archs[0]]
    rows = 0 if isinstance(op, Extend) else op.rows
    columns = rows * (kernels.q_heads if isinstance(op, MlaDecode) else kernels.group)
    return {
        "kernel": first.name,
        "how": first.fit.how,
        "on": {arch: _on(plan, choices[arch], arch) for arch in archs},
        "rows": rows,
        "columns": columns,
        "block_columns": d.columns,
        "block_rows": d.columns // kernels.group if isinstance(op, Extend) else None,
        "column_blocks": d.tiles,
        "kv_heads_of_block": d.heads,
        "tile_tokens": d.tokens,
        "teams": d.teams,
        "team_warps": d.team_warps,
        "lanes": d.lanes,
        "query": d.query,
        "blocks_per_multiprocessor": d.blocks,
        "split": op.split,
        "chunk": op.chunk if op.split == "invariant" else None,
        "lists": isinstance(op, MlaDecode) and op.sparse,
        **({"mma_share": _mma_share()} if any(architecture(a).tcgen05 for a in archs) and not d.lanes else {}),
        **(_rows_of_decode(kernels, op) if isinstance(op, Extend) else {}),
    }


def _on(plan: KernelPlan, choice: Choice, arch: str) -> dict[str, Any]:
    """The kernel of one architecture: why not another, and its ring."""
    own, target = plan.on(arch), architecture(arch)
    assert own.division is not None
    room = target.shared // (own.shared + BLOCK_CHARGE)
    blocks = max(1, min(own.division.blocks, room))
    return {
        "why_not": dict(choice.why_not),
        "stages": own.division.stages,
        "blocks": blocks,
        "bytes_in_flight": own.division.in_flight(blocks),
    }


def _mma_share() -> dict[str, float]:
    """The part of what sm_100's tensor cores can multiply that m16n8k16 can. No source has it: Hopper's interval is assumed."""
    interval = DEVICES["H200"].hmma_interval
    cycles = {"value": interval.value, "low": interval.high, "high": interval.low}
    return {name: _M16N8K16 / n / _TCGEN05 for name, n in cycles.items()}


def _rows_of_decode(kernels: KernelSet, op: Extend) -> dict[str, Any]:
    """The rule of rows and its arithmetic at the last row of decode's and the next one; nothing without a decode."""
    decode, arch = op.decode_of(kernels), row_rule.arch_of(kernels)
    if decode is None:
        return {}
    if op.split == "invariant":
        return {"decode_rows": 0, "decode_rows_of_any": 0, "token_costs": []}
    found, fit = op.decode_rows(kernels, row_rule.MOST_ROWS), op.choices(kernels)[arch].fit
    if fit.division.lanes:  # which the rule has no costs of
        return {"decode_rows": op.decode_rows(kernels), "decode_rows_of_any": found, "token_costs": []}
    costs = []
    for rows in (max(1, found), found + 1):
        by_decode = row_rule.decode_cost(kernels, rows, arch, elementwise=op.elementwise)
        by_extend = row_rule.extend_cost(kernels, rows, arch, fit)
        costs.append({"rows": rows, "decode": by_decode and asdict(by_decode), "extend": asdict(by_extend)})
    return {"decode_rows": op.decode_rows(kernels), "decode_rows_of_any": found, "token_costs": costs, "arch": arch}


# Text ----------------------------------------------------------------------------------------------------------------------


def attention_text(found: dict[str, Any]) -> list[str]:
    """`attention`'s result for a reader, a line a decision."""
    return [
        f"{found['kernel']}: {found['how']}",
        *_why_not(found),
        _columns(found),
        *_speed(found),
        _tiles(found),
        *_rings(found),
        *_mma(found),
        f"split    {_split(found)}",
        *_rows_lines(found),
    ]


def _why_not(found: dict[str, Any]) -> list[str]:
    """A line for each candidate before the chosen one, with the architectures that it does not serve."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for arch, own in found["on"].items():
        for candidate, why in own["why_not"].items():
            reasons.setdefault((candidate, why), []).append(arch)
    every = list(found["on"])
    return [
        f"not      {candidate}{'' if archs == every else ' on ' + ', '.join(archs)}: {why}"
        for (candidate, why), archs in reasons.items()
    ]


def _columns(found: dict[str, Any]) -> str:
    if found["block_rows"] is not None:
        return (
            f"columns  {found['block_columns']} a block, {found['block_rows']} rows with all their heads or parts of rows; "
            f"{_warps(found['team_warps'])}, Q in {found['query']}"
        )
    rows, columns, blocks = found["rows"], found["columns"], found["column_blocks"]
    heads, several = columns // rows, found["kv_heads_of_block"]
    shared = (
        f"{blocks} blocks share a kv head's columns, and each reads its tokens"
        if blocks > 1
        else "one block has them all"
    )
    together = f", of {several} neighbouring kv heads, a warp of each team a head" if several > 1 else ""
    return (
        f"columns  {columns}: {_rows(rows)} of {heads} query head{'s' if heads > 1 else ''}; a block has room for "
        f"{found['block_columns']}{together}, {shared}"
    )


def _speed(found: dict[str, Any]) -> list[str]:
    if not found.get("percent_of_reachable"):
        return []
    least, most = found["percent_of_reachable"]
    return [f"speed    by the model {least:.0f} to {most:.0f} % of what an {found['device']} can read (docs/cycles.md)"]


def _tiles(found: dict[str, Any]) -> str:
    tokens, teams, warps = found["tile_tokens"], found["teams"], found["team_warps"]
    ring = any(own["stages"] for own in found["on"].values())
    if found["block_rows"] is not None:
        return f"tiles    {tokens} tokens, " + (
            "with a ring of tiles in shared memory" if ring else "K and then V in shared memory as f32"
        )
    if found["lanes"]:
        return f"tiles    {tokens} token{'s' if tokens > 1 else ''} a warp, {found['lanes']} lanes each, {teams} warps"
    turns = f"{teams} teams of {_warps(warps)} take tiles in turn" if teams > 1 else f"a team of {_warps(warps)}"
    return f"tiles    {tokens} tokens; {turns}, with a ring of tiles in shared memory"


def _rings(found: dict[str, Any]) -> list[str]:
    return [
        f"         {arch}: rings of {own['stages']} tiles, {_blocks(own['blocks'])} a multiprocessor, "
        f"{own['bytes_in_flight'] / 1024:.0f} KB in flight there"
        for arch, own in found["on"].items()
        if own["stages"]
    ]


def _mma(found: dict[str, Any]) -> list[str]:
    if "mma_share" not in found:
        return []
    value, low, high = (round(100 * found["mma_share"][name]) for name in ("value", "low", "high"))
    archs = ", ".join(arch for arch in found["on"] if architecture(arch).tcgen05)
    return [
        f"         {archs}: by mma.sync at most {value} % of what tcgen05 can multiply ({low} to {high}; assumed: mma.sync as "
        "fast as Hopper's)"
    ]


def _split(found: dict[str, Any]) -> str:
    split, chunk = found["split"], found["chunk"]
    if found["block_rows"] is not None:
        return {
            "balanced": "balanced: keys of a tile are cut where tiles do not fill the GPU",
            "invariant": f"invariant: sums begin anew at multiples of {chunk} tokens",
        }[split]
    whose, what = ("row of q", "listed rows") if found["lists"] else ("request", "tokens")
    return {
        "none": f"none: a block for each {whose}",
        "balanced": f"balanced: a planner divides all {what} evenly among the blocks that the GPU holds at once",
        "invariant": f"invariant: a planner cuts requests into chunks of {chunk} tokens",
    }[split]


def _rows_lines(found: dict[str, Any]) -> list[str]:
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


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"up to {count} rows"


def _warps(count: int) -> str:
    return f"{count} warp{'' if count == 1 else 's'}"


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"
