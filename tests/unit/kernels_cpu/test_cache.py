"""What the cache knows of the kernels' layout: a slot that is cleaned is that token's in every layer, no other's."""

from dataclasses import replace

import pytest
import torch

from executor_svc.kernels_cpu.cache import NativeCache
from executor_svc.kernels_cpu.decoder import NativeDecoder
from tests.unit.kernels_cpu.scene import Case, Scene, Work


@pytest.mark.parametrize("block_size", [16, 32, 12])
def test_a_cleaned_slot_is_what_its_token_wrote(block_size: int) -> None:
    scene = Scene(replace(Case(), block_size=block_size))
    side, tables = scene.native_side, scene.tables
    cache = NativeCache(side.cache.shape, side.cache.num_blocks, lambda size, dtype: torch.zeros(size, dtype=dtype))
    side.cache = cache
    assert isinstance(side.model, NativeDecoder)
    count = block_size + 7
    side.step([Work(0, 0, list(range(1, count + 1)))], tables)
    written = cache.data.clone()
    at = torch.arange(count)
    slots = tables[0][at // block_size] * block_size + at % block_size
    assert written.count_nonzero() > 0.99 * count * cache.data[:, :, 0, 0].numel()
    kept = (3, block_size + 2)
    cleaned = torch.tensor([int(slot) for token, slot in enumerate(slots) if token not in kept])
    cache.clean_slots(cleaned)
    left = cache.data.clone()
    assert torch.equal(left[left != 0], written[left != 0])
    # What is left is what the kernels write for the tokens that stayed.
    assert left.count_nonzero() > 0.99 * len(kept) * cache.data[:, :, 0, 0].numel()
    assert left.count_nonzero() <= len(kept) * cache.data[:, :, 0, 0].numel()
    cache.clean_slots(slots[torch.tensor(kept)])
    assert not cache.data.any()
