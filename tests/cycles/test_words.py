"""Instructions as nvdisasm prints them: the fields of the encoding, operands, registers."""

from __future__ import annotations

import pytest

from kvgen.compile import compile_unit, default_cache
from kvgen.compile.sass import sass
from kvgen.cycles.words import Word, words
from tests.compile.test_sass import needs_tool
from tests.compile.tiny import unit_of
from tests.cycles.programs import program

# Lines of kernels of specs/, as nvdisasm -hex prints them.
LISTING = """
.L_x_57:
        /*50a0*/                   LDGDEPBAR ;                                            /* 0x00000000000079af */
                                                                                          /* 0x000e220000000000 */
        /*3a10*/                   DEPBAR.LE SB0, 0x1 ;                                   /* 0x000080400000791a */
                                                                                          /* 0x000fc80000000000 */
        /*2890*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+UR6+0x38200], RZ ;  /* 0x038200ff16ff79a7 */
                                                                                          /* 0x0045e60008100006 */
        /*0010*/               @P0 BRA `(.L_x_57) ;
"""


def test_the_fields_of_an_encoding() -> None:
    label, commit, wait, arrive, branch = words(LISTING)
    assert label == ".L_x_57"
    assert commit == Word("LDGDEPBAR", 0x50A0, stall=1, sets=0)
    assert wait == Word("DEPBAR.LE SB0, 0x1", 0x3A10, stall=4, yields=True)
    # Upper half 0x0045e6: waits for scoreboard 2, its operands release 2, stalls 3.
    assert arrive == Word("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R22+UR6+0x38200], RZ", 0x2890, stall=3, reads=2, waits=(2,))
    assert branch == Word("@P0 BRA `(.L_x_57)", 0x10)


@pytest.mark.parametrize(
    ("text", "writes", "sources"),
    [
        ("LDG.E.128 R4, desc[UR6][R72.64]", "R4 R5 R6 R7", "R72 R73 UR6"),
        ("@!P0 LDG.E R115, desc[UR6][R2.64+0x10]", "R115", "P0 R2 R3 UR6"),
        ("IMAD.WIDE.U32 R36, R131, UR10, RZ", "R36 R37", "R131 UR10"),
        ("LEA R41, P2, R36, UR12, 0x1", "R41 P2", "R36 UR12"),
        ("ISETP.GT.U32.AND P0, PT, R8.reuse, R62.reuse, PT", "P0", "R8 R62"),
        ("SHFL.BFLY PT, R74, R87, 0x4, 0x1f", "R74", "R87"),
        ("STG.E desc[UR6][R2.64], R5", "", "R2 R3 R5 UR6"),
        ("@P1 STS.128 [R9+0x10], R28", "", "P1 R9 R28 R29 R30 R31"),
        ("LDGSTS.E.BYPASS.128 [R59+0x1100], desc[UR6][R38.64]", "", "R59 R38 R39 UR6"),
        ("@P0 BRA `(.L_x_1)", "", "P0"),
    ],
)
def test_registers(text: str, writes: str, sources: str) -> None:
    word = Word(text)
    assert word.writes == set(writes.split())
    assert word.sources == set(sources.split())


def test_what_tests_write_by_hand() -> None:
    (word,) = program("[02:1:-:4y] @!P0 LDS.64 R2, [R4] ;")
    assert word == Word("@!P0 LDS.64 R2, [R4]", 0, stall=4, yields=True, sets=1, waits=(0, 2))
    assert (word.guard, word.opcode, word.base, word.modifiers) == ("!P0", "LDS.64", "LDS", ("64",))


@needs_tool
def test_a_kernel_of_today() -> None:
    """Every instruction of a listing with encodings has its two words, and nothing else is lost."""
    image = compile_unit(unit_of(), "sm_90a", cache=default_cache())
    plain = [w for w in words(sass(image.data, cache=default_cache())) if isinstance(w, Word)]
    full = [w for w in words(sass(image.data, cache=default_cache(), encodings=True)) if isinstance(w, Word)]
    assert [w.text for w in plain] == [w.text for w in full] and len(full) > 10
    (load,) = (w for w in full if w.base == "LDG")
    assert load.sets is not None and any(load.sets in w.waits for w in full)
    assert any(w.stall > 1 for w in full)
