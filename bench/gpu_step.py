"""What bench.gpu's part "kernels" times around the layers: a step's inputs, and keys and values written alone."""

from collections.abc import Iterator

import torch

from bench.gpu_report import Row, Shape, Sizes, make_row, random_bf16
from bench.gpu_timing import Bounds, time_us
from executor_svc.buffers import RowState
from executor_svc.build import make_device
from executor_svc.kernels.decode_inputs import decode_inputs
from executor_svc.kernels.kv_write import write_kv
from executor_svc.kv_cache import KvCache, KvShape
from executor_svc.step_inputs import FINE, PADDING

BLOCK_SIZE = 16
MAX_BLOCKS = 128


def plain_decode_inputs(idx: torch.Tensor, state: RowState, cache: KvCache) -> tuple[torch.Tensor, ...]:
    """As executor_svc.kernels.decode_inputs without a cursor, by torch's operators: rows, positions, tokens, slots,
    status."""
    rows = state.effective(idx)
    positions = state.length[rows] - 1
    size = cache.shape.block_size
    blocks = state.block_tables[rows, positions // size].long()
    blocks = torch.where(rows == state.pad_row, cache.sink_block, blocks)
    status = torch.where(rows == state.pad_row, PADDING, FINE)
    return rows, positions, state.last_token[rows], blocks * size + positions % size, status


def inputs(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    """error: whether anything differs. Some rows are padding, some dead."""
    owner = make_device(device.type)
    for count in [tokens for tokens in sizes.tokens if tokens <= 256]:
        state = RowState(owner, count, MAX_BLOCKS, count, shape.vocab)
        cache = KvCache(
            KvShape(1, 1, 8, BLOCK_SIZE, torch.bfloat16), count, lambda size, dtype: owner.zeros(*size, dtype=dtype)
        )
        state.length[:-1] = torch.randint(1, MAX_BLOCKS * BLOCK_SIZE, (count,), device=device)
        state.last_token[:-1] = torch.randint(0, shape.vocab, (count,), device=device)
        state.block_tables[:-1] = torch.randint(0, count, (count, MAX_BLOCKS), device=device).to(torch.int32)
        idx = torch.randperm(count, device=device)
        idx[1::4] = -1
        state.dead[2::5] = 1
        fused, plain = decode_inputs(idx, state, cache), plain_decode_inputs(idx, state, cache)
        error = float(not all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True)))
        us = time_us([lambda i=idx, s=state, c=cache: decode_inputs(i, s, c)])  # type: ignore[misc]
        torch_us = time_us([lambda i=idx, s=state, c=cache: plain_decode_inputs(i, s, c)])  # type: ignore[misc]
        moved = count * (6 * 8 + 2 * 8 + 2 * 4)
        yield make_row("step inputs", shape, f"{count}", us, torch_us, error, moved / bounds.bytes_per_s * 1e6)
    owner.close()


def writes(shape: Shape, sizes: Sizes, bounds: Bounds, device: torch.device) -> Iterator[Row]:
    """error: whether anything differs, also where nothing is to be written: a quarter of the tokens is padding."""
    for count in sizes.tokens:
        k, v = (random_bf16(count, shape.kv_heads, shape.dim, device=device) for _ in range(2))
        keys, values = (random_bf16(count + BLOCK_SIZE, shape.kv_heads, shape.dim, device=device) for _ in range(2))
        slots = torch.randperm(count, device=device)
        slots[1::4] = count + 1  # behind the cache, as the sink is
        written = (slots < count).nonzero()[:, 0]
        places = slots[written]
        want = keys.index_copy(0, places, k[written]), values.index_copy(0, places, v[written])

        def fused(k: torch.Tensor = k, v: torch.Tensor = v, slots: torch.Tensor = slots, keys: torch.Tensor = keys,
                  values: torch.Tensor = values, count: int = count) -> None:  # fmt: skip
            write_kv(k, v, slots, keys, values, count)

        def plain(k: torch.Tensor = k, v: torch.Tensor = v, slots: torch.Tensor = slots, keys: torch.Tensor = keys,
                  values: torch.Tensor = values) -> None:  # fmt: skip
            keys.index_copy_(0, slots, k)
            values.index_copy_(0, slots, v)

        fused()
        error = float(not (torch.equal(keys, want[0]) and torch.equal(values, want[1])))
        us, torch_us = time_us([fused]), time_us([plain])
        moved = 4 * 2 * len(written) * shape.kv_heads * shape.dim
        yield make_row("cache write", shape, f"{count}", us, torch_us, error, moved / bounds.bytes_per_s * 1e6)
