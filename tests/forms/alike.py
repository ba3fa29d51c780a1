"""Tests that a campaign alone runs: others of the same function stay in `make test`, and have the forms of what these launch.

alike.txt has their ids, a line each. `make test` leaves them out and says how many; `make campaign` gives the file to pytest. A
test that is named on the command line runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

TABLE: Final = Path(__file__).with_name("alike.txt")
_wrong: list[str] = []  # lines of the table, as this run collects tests


def table() -> list[str]:
    """Ids of tests, as pytest has them."""
    return TABLE.read_text(encoding="utf-8").splitlines()


def function(test: str) -> str:
    """The id of a test's function."""
    return test.partition("[")[0]


def all_wanted(config: pytest.Config) -> bool:
    """True in a campaign, or where tests are named: nothing is left out."""
    return "KVGEN_FAMILY" in os.environ or "KVGEN_DRAWN" in os.environ or any("::" in given for given in config.args)


def of_campaign(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """The items that this run leaves out: none in a campaign, or where tests are named."""
    if all_wanted(config):
        return []
    ids = set(table())
    found = {item.nodeid for item in items}
    files = {name.partition("::")[0] for name in found}
    kept = {function(name) for name in found - ids}
    _wrong[:] = [
        line for line in ids if line.partition("::")[0] in files and (line not in found or function(line) not in kept)
    ]
    return [item for item in items if item.nodeid in ids]


def wrong() -> list[str]:
    """Lines of the table that name no test of the files that this run has, or whose function has no test left."""
    return sorted(_wrong)
