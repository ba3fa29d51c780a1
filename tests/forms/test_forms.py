"""Every form that a drawn spec can have is executed by a test, and held to an oracle there.

executed.txt says by which; the tests that it names are held to what they launch (held.py). chosen.txt has drawn sets that run
here in a campaign, which draws many more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from kvgen.lowering.cache_header import cache_context
from kvgen.lowering.lowered import lower
from tests.forms import alike, cover, form, held
from tests.forms.drawing import EXECUTED, drawn
from tests.forms.running import run

CAMPAIGN: Final = "KVGEN_FAMILY" in os.environ
SEED: Final = int(os.environ.get("KVGEN_DRAWN_SEED", "1"))
COUNT: Final = int(os.environ.get("KVGEN_FORMS", "20000" if CAMPAIGN else "400"))
# Fields that no drawn set gives a value of its own: a table's kind is its class, a latent row has one head of both dims, totals
# are given where strides need them, a row's mean square is in a set of tests/ops, and the rest is no part of a kernel.
AS_THEY_ARE: Final = {
    "Latent": {"kv_heads", "v_head_dim", "stores", "k_quant", "v_quant", "total_pages", "total_layers"},
    "Ragged": {"lengths", "stores", "total_pages", "total_layers", "total_tokens"},
    "KernelSet": {"model", "layers"},
    "RmsNorm": {"mean_square"},  # in `row_given` of tests/support/append_sets.py
    **{table: {"kind"} for table in ("CSR", "Dense", "Indirect", "Mapped", "PerKV", "Ring")},
}


def test_every_drawn_form_is_executed() -> None:
    executed, found = cover.executed(), dict[str, str]()
    for seed, kernels in cover.drawings(SEED, COUNT):
        for missing in form.all_forms(cover.rendered(kernels)) - executed:
            found.setdefault(missing, seed)
    lines = "\n".join(f"    {missing}    drawn({seed!r})" for missing, seed in sorted(found.items()))
    assert not found, (
        f"{len(found)} forms are executed by no test of tests/forms/executed.txt; give a test a set that has them, then "
        f"`make forms`, or `make forms` alone, which chooses drawn sets for them:\n{lines}"
    )


def test_tests_that_are_named_are_there(request: pytest.FixtureRequest) -> None:
    """Every file that this run has whole is looked at."""
    given = request.config
    chosen = given.option.keyword or given.option.op or getattr(given.option, "lf", False)
    if chosen or any("::" in argument for argument in given.args):
        return
    assert not held.absent(request.session.items)
    assert not alike.wrong(), "lines of tests/forms/alike.txt without a test, or that leave their function none"


def test_what_a_campaign_alone_runs_is_executed_elsewhere() -> None:
    """executed.txt names no test that `make test` leaves out: the forms are executed by those that stay."""
    ids = alike.table()
    assert ids == sorted(set(ids))
    assert not set(ids) & {entry.test for entry in cover.table() if not entry.campaign}


def test_every_field_of_contexts_is_known() -> None:
    """A new number or name of a context is a feature, or is left out: a line of tests/forms/form.py says which."""
    found = set[str]()
    for i in range(150):
        kernels = drawn(f"fields {i}")
        found |= form.unknown(cache_context(lower(kernels.kv), ""))
        for plan in kernels.ops[0].plan(kernels):
            for _, here in (("", plan), *plan.by_arch):
                found |= form.unknown(here.context)
    assert not found


def _models(model: BaseModel) -> Iterator[BaseModel]:
    """A model and every one within it."""
    yield model
    for value in (getattr(model, name) for name in type(model).model_fields):
        within = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else (value,)
        for each in within:
            if isinstance(each, BaseModel):
                yield from _models(each)


@pytest.mark.skipif(not CAMPAIGN, reason="make campaign: rare fields want thousands of sets")
def test_every_field_of_specs_is_drawn() -> None:
    """A new field of a spec gets values in tests/forms/drawing.py."""
    left: dict[str, set[str]] = {}
    for i in range(5000):
        for model in _models(drawn(f"1 {i}")):
            kind = type(model)
            names = left.setdefault(kind.__name__, set(kind.model_fields) - AS_THEY_ARE.get(kind.__name__, set()))
            for name in list(names):
                field = kind.model_fields[name]
                if field.is_required() or getattr(model, name) != field.get_default(call_default_factory=True):
                    names.remove(name)
    assert not {name: fields for name, fields in left.items() if fields}


def test_two_kernels_that_differ_in_a_number_have_the_same_form() -> None:
    lines = [
        "decode_mma | K: e4m3, scaled, zero, groups",
        "decode_mma | K: e4m3, scaled, tokens=32",
    ]
    first, second = (form.all_forms([form.parse(line)]) for line in lines)
    assert "tensor cores | K: groups & zero" in first and "decode_mma | K: tokens=32" in second
    assert not [f for f in second if "&" in f and "=" in f]
    assert form.parse(lines[0]).line == "decode_mma | K: e4m3, groups, scaled, zero"


@pytest.mark.parametrize("seed", [s for s in cover.seeds() if CAMPAIGN or s in cover.ALWAYS])
@settings(max_examples=2)
@given(data=st.data())
def test_a_chosen_set(seed: str, data: Any) -> None:
    kernels = drawn(seed).model_copy(update={"name": f"chosen_{seed.replace(' ', '_')}"})
    for arch in (a for a in kernels.arch if a in EXECUTED):
        run(kernels, arch, data)
