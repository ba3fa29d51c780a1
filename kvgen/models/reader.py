"""A family's row and a text model's config.json -> its facts, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, cast

from kvgen.errors import ConfigError
from kvgen.models.compressed import read_compressed
from kvgen.models.family import CACHELESS, Family
from kvgen.models.fields import Fields
from kvgen.models.indexers import index_norm, index_rope, indexers
from kvgen.models.layers import CacheDtype, Checkpoint, LayerFacts, Norm, QueryScale
from kvgen.models.model_facts import model_of
from kvgen.models.outside import HEAD_DIM, HEADS, LAYERS, POSITIONS, Latents, Shape, checked
from kvgen.models.patterns import layer_count, layer_kinds, rope_flags, specials
from kvgen.models.rope import LayerRope, layer_ropes, unscaled
from kvgen.models.source import harmless
from kvgen.models.unread import ORIGINAL
from kvgen.schema.model import Indexer, Mla
from kvgen.schema.norm import LayerNorm, RmsNorm

# An engine keeps the cache in the checkpoint's type unless told otherwise; the newest published configs omit it.
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_EXTENT = HEADS * HEAD_DIM
_NAMED: Final = 8  # fields that a spec's docstring names one by one
# In which layers of one kind are alike.
_COMPARED: Final = tuple(field.name for field in fields(LayerFacts) if field.name not in ("index", "kind"))


def read_family(family: Family, text: Fields, outer: Fields, architecture: str) -> Checkpoint:
    """The facts of a text model; `outer` is the whole config, whose dtype holds where the text model's own is absent."""
    for refusal in family.refuses:
        _refuse(text, refusal.field, refusal.rule, refusal.when)
    if family.compressed is not None:
        return read_compressed(family, text, architecture, _dtype(text, outer))
    reader = _Reader(family, text, architecture)
    kinds, pattern = reader.layers()
    first = next((kind for kind in kinds if kind.cache), None)
    if first is None:
        text.fail(
            next((name for name in family.pattern.types if text.has(name)), "num_hidden_layers"),
            "no layer of it has keys and values, and so it has no KV cache; valid: a model with attention",
        )
    norm = first.k_norm
    plain = norm is not None and norm.kind == "rms" and norm.weight
    return Checkpoint(
        q_heads=first.q_heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim_k,
        dtype=_dtype(text, outer),
        stores="k" if first.mla is not None else "kv",
        model=model_of(architecture, kinds, pattern, rsqrt=reader.rsqrt),
        norm=rms_norm(norm) if norm is not None and plain else None,
        kinds=kinds,
        pattern=pattern,
        notes=(*family.notes, *reader.notes),
    )


def rms_norm(norm: Norm) -> RmsNorm:
    """An RMS norm as an operation states it."""
    if not norm.weight:
        return RmsNorm(over=norm.over, mean_square=norm.mean_square, eps=norm.eps, weight=False)
    return RmsNorm(
        over=norm.over, mean_square=norm.mean_square, eps=norm.eps, weight_offset=norm.offset, multiply=norm.multiply
    )


def norm_of(norm: Norm) -> RmsNorm | LayerNorm:
    """A norm as an operation states it."""
    if norm.kind == "rms":
        return rms_norm(norm)
    return LayerNorm(eps=norm.eps, bias=norm.bias, per_head=norm.per_head)


def _refuse(text: Fields, path: str, rule: str, when: str) -> None:
    place, key = text.inner(path)
    if place is None or not place.has(key):
        return
    value = place.values[key]
    wrong = {
        "true": bool(value) if isinstance(value, bool | int | float | str | list | Mapping) else True,
        "set": True,
        "false": value is False,
    }.get(when, value == when or (when.startswith("has:") and isinstance(value, list) and when[4:] in value))
    if wrong:
        place.fail(key, rule)


@dataclass
class _Shape:
    """Heads and their size in a layer."""

    q_heads: int
    kv_heads: int
    head_dim: int


class _Reader:
    """One config under its family's row."""

    def __init__(self, family: Family, text: Fields, architecture: str) -> None:
        self.family, self.text, self.architecture = family, text, architecture
        self.notes: list[str] = []
        self.rsqrt: float | None = None
        self.shape = self._shape()
        self.mla = self._mla() if family.rows is not None else None

    # Names ------------------------------------------------------------------------------------------------------------

    def _spelled(self, name: str) -> tuple[Fields | None, str]:
        """Where a field is, by the family's names: the first that is there, else the first."""
        paths = self.family.names.get(name, (name,))
        for path in paths:
            place, key = self.text.inner(path)
            if place is not None and place.has(key):
                return place, key
        return self.text.inner(paths[0])

    def _given(self, name: str, *, default: Any = None) -> tuple[Any, bool]:
        """(value, whether the field is there): null is a value, an absent field is the family's default."""
        place, key = self._spelled(name)
        if place is None or key not in place.values:
            return default, False
        return place.values[key], True

    def _has(self, name: str) -> bool:
        place, key = self._spelled(name)
        return place is not None and place.has(key)

    def _named(self, name: str) -> str:
        place, key = self._spelled(name)
        return place.name(key) if place is not None else key

    # Heads ------------------------------------------------------------------------------------------------------------

    def _shape(self) -> _Shape:
        family, text = self.family, self.text
        counted = not (
            family.pattern.letters and any(map(text.has, (*family.pattern.types, family.pattern.letters[0])))
        )
        named = ["num_attention_heads"] if family.heads is None and family.heads_of is None else []
        named += ["num_hidden_layers"] if counted and family.pattern.letters is None else []
        given_dim, there = (None, True) if family.divided else self._given("head_dim", default=family.head_dim)
        own = given_dim if there else family.head_dim
        if family.rows is None and own is None:
            named.append("hidden_size")
        needed = [self._spelled(name) for name in named]
        absent = [
            place.name(key) if place is not None else key
            for place, key in needed
            if place is None or not place.has(key)
        ]
        if family.rows is not None:
            defaults = family.rows.defaults
            latent = [
                n for n in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim") if n not in defaults
            ]
            absent += [text.name(name) for name in latent if not text.has(name)]
            named += latent
        if absent:
            raise ConfigError(
                f"{absent[0]}: missing from a {self.architecture} config; it needs "
                f"{', '.join(self._named(name) for name in named)}; missing: {', '.join(absent)}"
            )
        values = {name: self._given(name)[0] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers")}
        values["head_dim"] = own
        if family.heads is not None:
            values["num_attention_heads"] = values["num_attention_heads"] or family.heads
        if values["num_hidden_layers"] is None or not counted:
            values["num_hidden_layers"] = 1
        if family.heads_of is not None:
            values["num_attention_heads"] = values["num_attention_heads"] or 1
        if family.rows is not None:
            values.pop("head_dim")
            values.pop("hidden_size")
        elif own is not None:
            values.pop("hidden_size")
        found = checked(Shape, values, self._named)
        self.counted = found.num_hidden_layers if counted and self._has("num_hidden_layers") else None
        q_heads = found.num_attention_heads
        if family.heads_of is not None:
            kv = self._kv_heads(1)
            times = text.integer(family.heads_of[0], default=family.heads_of[1], high=HEADS)
            if kv * times > HEADS:
                text.fail(family.heads_of[0], f"times {kv} KV heads it is the query heads; valid: up to {HEADS // kv}")
            return _Shape(kv * times, kv, found.head_dim or self._divided(kv * times))
        if family.rows is not None:
            return _Shape(q_heads, 1, 1)
        head_dim = found.head_dim or self._divided(q_heads)
        return _Shape(q_heads, self._kv_heads(q_heads), head_dim)

    def _divided(self, q_heads: int) -> int:
        place, key = self._spelled("hidden_size")
        assert place is not None
        hidden = place.integer(key, high=_EXTENT) * self.family.hidden_times
        if hidden % q_heads or hidden // q_heads > HEAD_DIM:
            place.fail(
                key,
                f"it is divided among {q_heads} heads; valid: a multiple of {q_heads} that gives each up to {HEAD_DIM}",
            )
        return hidden // q_heads

    def _kv_heads(self, q_heads: int) -> int:
        kv, text = self.family.kv, self.text
        if kv.always_all:
            return q_heads
        if kv.one_if:
            # null is false, as it is to transformers' code.
            many = kv.one_if in text.values and not text.flag(kv.one_if, default=False)
            if not many and not (kv.unless and text.flag(kv.unless, default=False)):
                return 1
            if not kv.field:
                return q_heads
        if kv.words is not None:
            place, key = text.inner(kv.words[0])
            word = place.choice(key, kv.words[1], default="heads") if place is not None else "heads"
            if word != "field":
                return 1 if word == "one" else q_heads
        name = "num_key_value_heads" if kv.field == "num_key_value_heads" else kv.field
        place, key = self._spelled(name)
        default = q_heads
        if (place is None or key not in place.values) and kv.default is not None:
            default = kv.default
        if place is None:
            return default
        if kv.words is not None:
            found = place.integer(key, high=HEADS)
        else:
            found = place.integer(key, default=default, high=HEADS)
        if q_heads % found and self.family.heads_of is None:
            if not place.has(key):
                place.fail(
                    key,
                    f"where it is absent, {self.architecture} has {found} KV heads, which {q_heads} query heads do not share "
                    f"evenly; valid: divisors of {q_heads}",
                )
            place.fail(key, f"{q_heads} query heads share KV heads evenly; valid: divisors of {q_heads}")
        return found

    # Latent rows ------------------------------------------------------------------------------------------------------

    def _mla(self) -> Mla:
        rows, text = self.family.rows, self.text
        assert rows is not None
        values = {name: text.values.get(name) for name in Latents.model_fields}
        for name, default in rows.defaults.items():
            if values[name] is None:
                values[name] = default
        if rows.interleaved is not None:
            values.pop("rope_interleave")
        found = checked(Latents, values, text.name)
        mla_fields = found.model_dump(exclude={"rope_interleave"})
        null = (
            "rope_interleave" in text.values and text.values["rope_interleave"] is None
        )  # false, to transformers' code
        stated = found.rope_interleave is not False and not null
        self.interleaved = rows.interleaved if rows.interleaved is not None else stated
        if found.kv_lora_rank + found.qk_rope_head_dim > HEAD_DIM:
            text.fail(
                "kv_lora_rank",
                f"with qk_rope_head_dim {found.qk_rope_head_dim} a row has {found.kv_lora_rank + found.qk_rope_head_dim} "
                f"elements; valid: up to {HEAD_DIM}",
            )
        if found.qk_rope_head_dim < 1:
            text.fail("qk_rope_head_dim", f"it must be an integer; valid: 1 to {HEAD_DIM}")
        if rows.factor:
            self.notes.append(
                "The latent part is multiplied by (hidden_size / kv_lora_rank) ** 0.5: give k_weight times that."
            )
        return Mla(**mla_fields)

    # Layers -----------------------------------------------------------------------------------------------------------

    def layers(self) -> tuple[tuple[LayerFacts, ...], tuple[int, ...]]:
        """The kinds of layers, each with its first layer's number, and which kind each layer is of."""
        family, text = self.family, self.text
        count = layer_count(text, family, self.counted)
        if count > LAYERS:
            text.fail("num_hidden_layers", f"it counts {count} caches; valid: up to {LAYERS}")
        names = layer_kinds(text, family, count)
        window = self._window() if "local" in names else None
        chunk = self._chunk() if "chunked" in names else None
        shapes = self._shapes(names)
        rotary = self._rotary(names, window, count)
        ropes = self._ropes(names, shapes, rotary)
        sources = self._sources(names)
        scaled = self._scaled_layers(count)
        index = family.rows.index if family.rows is not None else None
        pickers = indexers(index, text, count) if index is not None else [None] * count
        facts: dict[tuple[Any, ...], LayerFacts] = {}
        found: list[tuple[Any, ...]] = []
        for i, name in enumerate(names):
            key: tuple[Any, ...] = (name,)
            if name not in CACHELESS:
                shape = shapes[i]
                key = (
                    name,
                    shape.q_heads,
                    shape.kv_heads,
                    shape.head_dim,
                    rotary[i],
                    sources[i],
                    scaled[i],
                    pickers[i],
                )
            if key not in facts:
                facts[key] = (
                    LayerFacts(i, name, cache=False)
                    if name in CACHELESS
                    else self._indexed(
                        self._facts(i, name, shapes[i], ropes, rotary[i], sources[i], scaled[i], window, chunk),
                        pickers[i],
                    )
                )
            found.append(key)
        return _merged(facts, found)

    def _window(self) -> int | None:
        family, text = self.family, self.text
        if family.window_before and text.has(family.window_before):
            return text.integer(family.window_before, low=0, high=POSITIONS - 1) + 1
        chosen = family.pattern.by_flags is not None and text.has("layer_types")  # the flag makes layer_types (SmolLM3)
        if family.window_when and not chosen and not text.flag(family.window_when, default=False):
            return None
        if family.window_over != 1 and "sliding_window" in text.values:
            return text.optional_integer("sliding_window", high=POSITIONS)
        value, there = self._given("sliding_window", default=family.window)
        if not there:
            return family.window // family.window_over if family.window is not None else None
        if value is None or (value == 0 and not isinstance(value, bool)):
            return None
        place, key = self._spelled("sliding_window")
        assert place is not None
        return max(1, place.integer(key, high=POSITIONS) // family.window_over)

    def _chunk(self) -> int | None:
        if "attention_chunk_size" not in self.text.values:
            return self.family.chunk
        return self.text.optional_integer("attention_chunk_size", high=POSITIONS)

    def _shapes(self, names: Sequence[str]) -> list[_Shape]:
        """Heads of every layer."""
        family, text, own = self.family, self.text, self.shape
        by_kind = {name: own for name in names}
        if family.global_heads and "per_layer_config" not in text.values:
            head_dim = text.integer("global_head_dim", default=512, high=HEAD_DIM)
            kv = own.kv_heads
            if text.flag("attention_k_eq_v", default=False) and text.has("num_global_key_value_heads"):
                kv = self._shared(text, "num_global_key_value_heads", own.q_heads)
            by_kind["full"] = _Shape(own.q_heads, kv, head_dim)
        if family.kv.local_times != 1:
            kv = own.kv_heads * family.kv.local_times
            if own.q_heads % kv:
                text.fail(
                    "num_key_value_heads",
                    f"windowed layers have {kv}, which {own.q_heads} query heads do not share evenly",
                )
            by_kind["local"] = replace(own, kv_heads=kv)
        for path in family.local_heads:
            place, key = text.inner(path)
            if place is not None and place.has(key):
                q_heads = place.integer(key, high=HEADS)
                if q_heads % own.kv_heads:
                    place.fail(key, f"they share {own.kv_heads} KV heads evenly; valid: multiples of {own.kv_heads}")
                by_kind["local"] = replace(own, q_heads=q_heads)
                break
        found = [by_kind[name] for name in names]
        if family.head_lists and text.has(family.head_lists):
            entries = text.items(family.head_lists, length=len(names))
            listed = Fields({str(i): value for i, value in enumerate(entries)}, text.name(family.head_lists))
            for i, shape in enumerate(found):
                q_heads = listed.integer(str(i), high=HEADS)
                if q_heads % shape.kv_heads:
                    listed.fail(
                        str(i), f"they share {shape.kv_heads} KV heads evenly; valid: multiples of {shape.kv_heads}"
                    )
                found[i] = replace(shape, q_heads=q_heads)
        return self._overridden(found, names)

    def _shared(self, place: Fields, key: str, q_heads: int) -> int:
        kv = place.integer(key, high=HEADS)
        if q_heads % kv:
            place.fail(key, f"{q_heads} query heads share KV heads evenly; valid: divisors of {q_heads}")
        return kv

    def _overridden(self, found: list[_Shape], names: Sequence[str]) -> list[_Shape]:
        """transformers 5 writes heads that differ by layer as per_layer_config: {"5": {"head_dim": 512}}."""
        if not (self.family.global_heads or self.family.local_heads):
            return found
        layers = self.text.object("per_layer_config")
        for key in layers.values if layers is not None else ():
            assert layers is not None
            if not (isinstance(key, str) and key.isdecimal() and len(key) <= 4 and int(key) < len(names)):
                continue  # not one of this model's layers
            own = layers.object(key)
            if own is None:
                continue
            shape = found[int(key)]
            q_heads = own.integer("num_attention_heads", default=shape.q_heads, high=HEADS)
            kv = own.integer("num_key_value_heads", default=shape.kv_heads, high=HEADS)
            if q_heads % kv:
                own.fail(
                    "num_key_value_heads", f"{q_heads} query heads share KV heads evenly; valid: divisors of {q_heads}"
                )
            found[int(key)] = _Shape(q_heads, kv, own.integer("head_dim", default=shape.head_dim, high=HEAD_DIM))
        return found

    # RoPE -------------------------------------------------------------------------------------------------------------

    def _rotary(self, names: Sequence[str], window: int | None, count: int) -> list[float | bool]:
        """Each layer's flag: it has RoPE; the base instead where it has one of its own."""
        family, text = self.family, self.text
        if family.rope is None:
            return [False] * count
        if family.rope.when is not None:
            key, word = family.rope.when
            value = text.values.get(key)
            if value is not None and not isinstance(value, str | bool):
                text.fail(key, f"it says whether the model has RoPE; valid: {word}, null")
            if ("true" if value is True else value) != word:
                return [False] * count
        if family.rotary == "flags":
            return list(rope_flags(text, family.pattern, count))
        if family.rotary == "thetas":
            return self._thetas(names, count)
        if family.rotary == "windowed":
            return [name == "local" and window is not None for name in names]
        if family.rotary == "sliding":
            return [name == "local" for name in names]
        if family.rotary == "local":
            whole = not (text.has("sliding_window") or "sliding_window" not in text.values)
            return [whole or name == "local" for name in names]
        return [True] * count

    def _thetas(self, names: Sequence[str], count: int) -> list[float | bool]:
        text, rope = self.text, self.family.rope
        assert rope is not None
        if not text.has("layer_rope_theta"):
            if rope.zero_on_special:
                return [not special for special in specials(text, self.family.pattern, count)]
            return [True] * count
        entries = text.items("layer_rope_theta", length=count)
        listed = Fields({str(i): value for i, value in enumerate(entries)}, text.name("layer_rope_theta"))
        found: list[float | bool] = []
        for i in range(count):
            theta = listed.number(str(i), low=0.0, high=1e12)
            if theta and theta <= 1.0:
                listed.fail(str(i), "it must be a number; valid: 0 for none, or above 1")
            found.append(bool(theta) if rope.zero_on_special else theta or False)
        return found

    def _ropes(
        self, names: Sequence[str], shapes: Sequence[_Shape], rotary: Sequence[float | bool]
    ) -> dict[str, LayerRope | None]:
        family, text = self.family, self.text
        if family.rope is None or not any(rotary):
            return {}
        if self.mla is not None:
            style: Literal["neox", "interleaved"] = "interleaved" if self.interleaved else "neox"
            row = replace(family.rope, style=style, share=1.0, shares=())
            dims = {"full": self.mla.qk_rope_head_dim}
            found = layer_ropes(_without_share(text), row, dims, "qk_rope_head_dim", family.positions)
            self._note(found)
            return {name: found["full"] for name in names}
        dims = {name: shape.head_dim for name, shape, has_rope in zip(names, shapes, rotary, strict=True) if has_rope}
        place, key = self._spelled("head_dim")
        known = key if place is not None and place.has(key) else "head_dim"
        found = layer_ropes(text, family.rope, dims, known, family.positions)
        self._note(found)
        return found

    def _note(self, found: Mapping[str, LayerRope | None]) -> None:
        """Say what is not read of the RoPE, and what is read otherwise than transformers reads it."""
        ropes = [layer_rope for layer_rope in found.values() if layer_rope is not None]
        for layer_rope in ropes:
            if layer_rope.ignored is not None and not self.notes:
                self.notes.append(
                    f"partial_rotary_factor {layer_rope.ignored:g} is not used: under default RoPE transformers' code for this "
                    "family rotates whole heads; vLLM rotates that part."
                )
        factors = dict.fromkeys(layer_rope.attn_factor for layer_rope in ropes if layer_rope.attn_factor is not None)
        self.notes += [f"{name} multiplies cos and sin, as in vLLM; transformers does not read it." for name in factors]
        unread = list(dict.fromkeys(name for layer_rope in ropes for name in self._unread(layer_rope)))
        if unread:
            more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
            self.notes.append(f"Not read: {', '.join(map(harmless, unread[:_NAMED]))}{more}.")

    def _unread(self, layer_rope: LayerRope) -> list[str]:
        """The names of RoPE's fields that nothing is made of."""
        read = {"llama_4_scaling_beta"} if self.family.q_scale == "ministral" else set()
        read |= {ORIGINAL} if read and layer_rope.beta else set()
        return [name for name in layer_rope.unread if name.rpartition(".")[2] not in read]

    def _scaled_layers(self, count: int) -> list[bool]:
        """Which layers' RoPE is scaled."""
        rope, text = self.family.rope, self.text
        if rope is None or not rope.unscaled_field or not text.has(rope.unscaled_field):
            return [True] * count
        value = text.values[rope.unscaled_field]
        if not isinstance(value, list) or len(value) > LAYERS:
            text.fail(rope.unscaled_field, f"it must be a list; valid: at most {LAYERS} entries")
        listed = Fields({str(i): number for i, number in enumerate(value)}, text.name(rope.unscaled_field))
        scaled = {listed.integer(str(i), low=0, high=LAYERS) for i in range(len(value))}
        return [i in scaled for i in range(count)]

    # One kind ---------------------------------------------------------------------------------------------------------

    def _sources(self, names: Sequence[str]) -> list[int | None]:
        """The layer whose cache each layer reads: the last one of its kind that stores."""
        count = len(names)
        if not self.family.shared:
            return [None] * count
        shared = self.text.integer(
            "num_kv_shared_layers", default=15 if self.family.types == "gemma3n_text" else 0, low=0, high=LAYERS
        )
        if shared >= count:
            self.text.fail(
                "num_kv_shared_layers", f"they read the caches of layers before them; valid: 0 to {count - 1}"
            )
        first = count - shared
        last = {name: i for i, name in enumerate(names[:first])}
        unfed = next((name for name in names[first:] if name not in last), None)
        if unfed is not None:
            self.text.fail("num_kv_shared_layers", f"no layer before them is of their kind, {unfed!r}; valid: fewer")
        return [None if i < first else last[name] for i, name in enumerate(names)]

    def _facts(
        self,
        index: int,
        name: str,
        shape: _Shape,
        ropes: Mapping[str, LayerRope | None],
        rotary: float | bool,
        source: int | None,
        scaled: bool,
        window: int | None,
        chunk: int | None,
    ) -> LayerFacts:
        family = self.family
        layer_rope = ropes.get(name) if rotary else None
        if layer_rope is not None and not scaled:
            layer_rope = unscaled(layer_rope)
        rope = layer_rope.rope if layer_rope is not None else None
        if rope is not None and rotary is not True:
            rope = rope.model_copy(update={"theta": float(rotary)})
        if rope is not None and self.mla is not None:
            rope = rope.model_copy(update={"dim": self.mla.qk_rope_head_dim})
        mla = self.mla
        latent = mla is not None
        head_dim = mla.row_dim if mla is not None else shape.head_dim
        v_dim = mla.kv_lora_rank if mla is not None else self._v_dim(shape.head_dim)
        q_norm, k_norm, v_norm = self._norms(shape, roped=rope is not None)
        row = family.rope
        return LayerFacts(
            index=index,
            kind=name,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim_k=head_dim,
            head_dim_v=v_dim,
            scale=self._scale(shape.head_dim, layer_rope),
            q_factor=self._q_factor(),
            window=window if name == "local" else None,
            chunk=chunk if name == "chunked" else None,
            softcap=self._softcap(),
            sinks=name in family.sinks,
            alibi=self._alibi(),
            rope=None if self._alibi() else rope,
            proportional=layer_rope is not None and layer_rope.proportional,
            mrope=layer_rope.sections if layer_rope is not None and row is not None and row.sections else (),
            mrope_layout=row.layout if row is not None else "runs",
            q_norm=None if latent else q_norm,
            k_norm=k_norm if source is None else None,
            v_norm=v_norm if source is None else None,
            q_scale=self._q_scale(rope is not None, layer_rope),
            mla=mla,
            kv_source=source,
        )

    def _indexed(self, fact: LayerFacts, indexer: Indexer | None) -> LayerFacts:
        """The layer with its indexer."""
        index = self.family.rows.index if self.family.rows is not None else None
        if index is None or indexer is None or indexer.source is not None:
            return replace(fact, indexer=indexer)
        assert fact.rope is not None
        rope, norm = index_rope(index, self.text, fact.rope), index_norm(index, self._eps())
        return replace(fact, indexer=indexer, index_rope=rope, index_norm=norm)

    def _v_dim(self, head_dim: int) -> int:
        if self.family.v_head_dim is None:
            return head_dim
        name, default = self.family.v_head_dim
        return self.text.integer(name, default=default, high=HEAD_DIM)

    def _alibi(self) -> bool:
        alibi, note = self.family.alibi, self.family.alibi_note
        if isinstance(alibi, bool):
            return alibi
        place, key = self.text.inner(alibi)
        default = "." in alibi
        found = place.flag(key, default=default) if place is not None else default
        if found and note and note not in self.notes:
            self.notes.append(note)
        return found

    def _q_factor(self) -> float:
        if self.family.q_factor is None:
            return 1.0
        name, default = self.family.q_factor
        return self.text.number(name, default=default, low=1e-6, high=1e6)

    def _softcap(self) -> float | None:
        if self.family.softcap is None:
            return None
        name, default = self.family.softcap
        if name not in self.text.values:
            return default
        return self.text.optional_number(name, low=1e-3, high=1e6)

    def _scale(self, head_dim: int, layer_rope: LayerRope | None) -> float:
        scale, text = self.family.scale, self.text
        if self.mla is not None:
            factor = layer_rope.factor if layer_rope is not None else 1.0
            scaling = layer_rope.rope.scaling if layer_rope is not None else None
            found = float(self.mla.qk_dim**-0.5)
            all_dim = getattr(scaling, "mscale_all_dim", None)
            if all_dim is not None:
                found *= cast(Any, scaling).magnitude(all_dim) ** 2
            return float(found * factor)
        if scale.fixed is not None:
            return scale.fixed
        if scale.halved:
            return float((head_dim / 2) ** -0.5)
        if scale.given:
            place, key = text.inner(scale.given)
            if place is not None and place.has(key):
                return place.number(key, low=1e-6, high=1e3)
            null = place is not None and key in place.values  # attention's own default
            return scale.default if scale.default is not None and not null else float(head_dim**-0.5)
        if scale.rsqrt:
            if text.has(scale.rsqrt):
                self.rsqrt = text.number(scale.rsqrt, low=1e-3, high=1e6)
            else:
                self.rsqrt = scale.default
            return float((self.rsqrt or head_dim) ** -0.5)
        return float(head_dim**-0.5)

    def _norms(self, shape: _Shape, *, roped: bool) -> tuple[Norm | None, Norm | None, Norm | None]:
        family, text = self.family, self.text
        if self.mla is not None:
            assert family.rows is not None
            # transformers builds the norm of the latent part with its own default, whatever rms_norm_eps says.
            return None, Norm(self.mla.kv_lora_rank, family.rows.eps or self._eps()), None
        norms = family.norms
        if (
            norms is None
            or (norms.when and not text.flag(norms.when, default=norms.default))
            or (norms.roped and not roped)
        ):
            return None, None, None
        over = norms.over
        if norms.over_when is not None:
            key, words = norms.over_when
            over = cast(Literal["head", "row"], text.choice(key, words, default=over))
        eps = norms.eps or self._eps()
        dims = [
            shape.head_dim if over == "head" else heads * shape.head_dim for heads in (shape.q_heads, shape.kv_heads)
        ]
        q, k = (
            Norm(
                *(dim, eps, norms.kind, over, norms.weight, norms.offset, norms.order, norms.multiply),
                *(norms.bias, norms.per_head),
            )
            for dim in dims
        )
        v = Norm(self._v_dim(shape.head_dim), eps, weight=False, multiply="before") if norms.v else None
        return q, k, v

    def _eps(self) -> float:
        place, key = self._spelled("rms_norm_eps")
        default = self.family.eps
        return place.number(key, default=default, low=1e-30, high=1.0) if place is not None else default

    def _q_scale(self, roped: bool, layer_rope: LayerRope | None) -> QueryScale | None:
        kind, text = self.family.q_scale, self.text
        if kind == "beam":
            return None if roped else QueryScale(0.1, 2048, 1, "power")
        if kind == "llama4":
            if roped or not text.flag("attn_temperature_tuning", default=True):
                return None
            positions = text.number("floor_scale", default=8192.0, low=1.0, high=2.0**24)
            if not positions.is_integer():
                text.fail("floor_scale", "it counts positions; valid: a whole number from 1")
            return QueryScale(text.number("attn_scale", default=0.1, low=1e-6, high=1e3), int(positions), 1)
        if kind == "ministral" and layer_rope is not None and layer_rope.beta:
            assert layer_rope.original is not None
            return QueryScale(layer_rope.beta, layer_rope.original)
        return None


def _without_share(text: Fields) -> Fields:
    """A latent row's RoPE part is said by qk_rope_head_dim alone."""
    changed = dict(text.values)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(changed.get(key), Mapping) and "partial_rotary_factor" in changed[key]:
            changed[key] = {k: v for k, v in changed[key].items() if k != "partial_rotary_factor"}
    return Fields(changed, text.where)


def _merged(
    facts: Mapping[tuple[Any, ...], LayerFacts], found: Sequence[tuple[Any, ...]]
) -> tuple[tuple[LayerFacts, ...], tuple[int, ...]]:
    """Layers of one kind where nothing differs; names that tell the rest apart."""
    kinds: list[LayerFacts] = []
    place: dict[tuple[Any, ...], int] = {}
    for key, fact in facts.items():
        alike = [getattr(fact, field) for field in _COMPARED]
        same = next(
            (i for i, other in enumerate(kinds) if alike == [getattr(other, field) for field in _COMPARED]), None
        )
        if same is not None and (fact.cache or kinds[same].kind == fact.kind):
            place[key] = same
        else:
            place[key] = len(kinds)
            kinds.append(fact)
    names: list[str] = []
    for kind in kinds:
        name = kind.kind if kind.window is not None or kind.kind != "local" else "full"
        if (
            kind.kind == "local"
            and kind.window is None
            and any(other.kind == "full" for other in kinds if other is not kind)
        ):
            name = "sliding"
        if kind.kv_source is not None:
            name += "_shared"
        if kind.indexer is not None and kind.indexer.source is not None:
            name += f"_by_{kind.indexer.source}"
        if name in names and kind.cache and kind.rope is None:
            name += "_nope"
        base, number = name, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    named = tuple(replace(kind, kind=name) for kind, name in zip(kinds, names, strict=True))
    return named, tuple(place[key] for key in found)


def _dtype(*places: Fields) -> CacheDtype:
    """`dtype` (transformers 5) or `torch_dtype`, in the first place that has one; bf16 where none has."""
    for place in places:
        for key in ("dtype", "torch_dtype"):
            if place.has(key):
                return cast(CacheDtype, place.choice(key, _DTYPES, default="bf16"))
    return "bf16"
