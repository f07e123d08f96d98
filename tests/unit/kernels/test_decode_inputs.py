"""What a decode step reads of the row state, against the same by torch's operators."""

import pytest
import torch

from bench.gpu_step import plain_decode_inputs
from executor_svc.buffers import RowState
from executor_svc.build import make_device
from executor_svc.kernels.decode_inputs import decode_inputs
from executor_svc.kv_cache import KvCache, KvShape
from tests.interpreter import DEVICE


@pytest.mark.parametrize("count", [1, 5, 130, 300])
@pytest.mark.parametrize("with_cursor", [False, True])
def test_rows_padding_and_dead_rows(count: int, with_cursor: bool) -> None:
    device = make_device(DEVICE.type)
    state = RowState(device, 400, 4, 50, 97)
    cache = KvCache(KvShape(1, 1, 8, 4, torch.float32), 50, lambda size, dtype: device.zeros(*size, dtype=dtype))
    device.close()
    generator = torch.Generator().manual_seed(count)
    state.length[:-1] = torch.randint(1, 16, (400,), generator=generator).to(DEVICE)
    state.last_token[:-1] = torch.randint(0, 97, (400,), generator=generator).to(DEVICE)
    state.block_tables[:-1] = torch.randint(0, 50, (400, 4), generator=generator).to(torch.int32).to(DEVICE)
    idx = torch.randperm(400, generator=generator)[:count].to(DEVICE)
    idx[1::4] = -1
    state.dead[idx[2::4]] = 1
    if with_cursor:
        ring = torch.full((3, count + 7), -1, device=DEVICE)
        ring[2, :count] = idx
        cursor = torch.tensor([2], device=DEVICE)
        rows, positions, tokens, slots, status, place = decode_inputs(ring[:, :count], state, cache, cursor)
        assert (int(place), int(cursor)) == (2, 0)
    else:
        rows, positions, tokens, slots, status = decode_inputs(idx, state, cache)
    got = (rows, positions, tokens, slots, status)
    assert [torch.equal(*pair) for pair in zip(got, plain_decode_inputs(idx, state, cache), strict=True)] == [True] * 5
