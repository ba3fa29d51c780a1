"""What every form of page table answers, on the host; how most of them do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from numpy.typing import NDArray

from kvgen.runtime.faults import Fault

# Token counts and indices are below this; whatever is not counts as invalid.
LIMIT = 2**32 - 1

Entry = tuple[str, tuple[int, ...]]


class Laid(NamedTuple):
    """Requests in pages: `ids[b, which, column]` for `which` of a page's ids; request b has `totals[b]` tokens in `counts[b]`
    pages."""

    ids: NDArray[Any]
    counts: Sequence[int]
    totals: Sequence[int]


def index(value: Any) -> int | None:
    """An untrusted entry as an index; None where it is negative or not below 2^32 - 1."""
    number = int(value)
    return number if 0 <= number < LIMIT else None


def slice_of(offsets: NDArray[Any], b: int, end: int) -> tuple[int, int] | None:
    """Where request b's slice of a list of `end` begins and ends; None where it decreases or leaves the list."""
    first, last = (index(x) for x in offsets[b : b + 2])
    return None if first is None or last is None or not first <= last <= end else (first, last)


@dataclass(frozen=True)
class Reading:
    """A page table as arrays, by the names of a generated Cache's arguments, of a pool of `pages` of `tokens` each."""

    arrays: Mapping[str, NDArray[Any]]
    pages: int
    tokens: int

    @property
    def requests(self) -> int:
        """The number of requests, B."""
        raise NotImplementedError

    @property
    def lengths_in(self) -> tuple[str, ...]:
        """The arrays that say how many tokens requests have."""
        return ("lengths",)

    def length(self, b: int) -> int | None:
        """Tokens of request b; None where the entry can be no length."""
        return index(self.arrays["lengths"][b])

    def first_token(self, n: int) -> int:
        """The oldest of n tokens that is still alive."""
        return 0

    def stored(self, b: int, token: int) -> bool:
        """Whether the table can still hold this token."""
        return True

    def overtaken(self, page: int, n: int) -> bool:
        """Whether the newest of n tokens lies where logical page `page` was."""
        return False

    def holds(self, b: int, n: int) -> bool:
        """Whether the table of request b has a place for every living one of its n tokens, at least one."""
        raise NotImplementedError

    def entries(self, b: int, i: int) -> NDArray[Any] | Fault:
        """The entries for logical page i of request b, K's and V's where they have one each; or what is wrong."""
        raise NotImplementedError

    def entry_places(self, b: int, i: int) -> list[Entry]:
        """Where those entries lie: (argument, index)."""
        raise NotImplementedError

    def read_first(self, b: int) -> list[Entry]:
        """Where it says which entries are request b's."""
        return []

    def written(self, laid: Laid) -> dict[str, Any]:
        """The table's arrays that say this: the opposite of reading."""
        raise NotImplementedError

    def counted_pages(self, b: int) -> int | Fault | None:
        """Pages of request b where the table counts them; None where its tokens say."""
        return None

    # Requests that go on from others ---------------------------------------------------------------------------------

    @property
    def copied_whole(self) -> bool:
        """Whether requests can share no page, be it full."""
        return False

    def has_row(self, b: int) -> bool:
        """Whether the table has a place for request b."""
        return True

    def free(self, fresh: NDArray[Any], b: int, i: int, which: int) -> Any:
        """Which of the free pages request b may have for logical page i, the first of its entries or the second."""
        return fresh[b]
