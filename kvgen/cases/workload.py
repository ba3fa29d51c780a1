"""How many tokens requests hold, and how many of them are new."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvgen.errors import ToolError
from kvgen.lowering.lowered import lower
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import Op


@dataclass(frozen=True)
class Workload:
    """One step of a batch: request b holds totals[b] tokens after it, new[b] of them (at least 1) appended by it. A list of
    gather_rows or mla_decode names `listed` tokens at most."""

    name: str
    totals: tuple[int, ...]
    new: tuple[int, ...]
    listed: int = 64

    @property
    def before(self) -> tuple[int, ...]:
        """Tokens of each request before the step."""
        return tuple(total - new for total, new in zip(self.totals, self.new, strict=True))

    @staticmethod
    def uniform(batch: int, tokens: int, new: int | None = None) -> Workload:
        """`batch` requests of `tokens` tokens, the last `new` of them (None: all) appended in this step.

        Raises ToolError for sizes below 1 and more new tokens than tokens.
        """
        for name, value in (("batch", batch), ("tokens", tokens), ("new", tokens if new is None else new)):
            if value < 1:
                raise ToolError(f"--{name}: got {value}; it must be at least 1")
        if new is not None and new > tokens:
            raise ToolError(
                f"--new: got {new} new tokens of --tokens {tokens}; at most all of a request's tokens are new"
            )
        own = tokens if new is None else new
        step = "" if own == tokens else f", {own} new"
        return Workload(f"{batch} x {tokens}{step}", (tokens,) * batch, (own,) * batch)

    @staticmethod
    def mixed(rows: str, tokens: int) -> Workload:
        """Requests of so many new tokens, "4000,1x60": one of 4000 and 60 of 1, each of at least `tokens` in all."""
        new: list[int] = []
        for part in rows.split(","):
            found = re.fullmatch(r"([0-9]{1,7})(?:x([0-9]{1,4}))?", part)
            if found is None or not int(found[1]):
                raise ToolError(
                    f"--rows: got {part!r}; it must be the new tokens of a request, as 4000, or of several, as 1x60; separate "
                    "them by commas"
                )
            new += [int(found[1])] * int(found[2] or 1)
        if not new:
            raise ToolError(f"--rows: got {rows!r}, which is no request; give at least one")
        return Workload(f"{rows} of {tokens}", tuple(max(n, tokens) for n in new), tuple(new))

    def check(self, cache: Cache, name: str) -> None:
        """Raise ToolError where a request is longer than the blocks of the set `name` allow."""
        most = max(self.totals)
        held = cache.page_tokens if lower(cache).allocation.one_page else None
        if held is not None and most > held:
            raise ToolError(
                f"--tokens: got a request of {most} tokens; a block of {name} holds {held} (max_tokens); give fewer"
            )


@dataclass(frozen=True)
class Launch:
    """One launch of several over the same memory: an operation, and the batch after it."""

    op: Op
    workload: Workload
