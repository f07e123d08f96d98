"""The real scheduler core, modelled executors, and a clock that jumps from event to event.

What the engine loop and its drivers do, without them: a result is booked, its executor's pipeline filled, tokens handed
out, then every executor's pipeline filled, least loaded first; messages that lie there are handled together, then all
are filled.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from common.errors import ConfigError, StepwireError
from common.messages import Welcome
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outcome import Ending
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.messages import Stats
from scheduler_svc.simulate.measures import Measures
from scheduler_svc.simulate.modelled_executor import ModelledExecutor, ModelledStep
from scheduler_svc.simulate.step_model import StepModel
from scheduler_svc.simulate.trace import Prompts, Trace

MAX_EXECUTORS = 64
_RETRY_NS = 1_000_000  # of a refused caller in a closed loop who was not told when to try again
_PROGRESS_STEPS = 4096


class Event(IntEnum):
    """Of events at the same time, the lower value comes first; then in the order they were made."""

    ARRIVAL = 1
    EXPIRY = 2  # the core asked to be told the time
    RESULT = 3


@dataclass(frozen=True, slots=True)
class Setup:
    """network_us: one way, scheduler to executor and back alike. loop_us: what the scheduler's own thread takes to make
    a plan, and to book a result; it does one thing at a time, for all executors. Raises ConfigError."""

    num_executors: int = 1
    network_us: float = 100.0
    loop_us: float = 50.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name, fine in (
            ("num_executors", 1 <= self.num_executors <= MAX_EXECUTORS),
            ("network_us", 0 <= self.network_us < inf),
            ("loop_us", 0 <= self.loop_us < inf),
            ("seed", self.seed >= 0),
        ):
            if not fine:
                raise ConfigError(f"{name}: {getattr(self, name)} is out of range", field=name)


class Simulation:
    """One run. Deterministic: the same arguments give the same measures. `measures` and `stats` are for afterwards."""

    def __init__(
        self,
        config: CoreConfig,
        trace: Trace,
        model: StepModel,
        setup: Setup | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress` is called now and then with the requests ended and the requests in all. Raises ConfigError."""
        self._setup = setup or Setup()
        self._trace = trace
        self._core = Scheduler(config)
        self._prompts = Prompts(trace, model.executor.vocab_size, self._setup.seed)
        self._progress = progress or (lambda ended, total: None)
        self._network_ns = int(self._setup.network_us * 1000)
        self._loop_ns = int(self._setup.loop_us * 1000)
        self._now = 0
        self._events: list[tuple[int, Event, int, int]] = []  # time, kind, order, request or executor
        self._orders = 0
        self._next_request = 0
        self._expiry_ns = 0  # of the earliest EXPIRY event; 0: there is none
        self._ended = 0
        self._depth = config.pipeline_depth
        self._executors = [ModelledExecutor(model) for _ in range(self._setup.num_executors)]
        self._flights: list[deque[ModelledStep]] = [deque() for _ in self._executors]
        self.measures = Measures(trace, config)
        for index in range(len(self._executors)):
            executor_id = self._core.add_executor(f"modelled:{index}")
            start = self._core.begin_epoch(executor_id)
            welcome = Welcome(index + 1, model.info(), self._depth, False, 0, 0)
            self._core.executor_up(executor_id, start.epoch, welcome, 0)

    @property
    def stats(self) -> Stats:
        return self._core.stats()

    @property
    def num_executors(self) -> int:
        return len(self._executors)

    @property
    def now_ns(self) -> int:
        """Virtual time."""
        return self._now

    def run(self) -> Measures:
        """Until every request has ended. Raises RuntimeError when requests are left and nothing moves: a defect of the
        core."""
        first = self._trace.concurrency or 1
        for _ in range(min(first, len(self._trace))):
            self._next_arrival(0)
        while self._events:
            at, kind, _, subject = heapq.heappop(self._events)
            self._now = max(self._now, at)
            if kind == Event.RESULT:
                self._take_result(subject)
            else:
                self._take_message(kind, subject, at)
                while self._events and self._events[0][0] <= self._now and self._events[0][1] != Event.RESULT:
                    at, kind, _, subject = heapq.heappop(self._events)
                    self._take_message(kind, subject, at)
            for executor_id in self._core.by_load():
                self._fill(executor_id)
            self._watch_expiry()
        if self._core.num_live:
            raise RuntimeError(f"requests are left and nothing moves: {self.stats}")
        self._progress(self._ended, len(self._trace))
        return self.measures

    # ------------------------------------------------------------------------------------------------------ requests

    def _next_arrival(self, at_ns: int) -> None:
        """Open loop: the trace says when. Closed loop: at `at_ns`."""
        index = self._next_request
        if index < len(self._trace):
            self._next_request += 1
            at = at_ns if self._trace.concurrency else int(self._trace.arrival_ns[index])
            self._push(at, Event.ARRIVAL, index)

    def _take_message(self, kind: Event, index: int, at_ns: int) -> None:
        if kind == Event.EXPIRY:
            self._expiry_ns = 0
            self._take_endings(self._core.expire(self._now))
            return
        if not self._trace.concurrency:
            self._next_arrival(0)
        request = self._prompts.submit(index, at_ns)
        self.measures.on_submit(index, at_ns)
        try:
            self._core.submit(request, self._now)
        except StepwireError as error:
            retry_ns = (error.retry_after_ms or 0) * 1_000_000 or _RETRY_NS
            self._ended_without_reason(index, f"refused: {type(error).__name__}", self._now + retry_ns)

    def _ended_without_reason(self, index: int, why: str, next_ns: int | None = None) -> None:
        self.measures.on_end(index, why)
        self._caller_is_free(self._now if next_ns is None else next_ns)

    def _caller_is_free(self, at_ns: int) -> None:
        self._ended += 1
        if self._trace.concurrency:
            self._next_arrival(at_ns)

    # --------------------------------------------------------------------------------------------------------- steps

    def _fill(self, executor_id: int) -> None:
        flights = self._flights[executor_id]
        while len(flights) < self._depth and self._core.can_schedule(executor_id):
            record = self._core.schedule(executor_id, self._now)
            if record is None:
                return
            self._now += self._loop_ns
            step = self._executors[executor_id].execute(record.plan, self._now + self._network_ns)
            flights.append(step)
            self.measures.on_plan(record, step, self._core.executors[executor_id].preemptions)
            self._push(step.end_ns + self._network_ns, Event.RESULT, executor_id)

    def _take_result(self, executor_id: int) -> None:
        step = self._flights[executor_id].popleft()
        outcome = self._core.update(executor_id, step.result, self._now)
        received_ns = self._now
        self._now += self._loop_ns
        self._fill(executor_id)
        self.measures.on_result(outcome.batches.get(0), outcome.record, received_ns)
        self._take_endings(outcome.endings)
        if len(self.measures.steps) % _PROGRESS_STEPS == 0:
            self._progress(self._ended, len(self._trace))

    def _take_endings(self, endings: Iterable[Ending]) -> None:
        for ending in endings:
            if ending.error is None:
                self._caller_is_free(self._now)
            else:
                self._ended_without_reason(ending.key, type(ending.error).__name__)

    def _watch_expiry(self) -> None:
        at = self._core.next_expiry_ns
        if at and (not self._expiry_ns or at < self._expiry_ns):
            self._expiry_ns = at
            self._push(at, Event.EXPIRY, 0)

    def _push(self, at_ns: int, kind: Event, subject: int) -> None:
        self._orders += 1
        heapq.heappush(self._events, (at_ns, kind, self._orders, subject))
