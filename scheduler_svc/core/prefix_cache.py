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


@dataclass(slots=True, eq=False)
class Kept:
    """What one sequence left that nobody uses. head: registered blocks in table order; tail: what follows."""

    head: list[int]
    tail: Tail | None


class PrefixCache:
    """What blocks hold, by hash. Those without users are kept to be found or evicted: least recently used first, what
    one sequence left together, and of that the last block first.

    Hashing is for who may come: a prompt's blocks are registered when they are computed, since others may begin alike;
    what a sequence generated is kept as one Tail behind its prompt's last block, and hashed and registered only when
    somebody comes whose tokens go on behind that block. Most tails are evicted before, whole and at once.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of = [b""] * num_blocks  # empty: not registered
        self._kept_in: list[Kept | None] = [None] * num_blocks  # of a registered block without users
        self._kept: OrderedDict[Kept, None] = OrderedDict()  # least recently used first; none is empty
        self._tails: dict[bytes, list[Kept]] = {}  # those with a tail, by its parent
        self._num_tail_blocks = 0
        self.num_idle = 0  # blocks
        self._spare: list[int] = []
        self.version = 0  # rises with all that can be found

    def __len__(self) -> int:
        return len(self._block_of) + self._num_tail_blocks

    def holds(self, block: int) -> bool:
        """`block` is registered."""
        return self._hash_of[block] != b""

    def is_idle(self, block: int) -> bool:
        """`block` is registered and has no user."""
        return self._kept_in[block] is not None

    def idle_blocks(self) -> tuple[int, ...]:
        """Next to be evicted first."""
        blocks: list[int] = []
        for kept in self._kept:
            blocks += kept.tail.blocks[::-1].tolist() if kept.tail is not None else ()
            blocks += reversed(kept.head)
        return tuple(blocks)

    def tails(self) -> tuple[Tail, ...]:
        """For reading."""
        return tuple(kept.tail for siblings in self._tails.values() for kept in siblings if kept.tail is not None)

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
        before = len(block_of)
        for digest, block in zip(digests, blocks, strict=True):
            if digest not in block_of and not hash_of[block]:
                block_of[digest] = block
                hash_of[block] = digest
        self.version += len(block_of) - before

    def _register_tails(self, parent: bytes) -> None:
        """They are asked for, so they become the most recently used."""
        for kept in self._tails.pop(parent):
            tail, kept.tail = kept.tail, None
            assert tail is not None
            if not kept.head:
                del self._kept[kept]
            blocks: list[int] = tail.blocks.tolist()
            self._num_tail_blocks -= len(blocks)
            self.num_idle -= len(blocks)
            self.register(_chain(parent, tail.tokens[: len(blocks) * tail.block_size], tail.block_size), blocks)
            self._spare += self.keep(blocks)

    def clear(self) -> list[int]:
        """Forgets everything. Returns the blocks that were idle, which nobody has now."""
        idle = list(self.idle_blocks())
        self._hash_of, self._kept_in = [b""] * len(self._hash_of), [None] * len(self._kept_in)
        for known in (self._block_of, self._kept, self._tails):
            known.clear()
        self._num_tail_blocks = self.num_idle = 0
        return idle

    def keep(self, blocks: list[int], tail: Tail | None = None) -> list[int]:
        """These blocks of a sequence, in the order of its table, and those of its tail lost their last user. Those that
        are registered become, with the tail, the most recently used; returns the others."""
        hash_of, kept_in = self._hash_of, self._kept_in
        head: list[int] = []
        kept, others = Kept(head, tail), []
        for block in blocks:
            if hash_of[block]:
                kept_in[block] = kept
                head.append(block)
            else:
                others.append(block)
        self.num_idle += len(head)
        if tail is not None:
            self._tails.setdefault(tail.parent, []).append(kept)
            self._num_tail_blocks += len(tail.blocks)
            self.num_idle += len(tail.blocks)
            self.version += 1
        if head or tail is not None:
            self._kept[kept] = None
        return others

    def use(self, blocks: list[int]) -> list[int]:
        """Those of the blocks that were idle are not any more; returns the others."""
        kept_in = self._kept_in
        found: dict[Kept, None] = {}
        others = []
        for block in blocks:
            if (kept := kept_in[block]) is None:
                others.append(block)
            else:
                found[kept] = kept_in[block] = None
        for kept in found:
            kept.head = [block for block in kept.head if kept_in[block] is kept]
            if not kept.head and kept.tail is None:
                del self._kept[kept]
        self.num_idle -= len(blocks) - len(others)
        return others

    def evict(self, count: int) -> list[U32]:
        """Forgets the `count` least recently used idle blocks and returns them, in pieces. There must be so many."""
        self.num_idle -= count
        self._num_tail_blocks -= count
        tails: list[U32] = []
        heads: list[int] = []
        while count:
            kept, _ = self._kept.popitem(last=False)
            if (tail := kept.tail) is not None:
                if len(tail.blocks) > count:
                    tails.append(tail.blocks[-count:])
                    tail.blocks = tail.blocks[:-count]
                    self._put_back(kept)
                    break
                self._drop_tail(kept, tail)
                tails.append(tail.blocks)
                count -= len(tail.blocks)
            if len(kept.head) > count:
                left = len(kept.head) - count
                heads += kept.head[left:]
                del kept.head[left:]
                self._put_back(kept)
                break
            heads += kept.head
            count -= len(kept.head)
        self._num_tail_blocks += len(heads)
        block_of, hash_of, kept_in = self._block_of, self._hash_of, self._kept_in
        for block in heads:
            del block_of[hash_of[block]]
            hash_of[block], kept_in[block] = b"", None
        return [*tails, np.array(heads, dtype=np.uint32)]

    def _put_back(self, kept: Kept) -> None:
        self._kept[kept] = None
        self._kept.move_to_end(kept, last=False)

    def _drop_tail(self, kept: Kept, tail: Tail) -> None:
        siblings = self._tails[tail.parent]
        if len(siblings) > 1:
            siblings.remove(kept)
        else:
            del self._tails[tail.parent]
        kept.tail = None
