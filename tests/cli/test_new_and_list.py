"""`kvgen new`, `kvgen list`, `kvgen show --template` and the options of `kvgen init`: what a new user begins with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvgen import models
from kvgen.paths import templates_root
from kvgen.schema import presets
from kvgen.schema.cache import Paged
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.loader import load_file

from .conftest import Folder

CONFIGS = Path(__file__).parent.parent / "models/configs"


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_new_project_builds_checks_and_its_page_runs(tmp_path: Path) -> None:
    above, root = Folder(tmp_path), tmp_path / "engine"
    said = above.kvgen("new", "engine").stdout
    assert said.endswith("next: cd engine && kvgen build\n")
    assert set(tree(root)) == {"pyproject.toml", "specs/small.py", "README.md", ".gitignore", ".gitattributes"}
    project = Folder(root)
    page = (root / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    kvgen (.*?)(?: +#.*)?$", page, re.M)
    assert len(commands) == 4
    for command in commands:
        project.kvgen(*command.split())
    (program,) = re.findall(r"```python\n(.*?)```", page, re.S)
    assert program.count("\n") == 5
    paths = {"PYTHONPATH": str(Path(models.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=os.environ | paths, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[2 2 2 2]\n"
    assert "specs/small.py" in project.kvgen("list", "--json").stdout


def test_new_touches_nothing_that_is_there(empty: Folder) -> None:
    before = tree(empty.root)
    said = empty.kvgen("new", ".", code=2).stderr
    assert said.startswith(
        "error: DIR: got '.', which has pyproject.toml already; give a new folder, or add [tool.kvgen]"
    )
    assert tree(empty.root) == before
    inside = empty.root / "file"
    inside.touch()
    assert "which is a file" in empty.kvgen("new", "file", code=2).stderr
    (empty.root / "other/specs").mkdir(parents=True)
    assert "has specs already" in empty.kvgen("new", "other", code=2).stderr
    (empty.root / "plain").mkdir()
    (empty.root / "plain/notes.txt").touch()
    assert empty.kvgen("new", "plain", "-q").stdout == ""
    assert (empty.root / "plain/specs/small.py").is_file()


def test_list(project: Folder) -> None:
    said = project.kvgen("list").stdout.splitlines()
    assert said[0].split() == ["set", "heads", "stored", "layout", "architectures", "operations"]
    assert said[2].split() == [
        *("wide", "8/2", "x", "128", "bf16", "page", "kv", "layer", "token", "head", "dim"),
        *("sm_80", "sm_90a", "append", "gather"),
    ]
    (found,) = json.loads(project.kvgen("list", "wide/gather", "--json").stdout)
    assert found["ops"] == ["gather"]
    assert (found["spec"], found["about"], found["page_tokens"]) == ("specs/wide.py", "A cache for tests.", 16)
    (project.root / "specs/tiny.py").write_text("x = (\n")
    result = project.kvgen("list", code=2)
    assert "wide" in result.stdout and "specs/tiny.py:1: " in result.stderr


def test_list_presets(tmp_path: Path) -> None:
    outside = Folder(tmp_path)
    found = json.loads(outside.kvgen("list", "--presets", "--json").stdout)
    assert [p["preset"] for p in found] == presets.__all__
    assert all(p["about"] for p in found)
    vllm = next(p for p in found if p["preset"] == "vllm")
    assert (vllm["needs"], vllm["takes"]) == (["dtype", "kv_heads", "head_dim"], ["page_size", "kv_cache_dtype"])
    said = outside.kvgen("list", "--presets").stdout
    assert all(re.search(rf"^{name} ", said, re.M) for name in presets.__all__)
    assert "[kv_cache_dtype]" in said
    assert "drop one" in outside.kvgen("list", "--presets", "tiny", code=2).stderr


def test_a_template_that_a_banner_names_can_be_printed(built: Folder) -> None:
    banner = (built.out / "tiny/append.cu").read_text(encoding="utf-8").splitlines()[0]
    (name,) = re.findall(r"templates/\S+\.j2", banner)
    text = (templates_root() / name.removeprefix("templates/")).read_text(encoding="utf-8")
    for given in (name, name.removeprefix("templates/"), f"{name}:12"):
        assert built.kvgen("show", "--template", given).stdout == text
    assert built.kvgen("show", "--template", "device/base/types.cuh").stdout
    result = built.kvgen("show", "tiny/append", "--map")
    assert result.stderr == f"templates/ is {templates_root()}; `kvgen show --template NAME` prints one of its files\n"
    assert built.kvgen("show", "tiny/append", "--map", "-q").stderr == ""
    for wrong, said in (
        (["--template", "append.cu.j2"], "did you mean ops/append.cu.j2"),
        (["--template", "../pyproject.toml"], "there is no such template"),
        (["--template", name, "tiny"], "drop the rest"),
        (["--template", name, "--map"], "drop the rest"),
        ([], "got no SELECTOR"),
    ):
        assert said in built.kvgen("show", *wrong, code=2).stderr


def written(folder: Folder, config: str, *options: str) -> KernelSet:
    """The set of the spec that init writes, the first one, which says how it was written."""
    text = folder.kvgen("init", "--from", str(CONFIGS / f"{config}.json"), *options).stdout
    (folder.root / "specs").mkdir(exist_ok=True)
    path = folder.root / "specs/model.py"
    path.write_text(text, encoding="utf-8")
    loaded = next(iter(load_file(path, "specs/model.py")))
    assert f"{config}.json {' '.join(options)}`" in text
    return loaded.kernels


def test_init_for_an_engine(empty: Folder) -> None:
    kernels = written(empty, "llama_3_1_8b", "--tp", "4")
    assert (kernels.q_heads, kernels.cache.kv_heads, kernels.cache.head_dim) == (8, 2, 128)
    assert written(empty, "llama_3_1_8b", "--tp", "16").cache.kv_heads == 1
    cache = written(empty, "llama_3_1_8b", "--page-size", "64").cache
    assert isinstance(cache, Paged) and cache.page_size == 64
    cache = written(empty, "llama_3_1_8b", "--preset", "vllm").cache
    assert cache == presets.vllm(dtype="bf16", kv_heads=8, head_dim=128)
    options = "--kv-dtype fp8-static --tp 2 --page-size 32 --preset vllm_hnd --arch sm_90a,sm_100f"
    kernels = written(empty, "llama_3_1_8b", *options.split())
    assert kernels.cache == presets.vllm_hnd(
        dtype="bf16", kv_heads=4, head_dim=128, page_size=32, kv_cache_dtype="fp8_e4m3"
    )
    assert kernels.arch == ("sm_90a", "sm_100f")
    empty.kvgen("build")
    cache = written(empty, "deepseek_v3", "--kv-dtype", "bf16", "--tp", "8", "--preset", "flashmla").cache
    assert cache == presets.flashmla(dtype="bf16")


def test_init_reads_a_config_as_another_class(empty: Folder) -> None:
    config = dict(models.example(), architectures=["OwnForCausalLM"])
    (empty.root / "own.json").write_text(json.dumps(config), encoding="utf-8")
    assert "no reader for it" in empty.kvgen("init", "--from", "own.json", code=2).stderr
    said = empty.kvgen("init", "--from", "own.json", "--as", "LlamaForCausalLM").stdout
    assert "Written by `kvgen init --from own.json --as LlamaForCausalLM`" in said
    assert (
        "did you mean LlamaForCausalLM"
        in empty.kvgen("init", "--from", "own.json", "--as", "LlamaForCasualLM", code=2).stderr
    )


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ("llama_3_1_8b", "--tp 3", "--tp: got 3 for 32 query heads and 8 KV heads; every GPU has the same number"),
        ("llama_3_1_8b", "--tp 64", "valid: 2, 4, 8, 16, 32"),
        ("llama_3_1_8b", "--tp 0", "got 0; it must be at least 1"),
        ("llama_3_1_8b", "--page-size 0", "got 0; it must be at least 1"),
        ("llama_3_1_8b", "--page-size 9999999", "Paged.page_size: got 9999999"),
        ("llama_3_1_8b", "--preset vlm", "--preset: got 'vlm'; did you mean vllm, vllm_v4?"),
        ("llama_3_1_8b", "--preset flashmla", "caches K and V; valid: flash_attention, "),
        ("deepseek_v3", "--preset vllm", "caches latent rows; valid: flashinfer_mla, flashinfer_v4_nvfp4, flashmla, "),
        ("llama_3_1_8b", "--preset sglang --page-size 16", "--page-size: got 16 with --preset sglang"),
        ("llama_3_1_8b", "--preset vllm --kv-dtype int4", "give --kv-dtype bf16, fp8-static or int8-static"),
        ("llama_3_1_8b", "--preset kivi --kv-dtype int8", "give --kv-dtype bf16, or a preset of such a cache"),
        (
            "llama_3_1_8b",
            "--arch sm_86",
            "--arch: got 'sm_86'; it must be one of sm_80, sm_89, sm_90a, sm_100f, sm_120f; sm_86",
        ),
        ("llama_3_1_8b", "--arch sm_80,sm_80", "got 'sm_80' twice"),
        ("llama_3_1_8b", "--kv-dtype fp9", "fp9"),
    ],
)
def test_init_options_that_do_not_fit(empty: Folder, config: str, options: str, said: str) -> None:
    result = empty.kvgen("init", "--from", str(CONFIGS / f"{config}.json"), *options.split(), code=2)
    assert said in result.stderr
    assert result.stdout == ""
