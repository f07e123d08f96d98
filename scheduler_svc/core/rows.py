"""Bookkeeping of an executor's rows in columns, so that a steady decode step touches no Python object per row."""

import numpy as np
from numpy.typing import NDArray

from common.messages import EMPTY_U32, U32
from scheduler_svc.core.recent_tokens import Later, RecentTokens
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.messages import WORKER_SHIFT, FinishReason

NO_TOKEN = 0xFFFFFFFF
NEVER = 1 << 60

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Rows:
    """All columns are [num_rows] and belong to the row's present occupant, limbo included.

    admission: 0 for a free row. running: neither free nor in limbo. accept: tokens that arrive count (false once the
    sequence ended). tainted: its blocks must not enter the prefix cache. decoding: its last prefill chunk is planned.
    protected: may not be preempted. low: known tokens; final: where it ends, for end_reason; left: of its tokens up to
    there, those not planned yet, 0 while not decoding. table[row, :table_len]: its blocks; capacity: token slots they
    cover; slack: steps it can still decode before it needs another block, about NEVER if none or not decoding;
    least_slack: no row's is lower.
    prefilled: known computed positions of the prefill. tenant: slot in Tenants. forked_from: admission id of the leader
    whose prompt its table began with, 0: none. last_step: the last step naming the row.
    recent: known tokens the Sequences have not got yet.
    num_with_stops, num_with_raw, num_ignoring_eos: rows whose occupant has stop ids, wants raw logits, ignores EOS.
    num_of_worker: rows by the worker their occupant came through; who has none is not in it.
    """

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        def ints() -> I64:
            return np.zeros(num_rows, dtype=np.int64)

        def bools() -> Bools:
            return np.zeros(num_rows, dtype=np.bool_)

        self.seqs: list[Sequence | None] = [None] * num_rows
        self.keys = np.zeros(num_rows, dtype=np.uint64)
        self.admission, self.rank, self.last_step = ints(), ints(), ints()
        self.final = ints()
        # Side by side what moves together, so that a step moves both with one addition.
        self._ahead: I64 = np.zeros((2, num_rows), dtype=np.int64)
        self.left: I64 = self._ahead[0]
        self.slack: I64 = self._ahead[1]
        self.slack[:] = NEVER
        self.least_slack = NEVER
        self.low, self.capacity, self.prefilled = ints(), ints(), ints()
        self.running, self.accept, self.tainted, self.decoding = bools(), bools(), bools(), bools()
        self.protected, self.ignore_eos, self.raw_logits = bools(), bools(), bools()
        self.end_reason = [FinishReason.MAX_TOKENS] * num_rows
        self.cached: U32 = np.zeros(num_rows, dtype=np.uint32)
        self.table: U32 = np.zeros((num_rows, max_blocks), dtype=np.uint32)
        self.table_len = ints()
        self.stops: U32 = np.full((num_rows, 4), NO_TOKEN, dtype=np.uint32)
        self.recent = RecentTokens(num_rows)
        self.tenant, self.forked_from = ints(), ints()
        self.num_with_stops = self.num_with_raw = self.num_ignoring_eos = 0
        self.num_of_worker: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def blocks(self, row: int) -> U32:
        """The row's block table: a view."""
        return self.table[row, : self.table_len.item(row)]

    def occupy(self, row: int, sequence: Sequence, admission_id: int, final: int, end_reason: FinishReason) -> None:
        """`sequence` takes the free row and ends at `final`, for `end_reason`. What the occupant before left behind is
        overwritten here, by the caller or by `clear`."""
        request = sequence.request
        sampling = request.sampling
        self.seqs[row] = sequence
        self.keys[row] = request.key
        worker = request.key >> WORKER_SHIFT
        self.num_of_worker[worker] = self.num_of_worker.get(worker, 0) + 1
        self.tenant[row], self.cached[row] = sequence.tenant, sequence.cached
        self.admission[row], self.rank[row] = admission_id, sequence.rank
        self.low[row] = sequence.length
        self.final[row], self.end_reason[row] = final, end_reason
        self.running[row] = self.accept[row] = True
        if sampling.ignore_eos:
            self.ignore_eos[row] = True
            self.num_ignoring_eos += 1
        if sampling.stop_ids:
            self._set_stops(row, sampling.stop_ids)
        if request.raw_logits:
            self.raw_logits[row] = True
            self.num_with_raw += 1

    def _set_stops(self, row: int, stop_ids: tuple[int, ...]) -> None:
        self.num_with_stops += 1
        if len(stop_ids) > self.stops.shape[1]:
            wider: U32 = np.full((len(self), len(stop_ids)), NO_TOKEN, dtype=np.uint32)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row, : len(stop_ids)] = stop_ids

    def plan_tokens(self, advance: I64) -> None:
        """One more token is planned for each row with a 1."""
        self._ahead -= advance
        self.least_slack -= 1

    def append(self, index: I64, advance: I64, tokens: U32) -> None:
        """One more token is known for each row of `index`, for which `advance` has a 1."""
        self.recent.append(index, tokens)
        self.low += advance
        if not self.recent.room:
            self.make_room()

    def high(self, row: int) -> int:
        """Tokens there will be after all planned steps, of a row in use."""
        return int(self.final[row] - self.left[row] if self.decoding[row] else self.low[row])

    def computed(self, row: int) -> int:
        """Positions whose KV is known to be in the row's blocks."""
        sequence = self.seqs[row]
        assert sequence is not None
        low = self.low.item(row)
        return low - 1 if low > sequence.admitted_len else self.prefilled.item(row)

    def flush(self, row: int) -> None:
        """Moves the row's tokens of `recent` into the Sequence."""
        sequence = self.seqs[row]
        assert sequence is not None
        if self.low.item(row) > sequence.length:
            sequence.append(self.recent.of([row])[0])
        self.recent.forget(row)

    def known(self, row: int, start: int, end: int) -> U32 | Later:
        """The occupant's known tokens [start, end), as of now; those before `start` are in the Sequence."""
        sequence = self.seqs[row]
        assert sequence is not None
        own = sequence.view()
        if end <= len(own):
            return own[start:end].copy()
        if start >= len(own):
            return self.recent.later(row, EMPTY_U32, start - len(own), end - len(own))
        return self.recent.later(row, own[start:].copy(), 0, end - start)

    def make_room(self) -> None:
        """Flushes the rows that were not for longest, a few at a time: rows admitted together are due together."""
        oldest = self.recent.oldest()
        for row, tokens in zip(oldest, self.recent.of(oldest), strict=True):
            sequence = self.seqs[row]
            if sequence is not None and self.low.item(row) > sequence.length:
                sequence.append(tokens)
            self.recent.forget(row)
        self.recent.make_room()

    def clear(self, row: int) -> None:
        """The row, given up before, is free: nothing of its occupant counts any more."""
        sequence = self.seqs[row]
        assert sequence is not None
        request = sequence.request
        if request.sampling.stop_ids:
            self.stops[row] = NO_TOKEN
            self.num_with_stops -= 1
        if request.sampling.ignore_eos:
            self.ignore_eos[row] = False
            self.num_ignoring_eos -= 1
        if request.raw_logits:
            self.raw_logits[row] = False
            self.num_with_raw -= 1
        worker = request.key >> WORKER_SHIFT
        self.num_of_worker[worker] -= 1
        if not self.num_of_worker[worker]:
            del self.num_of_worker[worker]
        self.seqs[row] = None
        self.admission[row] = self.table_len[row] = self.keys[row] = self.final[row] = self.forked_from[row] = 0
        self.accept[row] = self.tainted[row] = False
