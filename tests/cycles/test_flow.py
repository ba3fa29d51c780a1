"""Loops of machine code, and what is none."""

from __future__ import annotations

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
