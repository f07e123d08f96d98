"""All that a decode step reads of the row state before its forward pass, from `idx` alone, in one kernel."""

import torch
import triton
import triton.language as tl

from executor_svc.buffers import RowState
from executor_svc.kernels.early import await_previous, early_options
from executor_svc.kv_cache import KvCache

_BLOCK = 256
# The status of executor_svc/step_inputs.py.
FINE, PADDING = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["count", "pad_row", "sink_block", "num_slots"])
def decode_inputs_kernel(
    idx, cursor, place, dead, lengths, last_token, block_tables, rows, positions, tokens, slots, status,
    count, pad_row, sink_block, table_stride, idx_stride, num_slots,
    BLOCK_SIZE: tl.constexpr, HAS_CURSOR: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """See decode_inputs. With a cursor there is one program."""
    await_previous(EARLY)
    source = idx
    slot_at = tl.program_id(0).to(tl.int64)
    if HAS_CURSOR:
        slot_at = tl.load(cursor)
        source = idx + slot_at * idx_stride
    for start in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_there = at < count
        row = tl.load(source + at, mask=is_there, other=-1)
        row = tl.where(row < 0, pad_row, row)
        row = tl.where(tl.load(dead + row) != 0, pad_row, row)
        is_padding = row == pad_row
        position = tl.load(lengths + row) - 1
        block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
        block = tl.where(is_padding, sink_block, block)
        tl.store(rows + at, row, mask=is_there)
        tl.store(positions + at, position, mask=is_there)
        tl.store(tokens + at, tl.load(last_token + row), mask=is_there)
        tl.store(slots + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=is_there)
        tl.store(status + at, tl.where(is_padding, PADDING, FINE).to(tl.int64), mask=is_there)
    if HAS_CURSOR:
        tl.debug_barrier()  # all have read it
        tl.store(place, slot_at)
        tl.store(cursor, (slot_at + 1) % num_slots)


def decode_inputs(
    idx: torch.Tensor, state: RowState, cache: KvCache, cursor: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """idx: int64 [B], rows, -1 pads. Returns effective rows, positions, tokens, slots and status, each new, int64 [B].

    Dead rows are padding, whose slots are the sink block's. The row state stays as it is. Launch: B / 256 programs.
    With `cursor`, int64 [1], idx is [slots, B], rows of it contiguous, and the cursor names the one that counts; it
    moves on to the next, and what it was is returned too, int64 [1]. Launch: one program.
    """
    count = idx.shape[-1]
    made = tuple(torch.empty(count, dtype=torch.int64, device=idx.device) for _ in range(5))
    place = idx if cursor is None else torch.empty(1, dtype=torch.int64, device=idx.device)
    decode_inputs_kernel[(1 if cursor is not None else -(-count // _BLOCK),)](
        idx, idx if cursor is None else cursor, place, state.dead, state.length, state.last_token, state.block_tables,
        *made, count, state.pad_row, cache.sink_block, state.block_tables.stride(0), idx.stride(0), idx.shape[0],
        BLOCK_SIZE=cache.shape.block_size, HAS_CURSOR=cursor is not None, BLOCK=_BLOCK, num_warps=4,
        **early_options(),
    )  # fmt: skip
    return made if cursor is None else (*made, place)
