"""A table of angles for rows whose positions the call brings."""

from __future__ import annotations

from kvgen.cases.scene import Scene


def table_rows(scene: Scene) -> int:
    """Positions of the table: as many as there are pages."""
    return -(-scene.pages // scene.cache.page_table.id_multiplier)
