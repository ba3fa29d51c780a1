"""Which form of latent attention costs fewer products: the absorbed one, or attention over decompressed keys and values."""

from __future__ import annotations

from typing import Literal

from kvgen.errors import ArgumentError


def mla_form(
    new_rows: int, prefix: int, *, latent_dim: int = 512, rope_dim: int = 64, nope_dim: int = 128, v_dim: int = 128
) -> Literal["absorbed", "decompressed"]:
    """The form in which `new_rows` query rows of a request attend to `prefix` tokens before them and to each other.

    "absorbed" (`MlaDecode`): a row has latent_dim + rope_dim products with a key and latent_dim with its value.
    "decompressed" (`MlaDecompress`, up-projections, `Extend` over heads of nope_dim + rope_dim and v_dim): nope_dim + rope_dim
    and v_dim of them, and every token of the request is projected up once for all rows. A head's products are counted, causal
    rows' keys one by one; of DeepSeek's dims it pays from 171 rows over a long prefix on, from 341 without one.
    """
    for name, value in (("new_rows", new_rows), ("prefix", prefix)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(
                f"{name}: got {value!r}; it counts tokens of a request; pass a whole number of at least 0"
            )
    pairs = new_rows * prefix + new_rows * (new_rows + 1) // 2
    absorbed = pairs * (2 * latent_dim + rope_dim)
    decompressed = pairs * (nope_dim + rope_dim + v_dim) + (prefix + new_rows) * latent_dim * (nope_dim + v_dim)
    return "decompressed" if decompressed < absorbed else "absorbed"
