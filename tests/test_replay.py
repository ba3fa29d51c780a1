"""`make replay`: what a revision's kernels were, against what the specs render now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import replay
from benchmarks.launch_sizes import give, launch_sizes
from kvgen.cli.project import generated
from tests.cli.conftest import Folder
from tests.cli.test_diff import git
from tests.compile.test_sass import needs_tool

pytestmark = needs_tool

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A set that gathers, built and committed."""
    (tmp_path / "pyproject.toml").write_text("[tool.kvgen]\n", encoding="utf-8")
    folder = Folder(tmp_path)
    spec(folder, "ops.Gather()")
    git(folder, "init", "-q")
    commit(folder)
    monkeypatch.chdir(tmp_path)
    return folder


def spec(folder: Folder, ops: str) -> None:
    folder.spec("tiny", ops=ops, head_dim=8, page_size=4)
    folder.change("specs/tiny.py", '"sm_80", "sm_90a"', '"sm_80"')
    folder.kvgen("build")


def commit(folder: Folder) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "as it was")


def was(folder: Folder, old: str, new: str) -> None:
    """Commit a past in which the kernel had another text, and build it as it is again."""
    folder.change("generated/tiny/gather.cu", old, new)
    commit(folder)
    folder.kvgen("build", "--force")


def replayed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int) -> replay.Replay:
    assert replay.main(["HEAD", "--json", *arguments]) == code
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == replay.Replay.__dataclass_fields__.keys()
    changes = tuple(
        replay.Change(c["kernel"], c["arch"], replay.Code(**c["before"]), replay.Code(**c["after"]))
        for c in found.pop("changes")
    )
    return replay.Replay(changes=changes, **{n: tuple(x) if isinstance(x, list) else x for n, x in found.items()})


def test_nothing_changed(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(["HEAD"]) == 0
    assert (
        "1 of 1 kernels, by architecture, have the machine code of HEAD; 1 of them its text" in capsys.readouterr().out
    )
    assert replayed(capsys, "--only", "other*", code=0).same == 0


def test_another_text_of_the_same_code(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    was(project, "  pdl_wait();", "  // Another comment.\n  pdl_wait();")
    found = replayed(capsys, code=0)
    assert (found.same, found.unchanged, found.changes, found.ran) == (1, 0, (), ())


def test_other_code_with_the_same_results(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are run, and are found to agree; the table has what the change costs."""
    was(project, "  pdl_wait();", "  __syncthreads();\n  __syncthreads();\n  pdl_wait();")
    found = replayed(capsys, code=1)
    assert [(c.kernel, c.arch) for c in found.changes] == [("tiny/gather", "sm_80")]
    assert all(c.before.instructions > c.after.instructions and c.before.seconds > 0 for c in found.changes)
    (said,) = found.ran
    assert said.startswith("tiny/gather: the same bytes in ")
    assert replay.main(["HEAD"]) == 1
    assert f"{found.changes[0].before.instructions} -> " in capsys.readouterr().out


def test_other_results(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    was(project, "k_out_stride, first, rows", "k_out_stride, first, rows - 1")
    (said,) = replayed(capsys, code=1).ran
    assert said.startswith("tiny/gather: differs in ") and "k_out" in said


def test_other_parameters(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    was(project, "tiny_gather(", "tiny_gather(uint32_t one_more, ")
    (said,) = replayed(capsys, code=1).ran
    assert said == "tiny/gather: not run: the kernel's parameters are others"


def test_the_launch_sizes_of_the_revision(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kernels run in its own launchers' grid: here of no block at all."""
    project.change("generated/tiny/_table.py", "grid=lambda d: (", "grid=lambda d: (0 * ")
    was(project, "  pdl_wait();", "  __syncthreads();\n  pdl_wait();")
    (said,) = replayed(capsys, code=1).ran
    assert said.startswith("tiny/gather: differs in ") and "k_out" in said


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('d["T"]', 'd["rows"]', "its grid needs 'rows', which a call has no more"),
        ('d["T"]', 'd["T"].bit_length()', "`lambda d: (-(-d['T'].bit_length() // 32), 1, 1)`, which is no grid"),
        ("threads=256,", "threads=min(256, 512),", "got `min(256, 512)`, which is no number"),
        ("threads=256,", "", "its Kernel has other fields than today's"),
    ],
)
def test_launch_sizes_that_cannot_be_read(
    project: Folder, capsys: pytest.CaptureFixture[str], old: str, new: str, why: str
) -> None:
    project.change("generated/tiny/_table.py", old, new)
    was(project, "  pdl_wait();", "  __syncthreads();\n  pdl_wait();")
    (said,) = replayed(capsys, code=1).ran
    assert said.startswith("tiny/gather: not run: generated/tiny/_table.py of the revision: ") and said.endswith(why)


def test_sizes_of_a_planned_operation() -> None:
    """Shared memory by architecture, the planner, and how a step is split."""
    text = (ROOT / "generated/gpt_oss_20b/_table.py").read_text(encoding="utf-8")
    sizes = launch_sizes(text.replace("blocks_per_sm=2", "blocks_per_sm=3").replace("74752", "74784"))
    with generated(ROOT / "generated", "gpt_oss_20b") as package:
        give(package, sizes)
        decode = package.DecodeLauncher
        assert (decode.SPLIT_PLAN.blocks_per_sm, decode.KERNEL.shared_on("sm_80")) == (3, 74784)
        assert decode.KERNEL.grid({"num_sm_parts": 5}) == (40, 1, 1)
        assert (decode.PLAN.threads, decode.PLAN.shared_on("sm_80")) == (256, 0)
        assert package.AppendLauncher.KERNEL.grid({"T": 7}) == (7, 1, 1)
        give(package, {"NoLauncher": sizes["DecodeLauncher"]})


def test_sizes_by_architecture() -> None:
    """Files, grids and workspaces of the revision's architectures take the place of today's, also where it has none."""
    text = (ROOT / "generated/llama3_8b/_table.py").read_text(encoding="utf-8")
    sizes = launch_sizes(text.replace('"sm_90a": lambda d: (d["num_sm_parts"], 1, 1)', '"sm_90a": lambda d: (7, 1, 1)'))
    with generated(ROOT / "generated", "llama3_8b") as package:
        extend = package.ExtendLauncher
        before = extend.KERNEL, extend.SPLIT_PLANS
        give(package, sizes)
        assert extend.KERNEL.grid_by_arch["sm_90a"]({"num_sm_parts": 5}) == (7, 1, 1)
        assert (extend.SPLIT_PLANS, extend.KERNEL.files) == (before[1], before[0].files)
        alike = sizes["ExtendLauncher"] | {"KERNEL": sizes["DecodeLauncher"]["KERNEL"]}
        del alike["SPLIT_PLANS"]
        give(package, {"ExtendLauncher": alike})
        assert not extend.SPLIT_PLANS and not extend.KERNEL.files and not extend.KERNEL.grid_by_arch
        assert extend.KERNEL.file == "extend.cu"


@pytest.mark.campaign
def test_batches_of_a_decode_with_sinks(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    spec(project, 'ops.Decode(sinks="lse")')
    project.change("generated/tiny/decode.cu", "  pdl_wait();", "  __syncthreads();\n  pdl_wait();")
    commit(project)
    project.kvgen("build", "--force")
    (said,) = replayed(capsys, code=1).ran
    assert said == "tiny/decode: the same bytes in 5 batches"


def test_kernels_that_one_side_lacks(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    spec(project, "ops.Append()")
    found = replayed(capsys, code=1)
    assert (found.same, found.added, found.removed) == (0, ("tiny/append",), ("tiny/gather",))


@pytest.mark.parametrize("revision", ["no_such_branch", "-x"])
def test_revisions_that_are_none(project: Folder, capsys: pytest.CaptureFixture[str], revision: str) -> None:
    assert replay.main(["--", revision]) == 2
    assert f"got {revision!r}" in capsys.readouterr().err


def test_a_folder_that_is_not_what_the_specs_render(project: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    project.change("generated/tiny/gather.cu", "  pdl_wait();", "  pdl_wait(); ")
    assert replay.main(["HEAD"]) == 2
    assert (
        capsys.readouterr().err == "error: generated/tiny/gather.cu: not what the specs render now; run `kvgen build`\n"
    )
