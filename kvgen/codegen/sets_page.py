"""README.md of the output folder: every generated set with its heads, its cache and its operations."""

from __future__ import annotations

import re
from typing import Final

from kvgen.lowering.lowered import lower
from kvgen.lowering.state_rows import state_bytes
from kvgen.schema.any_cache import AnyCache
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import LoadedSet
from kvgen.schema.quant import Quant

PATH: Final = "README.md"
COMMENT: Final = ("<!--", " -->")  # how a line that is not shown begins and ends
_HEAD: Final = """# Generated kernel sets

One folder a set: `cache.cuh`, a `.cu` a kernel, typed launchers in `__init__.py`, their parameters and grids in `_table.py`.
`device/` is the library that kernels include. Change the spec, then run `kvgen build`.

Heads are query heads / KV heads x elements of a KV head. A layout has its axes slowest first, a tensor before and after a slash.

| set | what | heads | cache | tokens a page | page table | operations |
|---|---|---|---|---|---|---|
"""
_ROW: Final = re.compile(r"^\| \[(\w+)\]\(\1/\), .*$", re.MULTILINE)


def sets_page(sets: list[LoadedSet], before: str = "") -> str:
    """The page, without a banner: a row a set, by name.

    Rows of other sets are kept from the page `before`: for a build that loads only some of the specs.
    """
    rows = {m[1]: m[0] for m in _ROW.finditer(before)} | {s.kernels.name: _row(s) for s in sets}
    return _HEAD + "".join(f"{rows[name]}\n" for name in sorted(rows))


def _row(loaded: LoadedSet) -> str:
    kernels = loaded.kernels
    cells = _states_cells(kernels.cache) if kernels.cache.states else _cells(kernels)
    row = (
        f"[{kernels.name}]({kernels.name}/), `{loaded.source}`",
        _first_line(loaded.doc),
        *cells,
        ", ".join(op.name for op in kernels.ops),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _states_cells(cache: AnyCache) -> tuple[str, ...]:
    """Heads, cache, tokens a page and page table of a cache of states."""
    return (
        "none",
        f"{state_bytes(cache)} bytes `{cache.storage.tensors[0].text}`",
        "a state a request",
        cache.page_table.kind,
    )


def _cells(kernels: KernelSet) -> tuple[str, ...]:
    """The same of a cache of tokens."""
    cache = kernels.kv
    layout = cache.layout.kv or " / ".join(t for t in (cache.layout.k, cache.layout.rope, cache.layout.v) if t)
    page = lower(cache).allocation.page_size
    pages = f"{page}" if page else "none" if cache.ragged else "a block a request"
    stored = " / ".join(dict.fromkeys(_stored(cache.dtype, quant) for quant in cache.quants.values()))
    return (
        f"{kernels.q_heads}/{cache.kv_heads} x {cache.head_dim}",
        f"{stored} `{layout}`",
        pages,
        cache.page_table.kind,
    )


def _first_line(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split())


def _stored(dtype: str, quant: Quant | None) -> str:
    if quant is None:
        return dtype
    scales = f", {quant.scale_dtype} scales" if quant.scale_dtype else ""
    return f"{quant.dtype}{scales}{' and zeros' if quant.zero else ''}"
