"""Runs the operation tests set by set, so that test processes share out the sets and few build the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sets import ALL

HERE = Path(__file__).parent


def _set_number(item: pytest.Item) -> int:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return list(ALL).index(parameters["name"]) if parameters.get("name") in ALL else len(ALL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [i for i, item in enumerate(items) if item.path.is_relative_to(HERE)]
    for place, item in zip(places, sorted((items[i] for i in places), key=_set_number), strict=True):
        items[place] = item
