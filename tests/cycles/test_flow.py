"""Loops of machine code, and what is none."""

from __future__ import annotations

from kvgen.cycles.facts import work_loop
from kvgen.cycles.flow import blocks, loops, main_loop

OUT_OF_LINE = """
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0020*/                   BRA.DIV UR4, `(.L_x_5) ;
.L_x_1:
        /*0030*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0040*/               @P3 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_5:
        /*0060*/                   WARPSYNC.COLLECTIVE R78, `(.L_x_6) ;
.L_x_6:
        /*0070*/                   BRA `(.L_x_1) ;
"""
NESTED = """
.L_x_0:
        /*0010*/                   MOV R1, R2 ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
"""


def test_a_return_from_out_of_line_code_is_no_loop() -> None:
    """It goes back in the text; what it goes back to does not lead to it but through the loop's head."""
    (loop,) = loops(blocks(OUT_OF_LINE))
    assert [x.address for x in loop.usual] == [0x10, 0x20, 0x30, 0x40]
    assert main_loop(OUT_OF_LINE).head == 0


def test_loops_within_loops() -> None:
    found = loops(blocks(NESTED))
    assert [(x.head, len(x.members), x.holds_loops) for x in found] == [(0, 3, True), (1, 1, False)]
    assert [x.address for x in found[0].usual] == [0x10, 0x20, 0x30, 0x40]


_SUMS = "\n".join(f"        /*{0x200 + 16 * n:04x}*/                   FMUL R{n + 4}, R{n + 4}, R2 ;" for n in range(8))
# What few trips do: weights of hidden tokens, and sums that shrink.
RARE = f"""
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   FSETP.NEU.AND P1, PT, R4, -INF , PT ;
        /*0040*/                   MUFU.EX2 R5, R4 ;
        /*0050*/                   FSEL R5, R5, -RZ, P1 ;
        /*0060*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0070*/                   MUFU.EX2 R5, R4 ;
.L_x_2:
        /*0080*/               @P2 BRA `(.L_x_3) ;
{_SUMS}
.L_x_3:
        /*0300*/               @P3 BRA `(.L_x_0) ;
        /*0310*/                   EXIT ;
"""


def test_hidden_tokens_and_sums_that_shrink_are_rare() -> None:
    (loop,) = loops(blocks(RARE))
    assert [x.address for x in loop.usual] == [0x10, 0x20, 0x70, 0x80, 0x300]


# A loop over chunks; in it one over tokens, where hidden ones go past the shuffles and V; then a merge with more loads.
WITHOUT_PRODUCTS = """
.L_x_0:
        /*0010*/                   MOV R1, R2 ;
.L_x_1:
        /*0020*/                   LDG.E R4, desc[UR6][R2.64] ;
        /*0030*/               @P0 BRA `(.L_x_2) ;
        /*0040*/                   SHFL.BFLY PT, R5, R4, 0x1, 0x1f ;
        /*0050*/                   MUFU.EX2 R5, R5 ;
        /*0060*/                   LDG.E R6, desc[UR6][R2.64+0x10] ;
.L_x_2:
        /*0070*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0080*/                   LDG.E R7, desc[UR6][R2.64+0x20] ;
        /*0090*/                   LDG.E R8, desc[UR6][R2.64+0x30] ;
        /*00a0*/                   LDG.E R9, desc[UR6][R2.64+0x40] ;
        /*00b0*/               @P2 BRA `(.L_x_3) ;
        /*00c0*/               @P3 BRA `(.L_x_0) ;
        /*00d0*/                   EXIT ;
"""


def test_without_products_the_loop_that_takes_exponentials_does_the_work() -> None:
    loop = work_loop(blocks(WITHOUT_PRODUCTS))
    assert loop is not None
    assert [x.address for x in loop.usual] == [0x20, 0x30, 0x40, 0x50, 0x60, 0x70]
