import hashlib

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from common.messages import u32
from scheduler_svc.core.prefix_cache import Kept, PrefixCache, extend_hashes, head_hash


def _hashes(tokens: list[int], block_size: int = 4, salt: bytes = b"", count: int | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, u32(tokens), block_size, salt, len(tokens) // block_size if count is None else count)
    return hashes


def _evict(cache: PrefixCache, count: int) -> set[int]:
    evicted = [block for piece in cache.evict(count) for block in piece.tolist()]
    assert len(set(evicted)) == len(evicted) == count
    return set(evicted)


def test_a_hash_covers_tokens_parents_and_salt() -> None:
    base = _hashes([1, 2, 3, 4, 5, 6, 7, 8])
    assert _hashes([1, 2, 3, 4, 5, 6, 7, 9])[0] == base[0]
    assert _hashes([1, 2, 3, 4, 5, 6, 7, 9])[1] != base[1]
    assert _hashes([0, 2, 3, 4, 5, 6, 7, 8])[1] != base[1], "the same block behind another head"
    assert not set(_hashes([1, 2, 3, 4, 5, 6, 7, 8], salt=b"s")) & set(base)
    assert _hashes([1, 2, 3, 4, 1, 2, 3, 4])[0] != _hashes([1, 2, 3, 4, 1, 2, 3, 4])[1]


def test_the_chain_grows_in_place() -> None:
    tokens = list(range(40))
    hashes = _hashes(tokens[:12])
    extend_hashes(hashes, u32(tokens), 4, b"", 10)
    assert hashes == _hashes(tokens)
    extend_hashes(hashes, u32(np.zeros(40)), 4, b"", 3)
    assert len(hashes) == 10, "what is there is not computed again"


def test_only_full_blocks_in_a_row_match() -> None:
    cache, hashes = PrefixCache(16), _hashes(list(range(16)))
    cache.register([hashes[0], hashes[1], hashes[3]], [10, 11, 13])
    assert cache.match(hashes, 4) == [10, 11]
    assert cache.match(hashes, 1) == [10]


def test_the_first_block_with_some_tokens_is_kept() -> None:
    cache = PrefixCache(16)
    version = cache.version
    cache.register([b"a", b"a", b"b"], [1, 2, 1])
    assert cache.version == version + 1 and len(cache) == 1
    assert cache.holds(1) and not cache.holds(2)


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache(16)
    cache.register([b"a", b"b", b"c"], [1, 2, 3])
    assert cache.keep([2]) == [] and cache.keep([1, 7]) == [7], "what is not registered is nothing to keep"
    assert cache.keep([3]) == []
    assert cache.use([1, 4]) == [4], "who was not idle was in use"
    assert cache.keep([1]) == []
    assert _evict(cache, 1) == {2} and _evict(cache, 1) == {3} and _evict(cache, 1) == {1}
    assert len(cache) == 0 and cache.match([b"a"], 1) == []


def test_what_is_evicted_in_part_is_the_next_to_be_evicted() -> None:
    cache = PrefixCache(16)
    cache.register([b"a", b"b", b"c", b"d"], [1, 2, 3, 4])
    cache.keep([1, 2, 3])
    cache.keep([4])
    assert [_evict(cache, 1) for _ in range(4)] == [{3}, {2}, {1}, {4}]


def test_no_two_different_inputs_are_the_same_bytes() -> None:
    """A salt may say anything: what looks like a field, a digest or a block's content stays a salt."""
    block = u32([1, 2, 3, 4])
    head = head_hash(b"")
    (first,) = _hashes([1, 2, 3, 4])
    parent, tokens = (32).to_bytes(8, "little"), (16).to_bytes(8, "little")
    as_block = b"p" + parent + head + b"t" + tokens + block.tobytes()
    assert hashlib.blake2b(b"B" + as_block, digest_size=32).digest() == first
    salts = [b"", b"s", head, first, as_block, as_block[1:], b"\0", b"\0\0", block.tobytes()]
    heads = [head_hash(salt) for salt in salts]
    assert len({*heads, first}) == len(salts) + 1
    # Two blocks of 2 are not one of 4, and a block of 1-token pieces hashes apart from both.
    assert not set(_hashes([1, 2, 3, 4], 2)) & {first} and not set(_hashes([1, 2, 3, 4], 1)) & {first}


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_heads_are_equal_only_for_equal_salts(one: bytes, other: bytes) -> None:
    assert (head_hash(one) == head_hash(other)) == (one == other)


# ---------------------------------------------------------------------------------------------------------------- tails

TOKENS = list(range(24))
CHAIN = _hashes(TOKENS)  # six blocks of four: two of a prompt, four of an answer


def _with_tail(*blocks: int) -> PrefixCache:
    """Blocks 1 and 2 hold the prompt, `blocks` the answer; all idle."""
    cache = PrefixCache(16)
    cache.register(CHAIN[:2], [1, 2])
    cache.keep([1, 2], Kept(u32([1, 2, *blocks]), 2, CHAIN[1], u32(TOKENS[8:]), 4))
    return cache


def test_a_tail_is_found_by_who_goes_on_with_it() -> None:
    cache = _with_tail(3, 4, 5, 6)
    version, size = cache.version, len(cache)
    assert cache.match(CHAIN, 2) == [1, 2] and not cache.holds(3), "the same prompt alone does not need it hashed"
    assert cache.match(CHAIN, 6) == [1, 2, 3, 4, 5, 6]
    assert cache.version > version and len(cache) == size == 6 and cache.num_idle == 6
    assert all(cache.holds(block) for block in range(1, 7)) and not cache.tail_blocks() and not cache.take_spare()
    assert cache.idle_blocks() == (2, 1, 6, 5, 4, 3), "who was asked for goes last"


def test_who_goes_on_otherwise_finds_the_common_head() -> None:
    cache = _with_tail(3, 4, 5, 6)
    other = _hashes([*TOKENS[:16], 99, 98, 97, 96])
    assert cache.match(other, 5) == [1, 2, 3, 4]


def test_a_tail_is_evicted_from_its_end_and_the_rest_is_still_found() -> None:
    cache = _with_tail(3, 4, 5, 6)
    assert cache.idle_blocks() == (6, 5, 4, 3, 2, 1)
    assert _evict(cache, 2) == {6, 5} and cache.num_idle == len(cache) == 4
    assert cache.match(CHAIN, 6) == [1, 2, 3, 4]


def test_a_head_that_is_asked_for_leaves_its_tail_where_it_was() -> None:
    cache = _with_tail(3, 4)
    cache.register([b"x"], [9])
    cache.keep([9])
    assert cache.use(cache.match(CHAIN, 2)) == []
    assert cache.idle_blocks() == (4, 3, 9) and not cache.is_idle(1) and cache.holds(1)
    assert cache.match(CHAIN, 6) == [1, 2, 3, 4] and cache.idle_blocks() == (9, 4, 3)
    cache.keep([1])
    assert cache.idle_blocks() == (9, 4, 3, 1) and cache.num_idle == 4
    assert _evict(cache, 2) == {9, 4} and cache.match(CHAIN, 6) == [1, 2, 3]


def test_an_evicted_tail_leaves_nothing_behind() -> None:
    cache = _with_tail(3, 4)
    assert _evict(cache, 2) == {4, 3} and not cache.tail_blocks() and cache.idle_blocks() == (2, 1)
    assert _evict(cache, 1) == {2} and not cache.holds(2)
    assert cache.num_idle == len(cache) == 1 and cache.idle_blocks() == (1,)


def test_of_equal_tails_one_is_kept() -> None:
    cache = _with_tail(3, 4)
    cache.keep([], Kept(u32([1, 2, 7, 8, 9]), 2, CHAIN[1], u32(TOKENS[8:]), 4))
    assert cache.match(CHAIN, 6) == [1, 2, 3, 4, 9]
    assert sorted(cache.take_spare()) == [7, 8] and cache.num_idle == len(cache) == 5


def test_clear_gives_up_tails_too() -> None:
    cache = _with_tail(3, 4)
    assert cache.clear() == [4, 3, 2, 1] and len(cache) == cache.num_idle == 0 and not cache.tail_blocks()
    assert cache.match(CHAIN, 6) == []
