import pytest

from common.messages import u32
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.prefix_cache import Kept


def test_allocate_and_free_conserve_blocks() -> None:
    pool = BlockPool(8, use_cache=True)
    first = pool.allocate(5)
    assert len(set(first)) == 5 and pool.available == 3
    assert pool.can_allocate(3) and not pool.can_allocate(4)
    pool.free(first, 0)
    assert pool.available == 8 and pool.num_free == 8


def test_a_shared_block_lives_until_its_last_user() -> None:
    pool = BlockPool(4, use_cache=True)
    assert pool.cache is not None
    table = pool.allocate(1)
    (block,) = table.tolist()
    pool.cache.register([b"h"], [block])
    pool.share([block])
    assert (pool.num_users(block), pool.shared_blocks()) == (2, (block,))
    pool.free(table, 1)
    assert pool.available == 3 and pool.num_users(block) == 1 and not pool.shared_blocks()
    pool.free(table, 1)
    assert pool.available == 4 and pool.cache.idle_blocks() == (block,)
    pool.share([block])
    assert pool.available == 3 and pool.cache.idle_blocks() == ()


def test_free_blocks_go_before_cached_ones_and_tails_before_heads() -> None:
    pool = BlockPool(6, use_cache=True)
    assert pool.cache is not None
    table = pool.allocate(4)
    pool.cache.register([bytes([i]) for i in range(4)], table.tolist())
    pool.free(table, 4)
    assert len(pool.allocate(2)) == 2 and len(pool.cache) == 4, "nothing cached is given away while others are free"
    assert set(pool.allocate(3)) == set(table[1:]), "the tail of a prefix goes first"
    assert pool.cache.match([b"\0", b"\1"], 2) == [table[0]]


def test_limbo_counts_only_what_becomes_free() -> None:
    pool = BlockPool(6, use_cache=True)
    assert pool.cache is not None
    table = pool.allocate(3)
    pool.cache.register([b"h"], table[:1].tolist())
    pool.share(table[:1].tolist())
    assert pool.num_freed_by([table]) == 2, "the shared head stays with its other user"
    assert pool.num_freed_by([table, table[:1]]) == 3, "unless that one goes too"
    assert pool.num_freed_by([]) == 0
    pool.free(table, 1)
    assert pool.available == 5


def test_without_a_cache_nothing_is_kept() -> None:
    pool = BlockPool(3, use_cache=False)
    pool.free(pool.allocate(3), 0)
    assert pool.cache is None and pool.num_free == 3
    with pytest.raises(AssertionError):
        pool.allocate(4)


@pytest.mark.parametrize("use_cache", [True, False])
def test_blocks_in_use_are_shared_whether_cached_or_not(use_cache: bool) -> None:
    pool = BlockPool(4, use_cache)
    blocks = pool.allocate(2)
    pool.share(blocks.tolist())
    pool.free(blocks, 2)
    assert pool.available == 2, "the other user holds them"
    pool.free(blocks, 2)
    assert pool.available == pool.num_free == 4


def test_a_tail_stays_until_it_is_evicted_and_what_is_behind_it_is_free_at_once() -> None:
    pool = BlockPool(8, use_cache=True)
    assert pool.cache is not None
    table = pool.allocate(6)
    pool.cache.register([b"a", b"b"], table[:2].tolist())
    pool.share(table[:1].tolist())
    pool.free(table, 2, Kept(table[:5].copy(), 2, b"b", u32(range(6)), 2))
    assert (pool.num_free, pool.available) == (3, 7), "one block is shared, one idle, three are the tail's"
    assert len(pool.allocate(3)) == 3
    assert set(pool.allocate(2)) == {table[4], table[3]}
    assert pool.cache.idle_blocks() == (table[2], table[1])


def test_a_reset_frees_what_is_idle_and_forgets_what_is_used() -> None:
    pool = BlockPool(6, use_cache=True)
    assert pool.cache is not None
    idle, used = pool.allocate(2), pool.allocate(3)
    pool.cache.register([b"a", b"b", b"c"], [*idle.tolist(), int(used[0])])
    pool.free(idle, 2)
    assert (pool.num_free, pool.available) == (1, 3)
    assert pool.reset_cache() == (2, 1)
    assert (pool.num_free, pool.available, len(pool.cache)) == (3, 3, 0)
    assert pool.cache.match([b"a"], 1) == pool.cache.match([b"c"], 1) == []
    pool.free(used, 1)
    assert pool.num_free == 6 and pool.reset_cache() == (0, 0)
    assert sorted(pool.allocate(6).tolist()) == list(range(6))
    assert BlockPool(3, use_cache=False).reset_cache() == (0, 0)


def test_a_few_that_are_idle_longest_are_evicted_with_the_one_that_is_needed() -> None:
    pool = BlockPool(1024, use_cache=True)
    assert pool.cache is not None
    table = pool.allocate(1024)
    pool.cache.register([str(block).encode() for block in table.tolist()], table.tolist())
    pool.free(table, 1024)
    oldest = table[::-1].tolist()
    first = pool.allocate(1).tolist()
    assert (pool.num_free, pool.available) == (3, 1023) and not any(map(pool.cache.holds, oldest[:4]))
    assert {*first, *pool.allocate(3).tolist()} == set(oldest[:4]) and len(pool.cache) == 1020
    assert set(pool.allocate(1020).tolist()) == set(oldest[4:]) and pool.available == 0, "no more than there are"


def test_a_few_are_evicted_early_while_as_many_are_not_free() -> None:
    pool = BlockPool(1024, use_cache=True)
    assert pool.cache is not None
    pool.evict_early()
    table = pool.allocate(1024)
    pool.evict_early()
    assert pool.available == 0, "all are in use"
    pool.cache.register([str(block).encode() for block in table.tolist()], table.tolist())
    pool.free(table, 1024)
    for _ in range(2):
        pool.evict_early()
        assert (pool.num_free, len(pool.cache)) == (4, 1020)
    assert pool.allocate(1).tolist() in [[block] for block in table[-4:].tolist()]
    pool.evict_early()
    assert (pool.num_free, len(pool.cache)) == (7, 1016), "one was taken"
    small = BlockPool(255, use_cache=True)
    assert small.cache is not None
    small.cache.register([b"a"], small.allocate(255).tolist()[:1])
    small.evict_early()
    assert len(small.cache) == 1, "of a small pool it would be too much"
