"""Instruction classes: which part of the machine an instruction keeps busy, by its opcode and modifiers."""

from __future__ import annotations

import functools

from kvgen.emulator.ptxtypes import TYPES

CLASSES = (
    "integer", "float", "half", "conversion", "global", "shared", "local", "generic", "atomic", "tensor", "async",
    "control", "sync", "other",
)  # fmt: skip
_BY_OPCODE = {
    **dict.fromkeys(("cvt",), "conversion"),
    **dict.fromkeys(("atom", "red"), "atomic"),
    **dict.fromkeys(("mma", "wmma", "wgmma", "tcgen05", "ldmatrix", "stmatrix", "movmatrix"), "tensor"),
    **dict.fromkeys(("cp",), "async"),
    **dict.fromkeys(("bra", "brx", "call", "ret", "exit", "trap", "brkpt", "nanosleep"), "control"),
    **dict.fromkeys(
        ("bar", "barrier", "membar", "fence", "mbarrier", "griddepcontrol", "shfl", "vote", "match", "redux", "elect",
         "activemask"),
        "sync",
    ),
    # Moves and addresses: mostly gone once PTX has become machine code.
    **dict.fromkeys(("mov", "cvta", "isspacep", "mapa", "getctarank", "createpolicy", "setmaxnreg", "alloca"), "other"),
}  # fmt: skip
_BY_KIND = {
    "u": "integer", "s": "integer", "b": "integer", "q": "integer", "pred": "integer",
    "f": "float", "w": "float", "h": "half", "p": "half",
}  # fmt: skip


@functools.cache
def instruction_class(op: str) -> str:
    """The class of the instruction `op`: its opcode, then its modifiers, dots between them.

    Arithmetic goes by the type it works on, the last one named; loads and stores by their state space.
    """
    opcode, *modifiers = op.split(".")
    if opcode in ("ld", "ldu", "st"):
        space = next((m.partition("::")[0] for m in modifiers if m.partition("::")[0] in _SPACES), None)
        return "generic" if space is None else _SPACES[space]
    if opcode in _BY_OPCODE:
        return _BY_OPCODE[opcode]
    kind = next((TYPES[m].kind for m in reversed(modifiers) if m in TYPES), None)
    return "other" if kind is None else _BY_KIND[kind]


_SPACES = {"global": "global", "shared": "shared", "local": "local", "param": "other", "const": "other"}
