"""What a step's attention must know of its batch, and the seam of the backends."""

from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.attention.base import Attend
from executor_svc.kv_cache import KvCache


@dataclass(frozen=True, slots=True, eq=False)
class DecodePart:
    """Rows with one token each. B rows; all tensors on the device.

    index: int64 [B], their places among the step's tokens; None: they are all of them, in order.
    tables: int64 [B, num_blocks]: enough for max_length tokens, entries without a block name the null block.
    lengths: int64 [B]: tokens attended to, this step's included. max_length bounds them and is known to the host.
    """

    index: torch.Tensor | None
    tables: torch.Tensor
    lengths: torch.Tensor
    max_length: int


@dataclass(frozen=True, slots=True, eq=False)
class PrefillPart:
    """A row's chunk: tokens [first, first + count) of the step are positions [start, start + count) of the row.

    table: int64 [num_blocks], for start + count tokens.
    """

    first: int
    count: int
    start: int
    table: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """slots: int64 [T], where each token's keys and values go; the sink block's for padding."""

    slots: torch.Tensor
    decode: DecodePart | None
    prefills: tuple[PrefillPart, ...]


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

    def begin(self, cache: KvCache, layout: StepLayout) -> Attend:
        """Attention for one step."""
        ...
