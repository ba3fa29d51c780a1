"""Page ids of one pool: reference counts, and the free ones in the order in which they are taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvgen.errors import KvgenError
from kvgen.pages.arguments import PageError, whole


class OutOfPages(KvgenError):
    """A pool has too few free pages; nothing has changed."""

    def __init__(self, what: str, needed: int, free: int) -> None:
        super().__init__(
            f"{what}: needs {needed} more pages, {free} are free; release or swap out a request, or make the pool larger"
        )
        self.needed, self.free = needed, free


class Pool:
    """The pages [0, pages) of one pool, without those `reserved`.

    A page is held by its references. Without any it is free, and is taken again: first those that hold nothing, the last
    one freed first; then those whose tokens are `kept` for requests with the same prefix, the least recently used first,
    for each of which `evicted` is called.
    """

    def __init__(
        self, pages: int, *, reserved: Iterable[int] = (), evicted: Callable[[int], None] | None = None
    ) -> None:
        pages = whole("pages", pages, "a pool has at least 1 page", least=1)
        self.pages, self._reserved, self._evicted = pages, frozenset(reserved), evicted
        for page in self._reserved:
            if not 0 <= page < pages:
                raise PageError(f"reserved: got page {page}; the pool has the pages 0 to {pages - 1}")
        self._references = [0] * pages
        self._kept: set[int] = set()
        self._free: OrderedDict[int, None] = OrderedDict((p, None) for p in range(pages) if p not in self._reserved)

    @property
    def free(self) -> int:
        """Pages without a reference, those with kept tokens included."""
        return len(self._free)

    @property
    def kept(self) -> int:
        """Pages whose tokens are kept, free or not."""
        return len(self._kept)

    def references(self, page: int) -> int:
        """References to `page`; raises PageError for a page that is not the pool's to give."""
        if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page < self.pages:
            raise PageError(f"page: got {page!r}; the pool has the pages 0 to {self.pages - 1}")
        if page in self._reserved:
            raise PageError(f"page: got {page}, which is reserved; it is no request's")
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages with one reference each; raises OutOfPages if there are fewer, PageError for what is no count."""
        count = whole("count", count, "at least 0 pages are taken", least=0)
        if count > len(self._free):
            raise OutOfPages("take", count, len(self._free))
        taken = []
        for _ in range(count):
            page, _ = self._free.popitem(last=False)
            self._references[page] = 1
            if page in self._kept:
                self._kept.remove(page)
                if self._evicted is not None:
                    self._evicted(page)
            taken.append(page)
        return taken

    def retain(self, page: int) -> None:
        """One more reference to a page that has some, or whose tokens are kept."""
        if self.references(page) == 0 and page not in self._kept:
            raise PageError(f"page: got {page}, which is free and holds nothing; take() gives pages out")
        self._free.pop(page, None)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One reference less; raises PageError for a page that has none."""
        if self.references(page) == 0:
            raise PageError(f"page: got {page}, which is free already; every reference is released once")
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free[page] = None
            if page not in self._kept:
                self._free.move_to_end(page, last=False)

    def keep(self, page: int) -> None:
        """The page's tokens stay after its last reference, until the page is needed."""
        if self.references(page) == 0:
            raise PageError(f"page: got {page}, which is free; tokens are kept of pages that are held")
        self._kept.add(page)

    def forget(self, page: int) -> None:
        """The page's tokens are kept no longer."""
        self.references(page)
        self._kept.discard(page)
        if page in self._free:
            self._free.move_to_end(page, last=False)
