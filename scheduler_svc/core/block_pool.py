"""Reference-counted KV blocks of one executor."""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.prefix_cache import PrefixCache, Tail

I64 = NDArray[np.int64]


class BlockPool:
    """Each block is free, idle in the prefix cache, or has users; `available` counts the first two.

    `limbo_refs` counts the users among a block's users that only wait for a step in flight.
    """

    def __init__(self, num_blocks: int, use_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.refs: I64 = np.zeros(num_blocks, dtype=np.int64)
        self.limbo_refs: I64 = np.zeros(num_blocks, dtype=np.int64)
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
        at_hand = min(count, len(self._free))
        blocks = self._free[len(self._free) - at_hand :]
        del self._free[len(self._free) - at_hand :]
        blocks.reverse()
        if self.cache is not None:
            blocks += self.cache.evict(count - at_hand)
        self.refs[blocks] = 1
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
        return int((self.refs[blocks] == 0).sum()) if blocks else 0

    def free(self, table: I64, tail: Tail | None = None, first: int = 0) -> None:
        """One user less for each block of a row's table (in table order). Tail blocks are given up first, so that of
        a cached prefix the head lives longest. `tail` begins at table[first]; all from there on had this user alone."""
        refs = self.refs[table] - 1
        self.refs[table] = refs
        if tail is not None:
            assert self.cache is not None
            self._free += table[first + len(tail.blocks) :][::-1].tolist()
            self.cache.add_tail(tail)
            table, refs = table[:first], refs[:first]
        unused: list[int] = table[refs == 0][::-1].tolist()
        self._free += self.cache.set_idle(unused) if self.cache is not None else unused

    def reset_cache(self) -> tuple[int, int]:
        """Forgets every registration. Returns how many blocks were idle, which are free now, and how many in use."""
        if self.cache is None:
            return 0, 0
        num_registered = len(self.cache)
        idle = self.cache.clear()
        self._free += idle
        return len(idle), num_registered - len(idle)

    def enter_limbo(self, table: I64) -> None:
        self.limbo_refs[table] += 1

    def leave_limbo(self, table: I64) -> None:
        self.limbo_refs[table] -= 1

    def num_limbo(self) -> int:
        """Blocks that become available once the results in flight have arrived. Walks over all blocks: for when
        blocks are short, and for statistics."""
        return int(((self.refs > 0) & (self.refs == self.limbo_refs)).sum())

    def free_blocks(self) -> tuple[int, ...]:
        return tuple(self._free)
