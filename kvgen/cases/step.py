"""The rows of a step as append takes them: role by role, and what is done to each before it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.ops import Append, RotateCache
from kvgen.reference.append import Change, Changed, changed
from kvgen.reference.rope import Table
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.model import Rope

Raw = NDArray[Any]
MOST_POSITIONS: Final = 2**24  # computed angles are exact below


class Step:
    """The work of an append, or of a rotate_cache, in a set: its RoPE, the dims that are rotated, the rows in its arguments."""

    def __init__(self, op: Append | RotateCache, kernels: KernelSet) -> None:
        if isinstance(op, RotateCache):
            op = Append(**{name: getattr(op, name) for name in type(op).model_fields})
        self.op, self.kernels, self.cache = op, kernels, kernels.kv
        self.rope: Rope | None = op.new_rows(kernels).rope
        part = self.cache.rope_part
        self.latent = self.cache.head_dim - part if part else 0
        self.q_dim = op.q_dim or part or self.cache.head_dim
        self.rotary_dim = 0 if self.rope is None else self.rope.dim or part or self.cache.head_dim
        # Dims from the first that rotates to the last; in a proportional rope with pairs apart others lie between them.
        self.rotary_span = self.rotary_dim
        if self.rope is not None and self.rope.proportional and self.rope.style == "neox":
            self.rotary_span = (self.cache.head_dim + self.rotary_dim) // 2

    def changes(self, role: str) -> bool:
        """True where rows of a role are changed before they are stored."""
        op = self.op
        norm = {"k": op.k_norm, "v": op.v_norm}.get(role)
        return op.bias or (role != "v" and self.rope is not None) or norm is not None or role in (op.hadamard or "")

    def rotated(self, dim: int) -> tuple[int, int]:
        """The dims of a head of `dim` that are rotated, from and to."""
        first = self.rope is not None and self.rope.part != "last" and not self.latent
        return (0, self.rotary_span) if first else (dim - self.rotary_dim, dim)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, elements of one) of q, k and v, in the order of a flat row."""
        cache = self.cache
        found = {"q": (self.kernels.q_heads, self.q_dim)}
        if self.op.inputs == "q":
            return found
        found["k"] = (cache.kv_heads, cache.head_dim)
        return found | ({"v": (cache.kv_heads, cache.v_dim)} if "v" in cache.roles else {})

    def columns(self) -> dict[str, slice]:
        """The columns of each role in a flat row q | k | v."""
        begin, found = 0, {}
        for role, (heads, dim) in self.shapes().items():
            found[role] = slice(begin, begin + heads * dim)
            begin += heads * dim
        return found

    def rows(self, arrays: Mapping[str, Raw]) -> dict[str, Raw]:
        """Every role's rows `[rows, heads, dim]`, padded ones in a row; views, but for latent rows that come in parts."""
        deep = 2 if self.op.rows == "padded" else 1
        flat = {n: a.reshape(-1, *a.shape[deep:]) for n, a in arrays.items() if n in _ROWS}
        if "qkv" in flat:
            shapes = self.shapes()
            return {r: flat["qkv"][:, at].reshape(-1, *shapes[r]) for r, at in self.columns().items()}
        if "k_latent" in flat:
            flat["k"] = np.concatenate([flat.pop("k_latent"), flat.pop("k_rope")], axis=2)
        return flat

    def position_out_of_range(self, arrays: Mapping[str, Raw], row: int, position: int | None) -> bool:
        """True for a row that has no angle."""
        if self.rope is None and (self.op.positions == "lengths" or self.op.position_scale is None):
            return False
        most = len(arrays["cos_sin"]) if "cos_sin" in arrays else MOST_POSITIONS
        if self.op.positions == "lengths":
            return position is not None and position >= most
        given = arrays["positions"].reshape(max(1, len(self.op.sections)), -1)[:, row]
        return any(not 0 <= int(p) < most for p in given)

    def changed(self, arrays: Mapping[str, Raw], positions: Raw) -> dict[str, Changed]:
        """Every role's rows as they are stored; `positions[rows]` are those by which they rotate, unless the call brings them."""
        op, found = self.op, {}
        if op.positions == "given":
            rate = 1 if op.inputs == "q" else self.cache.entry_tokens
            most = len(arrays["cos_sin"]) if "cos_sin" in arrays else MOST_POSITIONS
            given = np.asarray(arrays["positions"]).reshape(max(1, len(op.sections)), -1) // rate * rate
            given = np.where((given >= 0) & (given < most), given, 0)  # nobody looks at rows without an angle
            positions = given if len(op.sections) > 1 else given[0]
        for role, array in self.rows(arrays).items():
            norm = {"q": op.q_norm, "k": op.k_norm, "v": op.v_norm}[role]
            do = Change(
                bias=self._bias(role, arrays),
                norm=norm,
                weight=arrays.get(f"{role}_weight"),
                norm_bias=arrays.get(f"{role}_norm_bias"),
                mean_square=arrays.get(f"{role}_mean_square"),
                norm_order=op.norm_order,
                rope=None if role == "v" else self.rope,
                positions=positions,
                table=Table(arrays["cos_sin"], op.angles) if op.angles != "computed" else None,
                sections=op.sections,
                sections_order=op.sections_order,
                position_scale=op.position_scale if role == "q" else None,
                hadamard=role in (op.hadamard or ""),
                local=op.rope == "local",
                latent=array.shape[2] - self.cache.rope_part if self.cache.rope_part else 0,
                whole=role == "q" or (norm is not None and norm.whole_row),
            )
            found[role] = changed(array, do)
        return found

    def _bias(self, role: str, arrays: Mapping[str, Raw]) -> Raw | None:
        if not self.op.bias:
            return None
        if "bias" in arrays:
            return arrays["bias"][self.columns()[role]].reshape(self.shapes()[role])
        return arrays[f"{role}_bias"]


_ROWS: Final = ("q", "k", "v", "qkv", "k_latent", "k_rope")
