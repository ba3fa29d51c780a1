"""The operations: one module each, with its spec and its plan. A line below is all that the package must be told of one."""

from kvgen.ops.advance import Advance as Advance
from kvgen.ops.append import Append as Append
from kvgen.ops.compact import Compact as Compact
from kvgen.ops.convert import Convert as Convert
from kvgen.ops.copy_pages import CopyPages as CopyPages
from kvgen.ops.custom import Custom as Custom
from kvgen.ops.decode import Decode as Decode
from kvgen.ops.gather import Gather as Gather
from kvgen.ops.gather_rows import GatherRows as GatherRows
from kvgen.ops.lora_add import LoraAdd as LoraAdd
from kvgen.ops.merge_states import MergeStates as MergeStates
from kvgen.ops.mla_decode import MlaDecode as MlaDecode
from kvgen.ops.mla_decompress import MlaDecompress as MlaDecompress
from kvgen.ops.mla_plan import MlaPlan as MlaPlan
from kvgen.ops.norm_cache import NormCache as NormCache
from kvgen.ops.remap_indices import RemapIndices as RemapIndices
from kvgen.ops.reorder import Reorder as Reorder
from kvgen.ops.rotate_cache import RotateCache as RotateCache
from kvgen.ops.row_offsets import RowOffsets as RowOffsets
from kvgen.ops.rows_add import RowsAdd as RowsAdd
from kvgen.ops.scatter import Scatter as Scatter
from kvgen.ops.seal import Seal as Seal
from kvgen.ops.sliced_add import SlicedAdd as SlicedAdd
from kvgen.ops.slot_mapping import SlotMapping as SlotMapping
from kvgen.ops.store_scales import StoreScales as StoreScales
from kvgen.ops.swap_pages import SwapPages as SwapPages
from kvgen.ops.to_csr import ToCsr as ToCsr
from kvgen.ops.to_dense import ToDense as ToDense
from kvgen.ops.zero_pages import ZeroPages as ZeroPages
from kvgen.spec.arguments import Array as Array
from kvgen.spec.arguments import Scalar as Scalar
from kvgen.spec.arguments import Size as Size
from kvgen.spec.arguments import TensorMap as TensorMap
from kvgen.spec.kernel_set import Op

# All that kvgen writes; Custom's the user writes.
ALL: tuple[type[Op], ...] = tuple(
    found
    for found in list(globals().values())
    if isinstance(found, type) and issubclass(found, Op) and found not in (Op, Custom)
)
