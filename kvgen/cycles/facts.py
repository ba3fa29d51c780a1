"""What the machine code of a kernel does that costs time whatever a GPU's figures are: counted, and compared by tests.

Of main loops the usual trip counts (`flow.py`): what few trips do is not in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvgen.cycles.flow import Block, Loop, blocks, loops
from kvgen.cycles.words import Word

PRODUCTS: Final = ("HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA")
WARPGROUP_PRODUCTS: Final = ("HGMMA", "QGMMA", "IGMMA")
COPIES: Final = ("LDGSTS", "UTMALDG", "UBLKCP")
_LOADS: Final = ("LDG", "LD")
_SERIALISED: Final = "instructions are serialized"
_MOVES_REGISTERS: Final = re.compile(r"\b(?:release|take)_registers<")  # as device/mma/wgmma.cuh calls it
_SHARED: Final = "shared"  # what any store to shared memory held, to whoever reads it


@dataclass(frozen=True)
class Facts:
    """Of one kernel on one architecture.

    `awaited_loads`: loads from global memory that the trip which asks for them waits for. `serialised_products`: products of a
    warpgroup that wait for the one before although nobody reads its sums between, and what the assembler says of it.
    `setmaxnreg_dropped`: the source moves registers among warpgroups, the machine code does not. `local_accesses`: to local
    memory. `loop_fences`: MEMBARs of a trip. `dependent_loads`: the longest chain of loads, each with its address or its branch
    from the one before, ahead of the first copy to shared memory; of a kernel without any, ahead of its main loop.
    """

    awaited_loads: int
    serialised_products: int
    setmaxnreg_dropped: int
    local_accesses: int
    loop_fences: int
    dependent_loads: int


def work_loop(graph: Sequence[Block]) -> Loop | None:
    """The loop that does the kernel's work: the innermost with at least half as many products as any; without products, the
    innermost that loads and takes exponentials, else one with loads.

    None where no loop has any: a kernel of one pass.
    """
    found = loops(graph)
    for bases in (PRODUCTS, _LOADS):
        counts = [sum(x.base in bases for x in loop.text) for loop in found]
        if bases == _LOADS:
            attending = [loop for loop, n in zip(found, counts, strict=True) if n and _takes_exponentials(loop)]
            if attending:
                # Sums of partial results are none of it, where inner loops with more arithmetic go over tokens.
                return max((max(attending, key=lambda loop: len(loop.text)), *_innermost(found)), key=_multiplications)
        if any(counts):
            likely = [loop for loop, n in zip(found, counts, strict=True) if 2 * n >= max(counts)]
            return min(likely, key=lambda loop: len(loop.members))
    return None


def _takes_exponentials(loop: Loop) -> bool:
    return not loop.holds_loops and any(x.opcode.startswith("MUFU.EX2") for x in loop.text)


def _innermost(found: Iterable[Loop]) -> Iterator[Loop]:
    return (loop for loop in found if not loop.holds_loops)


def _multiplications(loop: Loop) -> int:
    return sum(x.base in ("FFMA", "FFMA2") for x in loop.text)


def facts_of(listing: str, source: str = "", log: str = "") -> Facts:
    """Of a listing with encodings; `source` is the CUDA it was made of, `log` what the assembler said."""
    graph = blocks(listing)
    code = [x for block in graph for x in block.code]
    loop = work_loop(graph)
    trip = loop.usual if loop else ()
    return Facts(
        awaited_loads=awaited_loads(trip),
        serialised_products=sum(serialised(block.code) for block in graph) + log.count(_SERIALISED),
        setmaxnreg_dropped=int(bool(_MOVES_REGISTERS.search(source)) and not any(x.base == "USETMAXREG" for x in code)),
        local_accesses=sum(x.base in ("LDL", "STL") for x in code),
        loop_fences=sum(x.base == "MEMBAR" for x in trip),
        dependent_loads=dependent_loads(code, min((x.address for x in trip), default=None)),
    )


def awaited_loads(trip: Sequence[Word]) -> int:
    """Loads that an instruction behind them in the trip waits for, be it for another user of their scoreboard."""
    open_loads: dict[int, int] = {}
    count = 0
    for word in trip:
        for board in word.waits:
            count += open_loads.pop(board, 0)
        if word.base in _LOADS and word.sets is not None and word.guard != "!PT":
            open_loads[word.sets] = open_loads.get(word.sets, 0) + 1
    return count


def serialised(code: Iterable[Word]) -> int:
    """Products that wait for the product before them although only they need its sums."""
    count, waited = 0, False
    sums: frozenset[str] = frozenset()
    for word in code:
        if word.base in WARPGROUP_PRODUCTS:
            own = _sums(word)
            count += waited and own == sums and "RZ" not in word.operands
            sums, waited = own, False
        elif word.opcode.startswith("WARPGROUP.DEPBAR"):
            waited = bool(sums)
        elif sums & (word.sources | word.writes):
            sums, waited = frozenset(), False
    return count


def _sums(word: Word) -> frozenset[str]:
    """The registers of an m64nNk16 product's sums: N / 2 from the first one on."""
    first = re.match(r"R(\d+)", word.operands[0])
    shape = re.search(r"64x(\d+)x", word.opcode)
    if first is None or shape is None:
        return frozenset()
    return frozenset(f"R{int(first[1]) + n}" for n in range(int(shape[1]) // 2))


def dependent_loads(code: Sequence[Word], loop: int | None = None) -> int:
    """Loads one behind the other before the first copy, or before the address of the loop where nothing is copied.

    Read in the order of the text, as the way that a chunk of tokens goes; what goes through shared memory goes through all of it.
    """
    depth: dict[str, int] = {}
    branches = 0
    copies = any(word.base in COPIES for word in code)
    for word in code:
        if word.base in COPIES:
            return max([branches, *(depth.get(r, 0) for r in word.sources)])
        if loop is not None and word.address >= loop and not copies:
            break
        known = max([branches, *(depth.get(r, 0) for r in _read(word))])
        if word.base in ("BRA", "EXIT", "BRX"):
            branches = max(branches, known)
        elif word.base in _LOADS:
            known += 1
        for name in _written(word):
            # Under a guard the register may keep what it held.
            depth[name] = max(known, depth.get(name, 0)) if word.guard or name == _SHARED else known
    return max([branches, *depth.values()])


def _read(word: Word) -> Iterator[str]:
    yield from word.sources
    if word.base in ("LDS", "LDSM"):
        yield _SHARED


def _written(word: Word) -> Iterator[str]:
    yield from word.writes
    if word.base == "STS":
        yield _SHARED
