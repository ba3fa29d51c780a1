"""The README shows what is there: its spec, its kernel and its table of specs come from the repository."""

from __future__ import annotations

import re
from pathlib import Path

from kvgen.config import find_config
from kvgen.spec.cache import Paged
from kvgen.spec.loader import LoadedSet, load_folder

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table_row(loaded: LoadedSet) -> str:
    """One set's row in the README's table."""
    kernels, cache = loaded.kernels, loaded.kernels.cache
    layout = cache.layout.kv or f"{cache.layout.k} / {cache.layout.v}"
    pages = f"{cache.page_size}" if isinstance(cache, Paged) else "a block a request"
    heads = f"{kernels.q_heads}/{cache.kv_heads} x {cache.head_dim}"
    ops = ", ".join(op.name for op in kernels.ops)
    name = f"[{kernels.name}]({loaded.source})"
    return f"| {name} | {heads} | {cache.dtype} `{layout}` | {pages} | {cache.page_table.kind} | {ops} |"


def test_the_table_lists_every_set() -> None:
    config = find_config(ROOT)
    rows = [table_row(s) for s in load_folder(config.specs, config.root)]
    assert "\n".join(rows) in README


def test_the_spec_is_the_file() -> None:
    block = re.search(r"```python\n# (specs/\S+)\n(.*?)```", README, re.S)
    assert block is not None
    assert block[2] == (ROOT / block[1]).read_text(encoding="utf-8")


def test_the_kernel_is_generated() -> None:
    block = re.search(r"```cuda\n(.*?)```", README, re.S)
    assert block is not None and block[1].count("\n") > 20
    assert block[1] in (ROOT / "generated/llama3_8b/append.cu").read_text(encoding="utf-8")


def test_every_command_of_the_readme_exists() -> None:
    from kvgen.cli.app import app

    names = {command.name for command in app.registered_commands}
    assert set(re.findall(r"^    kvgen (\w+)", README, re.M)) | set(re.findall(r"`kvgen (\w+)", README)) <= names
