"""Pages that come from the code are as the code says; what pages list is complete; links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docpages import results
from docpages.__main__ import PAGES as WRITTEN
from docpages.blocks import block_of, markdown
from docpages.presets import functions, presets_page
from docpages.spec_reference import operations, spec_reference
from kvgen import ops, presets
from kvgen.compile import ARCHS, select_arch
from kvgen.errors import DeviceError
from kvgen.runtime.faults import Fault
from tests.docs.blocks import PAGES, ROOT


@pytest.mark.parametrize("path", WRITTEN)
def test_a_written_page(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == WRITTEN[path](), "`python -m docpages` writes it"


@pytest.mark.campaign
def test_the_counts_of_performance(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of one set, counted anew, without extend, whose bytes tests/cli/test_demo.py compares with the README's.

    `python -m docpages --run` counts all of them.
    """
    shown = block_of((ROOT / "docs/performance.md").read_text(encoding="utf-8"), "counted").splitlines()
    assert {line.split("|")[1].split("/")[0].strip() for line in shown[2:]} == set(results.COUNTED)
    counted = ["llama3_8b/append", "llama3_8b/gather", "llama3_8b/decode"]
    monkeypatch.setenv("KVGEN_CPU_COMPILE", "full")  # as for a GPU
    found = results.count(tuple(counted))
    assert list(found) == counted
    assert set(found.values()) <= set(shown), "`python -m docpages --run` writes them"


def test_every_preset_and_every_operation_has_a_section() -> None:
    page = presets_page()
    assert len(functions()) == len(presets.__all__) > 30
    assert all(f"\n### {name}\n" in page for name in presets.__all__)
    assert f"{len(functions())} caches of" in (ROOT / "README.md").read_text(encoding="utf-8")
    page = spec_reference()
    assert {o.__name__ for o in operations()} == {o.__name__ for o in (*ops.ALL, ops.Custom)}
    assert all(f"\n### {o.__name__}\n" in page for o in operations())


def test_text_that_multiplies_is_not_emphasised() -> None:
    assert markdown("P*D of `a*b` and 2*x") == r"P\*D of `a*b` and 2\*x"


def test_every_fault_is_explained() -> None:
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    assert [(int(n), name) for n, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.M)] == [
        (fault.value, fault.name) for fault in Fault
    ]


def test_the_architectures_are_those_that_kernels_choose() -> None:
    page = (ROOT / "docs/architectures.md").read_text(encoding="utf-8")
    runs = dict(re.findall(r'^\| `"(\w+)"` \| ([\d., ]+) \|', page, re.M))
    assert list(runs) == list(ARCHS)
    for arch, capabilities in runs.items():
        for major, minor in re.findall(r"(\d+)\.(\d)", capabilities):
            assert select_arch((int(major), int(minor)), [arch]) == arch
    takes = re.findall(r"^\| (\d+)\.(\d) \| `(\w+)` \|", page, re.M)
    assert {f"{major}.{minor}" for major, minor, _ in takes} >= {"8.6", "8.7", "9.0", "10.3", "12.1"}
    for major, minor, arch in takes:
        assert select_arch((int(major), int(minor)), ARCHS) == arch
    for capability in ((7, 5), (11, 0)):
        with pytest.raises(DeviceError):
            select_arch(capability, ARCHS)


def test_what_does_not_fit_small_shared_memory() -> None:
    """docs/architectures.md: 99 KB a block on 8.6, 8.9 and 12.x, and which recorded kernels ask for more."""
    page = " ".join((ROOT / "docs/architectures.md").read_text(encoding="utf-8").split())
    small, found = 99 * 1024, set()
    for kernels in results.recorded().values():
        for kernel, archs in kernels.items():
            for arch in ("sm_80", "sm_89", "sm_120f"):
                if arch in archs and archs[arch]["shared"] > small:
                    found.add((arch, kernel.split("_")[0], archs[arch]["shared"] // 1024))
    assert {(arch, operation) for arch, operation, _ in found} == {("sm_80", "mla"), ("sm_80", "extend")}
    sizes = sorted(kilobytes for _, operation, kilobytes in found if operation == "mla")
    assert f"compiled for `sm_80` asks for {sizes[0]} to {sizes[-1]} KB" in page
    sizes = sorted(kilobytes for _, operation, kilobytes in found if operation == "extend")
    assert f"`extend` of heads of 192 and 256 dims for {sizes[0]} to {sizes[-1]} KB" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = page if not path else page.parent / path
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in slugs, f"{page.name}: {target}"


def test_the_site_has_every_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    pages = {p.stem for p in PAGES if p.parent.name == "docs"} - {"index"}
    listed = [line for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S) for line in block.split()]
    assert pages == {name for name in listed if name in pages}, "docs/index.md lists it"
