"""config.json files that are broken or mean harm: a harmless spec or a ConfigError, never anything else."""

from __future__ import annotations

import ast
import copy
import json
import math
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgen import models
from kvgen.errors import ConfigError
from kvgen.models.compressed_text import PRESETS as OF_ROWS
from kvgen.models.families import BY_CLASS, BY_TYPE
from kvgen.models.layers import Checkpoint
from kvgen.schema.model import Model

from .checkpoints import CONFIGS, NAMES, WRITTEN, changed, config, model_in, without

# Broken files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"a": nan}', "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": ' + b"[" * 200_000 + b"}", "nested too deep"),
        (b'{"a": {"b": 1, "b": 2}}', "not JSON: the key 'b' is given twice in one object"),
        (b'{"a": 1e999}', "not JSON: 1e999 is larger than any float"),
        (b'{"a": "\\ud800"}', "has half of a surrogate pair"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested too deep: more than 64 levels"),
        (b"[]", "got a list of 0; it must be a JSON object"),
        (b'"import os"', "got 'import os'"),
        (b"null", "got null"),
        (b" " * (2**24 + 1), "larger than 16 MiB"),
    ],
)
def test_read_refuses(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        models.read(path)
    assert str(path) in str(caught.value)


def test_read_needs_a_file(tmp_path: Path) -> None:
    for path, said in ((tmp_path, r"config\.json: .*No such file"), (tmp_path / "absent.json", "No such file")):
        with pytest.raises(ConfigError, match=f"{said}.*; give the path of a model's config.json, or of its folder"):
            models.read(path)


def test_read_takes_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + (CONFIGS / "llama_2_7b.json").read_bytes())
    assert models.read(tmp_path / "config.json") == config("llama_2_7b")


def test_unknown_architecture_names_found_and_missing_fields() -> None:
    odd = {"architectures": ["MysteryLM"], "num_attention_heads": 12, "hidden_size": 768, "model_type": "llama"}
    with pytest.raises(ConfigError) as caught:
        models.facts(odd)
    message = str(caught.value)
    assert (
        message.startswith("architectures[0]: got 'MysteryLM'; no reader for it; valid: ")
        and "LlamaForCausalLM" in message
    )
    assert "Fields found: num_attention_heads = 12, hidden_size = 768;" in message
    assert "missing: num_hidden_layers, num_key_value_heads." in message


def test_unknown_multimodal_architecture_looks_into_text_config() -> None:
    odd = {"architectures": ["MysteryVL"], "text_config": {"num_attention_heads": 12, "head_dim": 64}}
    with pytest.raises(ConfigError, match=r"found: num_attention_heads = 12, head_dim = 64; missing: num_hidden_l"):
        models.facts(odd)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({}, "model_type: got null; no reader for it"),
        ({"model_type": ["llama"]}, "model_type: got a list of 1; no reader"),
        (
            changed("llama_2_7b", architectures="LlamaForCausalLM"),
            "architectures: got 'LlamaForCausalLM'; it must be a",
        ),
        (changed("llama_2_7b", architectures=[["x"]]), "architectures[0]: got a list of 1; no reader"),
        (changed("llama_2_7b", architectures=["X'\n"]), 'architectures[0]: got "X\'\\n"; no reader'),
        (
            changed("llama_2_7b", num_attention_heads=True),
            "num_attention_heads: got true; it must be an integer; valid: 1",
        ),
        (changed("llama_2_7b", num_attention_heads=0), "num_attention_heads: got 0;"),
        (changed("llama_2_7b", num_attention_heads=-8), "num_attention_heads: got -8;"),
        (changed("llama_2_7b", num_attention_heads=32.0), "num_attention_heads: got 32.0;"),
        (changed("llama_2_7b", num_attention_heads="32"), "num_attention_heads: got '32';"),
        (changed("llama_2_7b", num_hidden_layers=10**30), "num_hidden_layers: got an integer of 100 bits;"),
        (changed("llama_2_7b", num_key_value_heads=5), "num_key_value_heads: got 5; 32 query heads share"),
        (
            without("gpt_oss_20b", "num_key_value_heads") | {"num_attention_heads": 12},
            "num_key_value_heads: got null; where it is absent, GptOssForCausalLM has 8 KV heads, which 12 query heads do not",
        ),
        (changed("llama_2_7b", hidden_size=4095), "hidden_size: got 4095; it is divided among 32 heads"),
        (changed("llama_2_7b", head_dim=127), "head_dim: got 127; RoPE rotates pairs"),
        (changed("llama_2_7b", torch_dtype="float8_e4m3fn"), "torch_dtype: got 'float8_e4m3fn'; it is none that kvgen"),
        (changed("llama_2_7b", rope_theta=float("nan")), "rope_theta: got nan; it must be a number"),
        (changed("llama_2_7b", rope_theta=10**400), "rope_theta: got an integer of 1329 bits;"),
        (
            changed("llama_2_7b", rope_scaling={"type": "dynamic", "factor": 2.0}),
            "rope_scaling.type: got 'dynamic'; it",
        ),
        (changed("llama_2_7b", rope_scaling={"type": "linear"}), "rope_scaling.factor: got null; it must be a number"),
        (changed("llama_2_7b", rope_scaling=[1]), "rope_scaling: got a list of 1; it must be a JSON object"),
        (
            changed("llama_3_1_8b", rope_scaling={**config("llama_3_1_8b")["rope_scaling"], "high_freq_factor": 0.5}),
            "rope_scaling.high_freq_factor: got 0.5; it must not be below low_freq_factor; valid: from 1",
        ),
        (
            changed("gpt_oss_20b", rope_scaling={"rope_type": "yarn", "factor": 2, "beta_fast": 0.5}),
            "rope_scaling.beta_fast: got 0.5; it must not be below beta_slow",
        ),
        (
            without("llama_2_7b", "num_attention_heads", "hidden_size"),
            "num_attention_heads: missing from a LlamaForCausalLM config; it needs num_attention_heads, "
            "num_hidden_layers, hidden_size; missing: num_attention_heads, hidden_size",
        ),
        (without("gemma_3_4b_it", "text_config"), "num_hidden_layers: missing from a Gemma3ForConditionalGeneration"),
        (changed("gemma_3_4b_it", text_config="x"), "text_config: got 'x'; it must be a JSON object"),
        (without("deepseek_v3", "kv_lora_rank", "v_head_dim"), "missing: kv_lora_rank, v_head_dim"),
        (changed("deepseek_v3", kv_lora_rank=1000), "kv_lora_rank: got 1000; with qk_rope_head_dim 64 a row has 1064"),
        (changed("deepseek_v3", qk_rope_head_dim=63), "qk_rope_head_dim: got 63; RoPE rotates pairs"),
        (
            changed("gpt_oss_20b", layer_types=["full_attention"]),
            "layer_types: got a list of 1; it must be a list; valid: 24",
        ),
        (
            changed("gpt_oss_20b", layer_types=["chunked_attention"] * 24),
            "layer_types.0: got 'chunked_attention'; it is none that kvgen knows; valid: sliding_attention, "
            "full_attention",
        ),
        (changed("falcon_7b", alibi="no"), "alibi: got 'no'; it must be a boolean"),
        (changed("phi_3_mini_4k", partial_rotary_factor=0.01), "partial_rotary_factor: got 0.01; it rotates 0 of 96"),
        (
            changed("phi_3_5_mini", rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
            "rope_scaling.short_factor: got a list of 1; it must be a list; valid: 48 entries",
        ),
    ],
)
def test_broken_configs(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models.spec_text(broken, source="x")
    assert message in str(caught.value)


def test_a_config_that_is_no_object() -> None:
    with pytest.raises(ConfigError, match="config: got a list of 1; it must be a JSON object"):
        models.facts([1])  # type: ignore[arg-type]


# Files that mean harm ------------------------------------------------------------------------------------------------

CALLS = {
    *(
        "KernelSet",
        "Paged",
        "Latent",
        "Ragged",
        "Layout",
        "Quant",
        "Block",
        "Mask",
        "Score",
        "Model",
        "Kind",
        "Mla",
        "Rope",
    ),
    *("Compressed", "Indexer", "Keys"),
    *("LinearScaling", "Llama3Scaling", "YarnScaling", "LongRopeScaling", "RmsNorm", "LayerNorm", "PositionScale"),
}
OPERATIONS = {"Append", "Extend", "Gather", "Decode", "MlaDecode", "MergeStates"}
OPERATIONS |= {"AttentionOutput", "IndexerQuery", "IndexerScores", "ListKeys", "PoolTokens", "RemapIndices"}
PRESETS = {*OF_ROWS, *OF_ROWS.values()}
SHARED = ("window_rope", "rope", "model")


def check_harmless(text: str) -> None:
    """A docstring, one import from kvgen, and assignments made of constructor calls and plain literals, of `kernels` at last."""
    docstring, imports, *shared, assignment = ast.parse(text).body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
    assert isinstance(docstring.value.value, str)
    assert isinstance(imports, ast.ImportFrom) and (imports.module, imports.level) == ("kvgen", 0)
    assert {alias.name for alias in imports.names} <= CALLS | {"ops", "presets"}
    assert not any(alias.asname for alias in imports.names)
    named = []
    for statement in (*shared, assignment):
        assert isinstance(statement, ast.Assign) and len(statement.targets) == 1
        assert isinstance(statement.targets[0], ast.Name)
        named.append(statement.targets[0].id)
        check_value(statement.value)
    assert named[-1] == "kernels" and named[:-1] == [name for name in SHARED if name in named], (
        "what several sets share"
    )


def check_value(node: ast.expr) -> None:
    if isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute):
            assert isinstance(func.value, ast.Name)
            assert func.attr in {"ops": OPERATIONS, "presets": PRESETS}[func.value.id]
        else:
            assert isinstance(func, ast.Name) and func.id in CALLS
        assert not node.args and all(keyword.arg for keyword in node.keywords)
        for keyword in node.keywords:
            check_value(keyword.value)
    elif isinstance(node, ast.List | ast.Tuple):
        for item in node.elts:
            check_value(item)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            assert key is not None
            check_value(key)
            check_value(value)
    elif isinstance(node, ast.Name):
        assert node.id in SHARED
    else:
        assert isinstance(node, ast.Constant), ast.dump(node)
        if isinstance(node.value, str):
            assert re.fullmatch(r"[A-Za-z0-9_]+|page layer token head dim", node.value)
        else:
            assert node.value is None or isinstance(node.value, bool | int | float)


@cache
def harmless_model(text: str) -> Model:
    """The model of a harmless spec; of most values in most places the text is the same."""
    check_harmless(text)
    return model_in(text)


def spec_or_error(broken: Any, source: str = "x") -> None:
    """Either a harmless spec that says what was read, or a ConfigError of one short printable line."""
    try:
        text = models.spec_text(broken, source=source)
    except ConfigError as error:
        assert str(error).isprintable() and len(str(error)) < 2000
    else:
        facts = models.facts(broken)
        assert isinstance(facts, Checkpoint) and facts.q_heads % facts.kv_heads == 0
        assert harmless_model(text) == facts.model


# By kind: values of one kind are read, or refused, by the same lines of a reader.
KINDS: tuple[tuple[Any, ...], ...] = (
    (
        '"',
        "'''",
        '"""\nimport os\n"""',
        "\\",
        "\n__import__('os').system('true')\n",
        "{{ 7*7 }}",
        "\x1b[31m\u202e",
    ),
    ("yarn", "float16", "sliding_attention"),
    (True, False),
    (None,),
    (0, -1),
    (1, 2, 3),
    (10**6, 2**63),
    (10**400, -(10**400)),
    (0.5, -0.0, 1e-320, 1e308),
    (math.inf, -math.inf, math.nan),
    ([], [[[]]], ["full_attention"] * 3),
    ({}, {"a": {"b": [1]}}),
)
HOSTILE = tuple(value for kind in KINDS for value in kind)


def paths(value: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place inside a JSON value."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [place for key, item in items for place in [(*prefix, key), *paths(item, (*prefix, key))]]


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    """A copy of a JSON value with something else in one place; what is beside that place is shared."""
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new) if path[1:] else new
    return changed


class Noted(dict[str, Any]):
    """A JSON object that notes which places of it were read; whoever lists its keys has read them all."""

    def __init__(
        self, values: dict[str, Any], seen: set[tuple[str | int, ...]], prefix: tuple[str | int, ...] = ()
    ) -> None:
        inner = {k: Noted(v, seen, (*prefix, k)) if isinstance(v, dict) else v for k, v in values.items()}
        super().__init__(inner)
        self.seen, self.prefix = seen, prefix

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add((*self.prefix, key))
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add((*self.prefix, key))
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, str)
        self.seen.add((*self.prefix, key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.seen.update((*self.prefix, key) for key in super().__iter__())
        return super().__iter__()

    def keys(self) -> Any:
        return list(self)

    def items(self) -> Any:
        return [(key, self[key]) for key in self]

    def values(self) -> Any:
        return [self[key] for key in self]


def places_read(original: dict[str, Any]) -> set[tuple[str | int, ...]]:
    """The places of a config's objects that are looked at; what lies in any other can be anything, and changes nothing."""
    seen: set[tuple[str | int, ...]] = set()
    models.spec_text(Noted(original, seen), source="x")
    return seen


def one_of_each_type() -> list[str]:
    """A config of each model_type, read by the same row; `make campaign` takes all."""
    if "KVGEN_DRAWN" in os.environ:
        return WRITTEN
    return list({config(name).get("model_type"): name for name in WRITTEN}.values())


@cache
def with_the_place() -> dict[tuple[str | int, ...], list[str]]:
    """Place -> the configs that have it, of those whose turn it is."""
    found: dict[tuple[str | int, ...], list[str]] = {}
    for name in one_of_each_type():
        for path in paths(config(name)):
            found.setdefault(path, []).append(name)
    return found


@cache
def turns() -> dict[tuple[str | int, ...], int]:
    """Place -> its number."""
    return {path: i for i, path in enumerate(with_the_place())}


def values_of(name: str, path: tuple[str | int, ...]) -> tuple[Any, ...]:
    """A config's share of hostile values in a place: of every kind the place gets one, another one than the place before it, and
    the configs that have the place share them, with one or more each; in `make campaign` each config has all values."""
    if "KVGEN_DRAWN" in os.environ:
        return HOSTILE
    names, turn = with_the_place()[path], turns()[path]
    chosen = [kind[turn % len(kind)] for kind in KINDS]
    shares = min(len(names), len(chosen))
    return tuple(chosen[(names.index(name) + turn) % shares :: shares])


def test_every_kind_of_value_is_tried_in_every_place() -> None:
    tried = set()
    for path, names in with_the_place().items():
        shares = [values_of(name, path) for name in names]
        assert all(shares)
        values = {id(value) for share in shares for value in share}
        assert all(values & {id(value) for value in kind} for kind in KINDS)
        tried |= values
    assert tried == {id(value) for value in HOSTILE}


@pytest.mark.parametrize("name", one_of_each_type())
def test_one_hostile_value_in_every_place(name: str) -> None:
    """Values in places that are read, one in the others, where the spec then is the same."""
    original, turn = config(name), 0
    same, read = models.spec_text(original, source="x"), places_read(original)
    for path in paths(original):
        if any(isinstance(key, int) and key > 1 for key in path):
            continue  # the other entries of a list are read like its first two
        within = next((i for i, key in enumerate(path) if isinstance(key, int)), len(path))
        if any(path[:n] not in read for n in range(1, within)):
            continue  # inside of what nobody reads, which itself has its turn
        if path[:within] in read:
            for value in values_of(name, path):
                spec_or_error(replaced(original, path, value))
        else:
            turn += 1
            assert models.spec_text(replaced(original, path, HOSTILE[turn % len(HOSTILE)]), source="x") == same
    assert original == config(name), "a reader changed what it was given"


@pytest.mark.parametrize("name", NAMES if "KVGEN_DRAWN" in os.environ else one_of_each_type())
def test_one_field_missing(name: str) -> None:
    for key in config(name):
        spec_or_error(without(name, key))


FIELDS = sorted({key for name in NAMES for path in paths(config(name)) for key in path if isinstance(key, str)})
# Some of each kind of character: all that Unicode has would be looked up in every worker, which takes seconds.
ODD = "\u0131\u0300\u0660\u200b\u202e\u2028\ud800\udfff\ue000\ufeff\uffff\U0001f600\U0010ffff"
CHARACTERS = "".join(map(chr, range(256))) + ODD
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(CHARACTERS, max_size=40)
    | st.sampled_from(HOSTILE)
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6)
)
DRAWN = int(os.environ.get("KVGEN_DRAWN", "0"))  # `make campaign` has 100: 12,000 configs and files are drawn below
SLOW = settings(
    derandomize=True,
    deadline=None,
    max_examples=20 * DRAWN or 100,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)


@SLOW
@given(broken=JSON, source=st.text(CHARACTERS, max_size=200))
def test_any_json(broken: Any, source: str) -> None:
    spec_or_error(broken, source)


@SLOW
@given(
    name=st.sampled_from(NAMES),
    changes=st.dictionaries(st.sampled_from([*FIELDS, "rope_parameters", "dtype"]), JSON, max_size=5),
    source=st.text(CHARACTERS, max_size=200),
)
def test_any_change_of_a_real_config(name: str, changes: dict[str, Any], source: str) -> None:
    spec_or_error({**config(name), **changes}, source)


@SLOW
@given(
    architecture=st.sampled_from(sorted(BY_CLASS)),
    numbers=st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 4096) | st.floats(0, 64), max_size=25),
)
def test_plausible_numbers_under_every_reader(architecture: str, numbers: dict[str, Any]) -> None:
    base = {"num_attention_heads": 8, "num_hidden_layers": 4, "hidden_size": 512, "kv_lora_rank": 64}
    base |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    spec_or_error({**base, **numbers, "architectures": [architecture]})


LAYERED = {
    "layer_types": [
        ["full_attention"] * 4,
        ["sliding_attention", "full_attention"] * 2,
        ["linear_attention"] * 4,
        ["conv"],
    ],
    "no_rope_layers": [[1, 0, 1, 0], [2], []],
    "layer_rope_theta": [[10_000.0, 0, 5.0, 1e300], [0.5] * 4],
    "hybrid_override_pattern": ["M*-E", "*", "\x1b*", "M" * 5000],
    "rope_parameters": [
        {"full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": None},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        {"rope_type": "dynamic", "alpha": 1e6},
        {"mrope_section": [1, 2, 3]},
    ],
    "per_layer_config": [{"0": {"head_dim": 64}, "x": 1, "99999999999": {}}, {"1": {"num_key_value_heads": 3}}],
    "num_kv_shared_layers": [2, 4, 10**9],
    "attention_types": [[[["global", "local"], 2]], [[["global"], 10**9]], [[1]]],
    "linear_attn_config": [{"full_attn_layers": [1, 4]}, {"full_attn_layers": [0]}, 3],
    "attn_layer_indices": [[0, 3], [4], "x"],
    "quantization_config": [
        {"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}},
        {"layer_quant_config": {"*v_proj": {"output_tensors": {"dtype": "uint4"}}, "\n": 1}},
        {"export": {"kv_cache_group": ["*k_proj"]}},
    ],
}


@settings(SLOW, max_examples=40 * DRAWN or 300)
@given(
    model_type=st.sampled_from(sorted(BY_TYPE)),
    layered=st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in LAYERED.items()}),
    changes=st.dictionaries(st.sampled_from([*FIELDS, *LAYERED]), SCALARS, max_size=2),
)
def test_hostile_values_under_every_row(model_type: str, layered: dict[str, Any], changes: dict[str, Any]) -> None:
    base = {"num_attention_heads": 8, "num_hidden_layers": 4, "hidden_size": 512, "num_key_value_heads": 2}
    base |= {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    names = {"n_head": 8, "n_layer": 4, "n_embd": 512, "num_layers": 4, "attn_layer_indices": [1]}
    spec_or_error({**base, **names, **layered, **changes, "model_type": model_type})


@SLOW
@given(data=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(data: bytes) -> None:
    try:
        assert isinstance(models.parse(data, source="x"), dict)
    except ConfigError as error:
        assert str(error).startswith("x: ")


def test_source_cannot_leave_the_docstring() -> None:
    hostile = '"""\nimport os\nos.system("x")\n"""\\'
    text = models.spec_text(config("llama_3_1_8b"), source=hostile)
    check_harmless(text)
    assert "import os" not in text
    assert all(len(line) <= 120 for line in models.spec_text(config("gemma_3_27b_it"), source="a" * 999).splitlines())
