"""Which versions of vLLM have an adapter, and what is said of the others."""

from __future__ import annotations

import importlib
import sys
import warnings
from types import SimpleNamespace

import pytest

from kvgen.errors import ToolError
from kvgen.integrations.vllm import backend, versions

REFUSED = (
    "vllm: got version {version}; kvgen's backend serves 0.32.0 (its engine ran with it), 0.33.0 (its signatures were compared); "
    "install one of these, choose another --attention-backend, or set KVGEN_VLLM_UNTESTED=1 to try {version} with the adapter of "
    "{nearest}"
)


def test_the_table() -> None:
    numbers = [tuple(map(int, known.version.split("."))) for known in versions.KNOWN]
    assert numbers == sorted(set(numbers))
    assert len({number[:2] for number in numbers}) <= 2, "adapters are kept for two minor versions"
    assert any(known.how == "proved" for known in versions.KNOWN)


@pytest.mark.parametrize("known", versions.KNOWN, ids=lambda known: known.version)
def test_known_versions_have_their_adapter(known: versions.Known) -> None:
    for text in (known.version, f"{known.version}+cpu"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert versions.adapter_of(text) == known.adapter
    assert importlib.util.find_spec(f"kvgen.integrations.vllm.{known.adapter}") is not None


@pytest.mark.parametrize(
    ("version", "nearest"),
    [
        ("0.8.5", versions.KNOWN[0].version),
        ("0.32.1", "0.32.0"),
        ("0.33.0rc1", versions.KNOWN[-1].version),
        ("0.33.1.dev7+g0123abc", versions.KNOWN[-1].version),
        ("1.0.0", versions.KNOWN[-1].version),
        ("dev", versions.KNOWN[0].version),
    ],
)
def test_others_are_refused_by_name(version: str, nearest: str) -> None:
    with pytest.raises(versions.VersionError) as raised:
        versions.adapter_of(version)
    assert str(raised.value) == REFUSED.format(version=version, nearest=nearest)
    assert isinstance(raised.value, ToolError) and isinstance(raised.value, ImportError)
    adapter = next(known.adapter for known in versions.KNOWN if known.version == nearest)
    with pytest.warns(UserWarning, match=rf"^vllm: version .* is untested with kvgen; .* adapter of {nearest}$"):
        assert versions.adapter_of(version, untested=True) == adapter


@pytest.mark.parametrize("untested", ["", "0", "1"])
def test_the_version_is_checked_when_the_backend_is_chosen(monkeypatch: pytest.MonkeyPatch, untested: str) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.2"))
    monkeypatch.setenv(versions.UNTESTED, untested)
    monkeypatch.setattr(backend, "import_module", lambda name: SimpleNamespace(KvgenBackend=name, KvgenMLABackend=name))
    if untested == "1":
        with pytest.warns(UserWarning, match=r"0\.40\.2"):
            assert backend.KvgenBackend == f"kvgen.integrations.vllm.{versions.KNOWN[-1].adapter}"
        with pytest.warns(UserWarning, match=r"0\.40\.2"):
            assert backend.KvgenMLABackend == f"kvgen.integrations.vllm.{versions.KNOWN[-1].adapter}_mla"
    else:
        with pytest.raises(versions.VersionError, match=r"got version 0\.40\.2"):
            _ = backend.KvgenBackend
    with pytest.raises(AttributeError, match="has no attribute 'Backend'"):
        _ = backend.Backend
