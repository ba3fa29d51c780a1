"""The README shows what is there: its spec, its kernel and its table of specs come from the repository."""

from __future__ import annotations

import re
from pathlib import Path

from kvgen.config import find_config
from kvgen.spec.cache import Paged
from kvgen.spec.loader import LoadedSet, load_folder
from kvgen.spec.quant import Quant

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table_row(loaded: LoadedSet) -> str:
    """One set's row in the README's table."""
    kernels, cache = loaded.kernels, loaded.kernels.cache
    layout = cache.layout.kv or " / ".join(t for t in (cache.layout.k, cache.layout.rope, cache.layout.v) if t)
    pages = f"{cache.page_size}" if isinstance(cache, Paged) else "none" if cache.ragged else "a block a request"
    heads = f"{kernels.q_heads}/{cache.kv_heads} x {cache.head_dim}"
    ops = ", ".join(op.name for op in kernels.ops)
    name = f"[{kernels.name}]({loaded.source})"
    stored = " / ".join(dict.fromkeys(_stored(cache.dtype, quant) for quant in cache.quants.values()))
    return f"| {name} | {heads} | {stored} `{layout}` | {pages} | {cache.page_table.kind} | {ops} |"


def _stored(dtype: str, quant: Quant | None) -> str:
    if quant is None:
        return dtype
    scales = f", {quant.scale_dtype} scales" if quant.scale_dtype else ""
    return f"{quant.dtype}{scales}{' and zeros' if quant.zero else ''}"


def main() -> None:
    """Bring the README up to date: `python -m tests.test_readme`."""
    config = find_config(ROOT)
    rows = "\n".join(table_row(s) for s in load_folder(config.specs, config.root))
    text = re.sub(r"(?<=\|---\|---\|---\|---\|---\|---\|\n)(\| \[.*\n)+", rows + "\n", README)
    kernel = (ROOT / "generated/llama3_8b/append.cu").read_text(encoding="utf-8")
    phases = kernel[kernel.index("  // Slots:") : kernel.rindex("}\n")]
    (ROOT / "README.md").write_text(
        re.sub(r"(?<=```cuda\n).*?(?=```)", lambda _: phases, text, flags=re.S), encoding="utf-8"
    )


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


if __name__ == "__main__":
    main()
