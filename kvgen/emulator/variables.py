"""Variables of a module in C, and where shared ones lie in a block's window."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvgen.emulator.declarations import Address, Variable, variables
from kvgen.emulator.errors import TranslateError
from kvgen.emulator.parser import Function, Module

_REDZONE = 64  # bytes after each variable that no other has
_SHARED_LIMIT = 232448
_WINDOW = 0x48000  # SHARED_CAPACITY
_GLOBAL_LIMIT = 1 << 31


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("??", "?\\?") + '"'


def readable(symbol: str) -> str:
    """The last identifier of a mangled variable: _ZZ5racesE1s is s."""
    rest = symbol
    if not rest.startswith("_Z"):
        return symbol
    names = []
    while m := re.search(r"\d+", rest):
        length = int(m.group())
        name = rest[m.end() : m.end() + length]
        if not re.match(r"[A-Za-z_]\w*$", name):
            break
        names.append(name)
        rest = rest[m.end() + length :]
    return names[-1] if names else symbol


# ---------------------------------------------------------------- global and constant
def storage(v: Variable, name: str) -> str:
    """The C bytes of a global variable; a launch fills them from its `initial`."""
    if v.nbytes > _GLOBAL_LIMIT:
        raise TranslateError(f"{v.name} has {v.nbytes} bytes, more than the emulator holds", ptx_line=v.line)
    return f"static u8 {name}[{v.nbytes + _REDZONE}] __attribute__((aligned({max(v.align, 16)})));"


def initial(v: Variable, name: str, addresses: Mapping[str, str]) -> tuple[str, str]:
    """A C variable that begins with the variable's initial value, and statements that fill in the addresses in it; a .const
    variable is that C variable.

    `addresses` are generic ones, and under ".const NAME" those in the constant space."""
    fields, values, filled = [], [], []
    left = v.nbytes
    for i, item in enumerate(v.initial):
        if isinstance(item, Address):
            address = addresses.get(item.symbol)
            if address is None:
                raise TranslateError(f"{v.name} holds the address of unknown {item.symbol!r}", ptx_line=v.line)
            fields.append(f"u64 f{i};")
            near = None if item.generic else addresses.get(f".const {item.symbol}")
            values.append("0")
            filled.append(f"{name}.f{i} = {near or address} + {item.offset};")
            left -= 8
        else:
            fields.append(f"u8 f{i}[{len(item)}];")
            values.append(f"{{{', '.join(str(b) for b in item)}}}")
            left -= len(item)
    if v.space == "const":
        fields.append(f"u8 rest[{left + _REDZONE}];")
    align = f" __attribute__((aligned({max(v.align, 16)})))" if v.space == "const" else ""
    kind = "static struct" if filled else "static const struct"
    packed = f"{kind} __attribute__((packed)) {{ {' '.join(fields)} }}"
    return f"{packed} {name}{align} = {{{', '.join(values) or '0'}}};", " ".join(filled)


# ---------------------------------------------------------------- shared
@dataclass(frozen=True, slots=True)
class Window:
    """One entry's shared memory. `rows` are SharedVariable in C; `nbytes` is what its variables take on a GPU.

    `offsets` is keyed by the function that declares a variable, "" for the module, and its name.
    """

    offsets: Mapping[tuple[str, str], int]
    rows: tuple[str, ...]
    nbytes: int
    extent: int
    dynamic_offset: int


class SharedLayout:
    """Offsets of a module's shared variables.

    Those that functions use lie first, at the same place for every entry that can call functions; then the entry's own.
    A redzone follows each.
    """

    def __init__(self, module: Module, users: Mapping[str, frozenset[str]]) -> None:
        """`users`: the names each function's text mentions, by the function's name."""
        self.users = users
        self.module = [v for v in module.variables if v.space == "shared" and not v.extern]
        self.dynamic = [v for v in module.variables if v.space == "shared" and v.extern]
        self.own: dict[str, list[Variable]] = {}
        for function in (*module.functions.values(), *module.entries):
            self.own[function.name] = [
                v
                for s in function.statements
                if s.kind == "directive" and s.text.startswith(".shared")
                for v in variables(s.text, s.line)
            ]
        bodies = [f.name for f in module.functions.values() if f.body is not None]
        self.common, self.common_end = _lay_out(self.used_by(bodies), 0)

    def used_by(self, functions: Iterable[str]) -> list[tuple[str, Variable]]:
        """Variables and the function that declares each, "" for the module."""
        names = list(functions)
        mentioned = frozenset[str]().union(*(self.users[n] for n in names))
        found = [("", v) for v in self.module if v.name in mentioned]
        return found + [(n, v) for n in names for v in self.own[n]]

    def symbols(self, function: str, offsets: Mapping[tuple[str, str], int], dynamic: str) -> dict[str, str]:
        """C addresses of what one function may name; `dynamic` is that of dynamic shared memory."""
        out = {v.name: dynamic for v in self.dynamic}
        for (owner, name), offset in offsets.items():
            if owner in ("", function):
                out[name] = f"(SHARED_ORIGIN + {offset}u)"
        return out

    def window(self, entry: Function, reached: Sequence[str]) -> Window:
        used = self.used_by([*reached, entry.name])
        common = self.common if reached else {}
        rest = [(owner, v) for owner, v in used if (owner, v.name) not in common]
        offsets, end = _lay_out(rest, self.common_end if reached else 0)
        offsets = common | offsets
        nbytes = 0
        for _, v in used:
            nbytes = -(-nbytes // v.align) * v.align + v.nbytes
        if nbytes > _SHARED_LIMIT or end > _WINDOW - (_SHARED_LIMIT - nbytes):
            raise TranslateError(f"{entry.name} declares {nbytes} bytes of shared memory", ptx_line=entry.line)
        align = max([16, *(v.align for v in self.dynamic)])
        rows = sorted((offsets[owner, v.name], v) for owner, v in used)
        return Window(
            offsets=offsets,
            rows=tuple(f"{{{quoted(readable(v.name))}, {offset}, {v.nbytes}}}" for offset, v in rows),
            nbytes=nbytes,
            extent=end,
            dynamic_offset=-(-end // align) * align,
        )


def _lay_out(used: Iterable[tuple[str, Variable]], start: int) -> tuple[dict[tuple[str, str], int], int]:
    offsets = {}
    end = start
    for owner, v in used:
        offset = -(-end // v.align) * v.align
        offsets[owner, v.name] = offset
        end = offset + v.nbytes + _REDZONE
    return offsets, end
