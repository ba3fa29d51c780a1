"""Launchers of a generated set as PyTorch operators, for torch.compile, torch.export and CUDA graphs.

    from kvgen.torch import register

    llama = register("generated.llama3_8b")
    llama.append(pool, lengths, page_table, layer, q, k, v, q_out, row_offsets)

Needs PyTorch, which kvgen does not install: use the build for your GPU, or the CPU build.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError(
        "kvgen.torch needs PyTorch, which this environment does not have; install it as https://pytorch.org says for your GPU, "
        "or its CPU build",
        name="torch",
    )

from kvgen.torch.operation import Operation, OperationSet
from kvgen.torch.registry import register

__all__ = ["Operation", "OperationSet", "register"]
