"""Keys of a batch in one buffer, for mla_plan and mla_decompress."""

from __future__ import annotations

from kvgen.cases.scene import Scene
from kvgen.schema.kernel_set import Op


def alignment_of(scene: Scene, op: Op) -> int:
    """The tokens that a request's keys are padded to."""
    return int(getattr(op, "alignment", None) or scene.cache.page_tokens or 1)
