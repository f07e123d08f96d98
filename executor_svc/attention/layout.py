"""What a step's attention must know of its batch, and the seam of the backends."""

from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.attention.base import Attend
from executor_svc.kv_cache import KvCache


@dataclass(frozen=True, slots=True, eq=False)
class RowTables:
    """State by row that attention reads, on the device; owned by RowState, constant within a step's forward pass.

    block_tables: int32 [num_rows, max_blocks], entries without a block name the null block. lengths: int64 [num_rows].
    """

    block_tables: torch.Tensor
    lengths: torch.Tensor
    block_size: int

    def gather(self, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """int64 [B, num_blocks]: enough blocks of each row for num_tokens tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        return self.block_tables[:, :num_blocks].index_select(0, rows).to(torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class DecodePart:
    """Rows with one token each. B rows; all tensors on the device.

    index: int64 [B], their places among the step's tokens; None: they are all of them, in order.
    rows: int64 [B]; each attends to its length, this step's token included. max_length bounds the lengths and is known
    to the host.
    """

    index: torch.Tensor | None
    rows: torch.Tensor
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPart:
    """A row's chunk: tokens [first, first + count) of the step are positions [start, start + count) of the row.

    row: int64 [1], on the device.
    """

    first: int
    count: int
    start: int
    row: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PrefillColumns:
    """All chunks of the step, for a kernel. On the device, int64.

    rows: [B], of the whole batch; columns: [4, C]: the chunk's place in `rows`, first, count, start.
    """

    rows: torch.Tensor
    columns: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """slots: int64 [T], where each token's keys and values go; the sink block's for padding.

    The chunks are told twice, by row and in columns: a backend reads what suits it.
    """

    slots: torch.Tensor
    tables: RowTables
    decode: DecodePart | None
    prefills: tuple[PrefillPart, ...]
    columns: PrefillColumns | None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`windows[layer]`: positions attended to, the token's own included; 0: all before it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class AttentionBackend(Protocol):
    """Owner of whatever workspace attention needs between steps; used by the COMPUTE stream alone."""

    @property
    def name(self) -> str: ...

    @property
    def gathers(self) -> bool:
        """Whether a decode step takes memory for rows x context; its graphs are then many, their contexts bounded."""
        ...

    def begin(self, cache: KvCache, layout: StepLayout) -> Attend:
        """Attention for one step."""
        ...
