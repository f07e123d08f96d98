"""Backend "torch": paged attention from torch's own operators, for any device.

Decode rows are one batch: their blocks are gathered into a workspace that is kept between steps, then one fused
attention runs over it with the heads of a group as its queries, so that keys are never repeated. A chunk of a prompt
is one fused attention of its own.
"""

import torch
import torch.nn.functional as F

from executor_svc.attention.base import Attend
from executor_svc.attention.layout import AttentionShape, PrefillPart, StepLayout
from executor_svc.kv_cache import KvCache


class _Workspace:
    """Gathered keys and values of one layer's decode rows. Grows to the largest step seen and stays.

    On the CPU alone: there fresh memory costs a page fault for each 4 KiB. CUDA's allocator keeps memory by itself, and
    a captured graph must own the addresses it uses.
    """

    def __init__(self) -> None:
        self._flat: list[torch.Tensor | None] = [None, None]

    def gather(self, which: int, blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """blocks: [num_blocks, block_size, kv_heads, head_dim]; tables: [B, n]. Returns [B, n * block_size, ...]."""
        if blocks.is_cuda:
            return blocks.index_select(0, tables.reshape(-1)).view(tables.shape[0], -1, *blocks.shape[2:])
        size = tables.numel() * blocks[0].numel()
        flat = self._flat[which]
        if flat is None or flat.numel() < size or flat.dtype != blocks.dtype:
            # Doubled, so that sequences that grow block by block do not each time ask for a little more.
            capacity = 1 << (size - 1).bit_length()
            flat = self._flat[which] = torch.empty(capacity, dtype=blocks.dtype, device=blocks.device)
        out = flat[:size].view(tables.numel(), *blocks.shape[1:])
        torch.index_select(blocks, 0, tables.reshape(-1), out=out)
        return out.view(tables.shape[0], -1, *blocks.shape[2:])


class TorchPagedAttention:
    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._workspace = _Workspace()

    @property
    def name(self) -> str:
        return "torch"

    @property
    def gathers(self) -> bool:
        return True

    def begin(self, cache: KvCache, layout: StepLayout) -> Attend:
        return _Step(self._shape, self._workspace, cache, layout)


class _Step:
    """One step's attention over all layers. Masks are made once for each window length."""

    def __init__(self, shape: AttentionShape, workspace: _Workspace, cache: KvCache, layout: StepLayout) -> None:
        self._shape = shape
        self._workspace = workspace
        self._cache = cache
        self._layout = layout
        tables, decode = layout.tables, layout.decode
        self._prefill_tables = [tables.gather(part.row, part.start + part.count)[0] for part in layout.prefills]
        if decode is not None:
            self._decode_tables = tables.gather(decode.rows, decode.max_length)
            self._decode_lengths = tables.lengths.index_select(0, decode.rows)
        self._decode_masks: dict[int, torch.Tensor] = {}
        self._prefill_masks: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        self._cache.write(layer, layout.slots, k, v)
        if layout.decode is not None and layout.decode.index is None:
            return self._decode(layer, q)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for number, part in enumerate(layout.prefills):
            own = slice(part.first, part.first + part.count)
            out[own] = self._prefill(layer, number, part, q[own], k[own], v[own])
        if layout.decode is not None and layout.decode.index is not None:
            index = layout.decode.index
            out.index_copy_(0, index, self._decode(layer, q.index_select(0, index)))
        return out

    def _decode(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        batch = q.shape[0]
        keys = self._workspace.gather(0, self._cache.keys[layer], self._decode_tables).transpose(1, 2)
        values = self._workspace.gather(1, self._cache.values[layer], self._decode_tables).transpose(1, 2)
        window = shape.windows[layer]
        mask = self._decode_masks.get(window)
        if mask is None:
            mask = _decode_mask(self._decode_lengths, keys.shape[2], window, shape.group, q.dtype)
            self._decode_masks[window] = mask
        grouped = q.view(batch, shape.num_kv_heads, shape.group, shape.head_dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=shape.scale)
        return out.reshape(batch, shape.num_heads, shape.head_dim)

    def _prefill(
        self, layer: int, number: int, part: PrefillPart, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        shape = self._shape
        window = shape.windows[layer]
        queries = q.transpose(0, 1).unsqueeze(0)
        total = part.start + part.count
        if part.start == 0 and not 0 < window < total:
            keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (k, v))
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=shape.scale, enable_gqa=shape.group > 1
            )
            return out[0].transpose(0, 1)
        keys, values = (
            blocks[layer]
            .index_select(0, self._prefill_tables[number])
            .flatten(0, 1)[:total]
            .transpose(0, 1)
            .unsqueeze(0)
            for blocks in (self._cache.keys, self._cache.values)
        )
        mask = self._prefill_masks.get((number, window))
        if mask is None:
            mask = self._prefill_masks[number, window] = causal_mask(part.start, part.count, total, window, q.device)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=shape.scale, enable_gqa=shape.group > 1
        )
        return out[0].transpose(0, 1)


def _decode_mask(lengths: torch.Tensor, width: int, window: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive, [B, 1, group, width]."""
    positions = torch.arange(width, device=lengths.device)
    lengths = lengths[:, None]
    hidden = positions >= lengths
    if window:
        hidden |= positions < lengths - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    return mask[:, None, None, :].expand(-1, 1, group, -1)


def causal_mask(start: int, count: int, total: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [count, total]; True: query start + i sees key j."""
    queries = torch.arange(start, start + count, device=device)[:, None]
    keys = torch.arange(total, device=device)
    seen = keys <= queries
    if window:
        seen &= keys > queries - window
    return seen
