"""Sequences in a paged cache whose other slots are poison, and attention over them written plainly."""

from collections.abc import Sequence

import torch

from tests.interpreter import DEVICE

# Reading it is an illegal access on a device and far outside the tensor in the interpreter.
NO_BLOCK = 1 << 24


class PagedScene:
    """One layer's cache. `lengths` of the rows; blocks are handed out in no order; unused slots hold NaN."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim, self.block_size, self.dtype = heads, kv_heads, dim, block_size, dtype
        self.host_lengths = list(lengths)
        needed = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(needed) + 3, generator=self.generator)
        keys = torch.full((len(order), block_size, kv_heads, dim), torch.nan, dtype=dtype)
        values = keys.clone()
        tables = torch.full((len(lengths), max(needed)), NO_BLOCK, dtype=torch.int32)
        taken = 0
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            tables[row, :count] = order[taken : taken + count]
            taken += count
            slots = self._slots(tables, row, length)
            keys.view(-1, kv_heads, dim)[slots] = self.random(length, kv_heads, dim)
            values.view(-1, kv_heads, dim)[slots] = self.random(length, kv_heads, dim)
        self.keys, self.values, self.tables = (t.to(DEVICE) for t in (keys, values, tables))
        self.lengths = torch.tensor(self.host_lengths, device=DEVICE)

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def queries(self, count: int) -> torch.Tensor:
        """[count, heads, dim] as a model gives them: a slice of wider rows."""
        return self.random(count, self.heads + 2, self.dim).to(DEVICE)[:, : self.heads]

    def plain(self, q: torch.Tensor, row: int, position: int, window: int) -> torch.Tensor:
        """q: [heads, dim] at `position` of `row`. Returns float32 [heads, dim]."""
        first = max(0, position + 1 - window) if window else 0
        slots = self._slots(self.tables.cpu(), row, position + 1)[first:]
        group = self.heads // self.kv_heads
        keys, values = (
            t.cpu().view(-1, self.kv_heads, self.dim)[slots].float().repeat_interleave(group, 1)
            for t in (self.keys, self.values)
        )
        scores = torch.einsum("hd,khd->hk", q.cpu().float(), keys) * self.scale
        return torch.einsum("hk,khd->hd", scores.softmax(-1), values)

    def _slots(self, tables: torch.Tensor, row: int, count: int) -> torch.Tensor:
        positions = torch.arange(count)
        return tables[row, positions // self.block_size].long() * self.block_size + positions % self.block_size


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
