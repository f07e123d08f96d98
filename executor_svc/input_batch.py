"""From a plan that was checked to the columns of a batch. Pure host code, no torch operations."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.messages import StepPlan
from executor_svc.rows import RowBook

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of one step, ascending. All int64.

    rows, starts, counts, lengths: by batch position; start and length as before the step. offsets: [n + 1], of each
    row's tokens in the step. samples: bool, by batch position. A pure decode step has one token per row.
    """

    rows: I64
    starts: I64
    counts: I64
    lengths: I64
    offsets: I64
    samples: NDArray[np.bool_]
    is_prefill: NDArray[np.bool_]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def is_pure_decode(self) -> bool:
        return not bool(self.is_prefill.any())


def make_batch(plan: StepPlan, book: RowBook) -> Batch:
    """After the plan was applied to `book`."""
    decode = plan.decode_rows.astype(np.int64)
    if not len(plan.prefill_rows):
        lengths = book.length[decode]
        ones = np.ones(len(decode), np.int64)
        true = np.ones(len(decode), np.bool_)
        return Batch(decode, lengths - 1, ones, lengths, np.arange(len(decode) + 1), true, ~true)
    rows = np.concatenate([plan.prefill_rows.astype(np.int64), decode])
    starts = np.concatenate([plan.prefill_starts.astype(np.int64), book.length[decode] - 1])
    counts = np.concatenate([plan.prefill_counts.astype(np.int64), np.ones(len(decode), np.int64)])
    is_prefill = np.arange(len(rows)) < len(plan.prefill_rows)
    order = np.argsort(rows)
    rows, starts, counts, is_prefill = rows[order], starts[order], counts[order], is_prefill[order]
    lengths = book.length[rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return Batch(rows, starts, counts, lengths, offsets, starts + counts == lengths, is_prefill)
