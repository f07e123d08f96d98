"""Reference-counted KV blocks of one executor."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from common.messages import U32
from scheduler_svc.core.prefix_cache import Kept, PrefixCache

# Idle blocks are evicted so many at a time: the share of the pool that the prefix cache may lose before it has to.
_EVICTED_AT_ONCE = 1 / 256


class BlockPool:
    """Each block is free, idle in the prefix cache, or has users; `available` counts the first two.

    Most blocks that are in use have one user, whose table holds them. Only those with more are counted, so that a
    table comes and goes as a column and no block of it is looked at.
    """

    def __init__(self, num_blocks: int, use_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache(num_blocks) if use_cache else None
        self.num_free = num_blocks  # and holding nothing worth keeping
        self._free: U32 = np.arange(num_blocks, dtype=np.uint32)  # a stack: its last num_free entries, the first next
        self._users: dict[int, int] = {}  # of the blocks that have more than one
        self._at_once = int(num_blocks * _EVICTED_AT_ONCE)

    @property
    def available(self) -> int:
        return self.num_free + (self.cache.num_idle if self.cache is not None else 0)

    def can_allocate(self, count: int) -> bool:
        return count <= self.available

    def num_users(self, block: int) -> int:
        """Of a block that is in use."""
        return self._users.get(block, 1)

    def shared_blocks(self) -> tuple[int, ...]:
        """Those with more than one user."""
        return tuple(self._users)

    def allocate(self, count: int) -> U32:
        """`count` blocks with one user each; evicts idle cached blocks only when free ones are out."""
        if count > self.num_free:
            assert self.can_allocate(count)
            self._evict(count - self.num_free)
        top = self.num_blocks - self.num_free
        self.num_free -= count
        return self._free[top : top + count].copy()

    def _evict(self, least: int) -> None:
        """Frees `least` idle cached blocks, and a few of those that are next: what an eviction costs is what it finds
        cold, and most steps that admit then have none."""
        assert self.cache is not None
        count = min(max(least, self._at_once), self.cache.num_idle)
        self._push(np.concatenate(self.cache.evict(count)))

    def evict_early(self) -> None:
        """Keeps about as many blocks free as are evicted at once, so that most steps find theirs without an eviction.
        Nobody needs to call it."""
        if self.num_free < self._at_once and self.cache is not None and self.cache.num_idle:
            self._evict(1)

    def share(self, blocks: list[int]) -> None:
        """One more user for each of these blocks, which have users or are idle in the prefix cache."""
        for block in self.cache.use(blocks) if self.cache is not None else blocks:
            self._users[block] = self.num_users(block) + 1

    def match(self, hashes: list[bytes], limit: int) -> list[int]:
        """Blocks of the longest head of hashes[:limit] that the prefix cache knows."""
        if self.cache is None:
            return []
        blocks = self.cache.match(hashes, limit)
        if self.cache.spare:
            self._push(self.cache.take_spare())
        return blocks

    def count_idle(self, blocks: list[int]) -> int:
        return sum(map(self.cache.is_idle, blocks)) if blocks and self.cache is not None else 0

    def free(self, table: U32, num_known: int, kept: Kept | None = None) -> None:
        """One user less for each block of a row's table (in table order). The first `num_known` may have other users
        or be registered; the others had this user alone. `kept`: those and what of the others can be found again. Tail
        blocks are given up first, so that of a cached prefix the head lives longest."""
        unused: list[int] = table[:num_known].tolist()
        if self._users:
            unused = [block for block in unused if not self._was_shared(block)]
        own = table[num_known if kept is None else len(kept.blocks) :]
        if self.cache is not None:
            unused = self.cache.keep(unused, kept)
        self._push(own)
        if unused:
            self._push(unused)

    def _was_shared(self, block: int) -> bool:
        """Takes one of the block's users away, if it has others."""
        count = self._users.get(block, 1) - 1
        if count > 1:
            self._users[block] = count
        elif count == 1:
            del self._users[block]
        return count > 0

    def _push(self, blocks: U32 | list[int]) -> None:
        """The first of them is next to be allocated."""
        if count := len(blocks):
            self.num_free += count
            top = self.num_blocks - self.num_free
            self._free[top : top + count] = blocks

    def reset_cache(self) -> tuple[int, int]:
        """Forgets every registration. Returns how many blocks were idle, which are free now, and how many in use."""
        if self.cache is None:
            return 0, 0
        num_registered = len(self.cache)
        idle = self.cache.clear()
        self._push(idle)
        return len(idle), num_registered - len(idle)

    def num_freed_by(self, tables: Iterable[U32]) -> int:
        """Blocks that become available when the users with these tables are gone."""
        users = Counter(block for table in tables for block in table.tolist())
        return sum(self.num_users(block) == count for block, count in users.items())

    def free_blocks(self) -> tuple[int, ...]:
        """Next to be allocated first."""
        return tuple(self._free[self.num_blocks - self.num_free :].tolist())
