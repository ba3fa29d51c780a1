"""The programs of the pages, run as they stand on the CPU machine; docs/attention.md and docs/custom_kernels.md have tests
of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.cli.conftest import Folder, invoke
from tests.docs.blocks import PAGES, ROOT, fences, files, project, run

DOCS: Final = ROOT / "docs"
# The page's programs, or one of them, and where they are run.
RUN: Final = {
    "README.md": "tests/test_readme.py",
    "attention.md": "tests/test_attention_page.py",
    "custom_kernels.md": "tests/custom/test_document.py",
    "calling.md": "tests/test_calling_page.py",
    "deepseek_v4.md": "here",
    "disaggregation.md": "here",
    "disaggregation.md/over_nixl.py": "tests_vllm/test_over_nixl.py",
    "extend.md": "here",
    "faults.md": "here",
    "operations.md": "here",
    "pages.md": "here",
    "quantization.md": "here",
    "quickstart.md": "here",
    "sglang.md": "here",
    "shipping.md": "tests/runtime/test_shipped.py",
    "torch.md": "tests_torch/test_docs.py",
    "transformers.md": "tests_torch/test_docs.py",
    "tutorial.md": "here",
    "vllm.md": "tests_vllm/test_docs.py",
}


def runner(page: str, program: str) -> str:
    """The file that runs a program of a page; "" where none does."""
    where = RUN.get(f"{page}/{program}", RUN.get(page, ""))
    return "tests/docs/test_programs.py" if where == "here" else where


def test_every_program_is_run_somewhere() -> None:
    for page in PAGES:
        for language, text in fences(page):
            if language == "python":
                assert re.match(r"# \S+\.py\n", text), f"{page.name}: a program without a file name:\n{text}"
                assert page.name in RUN, f"{page.name}: {text.splitlines()[0]} is run nowhere"
    assert all((DOCS / page.partition("/")[0]).is_file() or page == "README.md" for page in RUN)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The project of the quick start, which the other small pages share."""
    pages = [
        DOCS / f"{name}.md"
        for name in (
            "quickstart",
            "deepseek_v4",
            "disaggregation",
            "extend",
            "faults",
            "operations",
            "pages",
            "quantization",
            "sglang",
        )
    ]
    folder = project(tmp_path_factory.mktemp("chat"), *pages)
    folder.kvgen("build")
    folder.kvgen("check")
    return folder


@pytest.mark.parametrize(
    "program",
    [
        "step.py",
        "prefill.py",
        "latent_prompt.py",
        "faults.py",
        "cascade.py",
        "scaled.py",
        "serve.py",
        "apart.py",
        "ranks.py",
        "pool.py",
        "sparse_step.py",
    ],
)
def test_a_program(chat: Folder, program: str) -> None:
    raised, _ = run(chat.root, program)
    assert not raised, raised[program]


def test_the_tutorial(tmp_path: Path) -> None:
    page = DOCS / "tutorial.md"
    (config,) = (text for language, text in fences(page) if language == "json")
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    folder = project(tmp_path, page)
    (tmp_path / "specs/toy.py").unlink()
    folder.kvgen("init", "--from", "config.json", "-o", "specs/toy.py")
    assert (tmp_path / "specs/toy.py").read_text(encoding="utf-8") == files(page)["specs/toy.py"]
    folder.kvgen("build", "toy")
    raised, printed = run(tmp_path, "model.py")
    assert not raised, raised["model.py"]
    assert printed.count("largest error of a logit") == 2


def test_the_tutorial_notices_a_wrong_model(tmp_path: Path) -> None:
    """The check at its end: another base of RoPE in the spec than in the config."""
    page = DOCS / "tutorial.md"
    (config,) = (text for language, text in fences(page) if language == "json")
    (tmp_path / "config.json").write_text(config.replace("10000.0", "500.0"), encoding="utf-8")
    folder = project(tmp_path, page)
    folder.kvgen("build", "toy")
    raised, _ = run(tmp_path, "model.py")
    assert "AssertionError" in raised["model.py"]


def test_a_new_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvgen new`, then everything that the quick start tells to type."""
    monkeypatch.chdir(tmp_path)
    if invoke("new", "--help").exit_code:
        pytest.skip("this kvgen has no `new`")
    assert invoke("new", "engine").exit_code == 0
    folder = Folder(tmp_path / "engine")
    for name, text in files(DOCS / "quickstart.md").items():
        (folder.root / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.root / name).write_text(text, encoding="utf-8")
    folder.kvgen("build")
    folder.kvgen("check")
    raised, _ = run(folder.root, "step.py")
    assert not raised, raised["step.py"]
