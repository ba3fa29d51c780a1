"""The sticky error word that kernels write when device data is wrong.

One u64, 0 when nothing happened. A fault is the complement of `position << 32 | request << 8 | code`, and kernels keep the
largest word, which is the first fault in that order: the word does not depend on the order in which blocks ran. The host
clears it and reads it when it likes; no launcher does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from kvgen.errors import ArgumentError, KvgenError

NO_FAULT: Final = 0
_ALL_ONES: Final = 2**64 - 1
_MANY: Final = 0xFFFFFF
# GivenScale of templates/device/base/fault.cuh, which a SCALE fault has for its request.
_SCALES: Final = ("k_scale", "v_scale", "q_scale", "out_scale", "k_global_scale", "v_global_scale")
_NEGATIVE: Final = 2**31


class Fault(IntEnum):
    """The codes of templates/device/base/fault.cuh."""

    PAGE_ID = 1
    POSITION = 2
    LENGTH = 3
    SLOT = 4
    ROW_OFFSETS = 5
    TABLE = 6
    LORA_END = 7
    PAIR = 8
    OVERLAP = 9
    PLAN = 10
    STALE = 11
    SCALE = 12


_MEANING: Final = {
    Fault.PAGE_ID: "a page id outside the pool, at token {position} of request {request}",
    Fault.POSITION: "token {position} of request {request} lies past its page table, or past the angles of RoPE",
    Fault.LENGTH: "request {request} (over lists: row {request}) has a length or count that its page table, its list, its rows "
    "or its k_sealed cannot have{at_count}",
    Fault.SLOT: "row {position} has a slot outside the pool",
    Fault.ROW_OFFSETS: "row offsets that decrease, pass the rows, or give request {request} too many rows{at_row}",
    Fault.TABLE: "an index into the page table that leaves it, at token {position} of request {request}",
    Fault.PAIR: "pair {position} names a page outside its pool",
    Fault.OVERLAP: "pair {position} writes to a page that another pair reads, or that an earlier one writes",
    Fault.PLAN: "a workspace without a plan for this operation, batch and rows, or one that was overwritten",
    Fault.STALE: "request {request} (over lists: row {request}) has {position} tokens now, and the workspace was planned for "
    "another number; plan again",
    Fault.SCALE: "{scale} is 0, negative or not finite at place {position} of its layer; what is made with it is NaN",
    Fault.LORA_END: "lora_end_idx counts rows that this step does not have, from row {position} (request {request}) on",
}


@dataclass(frozen=True)
class FaultReport:
    """A decoded error word: the first fault in the order of position, request, code."""

    code: Fault
    request: int
    position: int

    def __str__(self) -> str:
        request = f"{self.request}" if self.request < _MANY else f">= {_MANY}"
        scale = _SCALES[self.request] if self.request < len(_SCALES) else "a scale"
        # Kernels report 32 bits: a count of -1 as 2^32 - 1. No place is so large.
        position = self.position if self.position < _NEGATIVE else self.position - 2**32
        # Position 0 of a whole request says no more than the request does.
        places = {"at_count": f" (token or count {position})", "at_row": f" (row {position})"} if position else {}
        given = {"at_count": "", "at_row": ""} | places
        meaning = _MEANING[self.code].format(position=position, request=request, scale=scale, **given)
        return f"{self.code.name}: {meaning}"


class FaultError(KvgenError):
    """Kernels found wrong device data; `report` says what, and is the text."""

    def __init__(self, report: FaultReport) -> None:
        super().__init__(report)
        self.report = report


def describe(word: Any) -> FaultReport | None:
    """What an error word says, None if nothing happened. `word` is an int or a one-element array.

    An array on a GPU is waited for. Raises ArgumentError, a ValueError, for a word that no kernel writes.
    """
    # item(), because int() of a torch.uint64 of 2^63 or more, which every fault is, overflows.
    value = word if isinstance(word, int) else int(word.reshape(-1)[0].item())
    if value == NO_FAULT:
        return None
    bits = value ^ _ALL_ONES
    if 0 < value < _ALL_ONES and bits & 0xFF in _MEANING:
        return FaultReport(Fault(bits & 0xFF), bits >> 8 & _MANY, bits >> 32)
    if value == _ALL_ONES:
        rule = "all ones meant no fault up to ABI 4; 0 does now, and kernels cannot report over all ones"
    else:
        codes = ", ".join(f"{f.value} {f.name}" for f in Fault)
        rule = f"no kernel writes that: the low byte of its complement, {bits & 0xFF}, is none of {codes}"
    raise ArgumentError(
        f"word: got {value:#018x}; {rule}; pass the u64 that launches got as `errors`, set to 0 (clear) before them"
    )


def clear(word: Any) -> None:
    """Set an error word, a one-element u64 array that can be assigned to, to 0: nothing happened.

    Until then the word keeps the fault that it holds, unless a kernel reports one of a smaller position or request.
    """
    word[...] = NO_FAULT
