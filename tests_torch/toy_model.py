"""Two layers of attention over a kvgen cache, as a model that torch.compile and torch.export take whole."""

from __future__ import annotations

import torch

from kvgen.torch import register

llama = register("generated.llama3_8b")
INDEX = llama.append.dtypes["lengths"]  # of tables and row_offsets too
WIDTH = 64


class Attention(torch.nn.Module):
    """q, k and v of `x`, the step's rows into the cache, attention to all of it, back to the width of `x`."""

    def __init__(self, layer: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        shapes = {"q": (4096, WIDTH), "k": (1024, WIDTH), "v": (1024, WIDTH), "o": (WIDTH, 4096)}
        for name, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            self.register_parameter(name, torch.nn.Parameter(drawn.to(torch.bfloat16)))

    def forward(
        self,
        x: torch.Tensor,
        cache: dict[str, torch.Tensor],
        row_offsets: torch.Tensor,
        workspace: torch.Tensor,
        errors: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = (x @ self.q.T).view(-1, 32, 128), (x @ self.k.T).view(-1, 8, 128), (x @ self.v.T).view(-1, 8, 128)
        q = llama.append.returning(**cache, layer=self.layer, q=q, k=k, v=v, row_offsets=row_offsets, errors=errors)
        out = torch.empty_like(q)
        llama.decode(**cache, layer=self.layer, q=q, out=out, workspace=workspace, errors=errors)
        return x + out.view(-1, 4096) @ self.o.T


class Model(torch.nn.Module):
    """One plan a step, then the layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(Attention(i, generator) for i in range(layers))

    def forward(
        self,
        x: torch.Tensor,
        pool: torch.Tensor,
        lengths: torch.Tensor,
        page_table: torch.Tensor,
        row_offsets: torch.Tensor,
        workspace: torch.Tensor,
        errors: torch.Tensor,
    ) -> torch.Tensor:
        cache = {"pool": pool, "lengths": lengths, "page_table": page_table}
        llama.decode.plan(**cache, layer=0, workspace=workspace, row_offsets=row_offsets, rows=x.shape[0])
        for layer in self.layers:
            x = layer(x, cache, row_offsets, workspace, errors)
        return x


def step_of(requests: int, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """The model's arguments for a row of each of up to 4 requests; equal for equal numbers."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return (
        drawn(requests, WIDTH),
        drawn(8, 2, 2, 16, 8, 128),
        torch.tensor([17, 3, 5, 9][:requests], dtype=INDEX),
        torch.tensor([[4, 1], [0, 2], [3, 5], [6, 7]][:requests], dtype=INDEX),
        torch.arange(requests + 1).to(INDEX),
        torch.zeros(llama.decode.workspace_bytes(requests), dtype=torch.uint8),
        torch.zeros(1, dtype=torch.uint64),
    )
