import numpy as np

from common.messages import u32
from scheduler_svc.core.prefix_cache import PrefixCache, extend_hashes


def _hashes(tokens: list[int], block_size: int = 4, salt: bytes = b"", count: int | None = None) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, u32(tokens), block_size, salt, len(tokens) // block_size if count is None else count)
    return hashes


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
    cache, hashes = PrefixCache(), _hashes(list(range(16)))
    for index in (0, 1, 3):
        assert cache.register(hashes[index], 10 + index)
    assert cache.match(hashes, 4) == [10, 11]
    assert cache.match(hashes, 1) == [10]


def test_the_first_block_with_some_tokens_is_kept() -> None:
    cache = PrefixCache()
    version = cache.version
    assert cache.register(b"a", 1)
    assert not cache.register(b"a", 2) and not cache.register(b"b", 1)
    assert cache.version == version + 1 and not cache.holds(2)


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache()
    for block, digest in ((1, b"a"), (2, b"b"), (3, b"c")):
        cache.register(digest, block)
        cache.set_idle(block)
    cache.set_used(1)
    cache.set_idle(1)
    assert [cache.evict() for _ in range(3)] == [2, 3, 1]
    assert len(cache) == 0 and cache.match([b"a"], 1) == []
