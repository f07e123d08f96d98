"""Which full blocks hold which tokens, and which of them nobody uses now.

A block's hash covers its tokens and, through its parent, everything before it and the salt, so that equal hashes mean
equal contents. Digests are 256 bit: a prefix must not be reachable through a forged collision.

What is hashed is a kind and then fields, each with its tag and length in front, so that no two different inputs are the
same bytes: not a salt that looks like a digest, nor one field that ends where another begins.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.messages import U32

_SIZE = 32
_BLOCK_OF_PARENT = b"B" + b"p" + _SIZE.to_bytes(8, "little")


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


@lru_cache(maxsize=256)
def head_hash(salt: bytes) -> bytes:
    """The parent of a first block. Whose heads differ share nothing."""
    return hashlib.blake2b(b"H" + _field(b"s", salt), digest_size=_SIZE).digest()


def _chain(parent: bytes, tokens: U32, block_size: int) -> list[bytes]:
    """Hashes of the blocks that follow `parent`; `tokens` fill them."""
    size = 4 * block_size
    data = tokens.astype("<u4", copy=False).tobytes()
    between, blake2b = b"t" + size.to_bytes(8, "little"), hashlib.blake2b
    hashes = []
    for at in range(0, len(data), size):
        parent = blake2b(_BLOCK_OF_PARENT + parent + between + data[at : at + size], digest_size=_SIZE).digest()
        hashes.append(parent)
    return hashes


def extend_hashes(hashes: list[bytes], tokens: U32, block_size: int, salt: bytes, count: int) -> None:
    """Appends to `hashes` until it covers the first `count` full blocks of `tokens`."""
    first = len(hashes)
    if first < count:
        parent = hashes[-1] if hashes else head_hash(salt)
        hashes += _chain(parent, tokens[first * block_size : count * block_size], block_size)


def tenant_salt(salt: bytes, tenant: str) -> bytes:
    """A salt that no other tenant can have. Lengths and tags keep the two parts apart; a salt chosen by a caller is
    never one of these, as either all salts of a scheduler are made here or none is."""
    name = tenant.encode()
    return b"tenant:%d:%b:salt:%d:%b" % (len(name), name, len(salt), salt)


@dataclass(slots=True, eq=False)
class Tail:
    """Full blocks without users that hold what a sequence generated, not hashed yet. parent: hash of the block before
    them. tokens: what they held at first; blocks: those not evicted, from the head on."""

    parent: bytes
    tokens: U32
    block_size: int
    blocks: U32

    @property
    def first(self) -> int:
        """Its first block, the last to be evicted."""
        return int(self.blocks[0])


class PrefixCache:
    """What blocks hold, by hash. Those without users wait in `idle`, least recently used first, to be found or evicted.

    Hashing is for who may come: a prompt's blocks are registered when they are computed, since others may begin alike;
    what a sequence generated is kept as one Tail behind its prompt's last block, and hashed and registered only when
    somebody comes whose tokens go on behind that block. Most tails are evicted before, whole and at once.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._tails: dict[bytes, list[Tail]] = {}  # by parent
        self._num_tail_blocks = 0
        # Registered blocks and, under the number of their first block, tails.
        self._idle: OrderedDict[int, Tail | None] = OrderedDict()
        self.num_idle = 0  # blocks
        self._spare: list[int] = []
        self.version = 0  # rises with all that can be found

    def __len__(self) -> int:
        return len(self._block_of) + self._num_tail_blocks

    def holds(self, block: int) -> bool:
        """`block` is registered."""
        return block in self._hash_of

    def is_idle(self, block: int) -> bool:
        """`block` is registered and has no user."""
        return block in self._idle and block in self._hash_of

    def idle_blocks(self) -> tuple[int, ...]:
        """Next to be evicted first."""
        pieces = (tail.blocks[::-1].tolist() if tail else [block] for block, tail in self._idle.items())
        return tuple(block for piece in pieces for block in piece)

    def tails(self) -> tuple[Tail, ...]:
        """For reading."""
        return tuple(tail for siblings in self._tails.values() for tail in siblings)

    def match(self, hashes: list[bytes], limit: int) -> list[int]:
        """Blocks of the longest known head of hashes[:limit]. Call `take_spare` afterwards."""
        blocks: list[int] = []
        for index, digest in enumerate(hashes[:limit]):
            block = self._block_of.get(digest)
            if block is None and index and hashes[index - 1] in self._tails:
                self._register_tails(hashes[index - 1])
                block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take_spare(self) -> list[int]:
        """Blocks that were idle and turned out to hold what others hold: nobody has them now."""
        spare, self._spare = self._spare, []
        return spare

    def register(self, digests: list[bytes], blocks: list[int]) -> None:
        """Digests in the order of their blocks. Passes over a block that is registered already, and over one whose
        tokens another block holds."""
        block_of, hash_of = self._block_of, self._hash_of
        for digest, block in zip(digests, blocks, strict=True):
            if digest not in block_of and block not in hash_of:
                block_of[digest] = block
                hash_of[block] = digest
                self.version += 1

    def add_tail(self, tail: Tail) -> None:
        """Its blocks lost their only user; they become the most recently used, the first of them most."""
        self._tails.setdefault(tail.parent, []).append(tail)
        self._idle[tail.first] = tail
        self._num_tail_blocks += len(tail.blocks)
        self.num_idle += len(tail.blocks)
        self.version += 1

    def _register_tails(self, parent: bytes) -> None:
        """They are asked for, so they become the most recently used."""
        for tail in self._tails.pop(parent):
            blocks: list[int] = tail.blocks.tolist()
            del self._idle[tail.first]
            self._num_tail_blocks -= len(blocks)
            self.num_idle -= len(blocks)
            self.register(_chain(parent, tail.tokens[: len(blocks) * tail.block_size], tail.block_size), blocks)
            self._spare += self.set_idle(blocks[::-1])

    def clear(self) -> list[int]:
        """Forgets everything. Returns the blocks that were idle, which nobody has now."""
        idle = list(self.idle_blocks())
        for kept in (self._block_of, self._hash_of, self._tails, self._idle):
            kept.clear()
        self._num_tail_blocks = self.num_idle = 0
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
        self.num_idle += len(blocks) - len(others)
        return others

    def set_used(self, block: int) -> None:
        """The registered `block` was idle."""
        del self._idle[block]
        self.num_idle -= 1

    def evict(self, count: int) -> list[U32]:
        """Forgets the `count` least recently used idle blocks and returns them, in pieces. There must be so many."""
        self.num_idle -= count
        pieces: list[U32] = []
        single: list[int] = []
        while count:
            block, tail = next(iter(self._idle.items()))
            if tail is not None and len(tail.blocks) > count:
                pieces.append(self._cut(tail, count))
                break
            del self._idle[block]
            if tail is None:
                del self._block_of[self._hash_of.pop(block)]
                single.append(block)
                count -= 1
            else:
                pieces.append(self._drop(tail))
                count -= len(tail.blocks)
        if single:
            pieces.append(np.array(single, dtype=np.uint32))
        return pieces

    def _cut(self, tail: Tail, count: int) -> U32:
        """Takes `count` blocks off the end of a tail that has more; what is left of it stays next."""
        cut = tail.blocks[-count:][::-1]
        tail.blocks = tail.blocks[:-count]
        self._num_tail_blocks -= count
        return cut

    def _drop(self, tail: Tail) -> U32:
        """Forgets a tail. Returns its blocks, from the end on."""
        self._num_tail_blocks -= len(tail.blocks)
        siblings = self._tails[tail.parent]
        siblings.remove(tail)
        if not siblings:
            del self._tails[tail.parent]
        return tail.blocks[::-1]
