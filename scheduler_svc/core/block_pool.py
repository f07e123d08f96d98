"""Reference-counted KV blocks of one executor."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from scheduler_svc.core.prefix_cache import PrefixCache, Tail


class BlockPool:
    """Each block is free, idle in the prefix cache, or has users (`refs` of them); `available` counts the first two.

    Tables come and go a few blocks at a time: plain lists cost less than numpy's columns there.
    """

    def __init__(self, num_blocks: int, use_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.cache = PrefixCache() if use_cache else None
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free and holding nothing worth keeping."""
        return len(self._free)

    @property
    def available(self) -> int:
        return len(self._free) + (self.cache.num_idle if self.cache is not None else 0)

    def can_allocate(self, count: int) -> bool:
        return count <= self.available

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one user each; evicts idle cached blocks only when free ones are out."""
        assert self.can_allocate(count)
        free, refs = self._free, self.refs
        at_hand = min(count, len(free))
        blocks = free[: -at_hand - 1 : -1]
        del free[len(free) - at_hand :]
        if at_hand < count:
            assert self.cache is not None
            blocks += self.cache.evict(count - at_hand)
        for block in blocks:
            refs[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more user for each of these blocks, which have users or are idle in the prefix cache."""
        for block in blocks:
            if not self.refs[block]:
                assert self.cache is not None and self.cache.holds(block), "a free block can't be shared"
                self.cache.set_used(block)
            self.refs[block] += 1

    def match(self, hashes: list[bytes], limit: int) -> list[int]:
        """Blocks of the longest head of hashes[:limit] that the prefix cache knows."""
        if self.cache is None:
            return []
        blocks = self.cache.match(hashes, limit)
        self._free += self.cache.take_spare()
        return blocks

    def count_idle(self, blocks: list[int]) -> int:
        refs = self.refs
        return sum(not refs[block] for block in blocks)

    def free(self, table: list[int], tail: Tail | None = None, first: int = 0) -> None:
        """One user less for each block of a row's table (in table order). Tail blocks are given up first, so that of
        a cached prefix the head lives longest. `tail` begins at table[first]; all from there on had this user alone."""
        refs, unused = self.refs, []
        for block in reversed(table):
            refs[block] -= 1
            if not refs[block]:
                unused.append(block)
        if tail is not None:
            assert self.cache is not None
            behind = len(table) - first - len(tail.blocks)
            self._free += unused[:behind]
            self.cache.add_tail(tail)
            unused = unused[len(table) - first :]
        self._free += self.cache.set_idle(unused) if self.cache is not None else unused

    def reset_cache(self) -> tuple[int, int]:
        """Forgets every registration. Returns how many blocks were idle, which are free now, and how many in use."""
        if self.cache is None:
            return 0, 0
        num_registered = len(self.cache)
        idle = self.cache.clear()
        self._free += idle
        return len(idle), num_registered - len(idle)

    def num_freed_by(self, tables: Iterable[list[int]]) -> int:
        """Blocks that become available when the users with these tables are gone."""
        users = Counter(chain.from_iterable(tables))
        return sum(self.refs[block] == count for block, count in users.items())

    def free_blocks(self) -> tuple[int, ...]:
        return tuple(self._free)
