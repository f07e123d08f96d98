"""Backend "exact": attention whose result for a token depends on that token and the keys before it, and nothing else.

Keys are taken in tiles of 64 positions counted from the sequence's start, whatever the block size. A token's scores
are products with whole tiles, its softmax runs over whole tiles, and the tiles' shares of the output are added one
after the other from the first tile. Further tiles add exact zeros. So batch, chunking, block size and padding have no
way into the bits, as long as the products are batch-invariant, which `ExactOps` has made sure of.
"""

import torch

from executor_svc.attention.base import Attend
from executor_svc.attention.layout import AttentionShape, PrefillPart, StepLayout
from executor_svc.kv_cache import KvCache
from executor_svc.numerics import ExactOps

TILE = 64
# Scores one piece of a chunk may make; bounds the memory of long chunks over long contexts.
_MAX_SCORES = 8 << 20


class ExactAttention:
    def __init__(self, shape: AttentionShape, ops: ExactOps) -> None:
        self._shape = shape
        self._ops = ops

    @property
    def name(self) -> str:
        return "exact"

    @property
    def gathers(self) -> bool:
        return True

    def begin(self, cache: KvCache, layout: StepLayout) -> Attend:
        return _Step(self._shape, self._ops, cache, layout)


class _Step:
    """One step's attention over all layers. `_slots`: the tiles' places in the cache, made once a step."""

    def __init__(self, shape: AttentionShape, ops: ExactOps, cache: KvCache, layout: StepLayout) -> None:
        self._shape = shape
        self._ops = ops
        self._cache = cache
        self._layout = layout
        size = cache.shape.block_size
        tables, decode = layout.tables, layout.decode
        self._prefill_slots = [
            tile_slots(tables.gather(p.row, p.start + p.count), p.start + p.count, size) for p in layout.prefills
        ]
        self._decode_slots = self._positions = None
        if decode is not None:
            self._decode_slots = tile_slots(tables.gather(decode.rows, decode.max_length), decode.max_length, size)
            self._positions = (tables.lengths.index_select(0, decode.rows) - 1)[:, None]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layout = self._layout
        self._cache.write(layer, layout.slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part, slots in zip(layout.prefills, self._prefill_slots, strict=True):
            out[part.first : part.first + part.count] = self._prefill(layer, part, slots, q)
        if layout.decode is not None:
            index = layout.decode.index
            if index is None:
                return self._decode(layer, q)
            out.index_copy_(0, index, self._decode(layer, q.index_select(0, index)))
        return out

    def _decode(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        assert self._positions is not None and self._decode_slots is not None
        return self._attend(layer, q[:, None], self._positions, self._decode_slots)[:, 0]

    def _prefill(self, layer: int, part: PrefillPart, slots: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        piece = max(1, _MAX_SCORES // (slots.shape[1] * self._shape.num_heads))
        pieces = []
        for begin in range(0, part.count, piece):
            count = min(piece, part.count - begin)
            first, start = part.first + begin, part.start + begin
            positions = torch.arange(start, start + count, device=q.device)[None]
            pieces.append(self._attend(layer, q[None, first : first + count], positions, slots)[0])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _attend(self, layer: int, q: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """q: [B, n, heads, dim]; positions: [B, n]; slots: [B, tiles * TILE]. Returns [B, n, heads, dim]."""
        shape, ops = self._shape, self._ops
        batch, count = q.shape[:2]
        heads, group, dim = shape.num_kv_heads, shape.group, shape.head_dim
        width = slots.shape[1]
        tiles = width // TILE
        keys, values = (
            slotted[layer]
            .index_select(0, slots.reshape(-1))
            .view(batch, tiles, TILE, heads, dim)
            .permute(0, 3, 1, 2, 4)
            for slotted in (self._cache.key_slots, self._cache.value_slots)
        )  # [B, kv_heads, tiles, TILE, dim]
        # [B, kv_heads, n * group, dim], the scale in the queries.
        queries = (q * shape.scale).view(batch, count, heads, group, dim).transpose(1, 2).reshape(batch, heads, -1, dim)
        spread = queries[:, :, None].expand(-1, -1, tiles, -1, -1).reshape(-1, count * group, dim)
        scores = ops.matmul(spread, keys.transpose(-1, -2).reshape(-1, dim, TILE))
        scores = scores.view(batch, heads, tiles, count * group, TILE).transpose(2, 3)
        scores = scores.reshape(batch, heads, count, group, width)
        hidden = _hidden(positions, width, shape.windows[layer])
        weights = _softmax(scores.masked_fill_(hidden[:, None, :, None, :], float("-inf")))
        weights = weights.view(batch, heads, count * group, tiles, TILE).transpose(2, 3)
        parts = ops.matmul(weights.reshape(-1, count * group, TILE), values.reshape(-1, TILE, dim))
        parts = parts.view(batch, heads, tiles, count * group, dim)
        total = parts[:, :, 0]
        for tile in range(1, tiles):
            total = total + parts[:, :, tile]
        return total.view(batch, heads, count, group, dim).transpose(1, 2).reshape(batch, count, heads * group, dim)


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, whole tiles; further ones, all -inf, change no bit."""
    # torch's kernels for CUDA add few numbers in another order than many.
    return tiled_softmax(scores) if scores.is_cuda else scores.softmax(-1)


def tiled_softmax(scores: torch.Tensor) -> torch.Tensor:
    """As _softmax, by operations on elements alone: halves of a tile are added, then the tiles from the first on. The
    largest is the same in any order."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    sums = weights.view(*weights.shape[:-1], -1, TILE)
    while (half := sums.shape[-1] // 2) > 0:
        sums = sums[..., :half] + sums[..., half:]
    total = sums[..., 0, :]
    for tile in range(1, sums.shape[-2]):
        total = total + sums[..., tile, :]
    return weights.div_(total)


def _hidden(positions: torch.Tensor, width: int, window: int) -> torch.Tensor:
    """bool [B, n, width]: keys a query does not see."""
    keys = torch.arange(width, device=positions.device)
    hidden = keys > positions[..., None]
    if window:
        hidden |= keys <= positions[..., None] - window
    return hidden


def tile_slots(tables: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """Cache slots of positions 0 .. whole tiles over `length`. tables: int64 [B, n]. Returns int64 [B, tiles * TILE].

    Positions behind the table repeat its last block: they are masked, and what they name is finite.
    """
    positions = torch.arange(-(-length // TILE) * TILE, device=tables.device)
    blocks = (positions // block_size).clamp_(max=tables.shape[1] - 1)
    return tables.index_select(1, blocks) * block_size + positions % block_size
