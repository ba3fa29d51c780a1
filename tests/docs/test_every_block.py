"""Every program and command of README and docs runs in a test: a block that none runs fails here.

Programs are fenced blocks that begin with their file's name; tests/docs/test_programs.py says which test runs a page's. The
commands of kvgen, those of pages and of the help in docs/cli.md, run here, over a project of small sets. What is left is named
below: the test that runs it, or why none can.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvgen.verify import drawn
from tests.cli.conftest import Folder, one_disassembly_a_cubin  # noqa: F401 - a fixture of this package as well
from tests.cli.test_wheel import packed
from tests.conftest import has_gpu
from tests.docs.blocks import PAGES, ROOT
from tests.docs.test_programs import runner

# (page, how a block or command begins): the test that runs it or compares it, and a word of that test.
TESTED: Final = {
    ("README.md", "spec      llama_3_1_8b.json"): ("tests/cli/test_demo.py", "without_times"),
    ("README.md", "  // K: RoPE -> cache."): ("tests/test_readme.py", '"kernel"'),
    ("README.md", "make demo"): ("tests/cli/test_demo.py", "demo"),
    ("attention.md", "function: refused.py:5"): ("tests/test_attention_page.py", "Score(function=sharpen)"),
    ("cli.md", "Usage: kvgen"): ("tests/docs/test_pages.py", "test_a_written_page"),
    ("cli.md", "kvgen demo"): ("tests/cli/test_demo.py", "demo"),
    ("disaggregation.md", "vllm serve MODEL"): ("tests_vllm/test_servers.py", "vllm serve MODEL"),
    ("cycles.md", "python benchmarks/strangers.py"): ("tests/test_strangers.py", "strangers.main"),
    ("export.md", '#include "llama3_8b.h"'): ("tests/export/test_export.py", "export.md"),
    ("operations.md", "ops."): ("tests/docs/test_every_block.py", "test_operations_that_pages_show"),
    ("operations.md", "workspace = mla_decode.workspace"): ("tests/ops/test_mla_sources.py", "workspace, three, two)"),
    ("presets.md", "from kvgen import"): ("tests/docs/test_every_block.py", "test_operations_that_pages_show"),
    ("review.md", '"mla_decode": {"sm_90a"'): ("tests/test_choose.py", '"candidates"'),
    ("quantization.md", "cache = Paged(..."): ("tests/docs/test_every_block.py", "test_operations_that_pages_show"),
    ("operations.md", "cache=Latent("): ("tests/docs/test_every_block.py", "test_operations_that_pages_show"),
    ("quantization.md", "from kvgen.schema.codebooks"): (
        "tests/docs/test_every_block.py",
        "test_operations_that_pages_show",
    ),
    ("operations.md", "cache=State("): ("tests/docs/test_every_block.py", "test_operations_that_pages_show"),
    ("operations.md", "cache=Ragged("): ("tests/docs/test_every_block.py", "test_operations_that_pages_show"),
    ("quickstart.md", "cd engine"): ("tests/docs/test_programs.py", "test_a_new_project"),
    ("quickstart.md", "python step.py"): ("tests/docs/test_programs.py", "step.py"),
    ("shipping.md", "# pyproject.toml"): ("tests/custom/test_headers.py", "test_setuptools_packs_the_copies"),
    ("shipping.md", "python -m build"): ("tests/test_packaging.py", 'build("wheel"'),
    ("testing.md", "# tests/test_cache.py"): ("tests/testing/test_plugin.py", "testing.md"),
    ("testing.md", "from pathlib import Path"): ("tests/testing/test_plugin.py", "testing.md"),
    ("testing.md", "python benchmarks/run_gpu.py"): ("tests/test_run_gpu.py", "--prepare"),
    ("tutorial.md", "{"): ("tests/docs/test_programs.py", "test_the_tutorial"),
    ("tutorial.md", "python model.py"): ("tests/docs/test_programs.py", "model.py"),
    ("vllm.md", "kv_cache_dtype: got 'nvfp4'"): (
        "tests_vllm/test_refusals.py",
        "kv_cache_dtype: got 'nvfp4'; KVGEN stores auto",
    ),
    ("versioning.md", "SOURCE_DATE_EPOCH="): ("tests/test_packaging.py", "SOURCE_DATE_EPOCH"),
}
# What no test runs, and why.
UNTESTED: Final = {
    ("README.md", "make test"): "it is the run of all tests",
    ("README.md", "make docs"): "the job `docs` of .github/workflows/docs.yml: Sphinx is in an environment of its own",
    ("index.md", ":caption:"): "Sphinx's; the job `docs` reads it, and tests/docs/test_pages.py what it lists",
    ("install.md", "pip install"): "it needs the package index; .github/workflows/release.yml tries the wheel",
    ("quickstart.md", "pip install"): "it needs the package index; .github/workflows/release.yml tries the wheel",
    ("quantization.md", "dequantized value ="): "a formula",
    ("review.md", '"append": {'): "lines of a file, and of what `kvgen diff` prints, cut short",
    ("review.md", "llama3_8b: cache.page_size 16 -> 64"): "lines of what `kvgen diff` prints, cut short",
    ("shipping.md", "KVGEN_CUBINS=/opt/engine/cubins"): "the reader's program; tests/runtime/test_module.py sets both",
    ("testing.md", "make test-torch"): "it needs PyTorch, and is the run of all tests that do",
    ("testing.md", "make test-engines"): "it needs PyTorch and vLLM, and is the run of all tests that do",
    ("vllm.md", "pip install"): "it needs the package index and a GPU; tests_vllm/test_docs.py installs the wheel",
}  # fmt: skip
_FENCE: Final = re.compile(r"^```([^\n]*)\n(.*?)^```", re.S | re.M)
_INDENTED: Final = re.compile(r"(?:^    .*\n(?:\n+(?=    ))?)+", re.M)
_FILE: Final = re.compile(r"(?:#|//) (\S+\.\w+)\n")
_HELP: Final = re.compile(r"^  (kvgen [a-z].*?)(?:  .*)?$", re.M)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every fenced block, and ("", text) of the indented ones, without the indentation."""
    text = page.read_text(encoding="utf-8")
    yield from ((m[1] or "text", m[2]) for m in _FENCE.finditer(text))
    for match in _INDENTED.finditer(_FENCE.sub("", text)):
        yield "", re.sub(r"^    ", "", match[0], flags=re.M)


def commands(page: Path) -> list[str]:
    """The commands of kvgen that a page shows, without comments: in indented blocks, and in the help of docs/cli.md."""
    if page.name == "cli.md":
        return [m[1].strip() for language, text in blocks(page) if language == "text" for m in _HELP.finditer(text)]
    lines = [line for language, text in blocks(page) if not language for line in text.splitlines()]
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith("kvgen ")]


def known(page: str, text: str) -> str | None:
    """The entry of TESTED or UNTESTED that a block or a line begins with."""
    return next((begin for where, begin in (*TESTED, *UNTESTED) if where == page and text.startswith(begin)), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_some_test_runs_each(page: Path) -> None:
    used = set()
    for language, text in blocks(page):
        program = _FILE.match(text)
        if language in ("python", "cuda") and program:
            where = runner(page.name, program[1])
            assert where and (ROOT / where).is_file(), f"{page.name}: {program[1]}: no test runs this program"
            said, name = (ROOT / where).read_text(encoding="utf-8"), program[1]
            if name.endswith(".py") and not name.startswith("specs/"):
                assert f'"{name}"' in said, f"{page.name}: {name}: {where} does not run it"
            continue
        whole = known(page.name, text)
        if whole:
            used.add(whole)
        lines = [] if language not in ("", "sh") else text.splitlines()
        is_commands = all(re.match(r"(kvgen|make|pip|python|cd|[A-Z_]+=\S+) ?", line) for line in lines if line)
        for line in lines if is_commands else []:
            found = known(page.name, line)
            assert found or line.startswith("kvgen ") or not line, f"{page.name}: {line}: no test runs this command"
            used.add(found or "")
        assert whole or (lines and is_commands), f"{page.name}: no test runs this block:\n{text}"
    if page.name == "cli.md":
        used.add("kvgen demo")
    left = {begin for where, begin in (*TESTED, *UNTESTED) if where == page.name} - used
    assert not left, f"{page.name} has no such block: {left}"


def test_the_tests_are_there() -> None:
    for (page, begin), (path, word) in TESTED.items():
        assert word in (ROOT / path).read_text(encoding="utf-8"), f"{page}: {begin}: {path} has no {word}"


def test_operations_that_pages_show() -> None:
    """Fragments of specs: lines that are an operation or a cache, and the spec of docs/presets.md."""
    scope: dict[str, object] = {}
    exec("from kvgen import *\nfrom kvgen import ops, presets", scope)
    for name in ("operations.md", "quantization.md"):
        for language, text in blocks(ROOT / "docs" / name):
            if not language and text.startswith("ops."):
                for line in text.splitlines():
                    eval(line, scope)
            elif text.startswith("from kvgen.schema.codebooks"):
                exec(text, scope)
            elif not language and text.startswith(("cache=Latent", "cache=Ragged", "cache=State")):
                eval(text.split("=", 1)[1].split("#")[0].strip(), scope)
            elif not language and text.startswith("cache = Paged(..."):
                exec(
                    text.split("\n\n")[0].replace("...", 'dtype="bf16", kv_heads=2, head_dim=64, page_size=32', 1),
                    scope,
                )
                exec("KernelSet(q_heads=2, cache=cache, ops=ops)", scope)
                exec("from kvgen import ops", scope)
    (spec,) = (text for language, text in blocks(ROOT / "docs/presets.md") if not language)
    exec(spec, scope)


SPEC = """from kvgen import KernelSet, Paged, ops

kernels = KernelSet(
    q_heads={heads}, cache=Paged(dtype="f32", kv_heads={heads}, head_dim=8, page_size=16), ops=[{ops}]
)
"""


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false")
    subprocess.run(("git", *who, *words), cwd=root, check=True, capture_output=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Small sets under the names that the pages use, two commits on the branch main."""
    folder = Folder(tmp_path_factory.mktemp("typed"))
    (folder.root / "specs").mkdir()
    (folder.root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    for name in ("llama3_8b", "gemma3_4b", "qwen3_8b"):
        operations = "ops.Append(), ops.Decode(), ops.Extend()" if name == "llama3_8b" else "ops.Append()"
        (folder.root / f"specs/{name}.py").write_text(
            SPEC.format(ops=operations, heads=8 if name == "qwen3_8b" else 1), encoding="utf-8"
        )
    git(folder.root, "init", "-q", "-b", "main")
    for message in ("specs", "more"):
        git(folder.root, "add", "-A")
        git(folder.root, "commit", "-q", "--allow-empty", "-m", message)
    folder.kvgen("build")
    return folder


@pytest.fixture(scope="module")
def ran() -> set[str]:
    """The commands that ran before, of all pages."""
    return set()


def typed(folder: Folder, line: str) -> None:
    """Run a line that a page shows: commands behind one another, each to end with 0; where no GPU is, --gpu says so."""
    for part in line.partition(">")[0].split("&&"):
        words = shlex.split(part)
        if words[0] == "cd":
            folder = Folder(folder.root / words[1])
        elif "--gpu" in words and not has_gpu():
            assert "libcuda" in folder.kvgen(*words[1:], code=2).stderr  # tests/verify/test_gpu.py runs it
        else:
            folder.kvgen(*words[1:])


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_its_commands_run(
    page: Path, project: Folder, ran: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once: pages that show the command of another share the project in which it ran. Of the kinds of drawn sets one runs:
    tests/verify/test_drawn.py runs the others."""
    monkeypatch.setattr(drawn, "SUBJECTS", {"rates": drawn.SUBJECTS["rates"]})
    new = 0
    for line in commands(page):
        if line in ran:
            continue
        ran.add(line)
        verb = line.split()[1]
        model = "gpt_oss_20b" if "local=" in line else "llama_3_1_8b"  # one with local layers for an option about them
        config = ROOT / f"tests/models/configs/{model}.json"
        if verb == "demo":  # tests/cli/test_demo.py
            continue
        if verb in ("new", "init"):
            new += 1
            folder = Folder(tmp_path / str(new))
            folder.root.mkdir()
            shutil.copy(config, folder.root / "config.json")
            if verb == "init":
                (folder.root / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
            typed(folder, line)
            continue
        if page.name == "tutorial.md":
            line = line.replace("toy", "gemma3_4b")
        if "--wheel" in line:
            (project.root / "dist").mkdir(exist_ok=True)
            wheel = packed(
                {f"generated/{path}": data for path, data in project.tree().items() if not path.endswith(".pyc")}
            )
            (project.root / "dist/engine-1.0-py3-none-any.whl").write_bytes(wheel)
        typed(project, line)
