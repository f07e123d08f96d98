"""One executor's task: connect, open epochs one after the other, keep the pipeline full.

Results are taken, the next plan is on its way, and only then do the workers hear of the tokens: the device never waits
for a client.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from common.clock import Clock
from common.errors import ExecutorLost, StepwireError
from common.messages import Draining, Hello, PlanError, StepResult
from scheduler_svc.core.outcome import Ending, StepOutcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.executor_client import ExecutorStream, StreamOptions, open_stream
from scheduler_svc.messages import ExecutorStats, StepSeen
from scheduler_svc.observer import StepObserver
from scheduler_svc.step_seen import step_seen
from scheduler_svc.stream_parts import Backoff, ClockEstimate

log = logging.getLogger(__name__)


class DriverHost(Protocol):
    """What a driver needs of the engine loop. Loop thread."""

    def deliver(self, outcome: StepOutcome, now_ns: int) -> None:
        """Tokens and endings of one step, to the workers."""
        ...

    def deliver_endings(self, endings: Iterable[Ending], now_ns: int) -> None: ...

    def deliver_step(self, step: StepSeen) -> None:
        """To the workers that watch; only called while `watched`."""
        ...

    @property
    def watched(self) -> bool: ...

    @property
    def expected_model_hash(self) -> str:
        """Empty: any model will do."""
        ...

    def executors_changed(self) -> None:
        """One was connected or lost."""
        ...

    def fill_all(self) -> None:
        """Something may have become schedulable on any executor."""
        ...


@dataclass(frozen=True, slots=True)
class DriverOptions:
    scheduler_id: bytes
    pipeline_depth: int
    stream: StreamOptions = field(default_factory=StreamOptions)
    first_backoff_s: float = 0.1
    max_backoff_s: float = 2.0


class ExecutorDriver:
    """Owner of the stream to one executor; core state stays the core's."""

    def __init__(
        self,
        executor_id: int,
        address: str,
        core: Scheduler,
        host: DriverHost,
        options: DriverOptions,
        clock: Clock,
        observer: StepObserver,
    ) -> None:
        self.executor_id = executor_id
        self.address = address
        self._core = core
        self._host = host
        self._options = options
        self._clock = clock
        self._observer = observer
        self._estimate = ClockEstimate()
        self._stream: ExecutorStream | None = None
        self._in_flight = 0
        self._held: tuple[StepOutcome, int] | None = None
        self._half_closed = False
        self._stopping_for_good = False
        self._steps = 0
        self._last_error = ""

    @property
    def connected(self) -> bool:
        return self._stream is not None

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def steps(self) -> int:
        """Results since start."""
        return self._steps

    def stats(self, core: ExecutorStats) -> ExecutorStats:
        """The core's numbers with those of the connection."""
        return replace(core, rtt_ns=self._estimate.rtt_ns, clock_offset_ns=self._estimate.offset_ns)

    async def run(self) -> None:
        """Until cancelled. An executor that is not there, or refuses, is tried again and again."""
        backoff = Backoff(self._options.first_backoff_s, self._options.max_backoff_s)
        refused = False
        while True:
            start = self._core.begin_epoch(self.executor_id)
            hello = Hello(
                scheduler_id=self._options.scheduler_id,
                epoch=start.epoch,
                pipeline_depth=self._options.pipeline_depth,
                monotonic_ns=self._clock.monotonic_ns(),
                wall_ns=self._clock.wall_ns(),
                expected_model_hash=self._host.expected_model_hash,
                keep_kv=start.keep_kv,
                known_incarnation=start.known_incarnation,
            )
            try:
                stream = await open_stream(self.address, hello, self._clock, self._estimate, self._options.stream)
            except StepwireError as error:
                self._report(error)
                await asyncio.sleep(backoff.next_s())
                continue
            steps, refused_before = self._steps, refused
            refused = await self._epoch(stream, start.epoch)
            if self._stopping_for_good:
                return
            if self._steps > steps:
                backoff.reset()
                if refused and not refused_before:
                    continue  # the executor is well: one bad plan costs no pause
            await asyncio.sleep(backoff.next_s())

    def stop(self) -> bool:
        """Gives the executor back: `run` returns once what is in flight was answered. False: nothing to give back."""
        self._stopping_for_good = True
        self._half_close()
        return self._stream is not None

    async def _epoch(self, stream: ExecutorStream, epoch: int) -> bool:
        """Serves one epoch, from Welcome until its stream is closed. True: a refused plan ended it."""
        now_ns = self._clock.monotonic_ns()
        self._last_error = ""
        self._in_flight = 0
        self._half_closed = False
        refused = False
        try:
            endings = self._core.executor_up(self.executor_id, epoch, stream.welcome, now_ns)
            self._stream = stream
            self._host.deliver_endings(endings, now_ns)
            self._tell("connected", f"epoch {epoch}")
            self._host.executors_changed()
            self._host.fill_all()
            while not refused and (message := await stream.receive()) is not None:
                match message:
                    case StepResult():
                        await self._take_result(message)
                    case PlanError():
                        refused = True
                        self._take_error(message)
                    case Draining():
                        self._tell("draining", f"{message.reason}, {message.deadline_ms} ms")
                        self._half_close()
        except StepwireError as error:
            self._report(error)
        finally:
            self._stream = None
            self._in_flight = 0
            down_ns = self._clock.monotonic_ns()
            self.deliver_held()
            self._host.deliver_endings(self._core.executor_down(self.executor_id, down_ns), down_ns)
            if not refused:
                self._tell("lost", self._last_error or "closed properly")
            self._host.executors_changed()
            self._host.fill_all()  # others take over what ran here; an idle one would hear of it from nobody else
            await stream.close()
        return refused

    def _half_close(self) -> None:
        if self._stream is not None and not self._half_closed:
            self._half_closed = True
            self._stream.half_close()

    def fill(self) -> None:
        """Plans and sends until the pipeline is full or there is nothing to compute. Never waits."""
        stream = self._stream
        if stream is None or self._half_closed:
            return
        depth = stream.welcome.pipeline_depth
        while self._in_flight < depth and self._core.can_schedule(self.executor_id):
            start_ns = self._clock.monotonic_ns()
            context = self._observer.trace_context(self.executor_id, start_ns)
            record = self._core.schedule(self.executor_id, start_ns, context)
            if record is None:
                return
            stream.send(record.plan)
            self._in_flight += 1
            self._observer.on_plan(record, start_ns, self._clock.monotonic_ns())

    # --------------------------------------------------------------------------------------------------- one message

    async def _take_result(self, result: StepResult) -> None:
        received_ns = self._clock.monotonic_ns()
        outcome = self._core.update(self.executor_id, result, received_ns)
        updated_ns = self._clock.monotonic_ns()
        self._in_flight -= 1
        self._steps += 1
        self._held = outcome, updated_ns
        self.fill()
        # The stream writes the plan in this turn of the loop; a worker that wakes would compete for the CPU.
        await asyncio.sleep(0)
        self.deliver_held()
        self._core.look_ahead(self.executor_id)
        record = outcome.record
        self._observer.on_result(record, result, received_ns, updated_ns, self._estimate.offset_ns)
        if self._host.watched:
            executor = self._core.executors[self.executor_id]
            self._host.deliver_step(step_seen(executor, outcome, result, received_ns))
        self._host.fill_all()

    def deliver_held(self) -> None:
        """Hands out what the newest result brought, if that was not done yet. Also for who is about to tell of endings:
        tokens go before the end."""
        held, self._held = self._held, None
        if held is not None:
            self._host.deliver(*held)

    def _take_error(self, error: PlanError) -> None:
        """A refused plan ends the epoch; what of it is still in flight is answered EPOCH_ENDED and not waited for."""
        now_ns = self._clock.monotonic_ns()
        text = f"epoch {error.epoch} step {error.step_id}: {error.code.name} {error.field}: {error.text}"
        log.error("%s: %s", self.address, text)
        self._stream = None
        self._host.deliver_endings(self._core.plan_failed(self.executor_id, error, now_ns), now_ns)
        self._tell("epoch_ended", text)

    def _report(self, error: StepwireError) -> None:
        """Once per kind of trouble: an executor that is away for an hour is one line in the log."""
        if error.message != self._last_error:
            self._last_error = error.message
            level = logging.INFO if isinstance(error, ExecutorLost) else logging.WARNING
            log.log(level, "executor not usable, trying again: %s", error.message)

    def _tell(self, event: str, detail: str) -> None:
        if event != "epoch_ended":
            log.info("executor %s: %s (%s)", self.address, event, detail)
        self._observer.on_executor(self.executor_id, event, detail, self._clock.monotonic_ns())
