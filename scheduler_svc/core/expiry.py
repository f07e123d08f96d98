"""Which requests run out of time, and when to look."""

from collections.abc import Iterable

from common.errors import DeadlinePassed, Overloaded, StepwireError
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.drain_rate import DrainRate
from scheduler_svc.core.executor_state import ExecutorState
from scheduler_svc.core.sequence import Sequence, SequenceState
from scheduler_svc.core.timers import Timers
from scheduler_svc.core.waiting_queue import WaitingQueue


class Expiry:
    """Deadlines hold under every policy. `refuses_late`: a request that can not make its deadline any more is not begun
    either. A wait ends after max_queue_time_ms, but not that of a request that was admitted before (its tokens are
    out already). One timer for each request that has such a limit: nothing is walked over."""

    def __init__(
        self,
        config: CoreConfig,
        refuses_late: bool,
        queue: WaitingQueue,
        drain_rate: DrainRate,
        executors: Iterable[ExecutorState],
    ) -> None:
        self._max_wait_ns = config.max_queue_time_ms * 1_000_000
        self._refuses_late = refuses_late
        self._queue = queue
        self._drain_rate = drain_rate
        self._executors = executors
        self._timers = Timers()

    def __len__(self) -> int:
        """Requests that have a limit."""
        return len(self._timers)

    @property
    def next_ns(self) -> int:
        """When something may be due; 0: not as things stand."""
        return self._timers.next_ns

    def due(self, now_ns: int) -> list[int]:
        """Keys to look at with `overdue`; those that go on need `watch` again."""
        return self._timers.due(now_ns)

    def forget(self, sequence: Sequence) -> None:
        self._timers.clear(sequence.key)

    def watch(self, sequence: Sequence, now_ns: int) -> None:
        """Sets the timer for the next moment at which `overdue` can change its answer."""
        deadline_ns, times = sequence.request.deadline_ns, []
        if deadline_ns:
            times.append(deadline_ns - self._needed_ns(sequence))
        if self._max_wait_ns and _never_ran(sequence):
            times.append(sequence.request.arrival_ns + self._max_wait_ns)
        if times:
            self._timers.set(sequence.key, max(min(times), now_ns + 1))

    def overdue(self, sequence: Sequence, now_ns: int) -> StepwireError | None:
        """Why the request has to end now, if it has."""
        request = sequence.request
        if request.deadline_ns and now_ns >= request.deadline_ns:
            return DeadlinePassed("the request's deadline passed")
        if request.deadline_ns and now_ns + (needed_ns := self._needed_ns(sequence)) >= request.deadline_ns:
            left_ms = (request.deadline_ns - now_ns) // 1_000_000
            return DeadlinePassed(f"the deadline is in {left_ms} ms; at least {needed_ns // 1_000_000} ms are needed")
        if self._max_wait_ns and _never_ran(sequence) and now_ns >= request.arrival_ns + self._max_wait_ns:
            max_ms = self._max_wait_ns // 1_000_000
            return Overloaded(
                f"the request waited {max_ms} ms and found no room",
                limit=str(max_ms),
                retry_after_ms=self._drain_rate.retry_after_ms(len(self._queue), now_ns),
            )
        return None

    def _needed_ns(self, sequence: Sequence) -> int:
        """Where late requests are refused: the least time it takes on the fastest executor, as measured; 0 while
        nothing is, and once it was admitted. Prompt tokens in the prefix cache cost nothing, and of the output counts
        what must come: the first token, min_tokens, or all of max_tokens when nothing can end it before."""
        if not self._refuses_late or not _never_ran(sequence):
            return 0
        s = sequence.request.sampling
        outputs = max(s.max_tokens if s.ignore_eos and not s.stop_ids else 0, s.min_tokens, 1)
        prompt = sequence.prompt_len
        needs = [e.times.needed_ns(prompt - e.cached_tokens(sequence), outputs) for e in self._executors if e.up]
        return int(min(needs, default=0))


def _never_ran(sequence: Sequence) -> bool:
    """A further choice waits as long as it must: its request runs, or ends, with the leader."""
    if sequence.leader is not None:
        return False
    return not sequence.was_admitted and sequence.state in (SequenceState.WAITING, SequenceState.HELD)
