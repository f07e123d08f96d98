"""Columns that move on by one addition, and tokens that are known before the Sequence has them."""

from collections.abc import Iterator

import numpy as np

from common.messages import Sampling, u32
from scheduler_svc.core.recent_tokens import SAFE_AGE, SPAN
from scheduler_svc.core.row_set import SEVERAL, RowSet
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.messages import WORKER_SHIFT, Submit

NUM_ROWS = 100


def _rows(workers: int = 1) -> Rows:
    rows = Rows(NUM_ROWS, 1)
    for row in range(NUM_ROWS):
        key = (row % workers) << WORKER_SHIFT | row
        rows.seqs[row] = Sequence(Submit(key, f"r{row}", u32([row]), Sampling(row, 8), 0), row)
        rows.keys[row], rows.cached[row], rows.low[row] = key, row, 1
    return rows


def test_every_token_of_rows_that_fill_together_or_apart_reaches_its_sequence() -> None:
    rows, told = _rows(), {row: [row] for row in range(NUM_ROWS)}
    sets = [RowSet.of(rows, np.arange(NUM_ROWS)), RowSet.of(rows, np.arange(0, NUM_ROWS, 3))]

    def steps() -> Iterator[RowSet]:
        for step in range(2 * SPAN + 7):
            yield sets[step % 5 == 0]

    for step, chosen in enumerate(steps()):
        tokens = u32(1000 * step + chosen.index)
        chosen.append(tokens)
        assert rows.recent.oldest_age + rows.recent.room <= SAFE_AGE and rows.recent.has_all
        for row, token in zip(chosen.index.tolist(), tokens.tolist(), strict=True):
            told[row].append(token)
    for row in range(NUM_ROWS):
        rows.flush(row)
        sequence = rows.seqs[row]
        assert sequence is not None and sequence.view().tolist() == told[row]
        assert rows.low[row] == len(told[row])


def test_a_set_joined_by_others_is_ascending() -> None:
    rows = _rows()
    some = RowSet.of(rows, np.array([3, 7, 50]))
    assert some.joined_by([]) is some
    both = some.joined_by([60, 5])
    assert both.index.tolist() == both.column.tolist() == both.keys.tolist() == [3, 5, 7, 50, 60]
    assert np.flatnonzero(both.advance).tolist() == both.index.tolist()
    assert both.batch().cached.tolist() == [3, 5, 7, 50, 60]


def test_the_worker_of_a_set_is_known_if_it_is_one() -> None:
    rows = _rows(workers=3)
    assert RowSet.of(rows, np.array([1, 4, 7])).batch().worker == 1
    assert RowSet.of(rows, np.array([0, 1, 3])).batch().worker == SEVERAL
    assert RowSet.of(rows, np.array([0, 1, 2])).batch().worker == SEVERAL
    assert RowSet.of(rows, np.empty(0, dtype=np.int64)).batch().worker == SEVERAL
