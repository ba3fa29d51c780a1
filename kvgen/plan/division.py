"""How the blocks of an attention kernel divide a request among them on one architecture, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """The work of a block.

    A block has `columns` columns (query rows times their query heads) of `heads` neighbouring kv heads; `tiles` blocks share
    the columns of a kv head, and each of them reads its tokens. Tokens come in tiles of `tokens`, for each of `teams` teams of
    `team_warps` warps. A team has a ring of `stages` tiles in shared memory (0: no ring), of which `held` are worked on while
    the others are on their way; a tile of the ring has `tile_bytes` bytes. Plans count `blocks` blocks a multiprocessor.
    A trip of the main loop takes `trip_tokens` tokens with `trip_bytes` bytes of K and V, by `trip_warps` warps. `lanes`: lanes
    of a token, on CUDA cores (0: tensor cores). `query`: where Q is, of kernels that may have it in registers. `warpgroups` run
    one loop (0: all warps are alike), and `widens`: other warps widen rows for them.
    """

    columns: int
    tiles: int
    heads: int
    tokens: int
    teams: int
    team_warps: int
    stages: int
    held: int
    tile_bytes: float
    blocks: int
    trip_tokens: int
    trip_warps: int
    trip_bytes: float
    lanes: int = 0
    query: str = ""
    warpgroups: int = 0
    widens: bool = False

    @property
    def warps(self) -> int:
        """Warps of a block that multiply."""
        return self.teams * self.team_warps

    def in_flight(self, blocks: int) -> int:
        """Bytes on their way to shared memory of so many blocks."""
        return int(blocks * max(self.stages - self.held, 0) * self.teams * self.tile_bytes)
