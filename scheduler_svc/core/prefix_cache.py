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


def head_hash(salt: bytes) -> bytes:
    """The parent of a first block. Whose heads differ share nothing."""
    return hashlib.blake2b(b"H" + _field(b"s", salt), digest_size=_SIZE).digest()


def extend_hashes(hashes: list[bytes], tokens: U32, block_size: int, salt: bytes, count: int) -> None:
    """Appends to `hashes` until it covers the first `count` full blocks of `tokens`."""
    first, size = len(hashes), 4 * block_size
    if first >= count:
        return
    parent = hashes[-1] if hashes else head_hash(salt)
    data = tokens[first * block_size : count * block_size].astype("<u4", copy=False).tobytes()
    before, between = b"B" + _PARENT, b"t" + size.to_bytes(8, "little")
    for at in range(0, len(data), size):
        parent = hashlib.blake2b(before + parent + between + data[at : at + size], digest_size=_SIZE).digest()
        hashes.append(parent)


def tenant_salt(salt: bytes, tenant: str) -> bytes:
    """A salt that no other tenant can have. Lengths and tags keep the two parts apart; a salt chosen by a caller is
    never one of these, as either all salts of a scheduler are made here or none is."""
    name = tenant.encode()
    return b"tenant:%d:%b:salt:%d:%b" % (len(name), name, len(salt), salt)


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

    def register(self, digests: list[bytes], blocks: list[int]) -> None:
        """Digests in the order of their blocks. Passes over a block that is registered already, and over one whose
        tokens another block holds."""
        block_of, hash_of = self._block_of, self._hash_of
        for digest, block in zip(digests, blocks, strict=True):
            if digest not in block_of and block not in hash_of:
                block_of[digest] = block
                hash_of[block] = digest
                self.version += 1

    def clear(self) -> list[int]:
        """Forgets everything. Returns the blocks that were idle, which nobody has now."""
        idle = list(self._idle)
        self._block_of.clear()
        self._hash_of.clear()
        self._idle.clear()
        return idle

    def set_idle(self, blocks: list[int]) -> list[int]:
        """The blocks lost their last user. Those that are registered become the most recently used, the last one most;
        returns the others."""
        hash_of, idle = self._hash_of, self._idle
        others = []
        for block in blocks:
            if block in hash_of:
                idle[block] = None
            else:
                others.append(block)
        return others

    def set_used(self, block: int) -> None:
        self._idle.pop(block, None)

    def evict(self, count: int) -> list[int]:
        """Forgets the `count` least recently used idle blocks and returns them. There must be so many."""
        block_of, hash_of, pop = self._block_of, self._hash_of, self._idle.popitem
        blocks = [pop(last=False)[0] for _ in range(count)]
        for block in blocks:
            del block_of[hash_of.pop(block)]
        return blocks
