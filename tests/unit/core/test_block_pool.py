import numpy as np
import pytest

from scheduler_svc.core.block_pool import BlockPool


def _table(blocks: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(blocks, dtype=np.int64)


def test_allocate_and_free_conserve_blocks() -> None:
    pool = BlockPool(8, use_cache=True)
    first = pool.allocate(5)
    assert len(set(first)) == 5 and pool.available == 3
    assert pool.can_allocate(3) and not pool.can_allocate(4)
    pool.free(_table(first))
    assert pool.available == 8 and pool.num_free == 8


def test_a_shared_block_lives_until_its_last_user() -> None:
    pool = BlockPool(4, use_cache=True)
    assert pool.cache is not None
    (block,) = pool.allocate(1)
    pool.cache.register([b"h"], [block])
    pool.share([block])
    pool.free(_table([block]))
    assert pool.available == 3
    pool.free(_table([block]))
    assert pool.available == 4 and pool.cache.idle_blocks() == (block,)
    pool.share([block])
    assert pool.available == 3 and pool.cache.idle_blocks() == ()


def test_free_blocks_go_before_cached_ones_and_tails_before_heads() -> None:
    pool = BlockPool(6, use_cache=True)
    assert pool.cache is not None
    table = pool.allocate(4)
    pool.cache.register([bytes([i]) for i in range(4)], table)
    pool.free(_table(table))
    assert len(pool.allocate(2)) == 2 and len(pool.cache) == 4, "nothing cached is given away while others are free"
    assert pool.allocate(3) == [table[3], table[2], table[1]], "the tail of a prefix goes first"
    assert pool.cache.match([b"\0", b"\1"], 2) == [table[0]]


def test_limbo_counts_only_what_becomes_free() -> None:
    pool = BlockPool(6, use_cache=True)
    assert pool.cache is not None
    table = pool.allocate(3)
    pool.cache.register([b"h"], table[:1])
    pool.share(table[:1])
    pool.enter_limbo(_table(table))
    assert pool.num_limbo() == 2, "the shared head stays with its other user"
    pool.leave_limbo(_table(table))
    pool.free(_table(table))
    assert pool.num_limbo() == 0 and pool.available == 5


def test_without_a_cache_nothing_is_kept() -> None:
    pool = BlockPool(3, use_cache=False)
    pool.free(_table(pool.allocate(3)))
    assert pool.cache is None and pool.num_free == 3
    with pytest.raises(AssertionError):
        pool.allocate(4)
