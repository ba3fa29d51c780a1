"""Every field of every spec model says what it is, under the field, where editors and the spec reference find it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import kvgen.ops
import kvgen.schema
from kvgen import Paged, Quant
from kvgen.errors import FieldError
from kvgen.schema.base import Spec
from kvgen.schema.field_docs import field_docs


def models() -> list[type[Spec]]:
    """All spec models of kvgen."""
    for package in (kvgen.schema, kvgen.ops):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    found: list[type[Spec]] = [Spec]
    for model in found:
        found += [sub for sub in model.__subclasses__() if sub not in found]
    return [m for m in found if m.__module__.startswith("kvgen.")]


@pytest.mark.parametrize("model", models(), ids=lambda m: m.__name__)
def test_every_field_says_what_it_is(model: type[Spec]) -> None:
    docs = field_docs(model)
    assert not set(model.model_fields) - set(docs), "a docstring under the field"
    for name, text in docs.items():
        assert text.endswith(".") and len(text.split()) >= 3, f"{name}: {text!r} is no sentence"
        field = model.model_fields[name]
        if not field.is_required() and field.get_default(call_default_factory=True) is None:
            assert "None" in text, f"{name}: what its default, None, means"


def test_there_are_models() -> None:
    names = {m.__name__ for m in models()}
    assert {"Paged", "Quant", "Score", "Mask", "KernelSet", "Rope", "Dense", "Append"} <= names and len(names) > 50


def test_a_field_of_the_base_is_inherited() -> None:
    assert field_docs(Paged)["kv_heads"] == field_docs(kvgen.Continuous)["kv_heads"]
    assert field_docs(kvgen.Latent)["kv_heads"] != field_docs(Paged)["kv_heads"]


def test_a_model_without_source_has_none() -> None:
    assert field_docs(type("Made", (Spec,), {"__annotations__": {"x": int}, "__module__": "nowhere"})) == {}


def test_a_missing_field_is_told_with_what_it_is() -> None:
    with pytest.raises(FieldError) as error:
        Quant()  # type: ignore[call-arg]
    assert str(error.value).splitlines() == [
        "Quant.dtype: missing; this field has no default. " + field_docs(Quant)["dtype"]
    ]
