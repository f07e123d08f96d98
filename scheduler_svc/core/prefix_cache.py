"""Which full blocks hold which tokens, and which of them nobody uses now.

A block's hash covers its tokens and, through its parent, everything before it and the salt, so that equal hashes mean
equal contents. Digests are 256 bit: a prefix must not be reachable through a forged collision.

What is hashed is a kind and then fields, each with its tag and length in front, so that no two different inputs are the
same bytes: not a salt that looks like a digest, nor one field that ends where another begins.
"""

import hashlib
from collections import OrderedDict

from common.messages import U32

_SIZE = 32
_PARENT = b"p" + _SIZE.to_bytes(8, "little")


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def _digest(kind: bytes, fields: bytes) -> bytes:
    return hashlib.blake2b(kind + fields, digest_size=_SIZE).digest()


def head_hash(salt: bytes) -> bytes:
    """The parent of a first block. Whose heads differ share nothing."""
    return _digest(b"H", _field(b"s", salt))


def extend_hashes(hashes: list[bytes], tokens: U32, block_size: int, salt: bytes, count: int) -> None:
    """Appends to `hashes` until it covers the first `count` full blocks of `tokens`."""
    if len(hashes) >= count:
        return
    parent = hashes[-1] if hashes else head_hash(salt)
    tokens_field = b"t" + (4 * block_size).to_bytes(8, "little")
    for index in range(len(hashes), count):
        piece = tokens[index * block_size : (index + 1) * block_size].astype("<u4", copy=False).tobytes()
        parent = _digest(b"B", _PARENT + parent + tokens_field + piece)
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

    def clear(self) -> list[int]:
        """Forgets everything. Returns the blocks that were idle, which nobody has now."""
        idle = list(self._idle)
        self._block_of.clear()
        self._hash_of.clear()
        self._idle.clear()
        return idle

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
