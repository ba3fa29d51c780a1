"""Opcode mixes: counting works on text, disassembling where NVIDIA's tools are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvgen import paths
from kvgen.compile import Cache, compile_unit
from kvgen.compile.sass import CLASSES, _find_tool, _key, count, count_classes, histogram, sass
from kvgen.errors import ToolError

from .tiny import unit_of

WIDE = """\
struct __align__(16) Wide { float x, y, z, w; };
extern "C" __global__ void copy(Wide* out, const Wide* in, int n) {
    if (threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x];
}
"""

NVDISASM = """\
\t.target\tsm_90a
copy:
.text.copy:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR6][R2.64] ;
        /*0020*/              @UP1 LDG.E.64 R4, desc[UR6][R2.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
.L_x_0:
        /*12340*/                  BRA `(.L_x_0);
        /*12350*/                  NOP;
"""

CUOBJDUMP = """\
        /*0000*/                   MOV R1, c[0x0][0x28] ;      /* 0x00000a0000017a02 */
                                                                 /* 0x000fc40000000f00 */
        /*0010*/              @!P0 STG.E.128 [R2.64], R4 ;      /* 0x0000000402007986 */
"""

needs_tool = pytest.mark.skipif(
    _find_tool("nvdisasm") is None and _find_tool("cuobjdump") is None,
    reason="kvgen[sass] is not installed",
)


def test_histogram() -> None:
    assert histogram(NVDISASM) == {
        "LDC": 1,
        "LDG.E.128.CONSTANT": 1,
        "LDG.E.64": 1,
        "HMMA.16816.F32.BF16": 1,
        "BRA": 1,
        "NOP": 1,
    }
    assert histogram(CUOBJDUMP) == {"MOV": 1, "STG.E.128": 1}


@pytest.mark.parametrize(("pattern", "number"), [("LDG", 2), ("LDG.128", 1), ("LDG.E", 2), ("LD", 0), ("STL", 0)])
def test_count(pattern: str, number: int) -> None:
    assert count(histogram(NVDISASM), pattern) == number


@pytest.mark.parametrize(
    ("name", "opcodes", "others"),
    [
        ("global_loads", "LD LDG.E.128.CONSTANT", "LDC LDL LDS LDGSTS.E.128 LDGDEPBAR"),
        ("global_stores", "ST STG.E", "STL STS RED.E ATOMG"),
        ("shared_loads", "LDS.64 LDSM.16.M88.4", "LDG"),
        ("shared_stores", "STS.128 STSM.16", "STG"),
        ("async_copies", "LDGSTS.E.BYPASS.128 UBLKCP.S.G UTMALDG.2D UTMASTG.2D", "UTMACMDFLUSH LDGDEPBAR"),
        (
            "tensor_cores",
            "HMMA.16816.F32.BF16 IMMA.16832 HGMMA.64x64x16.F32 QGMMA.64x64x32 UTCHMMA UTCQMMA",
            "HFMA2 MOVM",
        ),
    ],
)
def test_classes(name: str, opcodes: str, others: str) -> None:
    """Each instruction is of one class at most."""
    found = count_classes(dict.fromkeys((opcodes + " " + others).split(), 1))
    assert found[name] == len(opcodes.split())
    assert count_classes(dict.fromkeys(opcodes.split(), 3)) == dict.fromkeys(CLASSES, 0) | {name: 3 * found[name]}


def test_every_fact_is_explained() -> None:
    text = (paths.templates_root().parent / "docs/review.md").read_text(encoding="utf-8")
    table = text.split("| fact | what |\n")[1].split("\n\n")[0]
    facts = re.findall(r"^\| `(\w+)` \|", table, re.M)
    assert facts == ["registers", "spills", "shared", "blocks", "instructions", *CLASSES, "machine_code"]


@needs_tool
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100f", "sm_120f"])
def test_vector_copy_is_one_load_and_one_store(arch: str) -> None:
    opcodes = histogram(sass(compile_unit(unit_of(WIDE, "tiny/copy", "copy"), arch, cache=None).data))
    assert count(opcodes, "LDG.128") == 1
    assert count(opcodes, "STG.128") == 1
    assert count(opcodes, "LDG") == 1
    assert count(opcodes, "LDL") == 0
    assert count(opcodes, "EXIT") >= 1


@needs_tool
def test_both_tools_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if _find_tool("nvdisasm") is None or _find_tool("cuobjdump") is None:
        pytest.skip("one of the two is not installed")
    cubin = compile_unit(unit_of(WIDE, "tiny/copy", "copy"), "sm_80", cache=None).data
    first = histogram(sass(cubin))
    only = {"cuobjdump": _find_tool("cuobjdump")}
    monkeypatch.setattr("kvgen.compile.sass._find_tool", only.get)
    assert histogram(sass(cubin)) == first


@needs_tool
def test_bytes_that_are_no_cubin() -> None:
    with pytest.raises(ToolError, match="cannot disassemble 4 bytes"):
        sass(b"none")


def test_missing_tools_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.compile.sass._find_tool", lambda name: None)
    with pytest.raises(ToolError, match=r"neither is installed; .*kvgen\[sass\]"):
        sass(b"")


@needs_tool
def test_a_listing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once a cubin and tool; refused bytes are not kept."""
    cubin = compile_unit(unit_of(WIDE, "tiny/copy", "copy"), "sm_80", cache=None).data
    kept = Cache(tmp_path)
    first = sass(cubin, cache=kept)
    for _ in range(2):
        with pytest.raises(ToolError, match="cannot disassemble"):
            sass(b"none", cache=kept)
    monkeypatch.setattr("subprocess.run", None)
    assert sass(cubin, cache=kept) == first


def test_another_release_of_a_tool_reads_anew(tmp_path: Path) -> None:
    """What was kept is one tool's listing of one cubin, in one form."""
    tool = tmp_path / "nvdisasm"
    tool.write_bytes(b"12.8")
    keys = {_key(tool, b"cubin"), _key(tool, b"other")}
    tool.write_bytes(b"13.0.1")
    assert len(keys | {_key(tool, b"cubin"), _key(tool, b"cubin", encodings=True)}) == 4
