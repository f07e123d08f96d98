"""What a decode step reads of the row state, by torch's operators."""

import torch

from executor_svc.buffers import RowState
from executor_svc.kv_cache import KvCache
from executor_svc.step_inputs import FINE, PADDING


def plain_decode_inputs(idx: torch.Tensor, state: RowState, cache: KvCache) -> tuple[torch.Tensor, ...]:
    """As executor_svc.kernels.decode_inputs without a cursor: rows, positions, tokens, slots, status."""
    rows = state.effective(idx)
    positions = state.length[rows] - 1
    size = cache.shape.block_size
    blocks = state.block_tables[rows, positions // size].long()
    blocks = torch.where(rows == state.pad_row, cache.sink_block, blocks)
    status = torch.where(rows == state.pad_row, PADDING, FINE)
    return rows, positions, state.last_token[rows], blocks * size + positions % size, status
