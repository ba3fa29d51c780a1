"""mla_decode: attention to latent rows, of all tokens or of lists, in one cache or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvgen.cases import attention
from kvgen.cases.attention import RowsAttentionCases
from kvgen.cases.closeness import Numerics
from kvgen.cases.comparison import Comparison
from kvgen.cases.contents import Call, Other
from kvgen.cases.named import places, selected, tokens_of_query
from kvgen.cases.operation import Totals
from kvgen.cases.scene import Scene
from kvgen.cases.token_rows import Rows
from kvgen.cases.touched_bytes import SECTOR, Marked, Token
from kvgen.cases.workload import Workload
from kvgen.ops import Gather, MlaDecode
from kvgen.reference import Rows as StoredRows
from kvgen.reference import mla_decode, mla_decode_sparse
from kvgen.reference.mla_decode import Listed
from kvgen.schema.kernel_set import KernelSet
from kvgen.schema.keys import class_of_keys

Raw = NDArray[Any]
LISTED: Final = 210  # entries of a long list: more tiles of 64 than shared memory holds at once


class MlaDecodeCases(RowsAttentionCases[MlaDecode]):
    """`rows` query rows a request; with `sparse` one, which has a list in each cache."""

    def __init__(self, op: MlaDecode) -> None:
        super().__init__(op)
        self.rows_each, self.sparse, self.reads_all = op.rows, op.sparse, not op.sparse
        lists = "lists of several caches" if op.sources else "lists of one cache"
        self.served = lists if op.sparse else "latent rows"

    def sizes(self, scene: Scene) -> dict[str, int]:
        if not self.sparse:
            return super().sizes(scene)
        return {f"{prefix}K": selected(its) for prefix, its in self._caches(scene).items()}

    def value(self, scene: Scene, name: str, like: Raw) -> Any:
        for prefix, its in self._caches(scene).items():
            if name == f"{prefix}indices":
                return np.stack([places(its, b, tokens_of_query(its, b, like.shape[1])) for b in range(len(like))])
            if name == f"{prefix}topk_lengths":
                return selected(its)
        return super().value(scene, name, like)

    def others(self, scene: Scene) -> dict[str, Other]:
        return {f"{prefix}cache": Other(its) for prefix, its in self._caches(scene).items() if prefix}

    def _caches(self, scene: Scene) -> dict[str, Scene]:
        """Scenes of the caches that lists name rows of, by the prefix of their arguments; the set's own comes first, with ""."""
        found = {"": scene}
        for keys in self.op.sources:
            found[f"{keys.name}_"] = scene.beside(class_of_keys(self.op.name, keys.name), keys.cache, Gather())
        return found

    def tokens(self, call: Call) -> Iterator[Token]:
        return _listed(call.scene) if self.sparse else super().tokens(call)

    def partial(self, call: Call, found: dict[str, int], rows: Rows) -> dict[str, int]:
        """Lists name tokens by their places: no table is read."""
        if not self.sparse:
            return found
        found = {name: n for name, n in found.items() if call.scene.group(name, call.launcher) in ("kv", "scales")}
        for argument, other in call.others.items():
            its = other.scene
            marked = Marked(its, its.tables())
            for token in _listed(its):
                marked.token(token)
            sectors = {name: n for name, n in marked.sectors().items() if n and name.partition("[")[0] in its.pools}
            found |= {f"{argument}.{name}": n for name, n in sectors.items()}
        return found

    def planning(self, call: Call) -> dict[str, int]:
        """Every request's length, or those of lists."""
        if not self.sparse:
            return super().planning(call)
        planned = {p.name for p in call.launcher.PLAN.arguments}
        return {name: -(-a.nbytes // SECTOR) for name, a in call.arrays.items() if name in planned}

    def batches(self, kernels: KernelSet, totals: Totals) -> list[Workload]:
        """Lists of more tiles than wait in shared memory, besides."""
        if not self.sparse:
            return super().batches(kernels, totals)
        rate = kernels.kv.entry_tokens
        return [Workload("long", totals(attention.LONG * rate, LISTED * rate), (1, 1), listed=LISTED)]

    def compare(self, j: Comparison) -> int:
        op, kernels = self.op, j.case.scene.kernels
        kind, (keys,) = kernels.kv.dtype, j.wanted.rows(j.case.scene)
        given = Numerics(
            op.softmax_scale(kernels),
            kind,
            op.out_dtype or kind,
            op.rows,
            sinks=j.arrays.get("sinks"),
            sinks_in_lse=op.sinks == "lse",
            lse_base=op.lse_base,
            lse_empty=op.lse_empty,
        )
        how: dict[str, Any] = {"scale": given.scale, "lse_base": op.lse_base, "lse_empty": op.lse_empty}
        how |= {"sinks": given.sinks, "sinks_in_lse": given.sinks_in_lse}
        if op.sparse:
            lists = [_lists(j, j.case.scene, keys, "")]
            for argument, other in j.case.call.others.items():
                (rows,) = j.wanted.others[argument].rows(other.scene)
                lists.append(_lists(j, other.scene, rows, argument.removesuffix("cache")))
            wanted = mla_decode_sparse(lists, j.arrays["q"], v_dim=j.arrays["out"].shape[2], **how)
        else:
            offsets = j.arrays.get("row_offsets")
            wanted = mla_decode(j.view, keys, j.arrays["q"], rows=op.rows, row_offsets=offsets, **how)
        return attention.take_attended(j, wanted, given)


def _listed(scene: Scene) -> Iterator[Token]:
    """The tokens that the lists of a cache name."""
    for b, total in enumerate(scene.workload.totals):
        for position in tokens_of_query(scene, b, selected(scene)).tolist():
            yield Token(b, position, None, total)


def _lists(j: Comparison, scene: Scene, rows: StoredRows, prefix: str) -> Listed:
    """The lists of rows of a cache."""
    lists = j.arrays[f"{prefix}indices"], j.arrays.get(f"{prefix}topk_lengths")
    return Listed(rows, scene.pages, scene.tokens, *lists)
