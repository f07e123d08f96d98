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
from scheduler_svc.core.recent_tokens import Later

_SIZE = 32
_NO_TOKENS: U32 = np.empty(0, dtype=np.uint32)
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
class Kept:
    """What one sequence left and nobody uses, in the order of its table: `num_head` registered blocks and a tail, full
    blocks that hold what it generated, not hashed yet. The last are evicted first. parent: hash of the block before the
    tail; tokens: what the tail held at first, seldom asked for."""

    blocks: U32
    num_head: int
    parent: bytes
    tokens: U32 | Later
    block_size: int

    def set_head(self, head: list[int]) -> None:
        self.blocks = np.concatenate((np.array(head, dtype=np.uint32), self.blocks[self.num_head :]))
        self.num_head = len(head)


class PrefixCache:
    """What blocks hold, by hash. Those without users are kept to be found or evicted: least recently used first, what
    one sequence left together, and of that the last block first.

    Hashing is for who may come: a prompt's blocks are registered when they are computed, since others may begin alike;
    what a sequence generated is kept as one tail behind its prompt's last block, and hashed and registered only when
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
        self.spare: list[int] = []  # see take_spare
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
        return tuple(block for kept in self._kept for block in kept.blocks[::-1].tolist())

    def tail_blocks(self) -> tuple[int, ...]:
        """For reading."""
        kept_ones = (kept for siblings in self._tails.values() for kept in siblings)
        return tuple(block for kept in kept_ones for block in kept.blocks[kept.num_head :].tolist())

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
        spare, self.spare = self.spare, []
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
            blocks: list[int] = kept.blocks[kept.num_head :].tolist()
            kept.blocks = kept.blocks[: kept.num_head]
            if not kept.num_head:
                del self._kept[kept]
            self._num_tail_blocks -= len(blocks)
            self.num_idle -= len(blocks)
            tokens = kept.tokens.read() if isinstance(kept.tokens, Later) else kept.tokens
            self.register(_chain(parent, tokens[: len(blocks) * kept.block_size], kept.block_size), blocks)
            kept.tokens = _NO_TOKENS
            self.spare += self.keep(blocks)

    def clear(self) -> list[int]:
        """Forgets everything. Returns the blocks that were idle, which nobody has now."""
        idle = list(self.idle_blocks())
        self._hash_of, self._kept_in = [b""] * len(self._hash_of), [None] * len(self._kept_in)
        for known in (self._block_of, self._kept, self._tails):
            known.clear()
        self._num_tail_blocks = self.num_idle = 0
        return idle

    def keep(self, unused: list[int], kept: Kept | None = None) -> list[int]:
        """`unused`: those blocks of a sequence's head, in the order of its table, that lost their last user. kept: the
        whole head and its tail, if it left one. What is registered becomes, with the tail, the most recently used;
        returns the others."""
        if kept is None:
            kept = Kept(np.array(unused, dtype=np.uint32), len(unused), b"", _NO_TOKENS, 0)
        hash_of, kept_in = self._hash_of, self._kept_in
        others = []
        for block in unused:
            if hash_of[block]:
                kept_in[block] = kept
            else:
                others.append(block)
        if len(unused) - len(others) < kept.num_head:
            kept.set_head([block for block in unused if hash_of[block]])
        count = len(kept.blocks)
        if count > kept.num_head:
            self._tails.setdefault(kept.parent, []).append(kept)
            self._num_tail_blocks += count - kept.num_head
            self.version += 1
        if count:
            self._kept[kept] = None
            self.num_idle += count
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
            kept.set_head([block for block in kept.blocks[: kept.num_head].tolist() if kept_in[block] is kept])
            if not len(kept.blocks):
                del self._kept[kept]
        self.num_idle -= len(blocks) - len(others)
        return others

    def evict(self, count: int) -> list[U32]:
        """Forgets the `count` least recently used idle blocks and returns them, in pieces. There must be so many."""
        self.num_idle -= count
        self._num_tail_blocks -= count
        pieces: list[U32] = []
        heads: list[int] = []
        while count:
            kept, _ = self._kept.popitem(last=False)
            num_blocks, num_head = len(kept.blocks), kept.num_head
            left = max(0, num_blocks - count)
            piece = kept.blocks[left:]
            pieces.append(piece)
            count -= num_blocks - left
            if left <= num_head:
                heads += piece[: num_head - left].tolist()
                if num_blocks > num_head:
                    self._forget_tail(kept)
            if left:  # and it stays next
                kept.blocks, kept.num_head = kept.blocks[:left], min(left, num_head)
                self._kept[kept] = None
                self._kept.move_to_end(kept, last=False)
        self._num_tail_blocks += len(heads)
        block_of, hash_of, kept_in = self._block_of, self._hash_of, self._kept_in
        for block in heads:
            del block_of[hash_of[block]]
            hash_of[block], kept_in[block] = b"", None
        return pieces

    def _forget_tail(self, kept: Kept) -> None:
        siblings = self._tails[kept.parent]
        if len(siblings) > 1:
            siblings.remove(kept)
        else:
            del self._tails[kept.parent]
