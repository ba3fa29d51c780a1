"""What the names in PTX stand for: registers, parameters, variables and functions, each with its C expression."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgen.emulator.declarations import Variable
from kvgen.emulator.ptxtypes import PtxType


def mangle(name: str, scope: int = 0) -> str:
    """A C name; PTX names are made of word characters and $, after % perhaps."""
    return f"v{scope}_{name[1:]}" if name.startswith("%") else f"w{scope}_{name}"


@dataclass(slots=True)
class Register:
    """`late`: it may hold the token of a wgmma that nobody has waited for; only moves may read that. `storage` is the C type of
    the variable: floats lie in float registers of the host, all else is unsigned."""

    c: str
    type: PtxType
    late: bool = False
    used: bool = False  # compilers declare twice as many as they use
    storage: str = field(init=False)

    def __post_init__(self) -> None:
        self.storage = self.type.c if self.type.kind == "f" and not self.late else self.type.storage


@dataclass(frozen=True, slots=True)
class ParamPlace:
    """Bytes of .param space: `c` is a C pointer to them, `address` theirs in that space."""

    c: str
    address: str
    nbytes: int
    readable: bool
    writable: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters and results of a function: each lies at its offset in a block of bytes."""

    params: tuple[Variable, ...]
    results: tuple[Variable, ...]


@dataclass(frozen=True, slots=True)
class Callee:
    """What a call of a known function needs.

    `c` is the C function, "" where the module has only a declaration; `address` what a function pointer holds, None
    for a function of the runtime. `recurses` says that the function may call itself, directly or through others.
    """

    name: str
    signature: Signature
    c: str
    address: str | None = None
    recurses: bool = False


@dataclass(slots=True)
class Symbols:
    """Module-level names: C expressions of their addresses, and functions.

    Addresses of `globals` are generic, those of `shared` and `constants` are in that space. `undefined` are variables
    declared but not defined; `function_table` is the C table of functions and its length, `most_frame` the most stack
    one of them takes.
    """

    shared: dict[str, str] = field(default_factory=dict)
    globals: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Callee] = field(default_factory=dict)
    undefined: frozenset[str] = frozenset()
    function_table: str = "nullptr, 0"
    indirect_recurses: bool = False
    most_frame: str = "0"


@dataclass(slots=True)
class Scope:
    number: int
    registers: dict[str, Register] = field(default_factory=dict)
    params: dict[str, ParamPlace] = field(default_factory=dict)
