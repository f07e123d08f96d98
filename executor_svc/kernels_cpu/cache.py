"""The KV cache as the CPU kernels lay it out: CacheShape of attention.h says how."""

import torch

from executor_svc.kv_cache import KvCache

_TILE = 16


class NativeCache(KvCache):
    """Written and read by the kernels alone; `data` keeps KvCache's sizes and says nothing about what lies where."""

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        raise TypeError("the CPU kernels write their cache themselves")

    def clean_slots(self, slots: torch.Tensor) -> None:
        """See KvCache."""
        shape, size = self.shape, self.shape.block_size
        if size % _TILE:
            super().clean_slots(slots)
            return
        layers, heads, dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        pieces = (layers, 2, -1, heads, size // _TILE)
        keys = self.data.view(*pieces, dim // 2, _TILE, 2)[:, 0]
        values = self.data.view(*pieces, dim // _TILE, _TILE // 2, _TILE, 2)[:, 1]
        block, piece, token = slots // size, slots % size // _TILE, slots % _TILE
        keys[:, block, :, piece, :, token] = 0
        values[:, block, :, piece, :, token // 2, :, token % 2] = 0
