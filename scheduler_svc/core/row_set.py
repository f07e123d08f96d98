"""The rows of one step that sample, with what plans and results say about them again and again."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.messages import U32, u32
from scheduler_svc.core.rows import I64, RECENT, Rows
from scheduler_svc.messages import WORKER_SHIFT

U8 = NDArray[np.uint8]
U64 = NDArray[np.uint64]

SEVERAL = -1


@dataclass(slots=True, eq=False)
class BatchColumns:
    """What a TokenBatch of a RowSet holds in any step in which nobody ends. Read-only. worker: SEVERAL, if
    the rows belong to more than one."""

    counts: U32
    no_reasons: U8
    cached: U32
    worker: int


@dataclass(slots=True, eq=False)
class RowSet:
    """Rows with their present occupants, ascending: valid as long as no row of it is freed, so for a step in flight.

    index and column: the same rows, for numpy and for the plan. advance: [num_rows] 1 for rows of the set, else 0, so
    that a column over all rows moves on with one addition. keys: uint64, of the requests. All read-only.
    """

    rows: Rows
    index: I64
    column: U32
    advance: I64
    keys: U64
    _batch: BatchColumns | None = None

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, rows: Rows, index: I64) -> "RowSet":
        """`index` ascending, without repetition."""
        advance: I64 = np.zeros(len(rows), dtype=np.int64)
        advance[index] = 1
        keys = rows.keys[index]
        for column in (index, advance, keys):
            column.setflags(write=False)
        return cls(rows, index, u32(index), advance, keys)

    def joined_by(self, others: list[int]) -> "RowSet":
        """This set and `others`, none of which is in it."""
        if not others:
            return self
        both = self.advance.astype(np.bool_)
        both[others] = True
        return RowSet.of(self.rows, both.nonzero()[0])

    def append(self, tokens: U32) -> None:
        """Books one known token for each row."""
        rows = self.rows
        rows.recent.reshape(-1)[self.index * RECENT + rows.recent_len[self.index]] = tokens
        rows.recent_len += self.advance
        rows.low += self.advance
        rows.room -= 1
        if not rows.room:
            rows.make_room()

    def batch(self) -> BatchColumns:
        if self._batch is None:
            cached: U32 = self.rows.cached[self.index]
            no_reasons: U8 = np.zeros(len(self), dtype=np.uint8)
            no_reasons.setflags(write=False)
            worker = SEVERAL
            if len(self) and (first := int(self.keys.max()) >> WORKER_SHIFT) == int(self.keys.min()) >> WORKER_SHIFT:
                worker = first
            counts: U32 = np.ones(len(self), dtype=np.uint32)
            self._batch = BatchColumns(u32(counts), no_reasons, u32(cached), worker)
        return self._batch
