"""Which full blocks hold which tokens, and which of them nobody uses now.

A block's hash covers its tokens and, through its parent, everything before it and the salt, so that equal hashes mean
equal contents. Digests are 256 bit: a prefix must not be reachable through a forged collision.
"""

import hashlib
from collections import OrderedDict

from common.messages import U32

_HEAD = b"stepwire-head:"
_BLOCK = b"stepwire-block:"


def extend_hashes(hashes: list[bytes], tokens: U32, block_size: int, salt: bytes, count: int) -> None:
    """Appends to `hashes` until it covers the first `count` full blocks of `tokens`."""
    if len(hashes) >= count:
        return
    parent = hashes[-1] if hashes else hashlib.blake2b(_HEAD + salt, digest_size=32).digest()
    for index in range(len(hashes), count):
        piece = tokens[index * block_size : (index + 1) * block_size].astype("<u4", copy=False).tobytes()
        parent = hashlib.blake2b(_BLOCK + parent + piece, digest_size=32).digest()
        hashes.append(parent)


class PrefixCache:
    """Registered blocks. Those without users wait in `idle`, least recently used first, to be found or evicted."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.version = 0  # rises with each registration

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def holds(self, block: int) -> bool:
        return block in self._hash_of

    def idle_blocks(self) -> tuple[int, ...]:
        return tuple(self._idle)

    def match(self, hashes: list[bytes], limit: int) -> list[int]:
        """Blocks of the longest registered head of hashes[:limit]."""
        blocks: list[int] = []
        for digest in hashes[:limit]:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, digest: bytes, block: int) -> bool:
        """False when another block holds the same tokens already, or this one is registered."""
        if digest in self._block_of or block in self._hash_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self.version += 1
        return True

    def set_idle(self, block: int) -> None:
        """The registered `block` lost its last user; it becomes the most recently used."""
        self._idle[block] = None

    def set_used(self, block: int) -> None:
        self._idle.pop(block, None)

    def evict(self) -> int:
        """Forgets the least recently used idle block and returns it. There must be one."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block
