"""Backend "triton": attention that reads the paged cache where it lies, by kernels of our own.

Block tables and lengths are read by row on the device, so a decode step gathers nothing and its launches hang on the
batch alone: one graph a bucket holds for every context. `exact` sums keys between fixed borders, in float32: a token's
bits then depend neither on the batch nor on chunks nor on who was in the cache before.
"""

import torch

from executor_svc.attention.base import Attend
from executor_svc.attention.layout import AttentionShape, StepLayout
from executor_svc.kernels.decode_attention import (
    DecodeSplit,
    DecodeWorkspace,
    decode_attention,
    even_split,
    fixed_split,
)
from executor_svc.kernels.kv_write import write_kv
from executor_svc.kernels.prefill_attention import prefill_attention
from executor_svc.kernels.rotary import rotate_and_write
from executor_svc.kv_cache import KvCache

# Keys summed in one part in exact numerics; a constant, as bits hang on it.
EXACT_PART = 512


class TritonAttention:
    """Keeps nothing between steps: a graph's workspace lies in the graph's memory."""

    def __init__(self, shape: AttentionShape, *, exact: bool) -> None:
        self._shape = shape
        self._exact = exact

    @property
    def name(self) -> str:
        return "triton"

    @property
    def gathers(self) -> bool:
        return False

    def begin(self, cache: KvCache, layout: StepLayout) -> Attend:
        return (_Step if self._exact else _FusedStep)(self._shape, self._exact, cache, layout)


class _Step:
    """One step's attention over all layers, which share one workspace."""

    def __init__(self, shape: AttentionShape, exact: bool, cache: KvCache, layout: StepLayout) -> None:
        self._shape = shape
        self._exact = exact
        self._cache = cache
        self._layout = layout
        self._num_slots = cache.num_blocks * cache.shape.block_size
        if layout.decode is not None:
            batch, tables = layout.decode.rows.shape[0], layout.tables
            # Not the lengths there are: what a row can ever hold.
            longest = tables.block_tables.shape[1] * tables.block_size
            self._split: DecodeSplit = (
                fixed_split(longest, EXACT_PART) if exact else even_split(batch, shape.num_kv_heads, longest)
            )
            self._workspace = DecodeWorkspace.make(
                batch, shape.num_heads, shape.head_dim, self._split, tables.lengths.device
            )

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache = self._cache
        write_kv(k, v, self._layout.slots, cache.key_slots[layer], cache.value_slots[layer], self._num_slots)
        return self._attend(layer, q)

    def _attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Keys and values of this step are in the cache."""
        shape, cache, layout = self._shape, self._cache, self._layout
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if layout.columns is not None:
            prefill_attention(
                q, cache.keys[layer], cache.values[layer], layout.tables.block_tables,
                layout.columns.rows, layout.columns.columns, out,
                scale=shape.scale, window=shape.windows[layer], split_tokens=EXACT_PART if self._exact else 0,
            )  # fmt: skip
        if layout.decode is not None:
            decode_attention(
                q, cache.keys[layer], cache.values[layer], layout.tables.block_tables, layout.tables.lengths,
                layout.decode.rows, out,
                scale=shape.scale, window=shape.windows[layer], split=self._split, workspace=self._workspace,
                index=layout.decode.index,
            )  # fmt: skip
        return out


class _FusedStep(_Step):
    def attend_projected(
        self,
        layer: int,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
    ) -> torch.Tensor:
        keys, values = self._cache.key_slots[layer], self._cache.value_slots[layer]
        q = rotate_and_write(
            qkv, positions, table, self._layout.slots, keys, values, self._num_slots, norms=norms, eps=eps
        )
        return self._attend(layer, q)
