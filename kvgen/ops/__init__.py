"""The operations: one module each, with its spec and its plan; the list below is all that kvgen writes, Custom the user."""

from kvgen.ops.advance import Advance
from kvgen.ops.append import Append
from kvgen.ops.compact import Compact
from kvgen.ops.convert import Convert
from kvgen.ops.copy_pages import CopyPages
from kvgen.ops.custom import Custom
from kvgen.ops.decode import Decode
from kvgen.ops.gather import Gather
from kvgen.ops.gather_rows import GatherRows
from kvgen.ops.lora_add import LoraAdd
from kvgen.ops.merge_states import MergeStates
from kvgen.ops.mla_decode import MlaDecode
from kvgen.ops.mla_decompress import MlaDecompress
from kvgen.ops.mla_plan import MlaPlan
from kvgen.ops.norm_cache import NormCache
from kvgen.ops.remap_indices import RemapIndices
from kvgen.ops.reorder import Reorder
from kvgen.ops.rotate_cache import RotateCache
from kvgen.ops.row_offsets import RowOffsets
from kvgen.ops.rows_add import RowsAdd
from kvgen.ops.scatter import Scatter
from kvgen.ops.seal import Seal
from kvgen.ops.sliced_add import SlicedAdd
from kvgen.ops.slot_mapping import SlotMapping
from kvgen.ops.store_scales import StoreScales
from kvgen.ops.swap_pages import SwapPages
from kvgen.ops.to_csr import ToCsr
from kvgen.ops.to_dense import ToDense
from kvgen.spec.arguments import Array, Scalar, Size, TensorMap

ALL = (
    Advance,
    Append,
    Compact,
    Convert,
    CopyPages,
    Decode,
    Gather,
    GatherRows,
    LoraAdd,
    MergeStates,
    MlaDecode,
    MlaDecompress,
    MlaPlan,
    NormCache,
    RemapIndices,
    Reorder,
    RotateCache,
    RowOffsets,
    RowsAdd,
    Scatter,
    Seal,
    SlicedAdd,
    SlotMapping,
    StoreScales,
    SwapPages,
    ToCsr,
    ToDense,
)

__all__ = [
    "ALL",
    "Advance",
    "Append",
    "Array",
    "Compact",
    "Convert",
    "CopyPages",
    "Custom",
    "Decode",
    "Gather",
    "GatherRows",
    "LoraAdd",
    "MergeStates",
    "MlaDecode",
    "MlaDecompress",
    "MlaPlan",
    "NormCache",
    "RemapIndices",
    "Reorder",
    "RotateCache",
    "RowOffsets",
    "RowsAdd",
    "Scalar",
    "Scatter",
    "Seal",
    "Size",
    "SlicedAdd",
    "SlotMapping",
    "StoreScales",
    "SwapPages",
    "TensorMap",
    "ToCsr",
    "ToDense",
]
