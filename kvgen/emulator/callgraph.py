"""Which functions an entry can reach, which of them recurse, and how much stack that takes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvgen.emulator.declarations import Address
from kvgen.emulator.parser import Function, Module

_RECURSION_BYTES = 256 << 10  # stack for functions that call themselves
_NAMES = re.compile(r"[\w$]+")
_CALL = re.compile(r"(?:@!?%?[\w$]+\s+)?call(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?(%?[\w$]+)")


class CallGraph:
    """`names` holds the words of each function's text; an indirect call may reach every function whose address is taken."""

    def __init__(self, module: Module) -> None:
        self.defined = {name: f for name, f in module.functions.items() if f.body is not None}
        everything = (*module.functions.values(), *module.entries)
        self.names = {f.name: frozenset(_NAMES.findall(" ".join(s.text for s in f.statements))) for f in everything}
        indirect: set[str] = set()
        taken = {a.symbol for v in module.variables for a in v.initial if isinstance(a, Address)}
        for f in everything:
            for s in f.statements:
                words = _NAMES.findall(s.text)
                if m := _CALL.match(s.text):
                    words.remove(m.group(1).lstrip("%"))
                    if m.group(1) not in module.functions:
                        indirect.add(f.name)
                taken.update(words)
        self.taken = [name for name in self.defined if name in taken]
        self.edges: dict[str, list[str]] = {}
        for f in everything:
            called = self.names[f.name] | frozenset(self.taken if f.name in indirect else ())
            self.edges[f.name] = [name for name in self.defined if name in called]
        self.recursive = frozenset(name for name in self.defined if name in self.reach(name))

    def reach(self, name: str) -> list[str]:
        """Functions that `name` can call, directly or through others, in the module's order."""
        found: set[str] = set()
        todo = [name]
        while todo:
            for callee in self.edges[todo.pop()]:
                if callee not in found:
                    found.add(callee)
                    todo.append(callee)
        return [n for n in self.defined if n in found]

    def stack_bytes(self, entry: Function, frames: Mapping[str, int]) -> int:
        """What the frames below `entry` take at most; a recursion that takes more is a fault."""
        reached = self.reach(entry.name)
        if self.recursive.intersection(reached):
            return sum(frames[n] for n in reached) + _RECURSION_BYTES
        deepest: dict[str, int] = {}

        def depth(name: str) -> int:
            if name not in deepest:
                deepest[name] = frames.get(name, 0) + max((depth(n) for n in self.edges[name]), default=0)
            return deepest[name]

        return depth(entry.name)
