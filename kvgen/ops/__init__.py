"""The operations: one module each, with its spec and its plan. Two lines below are all that the package must be told of one.

Each loads on first use (PEP 562): a spec pays for the operations that it names.
"""

from __future__ import annotations

import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgen.ops.advance import Advance as Advance
    from kvgen.ops.append import Append as Append
    from kvgen.ops.attention_output import AttentionOutput as AttentionOutput
    from kvgen.ops.combine_lists import CombineLists as CombineLists
    from kvgen.ops.compact import Compact as Compact
    from kvgen.ops.convert import Convert as Convert
    from kvgen.ops.copy_pages import CopyPages as CopyPages
    from kvgen.ops.custom import Custom as Custom
    from kvgen.ops.decode import Decode as Decode
    from kvgen.ops.extend import Extend as Extend
    from kvgen.ops.gather import Gather as Gather
    from kvgen.ops.gather_rows import GatherRows as GatherRows
    from kvgen.ops.gather_states import GatherStates as GatherStates
    from kvgen.ops.indexer_query import IndexerQuery as IndexerQuery
    from kvgen.ops.indexer_scores import IndexerScores as IndexerScores
    from kvgen.ops.list_keys import ListKeys as ListKeys
    from kvgen.ops.lora_add import LoraAdd as LoraAdd
    from kvgen.ops.merge_states import MergeStates as MergeStates
    from kvgen.ops.mla_decode import MlaDecode as MlaDecode
    from kvgen.ops.mla_decompress import MlaDecompress as MlaDecompress
    from kvgen.ops.mla_plan import MlaPlan as MlaPlan
    from kvgen.ops.move_tokens import MoveTokens as MoveTokens
    from kvgen.ops.norm_cache import NormCache as NormCache
    from kvgen.ops.pool_tokens import PoolTokens as PoolTokens
    from kvgen.ops.remap_indices import RemapIndices as RemapIndices
    from kvgen.ops.reorder import Reorder as Reorder
    from kvgen.ops.rotate_cache import RotateCache as RotateCache
    from kvgen.ops.row_offsets import RowOffsets as RowOffsets
    from kvgen.ops.rows_add import RowsAdd as RowsAdd
    from kvgen.ops.scatter import Scatter as Scatter
    from kvgen.ops.scatter_states import ScatterStates as ScatterStates
    from kvgen.ops.seal import Seal as Seal
    from kvgen.ops.sliced_add import SlicedAdd as SlicedAdd
    from kvgen.ops.slot_mapping import SlotMapping as SlotMapping
    from kvgen.ops.store_scales import StoreScales as StoreScales
    from kvgen.ops.swap_pages import SwapPages as SwapPages
    from kvgen.ops.to_csr import ToCsr as ToCsr
    from kvgen.ops.to_dense import ToDense as ToDense
    from kvgen.ops.zero_pages import ZeroPages as ZeroPages
    from kvgen.schema.arguments import Array as Array
    from kvgen.schema.arguments import Scalar as Scalar
    from kvgen.schema.arguments import Size as Size
    from kvgen.schema.arguments import TensorMap as TensorMap
    from kvgen.schema.kernel_set import Op

    ALL: tuple[type[Op], ...]

_HOME = {
    "Advance": "kvgen.ops.advance",
    "Append": "kvgen.ops.append",
    "AttentionOutput": "kvgen.ops.attention_output",
    "CombineLists": "kvgen.ops.combine_lists",
    "Compact": "kvgen.ops.compact",
    "Convert": "kvgen.ops.convert",
    "CopyPages": "kvgen.ops.copy_pages",
    "Custom": "kvgen.ops.custom",
    "Decode": "kvgen.ops.decode",
    "Extend": "kvgen.ops.extend",
    "Gather": "kvgen.ops.gather",
    "GatherRows": "kvgen.ops.gather_rows",
    "GatherStates": "kvgen.ops.gather_states",
    "IndexerQuery": "kvgen.ops.indexer_query",
    "IndexerScores": "kvgen.ops.indexer_scores",
    "ListKeys": "kvgen.ops.list_keys",
    "LoraAdd": "kvgen.ops.lora_add",
    "MergeStates": "kvgen.ops.merge_states",
    "MlaDecode": "kvgen.ops.mla_decode",
    "MlaDecompress": "kvgen.ops.mla_decompress",
    "MlaPlan": "kvgen.ops.mla_plan",
    "MoveTokens": "kvgen.ops.move_tokens",
    "NormCache": "kvgen.ops.norm_cache",
    "PoolTokens": "kvgen.ops.pool_tokens",
    "RemapIndices": "kvgen.ops.remap_indices",
    "Reorder": "kvgen.ops.reorder",
    "RotateCache": "kvgen.ops.rotate_cache",
    "RowOffsets": "kvgen.ops.row_offsets",
    "RowsAdd": "kvgen.ops.rows_add",
    "Scatter": "kvgen.ops.scatter",
    "ScatterStates": "kvgen.ops.scatter_states",
    "Seal": "kvgen.ops.seal",
    "SlicedAdd": "kvgen.ops.sliced_add",
    "SlotMapping": "kvgen.ops.slot_mapping",
    "StoreScales": "kvgen.ops.store_scales",
    "SwapPages": "kvgen.ops.swap_pages",
    "ToCsr": "kvgen.ops.to_csr",
    "ToDense": "kvgen.ops.to_dense",
    "ZeroPages": "kvgen.ops.zero_pages",
    **dict.fromkeys(("Array", "Scalar", "Size", "TensorMap"), "kvgen.schema.arguments"),
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "ALL":  # all that kvgen writes; Custom's the user writes
        return tuple(
            getattr(import_module(module), operation)
            for operation, module in _HOME.items()
            if module.startswith("kvgen.ops.") and operation != "Custom"
        )
    raise AttributeError(
        f"ops.{name}: kvgen has no such operation; it must be one of kvgen.ops (docs/operations.md){_instead(name)}",
        name=name,
        obj=sys.modules[__name__],
    )


def _instead(name: str) -> str:
    """The operation that is nearest to one that does not exist."""
    if name in ("Prefill", "Attention", "Attend"):
        return "; ops.Extend attends with any number of query rows a request, ops.Decode with a few"
    near = difflib.get_close_matches(name, _HOME, n=1)
    return f"; did you mean ops.{near[0]}?" if near else ""


def __dir__() -> list[str]:
    return sorted(_HOME)
