"""Whose turn it is to be admitted, and who has to make room for that."""

from collections.abc import Callable

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.suspects import may_be_tried, on_trial
from scheduler_svc.core.waiting_queue import WaitingQueue


class Turns:
    """The policy's order, and what stands above it: limits on partial prefills, trials of suspects, the return of the
    preempted."""

    def __init__(self, config: CoreConfig, policy: Policy, queue: WaitingQueue) -> None:
        self._config = config
        self._policy = policy
        self._evicts = type(policy).evicts_after is not Policy.evicts_after  # most never do, and every step asks
        self._queue = queue
        self._room_made: tuple[int, int] | None = None  # (ticket, executor) of whom the last eviction was for

    def next(self, executor: ExecutorState) -> Sequence | None:
        """Who is admitted next, if the number of partial prefills and trials (see suspects) allow anyone. While as many
        long prompts are in prefill as may be, shorter ones pass those that wait; as soon as one is done the first in
        the queue is first again, long or not."""
        limit, long_limit = self._config.max_partial_prefills, self._config.max_long_partial_prefills
        if (limit and len(executor.prefilling) >= limit) or (executor.trial is not None and on_trial(executor)):
            return None
        full = bool(long_limit) and long_limit <= self._num_long(executor)
        sequence = self._queue.peek(usual_only=full)
        if sequence is not None and sequence.is_suspect and not may_be_tried(executor):
            return None
        return sequence

    def _num_long(self, executor: ExecutorState) -> int:
        """Long prompts in prefill."""
        found = (executor.rows.seqs[row] for row in executor.prefilling)
        return sum(sequence is not None and self._queue.is_long(sequence) for sequence in found)

    def comes_after(self, sequence: Sequence, parked: int) -> bool:
        """Who was preempted (`parked`: its rank) and still waits for results comes back first."""
        if sequence.is_suspect:
            return False
        return parked < sequence.rank or (self._policy.returns_first and not sequence.was_admitted)

    def make_room(self, executor: ExecutorState, preempt: Callable[[ExecutorState, int], None]) -> None:
        """Where the policy says so, the next to be admitted takes the place of running ones that rank far enough behind
        it: first of the `max_num_seqs`, then, once an attempt has shown how many are short, their blocks. On one
        executor only, and only when that helps."""
        if not self._evicts:
            return
        head = self._queue.peek()
        limit = self._policy.evicts_after(head.rank) if head is not None else None
        if head is None or limit is None or head.is_suspect or self.next(executor) is not head:
            return
        if self._room_made is not None and self._room_made[0] == head.ticket and self._room_made[1] != executor.id:
            return
        while not _will_have_room(executor, head):
            victim = executor.victim_after(limit)
            if victim is None or not _can_have_room(executor, head, limit):
                return
            self._room_made = (head.ticket, executor.id)
            preempt(executor, victim)

    def forget(self, executor_id: int) -> None:
        """The executor is gone: room made there is lost."""
        if self._room_made is not None and self._room_made[1] == executor_id:
            self._room_made = None


def _can_have_room(executor: ExecutorState, sequence: Sequence, limit: int) -> bool:
    """If everyone behind `limit` went, blocks they share counted as if each had its own."""
    if executor.blocked is None or executor.blocked[0] != sequence.ticket:
        return True
    rows, pool = executor.rows, executor.pool
    behind = rows.running & ~rows.protected & (rows.rank > limit)
    freed = int(rows.table_len[behind].sum()) + int(behind.sum())
    return executor.blocked[1] + executor.num_running <= pool.available + executor.num_limbo_blocks + freed


def _will_have_room(executor: ExecutorState, sequence: Sequence) -> bool:
    """When the results in flight are there, as far as is known."""
    if executor.num_running >= executor.max_num_seqs:
        return False
    if executor.blocked is None or executor.blocked[0] != sequence.ticket:
        return True
    return executor.blocked[1] + executor.num_running <= executor.pool.available + executor.num_limbo_blocks
