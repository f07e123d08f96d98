"""How large the cache becomes, and that its two hidden blocks are what they promise."""

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from executor_svc.kv_cache import KvCache, KvShape, cgroup_available, host_available, plan_num_blocks

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
BLOCK = 2 * 3 * 4 * 2 * 8 * 4


def planned(**changes: int | float) -> int:
    values: dict[str, int | float] = {
        "available_bytes": 100 * BLOCK,
        "share": 0.5,
        "useful_blocks": 1000,
        "blocks_per_sequence": 8,
    }
    return plan_num_blocks(SHAPE, **(values | changes))  # type: ignore[arg-type]


def test_a_block_costs_keys_and_values_of_all_layers() -> None:
    assert SHAPE.block_bytes == BLOCK


def test_measured_size_is_a_share_and_never_more_than_is_useful() -> None:
    assert planned() == 50
    assert planned(share=0.25) == 25
    assert planned(useful_blocks=30) == 30


def test_explicit_sizes_win() -> None:
    assert planned(num_blocks=70, cache_bytes=10 * BLOCK) == 70
    assert planned(cache_bytes=10 * BLOCK + 5) == 10


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_blocks": 101}, "num_blocks"),
        ({"cache_bytes": 101 * BLOCK}, "kv_cache_memory"),
        ({"cache_bytes": BLOCK - 1}, "kv_cache_memory"),
        ({"available_bytes": 2 * BLOCK}, "kv_cache_memory"),
        ({"available_bytes": -5}, "kv_cache_memory"),
    ],
)
def test_what_does_not_fit_is_said_with_its_numbers(changes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(**changes)
    assert error.value.field == field
    assert str(BLOCK) in error.value.message or error.value.limit


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "300"}, 700),
        ({"memory.max": "1000", "memory.current": "1300"}, 0),
        ({"memory.max": "max", "memory.current": "300"}, None),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"}, 800),
        ({"memory/memory.limit_in_bytes": str((1 << 63) - 4096), "memory/memory.usage_in_bytes": "1"}, None),
        ({"memory.max": "nonsense", "memory.current": "1"}, None),
        ({}, None),
    ],
)
def test_control_groups_bound_the_memory(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert cgroup_available(tmp_path) == expected


def test_host_memory_is_measured() -> None:
    assert host_available() > 0


def make_cache(num_blocks: int = 5) -> KvCache:
    return KvCache(SHAPE, num_blocks, lambda size, dtype: torch.zeros(size, dtype=dtype))


def test_writes_go_to_their_slots_and_hidden_blocks_lie_behind() -> None:
    cache = make_cache()
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    cache.write(1, torch.tensor([6, cache.sink_block * 4]), k, v)
    assert torch.equal(cache.keys[1][1, 2], k[0]) and torch.equal(cache.values[1][1, 2], v[0])
    assert not cache.data[[0, 2]].any()
    assert not cache.data[:, :, cache.null_block].any()
    assert int((cache.data[1, 0, : cache.num_blocks] != 0).any(-1).any(-1).sum()) == 1


def test_copies_read_all_before_they_write() -> None:
    cache = make_cache()
    cache.data.copy_(torch.randn_like(cache.data))
    before = cache.data.clone()
    cache.copy_blocks(torch.tensor([0, 1]), torch.tensor([1, 0]))
    assert torch.equal(cache.data[:, :, 1], before[:, :, 0])
    assert torch.equal(cache.data[:, :, 0], before[:, :, 1])
    assert torch.equal(cache.data[:, :, 2:], before[:, :, 2:])


def test_slots_are_cleaned_in_every_layer_and_nowhere_else() -> None:
    cache = make_cache()
    cache.data.fill_(1.0)
    cache.clean_slots(torch.tensor([6, 7]))
    assert not cache.data[:, :, 1, 2:].any()
    assert cache.data.sum() == cache.data.numel() * (1 - 2 / (cache.data.shape[2] * cache.data.shape[3]))
