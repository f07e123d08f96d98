"""The rows of one step that sample, with what plans and results say about them again and again."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from common.bitmaps import column_of
from common.messages import U32
from scheduler_svc.core.rows import I64, Bools, Rows
from scheduler_svc.messages import WORKER_SHIFT

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

SEVERAL = -1


@dataclass(slots=True, eq=False)
class BatchColumns:
    """What a TokenBatch of a RowSet holds in any step in which nobody ends. Read-only. worker: SEVERAL, if
    the rows belong to more than one, or to none."""

    counts: U32
    no_reasons: U8
    cached: U32
    worker: int


@dataclass(slots=True, eq=False)
class RowSet:
    """Rows with their present occupants, ascending: valid as long as no row of it is freed, so for a step in flight.

    mask: bool [num_rows]. index and column: the same rows, for numpy and for the plan. advance: [num_rows] 1 for rows
    of the set, else 0, so that a column over all rows moves on with one addition. Nobody writes to any of them.
    """

    rows: Rows
    mask: Bools
    index: I64
    column: U32
    advance: I64
    _keys: U64 | None = None
    _batch: BatchColumns | None = None

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def where(cls, rows: Rows, mask: Bools) -> "RowSet":
        """The rows for which `mask`, handed over, is true."""
        index = mask.nonzero()[0]
        advance: I64 = mask.astype(np.int64)
        return cls(rows, mask, index, column_of(mask, index), advance)

    @classmethod
    def of(cls, rows: Rows, index: I64) -> "RowSet":
        """`index` without repetition."""
        mask: Bools = np.zeros(len(rows), dtype=np.bool_)
        mask[index] = True
        return cls.where(rows, mask)

    def joined_by(self, others: list[int]) -> "RowSet":
        """This set and `others`, none of which is in it."""
        if not others:
            return self
        both = self.mask.copy()
        for row in others:
            both[row] = True
        return RowSet.where(self.rows, both)

    @property
    def keys(self) -> U64:
        """uint64, of the requests. Not every set is asked."""
        if self._keys is None:
            self._keys = self.rows.keys.take(self.index)
            self._keys.setflags(write=False)
        return self._keys

    def append(self, tokens: U32) -> None:
        """Books one known token for each row."""
        self.rows.append(self.index, self.advance, tokens)

    def batch(self) -> BatchColumns:
        if self._batch is None:
            counts, no_reasons = _constants(len(self.mask))
            cached: U32 = self.rows.cached.take(self.index)
            cached.setflags(write=False)
            self._batch = BatchColumns(counts[: len(self)], no_reasons[: len(self)], cached, self._worker())
        return self._batch

    def _worker(self) -> int:
        if not len(self):
            return SEVERAL
        if len(self.rows.num_of_worker) == 1:
            return next(iter(self.rows.num_of_worker))
        first = int(self.keys[0])
        # Of keys all of which begin alike the bits that differ are low ones.
        differ = int(np.bitwise_or.reduce(self.keys)) ^ int(np.bitwise_and.reduce(self.keys))
        return SEVERAL if differ >> WORKER_SHIFT else first >> WORKER_SHIFT


@lru_cache(maxsize=8)
def _constants(num_rows: int) -> tuple[U32, U8]:
    """Ones and zeros, as many as a set of these rows can need; views of read-only arrays are read-only."""
    ones: U32 = np.ones(num_rows, dtype=np.uint32)
    zeros: U8 = np.zeros(num_rows, dtype=np.uint8)
    ones.setflags(write=False)
    zeros.setflags(write=False)
    return ones, zeros
