"""Split-KV: how the workspace is divided in which a planner lists the chunks of a step's requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.errors import ArgumentError

HEADER: Final = 64  # bytes: PlanHeader of device/attention/plan/split_kv.cuh
KV_CHUNK: Final = 48  # KvChunk


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """How an operation's workspace is divided (Plan in device/attention/plan/split_kv.cuh).

    `columns` blocks share a chunk, one a kv head and tile of columns; of `blocks_per_sm` blocks that a multiprocessor holds
    at once each belongs to one SM part. A slot has the partial results of a chunk, `partial_bytes` for all columns.
    `chunk_tokens` make a chunk where requests are cut alike in every batch, 0 where the planner balances; `max_seen` tokens
    of a request are seen at most, by a window or in a ring (0: all). `slots_a_part`: slots of `columns` blocks where the list has
    tiles of rows (extend), of which every row may be one, or `tiles_a_row`; a block is then an SM part of its own. 0 where it has
    chunks of requests.
    """

    columns: int
    blocks_per_sm: int
    partial_bytes: int
    chunk_tokens: int
    max_seen: int = 0
    slots_a_part: int = 0
    tiles_a_row: int = 1

    def sizes(self, max_rows: int, max_tokens: int | None, multiprocessors: int) -> dict[str, int]:
        """SM parts, chunks and slots, as kernels get them, and `bytes`; raises ArgumentError for what it cannot be made for."""
        for name, value, most in (("max_rows", max_rows, 2**31), ("multiprocessors", multiprocessors, 2**16)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < most:
                valid = "the largest batch" if name == "max_rows" else "how many the GPU has"
                raise ArgumentError(
                    f"{name}: got {value!r}; it must be a whole number of at least 1 and below 2^{most.bit_length() - 1}; "
                    f"pass {valid}"
                )
        sm_parts = max(1, multiprocessors * self.blocks_per_sm // self.columns)
        chunks, slots = max_rows + sm_parts, 2 * sm_parts
        if self.slots_a_part:
            slots = self.slots_a_part * sm_parts
            chunks = max_rows * self.tiles_a_row + slots
            sm_parts = multiprocessors * self.blocks_per_sm
        elif self.chunk_tokens:
            if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not 0 <= max_tokens < 2**32:
                raise ArgumentError(
                    f"max_tokens: got {max_tokens!r}; requests are cut into chunks of {self.chunk_tokens} tokens, so a workspace "
                    "is as large as the longest one asks; pass the most tokens of a request, cache.max_cache_length"
                )
            seen = min(max_tokens, self.max_seen or max_tokens)
            chunks = slots = max_rows * (-(-seen // self.chunk_tokens) + 1)
        held = HEADER + _up(4 * (sm_parts + 1)) + _up(max_rows) + _up(4 * slots * self.columns) + KV_CHUNK * chunks
        return {
            "num_sm_parts": sm_parts,
            "max_rows": max_rows,
            "max_chunks": chunks,
            "max_slots": slots,
            "bytes": held + self.partial_bytes * slots,
        }


def _up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16
