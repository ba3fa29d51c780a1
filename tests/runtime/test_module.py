"""Where a launcher's cubin comes from, the ABI number, and the error word."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgen.compile import Unit, compile_many, text_digest, write_folder
from kvgen.errors import ConfigError, DeviceError, KvgenError, ToolError
from kvgen.paths import templates_root
from kvgen.runtime import ABI, Fault, FaultReport, Module, clear, describe
from kvgen.runtime import module as module_of
from tests.runtime.launching import package

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cubins remembered, none named by the environment."""
    monkeypatch.delenv("KVGEN_CUBINS", raising=False)
    monkeypatch.delenv("KVGEN_NO_JIT", raising=False)
    module_of._cubin.cache_clear()
    yield
    module_of._cubin.cache_clear()


def blocks() -> Module:
    """The module of a set with one kernel."""
    return package("blocks").append.KERNEL.module  # type: ignore[no-any-return]


def cubin(capability: tuple[int, int] = HOPPER) -> bytes:
    return module_of.cubin(blocks(), "append.cu", "blocks_append", capability)


def unit() -> Unit:
    return blocks().unit("append.cu", "blocks_append")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `kvgen compile -o` makes of the set."""
    images = compile_many([(unit(), arch, "cubin") for arch in ("sm_80", "sm_90a")], cache=None)
    write_folder(tmp_path / "cubins", images, {"blocks/append": text_digest(unit().text)})
    return tmp_path / "cubins"


@pytest.mark.parametrize(("abi", "mend"), [(ABI - 1, "kvgen build"), (ABI + 1, "pip install --upgrade kvgen")])
def test_another_abi_is_refused_at_import(abi: int, mend: str) -> None:
    with pytest.raises(KvgenError) as caught:
        Module("somebodys", __file__, arch=("sm_80",), abi=abi)
    assert str(caught.value) == f"somebodys: generated for runtime ABI {abi}, this kvgen has {ABI}; run `{mend}`"


def test_generated_packages_carry_the_abi() -> None:
    text = (blocks().folder / "__init__.py").read_text(encoding="utf-8")
    assert f"abi={ABI})" in text


def test_the_unit_is_one_text_with_the_files_it_came_from() -> None:
    found = unit()
    assert (found.name, found.entry) == ("blocks/append", "blocks_append")
    assert "#include" not in found.text
    lines = set(re.findall(r'#line 1 "([^"]+)"', found.text))
    parent = blocks().folder.parent.name
    assert {f"{parent}/blocks/append.cu", f"{parent}/blocks/cache.cuh", f"{parent}/device/types.cuh"} <= lines


def test_a_missing_kernel_says_how_to_make_it(tmp_path: Path) -> None:
    copied = shutil.copytree(blocks().folder.parent, tmp_path / "kernels")
    (copied / "blocks" / "cache.cuh").unlink()
    module = Module("blocks", str(copied / "blocks" / "__init__.py"), arch=("sm_80",), abi=ABI)
    with pytest.raises(DeviceError, match=r"^blocks: cannot read kernels/blocks/cache\.cuh: .*; run `kvgen build`$"):
        module.unit("append.cu", "blocks_append")


def test_cubins_are_compiled_where_that_is_allowed() -> None:
    found = cubin()
    assert found.startswith(b"\x7fELF") and b"blocks_append" in found


def test_no_jit_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    with pytest.raises(DeviceError) as caught:
        cubin()
    assert str(caught.value) == (
        "blocks/append.cu: KVGEN_NO_JIT is set and $KVGEN_CUBINS names no folder; run `kvgen compile -o DIR` and set "
        "KVGEN_CUBINS=DIR"
    )
    monkeypatch.setenv("KVGEN_NO_JIT", "yes")
    with pytest.raises(ConfigError, match=r"^KVGEN_NO_JIT: got 'yes'; it must be 0 or 1"):
        cubin()
    monkeypatch.setenv("KVGEN_NO_JIT", "0")
    assert cubin()


@pytest.mark.parametrize("no_jit", ["0", "1"])
def test_a_folder_of_cubins_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch, no_jit: str) -> None:
    """The bytes of the folder, for the architecture of the GPU, whether or not compiling is allowed."""
    monkeypatch.setenv("KVGEN_CUBINS", str(folder))
    monkeypatch.setenv("KVGEN_NO_JIT", no_jit)
    assert cubin() == (folder / "blocks/append.sm_90a.cubin").read_bytes()
    assert cubin((8, 6)) == (folder / "blocks/append.sm_80.cubin").read_bytes()


def test_a_folder_of_other_texts_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CUBINS", str(folder))
    images = compile_many([(unit(), "sm_90a", "cubin")], cache=None)
    write_folder(folder, images, {"blocks/append": text_digest("older text")})
    with pytest.raises(ToolError) as caught:
        cubin()
    message = str(caught.value)
    assert message.startswith(f"{folder}/blocks/append.sm_90a.cubin: was compiled from text with digest ")
    assert text_digest("older text")[:12] in message and text_digest(unit().text)[:12] in message


def test_a_damaged_cubin_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGEN_CUBINS", str(folder))
    path = folder / "blocks/append.sm_90a.cubin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ToolError, match="its bytes are not those that were compiled"):
        cubin()


def test_a_folder_without_the_kernel_or_without_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled instead: the folder was asked for."""
    monkeypatch.setenv("KVGEN_CUBINS", str(tmp_path / "none"))
    with pytest.raises(ToolError, match=r"none/manifest\.json: cannot be read"):
        cubin()
    write_folder(tmp_path / "empty", [], {})
    monkeypatch.setenv("KVGEN_CUBINS", str(tmp_path / "empty"))
    with pytest.raises(ToolError, match="has no cubin of blocks/append for sm_90a"):
        cubin()


@pytest.mark.parametrize(("capability", "wanted"), [((12, 0), "'sm_120f'"), ((10, 0), "'sm_100f'")])
def test_a_gpu_that_the_set_is_not_generated_for(capability: tuple[int, int], wanted: str) -> None:
    with pytest.raises(DeviceError) as caught:
        cubin(capability)
    assert str(caught.value).startswith(f"compute capability {capability[0]}.{capability[1]}: ")
    assert str(caught.value).endswith(f"add {wanted} to `arch` in the spec")


# The error word ------------------------------------------------------------------------------------------------------

MEANINGS = {
    Fault.PAGE_ID: "PAGE_ID: a page id outside the pool, at token 9 of request 5",
    Fault.POSITION: "POSITION: token 9 of request 5 lies past its page table, or past the angles of RoPE",
    Fault.LENGTH: "LENGTH: request 5 has a length that its page table or this step's rows cannot have (token 9)",
    Fault.SLOT: "SLOT: row 9 has a slot outside the pool",
    Fault.ROW_OFFSETS: "ROW_OFFSETS: row offsets that decrease, pass the rows, or give request 5 too many rows (row 9)",
    Fault.TABLE: "TABLE: an index into the page table that leaves it, at token 9 of request 5",
    Fault.LORA_END: "LORA_END: lora_end_idx counts rows that this step does not have, from row 9 (request 5) on",
    Fault.PAIR: "PAIR: pair 9 names a page outside its pool",
    Fault.OVERLAP: "OVERLAP: pair 9 writes to a page that another pair reads, or that an earlier one writes",
}


@pytest.mark.parametrize("code", Fault)
def test_every_code_is_described(code: Fault) -> None:
    word = 9 << 32 | 5 << 8 | code
    for given in (word, np.uint64(word), np.array([word], np.uint64)):
        found = describe(given)
        assert found == FaultReport(code, request=5, position=9)
        assert str(found) == MEANINGS[code]


def test_the_codes_are_the_kernels() -> None:
    text = (templates_root() / "device/fault.cuh").read_text(encoding="utf-8")
    kernels = dict(re.findall(r"^  (\w+) = (\d+),", text, re.MULTILINE))
    assert {name.upper(): int(code) for name, code in kernels.items() if code != "0"} == Fault.__members__


def test_requests_past_the_words_field_are_not_named_wrongly() -> None:
    assert (
        str(describe(1 << 32 | 0xFFFFFF << 8 | 1))
        == "PAGE_ID: a page id outside the pool, at token 1 of request >= 16777215"
    )


@pytest.mark.parametrize("kind", [np.uint64, np.int64])
def test_a_cleared_word_says_nothing(kind: Any) -> None:
    word = np.zeros(1, kind)
    clear(word.view(np.uint64))
    assert describe(word.view(np.uint64)) is None


@pytest.mark.parametrize("word", [0, 100, 0xFF, 3 << 32 | 200])
def test_words_that_no_kernel_writes(word: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^error word: got {word:#018x}; code {word & 0xFF} is none of 1 PAGE_ID, .*clear\(\)"
    ):
        describe(np.array([word], np.uint64))


def test_the_cpu_machine_compiles_nothing_without_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgen.runtime.module import cpu_library

    monkeypatch.setenv("KVGEN_NO_JIT", "1")
    module = Module("absent", __file__, arch=("sm_90a",), abi=ABI)
    with pytest.raises(DeviceError, match=r"absent: KVGEN_NO_JIT is set; the CPU machine compiles"):
        cpu_library(module, "sm_90a", "check")
