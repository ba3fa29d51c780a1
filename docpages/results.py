"""The tables of docs/performance.md: what kernels occupy, from resources.json, and what they move, counted by `kvgen bench`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
ARCHS: Final = ("sm_80", "sm_89", "sm_90a", "sm_100f", "sm_120f")
# Sets that stand for what a decode kernel depends on: group, head dim, codes, scales, latent rows.
SHOWN: Final = (
    "llama3_8b",
    "qwen3_8b",
    "falcon_7b",
    "gemma2_9b",
    "layout_f32",
    "layout_vllm_xpacked",
    "llama3_8b_fp8",
    "qwen3_30b_fp8",
    "qwen3_235b_int8",
    "mistral_7b_int4",
    "qwen3_32b_nvfp4",
    "llama3_8b_kivi",
    "deepseek_v3",
    "deepseek_v3_fp8",
)
COUNTED: Final = ("llama3_8b", "layout_vllm", "qwen3_30b_fp8", "mistral_7b_int4", "qwen3_32b_nvfp4", "deepseek_v3_fp8")
WORKLOAD: Final = ("--batch", "4", "--tokens", "256")
Facts = dict[str, dict[str, Any]]


def recorded() -> dict[str, Facts]:
    """Set -> kernel -> architecture -> facts, of every generated set."""
    found = {}
    for path in sorted((ROOT / "generated").glob("*/resources.json")):
        found[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))["kernels"]
    return found


def totals_table() -> str:
    """A row an architecture: all kernels together."""
    lines = ["| | kernels | spill | most registers | most shared memory of a block |", "|---|---|---|---|---|"]
    for arch in ARCHS:
        here = {f"{s}/{k}": f[arch] for s, kernels in recorded().items() for k, f in kernels.items() if arch in f}
        spilling = sum(1 for facts in here.values() if facts["spills"])
        registers, shared = (max(here, key=lambda n, what=what: here[n][what]) for what in ("registers", "shared"))  # type: ignore[misc]
        lines.append(
            f"| {arch} | {len(here)} | {spilling} | {here[registers]['registers']} ({registers}) | "
            f"{here[shared]['shared'] / 1024:.0f} KB ({shared}) |"
        )
    return "\n".join(lines)


def kernels_table() -> str:
    """A row a kernel that stores, copies or attends, of the sets shown, for sm_90a."""
    lines = [
        "| kernel, sm_90a | registers | shared | instructions | global loads, stores | async copies | tensor cores |",
        "|---|---|---|---|---|---|---|",
    ]
    known = recorded()
    for name in SHOWN:
        for kernel in ("append", "gather", "extend", "decode", "mla_decode", "mla_decode_sm_90a"):
            facts = known[name].get(kernel, {}).get("sm_90a")
            if facts is not None:
                lines.append(
                    f"| {name}/{kernel} | {facts['registers']} | {facts['shared'] / 1024:.1f} KB | {facts['instructions']} | "
                    f"{facts['global_loads']}, {facts['global_stores']} | {facts['async_copies']} | {facts['tensor_cores']} |"
                )
    return "\n".join(lines)


def count(sets: tuple[str, ...]) -> dict[str, str]:
    """A row of the counted table a kernel, by set/operation."""
    command = [sys.executable, "-m", "kvgen", "bench", *sets, *WORKLOAD, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    found = {}
    for operation in json.loads(done.stdout)["operations"]:
        if operation["kernel"].endswith("_plan"):
            continue
        name = f"{operation['set']}/{operation['op']}"
        cells = [_ratio(operation["buffers"], group) for group in ("kv", "scales", "input", "output")]
        each = operation["warp_instructions"] / sum(json.loads(done.stdout)["workload"]["totals"])
        found[name] = f"| {name} | {' | '.join(cells)} | {each:,.0f} | {operation['peak_in_flight'] / 1024:.0f} KB |"
    return found


def _ratio(buffers: list[dict[str, Any]], group: str) -> str:
    """Sectors of a group of buffers over their minimum."""
    mine = [b for b in buffers if b["group"] == group and b["minimum_sectors"]]
    if not mine:
        return ""
    moved = sum(b[f"{way}_sectors"] for b in mine for way in ("load", "store", "atomic"))
    return f"{moved / sum(b['minimum_sectors'] for b in mine):.2f}"


def counted_table() -> str:
    """Bytes that kernels of some sets move, over the fewest that they could; runs them on the CPU machine."""
    head = "| | K, V | scales | inputs | outputs | warp instructions a token | in flight a block |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *count(COUNTED).values()])


BLOCKS: Final[dict[str, Callable[[], str]]] = {"totals": totals_table, "kernels": kernels_table}
RUNS: Final[dict[str, Callable[[], str]]] = {"counted": counted_table}
