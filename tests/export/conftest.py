"""The project in a temporary folder in which kvgen runs."""

from tests.cli.conftest import empty, project

__all__ = ["empty", "project"]
