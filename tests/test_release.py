"""What a release is made of agrees with itself: version, changelog, ABI number, workflow."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import kvgen
from kvgen.runtime.abi import ABI
from kvgen.version import __version__

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_the_version_is_stated_once_in_two_places() -> None:
    assert tomllib.loads(text("pyproject.toml"))["project"]["version"] == __version__ == kvgen.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def versions(changelog: str) -> list[tuple[str, str]]:
    """(version, day) of every section; the day is empty for what is unreleased."""
    return re.findall(r"^## \[([^\]]+)\](?: - (\S+))?$", changelog, re.M)


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    changelog = text("CHANGELOG.md")
    found = versions(changelog)
    assert found[0] == ("Unreleased", ""), "work goes under [Unreleased]"
    assert len(found) == len(re.findall(r"^## ", changelog, re.M)), "a section is [version] - YYYY-MM-DD"
    days = [date.fromisoformat(day) for _, day in found[1:]]
    assert days == sorted(days, reverse=True)
    numbers = [tuple(map(int, version.split("."))) for version, _ in found[1:]]
    assert numbers == sorted(numbers, reverse=True)
    assert set(re.findall(r"^### (.*)$", changelog, re.M)) <= set(KINDS)


def test_the_version_is_released_or_announced() -> None:
    changelog = text("CHANGELOG.md")
    released = [version for version, _ in versions(changelog)[1:]]
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0]
    assert __version__ in released or f"released as {__version__}" in unreleased


def test_the_changelog_and_the_policy_have_the_abi_number() -> None:
    assert re.search(r"ABI number\n\n.*?it is now \*\*(\d+)\*\*", text("docs/versioning.md"), re.S)[1] == str(ABI)  # type: ignore[index]
    assert int(re.findall(r"runtime ABI (\d+)", text("CHANGELOG.md"))[0]) == ABI


def test_links_of_these_pages_lead_somewhere() -> None:
    for path in ("CHANGELOG.md", "SECURITY.md", "docs/versioning.md", "docs/export.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", text(path)):
            assert target.startswith("https://") or (ROOT / path).parent.joinpath(target).exists(), f"{path}: {target}"


def test_the_workflow_tries_every_python_and_publishes_a_tag_alone() -> None:
    workflow = text(".github/workflows/release.yml")
    (least,) = re.findall(r'requires-python = ">=3\.(\d+)"', text("pyproject.toml"))
    pythons = re.search(r"python: \[(.*)\]", workflow)
    assert pythons is not None
    assert re.findall(r'"3\.(\d+)"', pythons[1]) == [str(n) for n in range(int(least), 15)]
    publish = workflow[workflow.index("\n  publish:") :]
    assert "needs: [try, test, versions]" in publish and "if: github.ref_type == 'tag'" in publish
    assert workflow.count("id-token: write") == publish.count("id-token: write") == 1
    assert "secrets." not in workflow and "password" not in workflow
