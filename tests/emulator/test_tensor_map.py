"""The rules of tensor maps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvgen.emulator import EmulatorError, TensorMap

RULES = {
    "element": ({"element": "float8"}, "element: got 'float8'"),
    "tf32": ({"element": "tfloat32"}, "element: got 'tfloat32'"),
    "rank": ({"dims": (), "strides": (), "box": ()}, "dims: got 0 dimensions"),
    "rank 6": ({"dims": (8,) * 6, "strides": (64,) * 5, "box": (8,) * 6}, "dims: got 6 dimensions"),
    "strides": ({"strides": ()}, "strides: got 0 values; rank 2 takes 1"),
    "box": ({"box": (8,)}, "box: got 1 values; rank 2 takes 2"),
    "steps": ({"element_strides": (1,)}, "element_strides: got 1 values"),
    "address": ({"address": 0x1008}, "address: got 0x1008; it must be a multiple of 16"),
    "null": ({"address": 0}, "address: got 0x0"),
    "no extent": ({"dims": (0, 9)}, r"dims\[0\]: got 0; it is 1 to 4294967296"),
    "extent": ({"dims": (40, 2**32 + 1)}, r"dims\[1\]: got 4294967297"),
    "stride": ({"strides": (168,)}, r"strides\[0\]: got 168 bytes; it must be a multiple of 16"),
    "long stride": ({"strides": (2**40,)}, r"strides\[0\]: got 1099511627776"),
    "empty box": ({"box": (16, 0)}, r"box\[1\]: got 0; it is 1 to 256"),
    "large box": ({"box": (16, 257)}, r"box\[1\]: got 257"),
    "odd box": ({"box": (6, 4)}, r"box\[0\]: got 6 x int32, 24 bytes; it takes a multiple of 16"),
    "no step": ({"element_strides": (1, 0)}, r"element_strides\[1\]: got 0; it is 1 to 8"),
    "long step": ({"element_strides": (1, 9)}, r"element_strides\[1\]: got 9"),
    "swizzle": ({"swizzle": 96}, "swizzle: got 96"),
    "wide box": ({"swizzle": 32}, r"box\[0\]: got 16 x int32, 64 bytes; a swizzle of 32 bytes takes no more"),
    "interleave": ({"interleave": "16B"}, "interleave: got '16B'; only 'none' is modelled"),
    "promotion": ({"l2_promotion": 32}, "l2_promotion: got 32"),
    "fill": ({"oob_fill": "one"}, "oob_fill: got 'one'"),
    "integer NaN": ({"oob_fill": "nan"}, "oob_fill: got 'nan'; int32 has no NaN"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_a_tensor_map(rule: str) -> None:
    changes, message = RULES[rule]
    good: dict[str, Any] = {"element": "int32", "address": 0x1000, "dims": (40, 9), "strides": (160,), "box": (16, 4)}
    TensorMap(**good)
    with pytest.raises(EmulatorError, match=message):
        TensorMap(**{**good, **changes})


def test_encoded_tensor_map() -> None:
    map = TensorMap("bfloat16", 0x10000, (128, 2**32), (256,), (64, 7), element_strides=(1, 2), swizzle=128)
    assert len(map.encode()) == 128 and map.rank == 2 and map.nbytes == 64 * 2 * 4
    assert map.encode() != dataclasses.replace(map, oob_fill="nan").encode()
