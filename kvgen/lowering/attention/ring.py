"""Rings of tiles in shared memory: how many tiles each architecture has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgen.architectures import ARCHITECTURES, Architecture

# Scores may pass a column's maximum by 2^8 before row_max rises: f16 weights stay below 2^16 by far, sums in f32.
SLACK: Final = 8
LARGEST: Final = max(a.shared for a in ARCHITECTURES.values()) >> 10  # KB of a multiprocessor's shared memory


@dataclass(frozen=True)
class Stages:
    """Tiles of a ring by kSharedKb of device/memory/ring.cuh, the largest memory first: of one architecture, or of all
    architectures that share a kernel's text."""

    choices: tuple[tuple[int, int], ...]

    @staticmethod
    def on(arch: Architecture, count: int) -> Stages:
        """`count` tiles on this architecture."""
        return Stages(((arch.shared >> 10, count),))

    def merged(self, other: Stages) -> Stages | None:
        """The tiles of both; None where both have the same memory and other numbers of tiles."""
        found = dict(self.choices)
        if any(found.get(kb, count) != count for kb, count in other.choices):
            return None
        return Stages(tuple(sorted((found | dict(other.choices)).items(), reverse=True)))

    @property
    def same(self) -> bool:
        """Every architecture has as many tiles."""
        return len({count for _, count in self.choices}) == 1

    @property
    def most(self) -> int:
        """Tiles with the largest memory."""
        return self.choices[0][1]

    @property
    def least(self) -> int:
        """Tiles with the smallest memory."""
        return self.choices[-1][1]

    @property
    def memory(self) -> int:
        """The largest memory, in KB."""
        return self.choices[0][0]


def shared_for(arch: Architecture, blocks: int) -> int:
    """Bytes of shared memory that each of so many blocks of a multiprocessor can have, all in whole blocks of 2 charges."""
    return (arch.shared - (2 << 10)) // blocks


def aligned(nbytes: int, to: int = 16) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to
