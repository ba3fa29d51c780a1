"""Arguments for any operator of a set, made from what the set says of them: one small step of two requests."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, Final
from zlib import crc32

import torch

from kvgen.layout.dtypes import DTYPES
from kvgen.plan.params import Array, Count, Scalar, Size
from kvgen.runtime import Kernel, OtherCache, PoolCache, Tensor
from kvgen.torch import Operation, OperationSet, register

TORCH: Final[dict[str, torch.dtype]] = {
    d.name: getattr(torch, d.numpy_name) for d in DTYPES.values() if hasattr(torch, d.numpy_name)
}
# Requests of 17 and 3 tokens, one row each; two pages a request of five, in two layers.
SIZES: Final = {
    "T": 2, "B": 2, "M": 2, "pages": 5, "scale_pages": 5, "layers": 2, "N": 1, "P": 5, "Q": 4, "K": 1, "J": 4, "S": 1, "A": 2,
}  # fmt: skip
NUMBERS: Final = {
    "lengths": [17, 3], "page_table": [[4, 1], [0, 2]], "row_offsets": [0, 1, 2], "starts": [0, 1], "errors": [0],
    "pairs": [[3, 1]], "page_ids": [3], "moves": [[-1, -1]] * 4, "num_moves": [0], "lora_end_idx": [1], "slots": [1, 20],
    "positions": [17, 3], "page_indptr": [0, 2, 3], "page_indices": [4, 1, 0, 2], "last_page_len": [1, 3],
    "parents": [1, 0], "fresh": [3, -1], "valid_lengths": [1, 1], "kept": [-1], "new_page_table": [[4, 1], [0, 2]],
    "state_ids": [4, 1], "new_state_ids": [4, 1], "ids": [3],
}  # fmt: skip


class Step:
    """A set, its operators, and tensors for them on `device`; the same seed gives the same tensors."""

    def __init__(self, name: str, device: str = "cpu", seed: int = 0) -> None:
        self.module: ModuleType = import_module(f"generated.{name}")
        self.operations: OperationSet = register(self.module)
        self.device = device
        self._seed = seed

    def arguments(self, operation: Operation, op: Any = None) -> dict[str, Any]:
        """All required arguments of the operator, and `errors`; a workspace is planned for the step."""
        kernel, cache = operation.method.kernel, self.module.Cache
        found: dict[str, Any] = {}
        for argument in (op or operation.op)._schema.arguments:
            if not argument.has_default_value() or argument.name == "errors":
                found[argument.name] = self._value(argument, kernel, cache)
        if "workspace" in found:
            launch = self._launch_of(operation)
            found["workspace"] = launch.workspace(SIZES["T"], device=self.device).zero_()
            if operation is launch:
                tables = {n: found[n] for n in found if n in self._names(cache)}
                launch.plan(**tables, workspace=found["workspace"], row_offsets=self._index("row_offsets", kernel))
        return found

    def _launch_of(self, operation: Operation) -> Any:
        return next(o for o in self.operations.operations.values() if o.method.launcher is operation.method.launcher)

    @staticmethod
    def _names(cache: type[PoolCache]) -> set[str]:
        return {t.name for t in cache.TENSORS} | {t.name for t in cache.TABLES} | {"layer"}

    def _value(self, argument: Any, kernel: Kernel, cache: type[PoolCache]) -> Any:
        name, several = argument.name, "[]" in str(argument.type) or "List" in str(argument.type)
        params = {p.name: p for p in kernel.params}
        for tensor in cache.TENSORS:
            if name in (tensor.name, f"other_{tensor.name}"):
                made = [self._pool(tensor, other=name != tensor.name) for _ in range(2 if several else 1)]
                return made if several else made[0]
        for table in cache.TABLES:
            if name == table.name:
                return self._array(table)
        for prefix in (p for p in params.values() if isinstance(p, OtherCache) and name.startswith(f"{p.name}_")):
            inside = type("Argument", (), {"name": name[len(prefix.name) + 1 :], "type": argument.type})
            return self._value(inside, kernel, prefix.cache)
        if name == "workspace":
            return None  # made when the other arguments are there
        if name == "layer":
            return 1
        found = params.get(name)
        if isinstance(found, Array):
            return self._array(found)
        if isinstance(found, (Scalar, Count)):
            return 0
        assert isinstance(found, Size), name  # which a returning operator asks for
        return SIZES[found.value]

    def _index(self, name: str, kernel: Kernel) -> torch.Tensor:
        plan = next(p for p in self.module.__dict__.values() if getattr(p, "KERNEL", None) is kernel).PLAN
        return self._array(next(p for p in plan.params if p.name == name))

    def _pool(self, tensor: Tensor, *, other: bool) -> torch.Tensor:
        dtype = tensor.dtype if isinstance(tensor.dtype, str) else "u8" if "u8" in tensor.dtype else tensor.dtype[0]
        made = self._filled(tensor.name, dtype, tensor.shape)
        return torch.zeros_like(made) if other else made

    def _array(self, array: Array) -> torch.Tensor:
        if array.name in NUMBERS:
            return torch.tensor(NUMBERS[array.name], dtype=TORCH[array.dtype], device=self.device)
        if array.name == "cos_sin":  # an angle for each position
            return self._filled(array.name, array.dtype, (32, *array.shape[1:]))
        return self._filled(array.name, array.dtype, array.shape)

    def _filled(self, name: str, dtype: str, shape: tuple[int | str, ...]) -> torch.Tensor:
        sizes = [n if isinstance(n, int) else SIZES[n.partition("+")[0]] + int(n.partition("+")[2] or 0) for n in shape]
        wanted = TORCH[dtype]
        generator = torch.Generator().manual_seed(self._seed + crc32(name.encode()))
        if name in ("state_pool", "states"):  # bytes that nothing computes with, so any will do
            return torch.randint(256, sizes, generator=generator, dtype=wanted).to(self.device)
        if not wanted.is_floating_point:
            return torch.zeros(sizes, dtype=wanted, device=self.device)
        drawn = torch.randn(sizes, generator=generator)
        return (drawn.abs() if sizes[-1] == 1 else drawn).to(self.device, wanted)
