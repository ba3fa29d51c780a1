"""What a user calls: the operations of a set, each with the operators of its launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvgen.errors import ArgumentError
from kvgen.runtime import PlannedLauncher
from kvgen.torch.schema import Method


class Operation:
    """One operation of a set as operators of PyTorch. Calling it writes to the arguments that the launcher writes to.

    `op` is what a call runs, `torch.ops.<namespace>.<name>`; its schema is `schema`. `returning` is the operator that
    allocates the required outputs and returns them, None where there are none. `dtypes` has the torch.dtype of every array
    by name, those of the cache among them (of an fp8 pool, which may be bytes as well, fp8). A planned operation has `plan`,
    others may have other methods of their launcher.
    """

    def __init__(self, name: str, op: Any, returning: Any, method: Method, dtypes: Mapping[str, Any]) -> None:
        self.name, self.op, self.returning = name, op, returning
        self.dtypes = dict(dtypes)
        self.schema = str(op._schema)
        self.home: tuple[object, str] = (self, "")  # what has it as an attribute, and under which name
        self.__doc__ = f"{self.schema}\n\n{type(method.launcher).__doc__}"
        self.method, self._launcher = method, method.launcher

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the operator that writes to its arguments; returns nothing."""
        return self.op(*arguments, **named)

    def workspace_bytes(self, max_rows: int, *, device: Any = "cpu", max_tokens: int | None = None) -> int:
        """Bytes of a workspace for steps of at most `max_rows` query rows on `device`, a torch.device or its name.

        max_tokens: a request's most tokens, which `split="invariant"` needs. Raises ArgumentError for an operation that
        takes no workspace.
        """
        if not isinstance(self._launcher, PlannedLauncher):
            raise ArgumentError(f"{self.name}: takes no workspace; only planned operations have one")
        return self._launcher.workspace_bytes(max_rows, device=_device_name(device), max_tokens=max_tokens)

    def workspace(self, max_rows: int, *, device: Any = "cpu", max_tokens: int | None = None) -> Any:
        """A u8 tensor of `workspace_bytes(...)` bytes from PyTorch's allocator: one per stream."""
        nbytes = self.workspace_bytes(max_rows, device=device, max_tokens=max_tokens)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def add(self, name: str, operation: Operation) -> None:
        """Make another method of the launcher an attribute."""
        operation.home = (self, name)
        setattr(self, name, operation)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or unpickled model finds the operators that its process has.
        return getattr, self.home

    def __getattr__(self, name: str) -> Operation:
        # Only for names that are not set; it also tells mypy that methods of the launcher are operations.
        raise AttributeError(f"{vars(self).get('name')} has no method {name!r}; its launcher has none")

    def __repr__(self) -> str:
        return f"<kvgen operation {self.schema.partition('(')[0]}>"


class OperationSet:
    """The operations of a generated set as operators of PyTorch: an attribute each, and `torch.ops.<namespace>.<name>`.

    `operations` has all of them by name. `left_out` says of each launcher that cannot be an operator why.
    """

    def __init__(
        self,
        name: str,
        namespace: str,
        operations: Mapping[str, Operation],
        left_out: Mapping[str, str],
        library: Any,
        again: Callable[[], OperationSet],
    ) -> None:
        self.name, self.namespace = name, namespace
        self.operations, self.left_out = dict(operations), dict(left_out)
        self._library = library  # the operators live as long
        self._again = again
        for attribute, operation in operations.items():
            operation.home = (self, attribute)
            setattr(self, attribute, operation)

    def __reduce__(self) -> tuple[Any, ...]:
        return self._again, ()

    def __getattr__(self, name: str) -> Operation:
        # Only for names that __init__ has not set; it also tells mypy what attributes are.
        left_out = vars(self).get("left_out", {})
        if name in left_out:
            raise AttributeError(left_out[name])
        has = ", ".join(vars(self).get("operations", ()))
        raise AttributeError(f"{vars(self).get('name')} has no operation {name!r}; it has {has}")

    def __repr__(self) -> str:
        return f"<kvgen operations of {self.name}: {', '.join(self.operations)}>"


def _device_name(device: Any) -> str:
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return str(found)
