"""The core process's loop: owns the Scheduler, listens to workers and executors, wakes only when one of them speaks.

Everything runs on one thread, the event loop's. The core is called synchronously and never waits.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from common.clock import Clock, SystemClock
from common.errors import Draining, RequestAborted, StepwireError
from scheduler_svc.core.outcome import Ending, StepOutcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.drain_waits import DrainWaits
from scheduler_svc.executor_driver import DriverOptions, ExecutorDriver
from scheduler_svc.guarded_observer import GuardedObserver
from scheduler_svc.liveness import Liveness, until_next_beat
from scheduler_svc.messages import (
    WORKER_SHIFT,
    Abort,
    AbortAnswer,
    Accepted,
    Cancel,
    CoreState,
    Drain,
    DrainAnswer,
    Ended,
    Finish,
    FinishReason,
    FromCore,
    GetStats,
    Refused,
    ResetAnswer,
    ResetPrefixCache,
    Stats,
    StatsAnswer,
    StepSeen,
    Submit,
    ToCore,
    WatchSteps,
    WorkerPort,
)
from scheduler_svc.observer import NoObserver, StepObserver
from scheduler_svc.ports import LocalPort

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`expected_model_hash` empty: the first executor's model is expected of the others."""

    executors: Sequence[str]
    driver: DriverOptions
    expected_model_hash: str = ""


class EngineLoop:
    """Owner of the core and of one driver per executor. A DriverHost.

    `failed` resolves to what killed the engine; the process should then end.
    """

    def __init__(
        self,
        core: Scheduler,
        options: EngineOptions,
        clock: Clock | None = None,
        observer: StepObserver | None = None,
        spans_dropped: Callable[[], int] = lambda: 0,
    ) -> None:
        """`spans_dropped`: traced but lost, in this process; for Stats."""
        self._core = core
        self._options = options
        self._spans_dropped = spans_dropped
        self._clock = clock or SystemClock()
        self._observer = GuardedObserver(observer or NoObserver())
        self._loop = asyncio.get_running_loop()
        self._workers: dict[int, WorkerPort] = {}
        self._watching: set[int] = set()
        self._traced: set[int] = set()  # keys of live requests whose Submit carries a trace context
        self._drivers = [
            ExecutorDriver(core.add_executor(address), address, core, self, options.driver, self._clock, self._observer)
            for address in options.executors
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._drains = DrainWaits(core, lambda: self._end_rest("the scheduler drains and the time for it is over"))
        self._state = CoreState(ready=False, draining=False, info=None)
        self.failed: asyncio.Future[BaseException] = self._loop.create_future()
        self._liveness = Liveness(self._clock.monotonic_ns())
        self._beat_timer: asyncio.TimerHandle | None = None

    # ----------------------------------------------------------------------------------------------------- lifetime

    def start(self) -> None:
        """Starts to reach for the executors."""
        for driver in self._drivers:
            task = asyncio.ensure_future(driver.run())
            task.add_done_callback(self._driver_done)
            self._tasks.append(task)
        self._beat()

    async def stop(self, wait_s: float = 1.0) -> None:
        """Gives the executors back and ends. What still runs ends with Unavailable."""
        self._end_rest("the scheduler stops")
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        for driver, running in zip(self._drivers, self._tasks, strict=False):
            if not driver.stop():
                running.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=wait_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def add_worker(self, worker: WorkerPort) -> LocalPort:
        """Returns the worker's way to the core; the worker gets the CoreState at once."""
        port = LocalPort(lambda: self._wake(port))
        self._workers[worker.worker_id] = worker
        worker.deliver(self._state)
        return port

    def remove_worker(self, worker_id: int) -> None:
        """The worker is gone: what it had in the core ends as if it had cancelled it. Idempotent."""
        if self._workers.pop(worker_id, None) is None:
            return
        self._watching.discard(worker_id)
        owned = [s.key for s in self._core.live_sequences() if s.key >> WORKER_SHIFT == worker_id]
        self.take([Cancel(key) for key in owned])

    async def drain(self, deadline_s: float) -> int:
        """Stops admission, lets what runs finish until the deadline, ends the rest; how many that were."""
        return await self._start_drain(deadline_s)

    @property
    def state(self) -> CoreState:
        return self._state

    @property
    def max_output_bytes(self) -> int:
        """Of one step of each executor known, together: what results bring beside tokens and logprobs."""
        return sum(executor.max_output_bytes for executor in self._core.executors)

    def is_alive(self) -> bool:
        """False only when the engine died, the loop is stuck, or work waits and nothing moves (liveness)."""
        return not self.failed.done() and self._liveness.is_alive(self._clock.monotonic_ns())

    def stats(self) -> Stats:
        """The core's numbers with those of the connections."""
        stats = self._core.stats()
        both = zip(self._drivers, stats.executors, strict=True)
        executors = tuple(driver.stats(of_core) for driver, of_core in both)
        return replace(stats, executors=executors, spans_dropped=self._spans_dropped())

    # ------------------------------------------------------------------------------------------------ from workers

    def _wake(self, port: LocalPort) -> None:
        self._loop.call_soon(self._take_messages, port)

    def _take_messages(self, port: LocalPort) -> None:
        self.take(port.take())

    def take(self, messages: Sequence[ToCore]) -> None:
        """What one worker says, in order; plans what became possible."""
        try:
            for message in messages:
                self._handle(message, self._clock.monotonic_ns())
            self.fill_all()
            self._drains.check()
        except Exception as error:  # noqa: BLE001 - the core broke: nothing it says can be trusted any more
            self._die(error)

    def _handle(self, message: ToCore, now_ns: int) -> None:
        match message:
            case Submit():
                self._submit(message, now_ns)
            case Cancel(key):
                self._cancel(key, now_ns)
            case Finish(key, token_count, reason):
                if self._core.finish(key, token_count, now_ns):
                    self._left(key, reason, "", now_ns)
            case Abort(call, worker_id, request_id):
                self._to(worker_id, AbortAnswer(call, self._abort(request_id, now_ns)))
            case GetStats(call, worker_id):
                self._to(worker_id, StatsAnswer(call, self.stats()))
            case ResetPrefixCache(call, worker_id):
                self._to(worker_id, ResetAnswer(call, *self._core.reset_cache()))
            case WatchSteps(worker_id, on):
                self._watching.add(worker_id) if on else self._watching.discard(worker_id)
            case Drain(call, worker_id, deadline_ms):
                waiting = self._start_drain(deadline_ms / 1000)
                waiting.add_done_callback(lambda done: self._to(worker_id, DrainAnswer(call, done.result())))

    def _submit(self, request: Submit, now_ns: int) -> None:
        try:
            self._core.submit(request, now_ns)
        except StepwireError as error:
            self._to_owner(request.key, Refused(request.key, error))
            return
        if request.trace_context:
            self._traced.add(request.key)
        self._observer.on_submit(request, now_ns)
        self._to_owner(request.key, Accepted(request.key))

    def _cancel(self, key: int, now_ns: int) -> None:
        if self._core.cancel(key, now_ns):
            self._left(key, None, RequestAborted.__name__, now_ns)

    def _abort(self, request_id: str, now_ns: int) -> bool:
        """Unlike a Cancel this is told to the request's worker, whose caller may be somebody else."""
        keys = self._core.keys_of(request_id)
        for key in keys:
            self._cancel(key, now_ns)
            self._to_owner(key, Ended(key, RequestAborted("the request was aborted")))
        return bool(keys)

    def _left(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
        self._traced.discard(key)
        self._observer.on_end(key, reason, error, now_ns)

    # --------------------------------------------------------------------------------------- from drivers (DriverHost)

    @property
    def watched(self) -> bool:
        return bool(self._watching)

    @property
    def expected_model_hash(self) -> str:
        return self._options.expected_model_hash or (self._core.info.model_hash if self._core.info else "")

    def fill_all(self) -> None:
        for executor_id in self._core.by_load():
            self._drivers[executor_id].fill()

    def deliver(self, outcome: StepOutcome, now_ns: int) -> None:
        for worker_id, batch in outcome.batches.items():
            self._to(worker_id, batch)
            if self._traced:
                for key, count in zip(batch.keys.tolist(), batch.counts.tolist(), strict=True):
                    if count and key in self._traced:
                        self._observer.on_tokens(key, count, now_ns)
        self._observer.on_delivered(outcome, now_ns)
        self.deliver_endings(outcome.endings, now_ns)

    def deliver_endings(self, endings: Iterable[Ending], now_ns: int) -> None:
        """A reason went out with the last tokens; an error is told here."""
        for ending in endings:
            if ending.error is not None:
                self._to_owner(ending.key, Ended(ending.key, ending.error))
            self._left(ending.key, ending.reason, type(ending.error).__name__ if ending.error else "", now_ns)
        self._drains.check()

    def deliver_step(self, step: StepSeen) -> None:
        for worker_id in self._watching:
            self._to(worker_id, step)

    def executors_changed(self) -> None:
        max_context, max_prompt_tokens = self._core.limits()
        state = CoreState(
            ready=self._core.is_ready,
            draining=self._core.is_draining,
            info=self._core.info,
            max_context=max_context,
            max_prompt_tokens=max_prompt_tokens,
        )
        if state != self._state:
            self._state = state
            for worker in self._workers.values():
                worker.deliver(state)

    # -------------------------------------------------------------------------------------------------- life and death

    def _start_drain(self, deadline_s: float) -> asyncio.Future[int]:
        waiting = self._drains.start(deadline_s)
        self.executors_changed()
        return waiting

    def _end_rest(self, why: str) -> int:
        now_ns = self._clock.monotonic_ns()
        self._deliver_held()
        endings = self._core.end_all(Draining(why), now_ns)
        self.deliver_endings(endings, now_ns)
        return len(endings)

    def _beat(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if 0 < self._core.next_expiry_ns <= now_ns:  # steps see to it while there are any
            self._deliver_held()
            self.deliver_endings(self._core.expire(now_ns), now_ns)
        stuck = self._liveness.beat(
            self._clock.monotonic_ns(),
            steps=sum(driver.steps for driver in self._drivers),
            in_flight=sum(driver.in_flight for driver in self._drivers),
            live=self._core.num_live,
            connected=any(driver.connected for driver in self._drivers),
        )
        if stuck:
            log.critical("requests wait, an executor is connected, and nothing was planned for a long time")
        self._beat_timer = self._loop.call_later(until_next_beat(self._loop.time()), self._beat)

    def _deliver_held(self) -> None:
        for driver in self._drivers:
            driver.deliver_held()

    def _driver_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        if not self.failed.done():
            log.critical("the engine loop died", exc_info=error)
            self.failed.set_result(error)

    # ------------------------------------------------------------------------------------------------------- workers

    def _to_owner(self, key: int, message: FromCore) -> None:
        self._to(key >> WORKER_SHIFT, message)

    def _to(self, worker_id: int, message: FromCore) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.deliver(message)
