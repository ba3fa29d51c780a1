"""What a spec cannot say: every rule of the cache, its tables and the kernel set, and the words it is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgen import ops
from kvgen.errors import SpecError
from kvgen.plan.kernel import KernelPlan
from kvgen.schema.cache import Block, Continuous, Paged
from kvgen.schema.cache_fields import Layout
from kvgen.schema.kernel_set import KernelSet, Op
from kvgen.schema.tables import CSR, Dense, Indirect, Mapped, PerKV, Ring

KEYS = "page layer token head dim"


def paged(**fields: Any) -> Paged:
    return Paged(**{"dtype": "bf16", "kv_heads": 8, "head_dim": 128, "page_size": 16, **fields})


def continuous(**fields: Any) -> Continuous:
    return Continuous(**{"dtype": "bf16", "kv_heads": 8, "head_dim": 128, **fields})


def kernel_set(**fields: Any) -> KernelSet:
    return KernelSet(**{"q_heads": 32, "cache": paged(), "ops": [ops.Append()], **fields})


def mistakes(make: Callable[..., object], **fields: Any) -> list[str]:
    """The lines that a spec file with this mistake is refused with."""
    try:
        made = make(**fields)
    except SpecError as error:
        return str(error).split("\n")
    raise AssertionError(f"accepted: {made!r}")


POSITIVE = "input should be greater than or equal to 1"

CASES: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    # Tables.
    (Dense, {"dtype": "u64"}, "Dense.dtype: got 'u64'; input should be 'u32', 'i32' or 'i64'"),
    (Dense, {"id_multiplier": 0}, f"Dense.id_multiplier: got 0; {POSITIVE}"),
    (
        Dense,
        {"id_multiplier": 2**20 + 1},
        "Dense.id_multiplier: got 1048577; input should be less than or equal to 1048576",
    ),
    (Dense, {"id_multiplier": 2.0}, "Dense.id_multiplier: got 2.0; input should be a valid integer"),
    (Dense, {"window": 8}, "Dense.window: unknown field; Dense has dtype, id_multiplier, kind"),
    (CSR, {"last_page_len": 1}, "CSR.last_page_len: got 1; input should be a valid boolean"),
    (CSR, {"kind": "dense"}, "CSR.kind: got 'dense'; input should be 'csr'"),
    (PerKV, {"dtype": "i8"}, "PerKV.dtype: got 'i8'; input should be 'u32', 'i32' or 'i64'"),
    (Mapped, {"request_dtype": "i8"}, "Mapped.request_dtype: got 'i8'; input should be 'u32', 'i32' or 'i64'"),
    (Indirect, {"request_dtype": "f32"}, "Indirect.request_dtype: got 'f32'; input should be 'u32', 'i32' or 'i64'"),
    (Ring, {}, "Ring.window: missing; this field has no default"),
    (Ring, {"window": 0}, f"Ring.window: got 0; {POSITIVE}"),
    (Ring, {"window": 2**31}, "Ring.window: got 2147483648; input should be less than or equal to 2147483647"),
    # Blocks of a scale.
    (Block, {"dim": 0}, f"Block.dim: got 0; {POSITIVE}"),
    (Block, {"token": 0}, f"Block.token: got 0; {POSITIVE}"),
    (Block, {"head": -1}, f"Block.head: got -1; {POSITIVE}"),
    # Layouts.
    (Layout, {}, "layout: give either kv='...' (one tensor) or k='...' (with v='...' unless stores='k')"),
    (
        Layout,
        {"kv": "page kv layer token head dim", "k": KEYS},
        "layout: give either kv='...' (one tensor) or k='...' (with v='...' unless stores='k')",
    ),
    (
        Layout,
        {"kv": "page kv layer token head dim", "v": KEYS},
        "layout: v stands beside kv; one tensor holds both, or k and v have one each",
    ),
    (
        Layout,
        {"kv": "page kv token head dim"},
        "layout: 'page kv token head dim' has no layer axis, but layers='axis'; layers='axis' needs one, "
        "layers='pointers' (a tensor per layer) must not have one",
    ),
    (
        Layout,
        {"kv": "page kv layer token head dim", "layers": "pointers"},
        "layout: 'page kv layer token head dim' has a layer axis, but layers='pointers'; layers='axis' needs one, "
        "layers='pointers' (a tensor per layer) must not have one",
    ),
    (
        Layout,
        {"k": KEYS, "v": "page kv layer token head dim"},
        "layout: 'page kv layer token head dim' has a kv axis, but K and V have a tensor each; drop the axis",
    ),
    (Layout, {"kv": KEYS, "layers": "none"}, "Layout.layers: got 'none'; input should be 'axis' or 'pointers'"),
    (Layout, {"kv": "page rows"}, "layout: got the axis 'rows' in 'page rows'; axes are page (or block), kv, layer,"),
    # Caches.
    (paged, {"dtype": "i8"}, "Paged.dtype: got 'i8'; input should be 'f32', 'f16' or 'bf16'"),
    (paged, {"kv_heads": 0}, f"Paged.kv_heads: got 0; {POSITIVE}"),
    (paged, {"kv_heads": 4097}, "Paged.kv_heads: got 4097; input should be less than or equal to 4096"),
    (paged, {"kv_heads": True}, "Paged.kv_heads: got True; input should be a valid integer"),
    (paged, {"head_dim": 0}, f"Paged.head_dim: got 0; {POSITIVE}"),
    (paged, {"head_dim": 1025}, "Paged.head_dim: got 1025; input should be less than or equal to 1024"),
    (paged, {"v_head_dim": 0}, f"Paged.v_head_dim: got 0; {POSITIVE}"),
    (paged, {"page_size": 0}, f"Paged.page_size: got 0; {POSITIVE}"),
    (paged, {"page_size": 2**20 + 1}, "Paged.page_size: got 1048577; input should be less than or equal to 1048576"),
    (paged, {"page_size": "16"}, "Paged.page_size: got '16'; input should be a valid integer"),
    (paged, {"lengths": "during"}, "Paged.lengths: got 'during'; input should be 'before' or 'after'"),
    (paged, {"lengths_dtype": "u8"}, "Paged.lengths_dtype: got 'u8'; input should be 'u32', 'i32' or 'i64'"),
    (paged, {"stores": "v"}, "Paged.stores: got 'v'; input should be 'kv' or 'k'"),
    (
        paged,
        {"max_tokens": 4},
        "Paged.max_tokens: unknown field; Paged has dtype, kv_heads, head_dim, v_head_dim, layout, lengths, "
        "lengths_dtype, total_pages, total_layers, stores, quant, k_quant, v_quant, page_size, rate, "
        "table",
    ),
    (Paged, {"dtype": "bf16", "kv_heads": 1, "head_dim": 8}, "Paged.page_size: missing; this field has no default"),
    (
        paged,
        {"stores": "k", "layout": Layout(k=KEYS, v=KEYS)},
        "stores: got 'k' beside a V layout or v_head_dim; a cache without V has neither",
    ),
    (
        paged,
        {"stores": "k", "v_head_dim": 64},
        "stores: got 'k' beside a V layout or v_head_dim; a cache without V has neither",
    ),
    (
        paged,
        {"layout": Layout(k=KEYS)},
        "layout: k stands without v; give v='...', or stores='k' for a cache without V",
    ),
    (
        paged,
        {"v_head_dim": 64},
        "v_head_dim: got 64 beside head_dim 128 in one tensor; give K and V a layout each",
    ),
    (
        paged,
        {"layout": KEYS},
        f"layout: '{KEYS}' has no kv axis; one tensor tells K from V by a kv axis, or by page ids of their own with "
        "table=PerKV()",
    ),
    (
        paged,
        {"table": PerKV()},
        "layout: 'page kv layer token head dim' has a kv axis; one tensor tells K from V by a kv axis, or by page ids "
        "of their own with table=PerKV()",
    ),
    (
        paged,
        {"stores": "k", "layout": Layout(k=KEYS), "table": PerKV()},
        "table: got PerKV for a cache without V; use Dense, CSR, Indirect, Mapped or Ring",
    ),
    (
        paged,
        {"table": Indirect()},
        "page_size: got 16 with table=Indirect(), whose entries are token slots; use 1",
    ),
    (
        paged,
        {"table": CSR(last_page_len=True)},
        "lengths: got 'before' with CSR(last_page_len=True), which counts this step's tokens; use 'after'",
    ),
    (
        paged,
        {"layout": "page kv layer head dim/8 token dim%4"},
        "layout: dim is split as dim/8, then dim%4 in 'page kv layer head dim/8 token dim%4'; dim%4 must count 8, "
        "as dim%8",
    ),
    (
        paged,
        {"layout": "page kv layer token dim"},
        "layout: 'page kv layer token dim' has no head axis, but head has 8 elements; add it",
    ),
    (
        paged,
        {"layout": Layout(kv="page kv layer token head dim", swizzle=(3, 3, 2))},
        "swizzle: got bits=3, base=3, shift=2; bits >= 1, base >= 0 and shift >= bits, or two elements would share",
    ),
    (
        paged,
        {"head_dim": 20, "kv_heads": 1, "layout": Layout(kv="page kv layer token head dim", swizzle=(3, 4, 3))},
        "swizzle: got bits=3, base=4 for 320 elements in 'page kv layer token head dim'; they must be a multiple of "
        "2^(base + bits) = 128, or elements would leave their page",
    ),
    (continuous, {"max_tokens": 0}, f"Continuous.max_tokens: got 0; {POSITIVE}"),
    (
        continuous,
        {"max_tokens": 2**31},
        "Continuous.max_tokens: got 2147483648; input should be less than or equal to 2147483647",
    ),
    (continuous, {"table_dtype": "bf16"}, "Continuous.table_dtype: got 'bf16'; input should be 'u32', 'i32' or 'i64'"),
    (
        continuous,
        {"page_size": 16},
        "Continuous.page_size: unknown field; Continuous has dtype, kv_heads, head_dim, v_head_dim, layout, lengths, "
        "lengths_dtype, total_pages, total_layers, stores, quant, k_quant, v_quant, max_tokens, table_dtype",
    ),
    (
        continuous,
        {"layout": "block kv layer head token dim"},
        "layout: head lies outside an axis whose extent is known only at run time in 'block kv layer head token dim'".replace(
            "block", "page"
        ),
    ),
    # Kernel sets.
    (kernel_set, {"q_heads": 0}, f"KernelSet.q_heads: got 0; {POSITIVE}"),
    (kernel_set, {"q_heads": 65537}, "KernelSet.q_heads: got 65537; input should be less than or equal to 65536"),
    (
        kernel_set,
        {"q_heads": 12},
        "q_heads: got 12 with kv_heads=8; every kv head serves the same number of query heads, so q_heads must be a "
        "multiple of kv_heads",
    ),
    (
        kernel_set,
        {"arch": ["sm_70"]},
        "KernelSet.arch.0: got 'sm_70'; input should be 'sm_80', 'sm_89', 'sm_90a', 'sm_100f' or",
    ),
    (kernel_set, {"arch": []}, 'KernelSet.arch: got []; it must have at least 1 item, such as ["sm_90a"]'),
    (
        kernel_set,
        {"arch": ["sm_80", "sm_80"]},
        "arch: got sm_80 twice; names in a set are unique (give name='...')",
    ),
    (kernel_set, {"ops": []}, "KernelSet.ops: got []; it must have at least 1 item, such as [ops.Append()]"),
    (
        kernel_set,
        {"ops": ["append"]},
        "KernelSet.ops.0: got 'append'; it must be an operation of kvgen.ops, such as ops.Append()",
    ),
    (
        kernel_set,
        {"ops": [ops.Append(), ops.Append()]},
        "ops: got append twice; names in a set are unique (give name='...')",
    ),
    (
        kernel_set,
        {"ops": [ops.Append(), ops.Gather(name="append")]},
        "ops: got append twice; names in a set are unique (give name='...')",
    ),
    (
        kernel_set,
        {"cache": paged(stores="k"), "ops": [ops.Decode()]},
        "ops: decode needs V, but the cache has stores='k'; use ops.MlaDecode() for latent rows, "
        "ops.Gather(), or a cache that stores both",
    ),
    (
        kernel_set,
        {"cache": paged(layout="page layer head token dim", table=PerKV()), "ops": [ops.Append(rows="slots")]},
        "rows: got 'slots' with table=PerKV(), where K and V lie in different pages; use 'ragged'",
    ),
    (kernel_set, {"cache": 5}, "KernelSet.cache: got 5; it must be a Cache, such as Paged("),
    (
        kernel_set,
        {"kv_heads": 8},
        "KernelSet.kv_heads: unknown field; KernelSet has name, q_heads, cache, ops, arch, model",
    ),
    (ops.Append, {"rows": "dense"}, "Append.rows: got 'dense'; input should be 'ragged', 'padded' or 'slots'"),
    (ops.Append, {"index_dtype": "f32"}, "Append.index_dtype: got 'f32'; input should be 'u32', 'i32' or 'i64'"),
    (ops.Gather, {"index_dtype": "u8"}, "Gather.index_dtype: got 'u8'; input should be 'u32', 'i32' or 'i64'"),
    (ops.Decode, {"scale": 0.0}, "scale: got 0.0; a softmax scale lies in [1e-30, 1e30]"),
    (ops.Decode, {"scale": float("inf")}, "scale: got inf; a softmax scale lies in [1e-30, 1e30]"),
]


@pytest.mark.parametrize(("make", "fields", "message"), CASES, ids=[f"{i}-{c[2][:40]}" for i, c in enumerate(CASES)])
def test_refused(make: Callable[..., object], fields: dict[str, Any], message: str) -> None:
    found = mistakes(make, **fields)
    assert any(line.startswith(message) for line in found), "\n".join(found)


RULE = (
    "it names files, C functions and Python functions: lower-case letters, digits and _, a letter first, at most 40 "
    "characters, no Python keyword"
)


@pytest.mark.parametrize("name", ["Llama", "8b", "_x", "a-b", "a b", "lambda", "a" * 41, "é", "a\n", "a/../b", 'a"'])
def test_names(name: str) -> None:
    for make in (kernel_set, ops.Append, ops.Gather, ops.Decode):
        assert mistakes(make, name=name) == [f"name: got {name!r}; {RULE}"]
    with pytest.raises(ValueError, match="name: got "):
        kernel_set().named(name)


@pytest.mark.parametrize("name", ["at_once", "object", "super"])
def test_names_that_a_generated_module_uses(name: str) -> None:
    rule = "the generated module needs that name itself; choose another"
    assert mistakes(ops.Append, name=name) == [f"name: got {name!r}; {rule}"]


def test_an_empty_name_is_the_default() -> None:
    assert ops.Append(name="store").name == "store"
    assert (ops.Append().name, ops.Gather().name, ops.Decode().name) == ("append", "gather", "decode")
    assert kernel_set().named("llama").name == "llama"
    assert kernel_set(name="own").named("llama").name == "own"


def test_every_mistake_of_a_constructor_is_listed() -> None:
    found = mistakes(paged, kv_heads=0, head_dim=0, pages=1)
    assert [line.split(":")[0] for line in found] == ["Paged.kv_heads", "Paged.head_dim", "Paged.pages"]


def test_specs_are_frozen_and_keyword_only() -> None:
    cache = paged()
    with pytest.raises(SpecError, match=r"Paged.kv_heads: got 4 for a spec that is made; specs are frozen"):
        cache.kv_heads = 4
    with pytest.raises(SpecError, match=r"Ring: got 8 by position; .* by name, as in Ring\(window=...\)"):
        Ring(8)  # type: ignore[call-arg,arg-type]


def test_an_operation_may_refuse_a_set() -> None:
    class Picky(Op):
        kind = "picky"

        def check(self, kernels: KernelSet) -> None:
            raise ValueError(f"q_heads: got {kernels.q_heads}; never enough")

        def plan(self, kernels: KernelSet) -> tuple[KernelPlan, ...]:
            return ()

    assert mistakes(kernel_set, ops=[Picky()]) == ["q_heads: got 32; never enough"]


def test_what_is_accepted() -> None:
    assert paged(layout="page kv layer head token dim").layout == Layout(kv="page kv layer head token dim")
    assert paged(stores="k", layout=Layout(k=KEYS)).regions[0].role == "k"
    assert paged(layout=KEYS, table=PerKV()).regions[0].shape == ("pages", "layers", 16, 8, 128)
    assert paged(layout=Layout(k=KEYS, v=KEYS), v_head_dim=64).regions[1].shape == ("pages", "layers", 16, 8, 64)
    assert paged(table=CSR(last_page_len=True), lengths="after").page_table == CSR(last_page_len=True)
    assert paged(table=Indirect(), page_size=1).page_tokens == 1
    assert (
        paged(head_dim=64, layout=Layout(kv="page kv layer token head dim", swizzle=(3, 3, 3))).regions[0].vector == 8
    )
    assert continuous(max_tokens=64, layout="block kv layer head token dim").page_tokens == 64
    assert continuous(table_dtype="i32").page_table == Dense(dtype="i32")
    assert kernel_set(q_heads=40).group == 5
