"""The table of opcodes. What is not in it, or carries a modifier its entry does not take, is a TranslateError."""

from __future__ import annotations

from kvgen.emulator import (
    async_ops,
    atomic_ops,
    call_ops,
    cluster_ops,
    compare_ops,
    convert_ops,
    fence_ops,
    float_ops,
    integer_ops,
    memory_ops,
    move_ops,
    sync_ops,
    tensor_ops,
    video_ops,
    wgmma_ops,
)
from kvgen.emulator.context import Handler

OPCODES: dict[str, Handler] = {
    **integer_ops.HANDLERS,
    **video_ops.HANDLERS,
    **float_ops.HANDLERS,
    **compare_ops.HANDLERS,
    **move_ops.HANDLERS,
    **convert_ops.HANDLERS,
    **memory_ops.HANDLERS,
    **atomic_ops.HANDLERS,
    **async_ops.HANDLERS,
    **fence_ops.HANDLERS,
    **call_ops.HANDLERS,
    **sync_ops.HANDLERS,
    **tensor_ops.HANDLERS,
    **wgmma_ops.HANDLERS,
    **cluster_ops.HANDLERS,
}
