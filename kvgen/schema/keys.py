"""Keys beside those of a set's own cache, which attention over lists reads under the same softmax."""

from __future__ import annotations

from pydantic import SerializeAsAny, field_validator

from kvgen.schema.base import Spec
from kvgen.schema.cache import Cache
from kvgen.schema.kernel_set import check_name


class Keys(Spec):
    """A cache whose rows `MlaDecode(sparse=True, sources=(...,))` attends to besides those of the set's cache.

    Records may differ in codes, scales, groups and places, in page size and in layout; rows have as many dims, V is as many
    of them, and `dtype` is q's. A call brings a layer of the cache, whose class the generated module has, and a list a row
    of q: `<name>_cache`, `<name>_indices` and `<name>_topk_lengths`. Of the cache its pages alone are read: `table` and
    `lengths` have no part in it, and the call may leave them out.
    """

    name: str
    """What its arguments and its class are called after: "compressed" gives `compressed_cache`."""
    cache: SerializeAsAny[Cache]
    """The cache, as a spec: Latent(...) or a preset."""

    @field_validator("name")
    @classmethod
    def _valid_name(cls, value: str) -> str:
        return check_name("name", value)


def class_of_keys(op: str, name: str) -> str:
    """The class, in the generated module, of the source `name` of an operation called `op`."""
    return "".join(part.title() for part in f"{op}_{name}_keys".split("_"))
