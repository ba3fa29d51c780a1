"""No form of an instruction is translated without a case that says what it must compute."""

from __future__ import annotations

import pytest

from kvgen.emulator import compare_ops, convert_ops, float_ops, integer_ops
from kvgen.emulator.context import Handler
from tests.emulator.forms import accepted, pairs
from tests.emulator.test_opcodes import SUITES

HANDLERS: dict[str, Handler] = {
    **integer_ops.HANDLERS, **float_ops.HANDLERS, **compare_ops.HANDLERS, **convert_ops.HANDLERS,
}  # fmt: skip
BY_PAIRS = ("set", "setp")  # thousands of forms: every two words together, see compare_cases
COVERED = {form for suite in SUITES.values() for case in suite.cases for form in case.forms()}


@pytest.mark.parametrize("opcode", HANDLERS)
def test_every_accepted_form_has_a_case(opcode: str) -> None:
    forms = set(accepted(opcode, HANDLERS[opcode]))
    assert forms
    if opcode in BY_PAIRS:
        met = {pair for form in COVERED for pair in pairs(form)}
        missing = {pair for form in forms for pair in pairs(form)} - met
        assert not missing, sorted(missing)[:10]
    else:
        assert forms <= COVERED, sorted(forms - COVERED)[:10]


def test_the_search_for_forms_finds_what_a_handler_takes() -> None:
    assert set(accepted("bmsk", HANDLERS["bmsk"])) == {"bmsk.clamp:b32", "bmsk.wrap:b32"}
    assert len(set(accepted("set", HANDLERS["set"]))) == 3264  # as many as ptxas 13.0 assembles
