"""The two threads beside the I/O loop: the runner calls the executor, the waiter waits for what it launched.

Plans and refusals pass runner and waiter in the order they came in, so answers leave in that order too. Neither thread
ever waits for the network: answers are posted to the I/O loop and the queues hold no more than the sessions let in.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from common.messages import Hello, PlanError, PlanErrorCode, StepPlan, StepResult
from common.wire import encode_from_executor
from common.wire_result import output_chunks
from executor_svc.step_executor import PendingStep, PlanRefused, StepExecutor
from stepwire.executor.v1 import executor_pb2 as pb

log = logging.getLogger(__name__)

# A step that takes longer hangs: the longest honest one, a large chunk of a large model on a small CPU, takes minutes.
STEP_LIMIT_S: Final = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What one plan came to, ready for the wire. `plan` and `result` are None where there is none (a PlanError)."""

    message: pb.FromExecutor
    chunks: tuple[pb.OutputChunk, ...] = ()
    plan: StepPlan | None = None
    result: StepResult | None = None


class EpochRun:
    """One epoch as the threads see it; its identity, not its number, says whether it is current.

    `deliver` takes the answers, on the I/O loop. `ended` only ever turns true: by the runner (a plan was refused) or
    the waiter (the device gave up); plans that reach the runner later are not run. `failed` is the waiter's own: steps
    launched before the failure was known do not count.
    """

    __slots__ = ("deliver", "ended", "failed", "hello")

    def __init__(self, hello: Hello, deliver: Callable[[Answer], None]) -> None:
        self.hello = hello
        self.deliver = deliver
        self.ended = False
        self.failed = False


@dataclass(frozen=True, slots=True, eq=False)
class _Begin:
    run: EpochRun
    done: asyncio.Future[bool]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    run: EpochRun
    plan: StepPlan
    received_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class _Refuse:
    run: EpochRun
    error: PlanError


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    run: EpochRun
    plan: StepPlan
    pending: PendingStep


class StepThreads:
    """Owner of the runner and waiter threads; the runner owns the executor. Methods are for the I/O thread.

    `on_fatal` is called on the I/O loop, after the answer that tells of it was posted, when the device is gone or the
    executor broke: the process should end.
    """

    def __init__(
        self,
        executor: StepExecutor,
        loop: asyncio.AbstractEventLoop,
        on_fatal: Callable[[str], None],
        step_limit_s: float = STEP_LIMIT_S,
    ) -> None:
        self._executor = executor
        self._loop = loop
        self._on_fatal = on_fatal
        self._step_limit_s = step_limit_s
        self._current: EpochRun | None = None  # the runner's
        # When the runner and the waiter began what they are at, time.monotonic(); 0: at nothing. Each writes its own,
        # the I/O loop reads.
        self._launching_since_s = 0.0
        self._waiting_since_s = 0.0
        self._inbox: queue.SimpleQueue[_Begin | _Step | _Refuse | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | _Refuse | threading.Event | None] = queue.SimpleQueue()
        self._runner = threading.Thread(target=self._run, name="runner", daemon=True)
        self._waiter = threading.Thread(target=self._wait, name="waiter", daemon=True)

    def start(self) -> None:
        self._runner.start()
        self._waiter.start()
        self._watch()

    def _watch(self) -> None:
        """A device that hangs answers nothing, not even an error: the process must end for another to take over."""
        since_s = min((s for s in (self._launching_since_s, self._waiting_since_s) if s), default=0.0)
        if since_s and time.monotonic() - since_s > self._step_limit_s:
            self._on_fatal(f"a step did not end within {self._step_limit_s:.0f} s")
        else:
            self._loop.call_later(self._step_limit_s / 10, self._watch)

    def begin_epoch(self, run: EpochRun) -> asyncio.Future[bool]:
        """Resolves, once device work in flight is over and the rows are released, to whether blocks were kept."""
        done: asyncio.Future[bool] = self._loop.create_future()
        self._inbox.put(_Begin(run, done))
        return done

    def step(self, run: EpochRun, plan: StepPlan, received_ns: int) -> None:
        self._inbox.put(_Step(run, plan, received_ns))

    def refuse(self, run: EpochRun, error: PlanError) -> None:
        """Answers a plan with `error` in its turn and ends the epoch there."""
        self._inbox.put(_Refuse(run, error))

    async def stop(self, timeout_s: float) -> bool:
        """Finishes what was handed in, closes the executor. False: a thread was still busy after `timeout_s`."""
        self._inbox.put(None)
        await asyncio.to_thread(self._runner.join, timeout_s)
        return not self._runner.is_alive()

    # ------------------------------------------------------------------------------------------------ runner thread

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            match item:
                case _Step():
                    self._launch(item)
                case _Refuse():
                    self._refuse(item.run, item.error)
                case _Begin():
                    self._begin(item)
        self._launched.put(None)
        self._waiter.join()
        self._executor.close()

    def _begin(self, begin: _Begin) -> None:
        # The waiter must be through with the old epoch: begin_epoch may hand its result slots to new steps.
        barrier = threading.Event()
        self._launched.put(barrier)
        barrier.wait()
        self._launching_since_s = time.monotonic()
        try:
            kept = self._executor.begin_epoch(begin.run.hello)
        except Exception as error:  # whatever broke the executor: the process must end and say so
            log.exception("begin_epoch failed")
            self._current = None
            self._post(_reject, begin.done, error)
            self._post(self._on_fatal, f"begin_epoch failed: {error!r}")
            return
        finally:
            self._launching_since_s = 0.0
        self._current = begin.run
        self._post(_resolve, begin.done, kept)

    def _launch(self, step: _Step) -> None:
        run, plan = step.run, step.plan
        if run is not self._current:
            self._refuse(run, _error(plan, PlanErrorCode.STALE_EPOCH, "another epoch has begun"))
        elif run.ended:
            self._refuse(run, _error(plan, PlanErrorCode.EPOCH_ENDED, "an earlier plan of this epoch failed"))
        else:
            self._launching_since_s = time.monotonic()
            try:
                pending = self._executor.execute(plan, step.received_ns)
            except PlanRefused as refusal:
                self._refuse(run, refusal.error)
                self._check_device(refusal.error)
            except Exception as error:  # as in _begin
                log.exception("execute failed at step %d of epoch %d", plan.step_id, plan.epoch)
                self._refuse(run, _error(plan, PlanErrorCode.DEVICE_FAILED, f"executor broke: {error!r}"))
                self._post(self._on_fatal, f"execute failed: {error!r}")
            else:
                self._launched.put(_Launched(run, plan, pending))
            finally:
                self._launching_since_s = 0.0

    def _refuse(self, run: EpochRun, error: PlanError) -> None:
        if run.ended and error.code is not PlanErrorCode.STALE_EPOCH:
            error = replace(error, code=PlanErrorCode.EPOCH_ENDED, field="", row=None, admission_id=0, limit=0)
        run.ended = True
        self._launched.put(_Refuse(run, error))

    # ------------------------------------------------------------------------------------------------ waiter thread

    def _wait(self) -> None:
        while (item := self._launched.get()) is not None:
            match item:
                case threading.Event():
                    item.set()
                case _Refuse():
                    self._answer(item.run, Answer(encode_from_executor(item.error)))
                case _Launched():
                    self._finish(item)

    def _finish(self, step: _Launched) -> None:
        run, plan = step.run, step.plan
        self._waiting_since_s = time.monotonic()
        try:
            result = step.pending.wait()
        except PlanRefused as refusal:
            self._fail(run, plan, refusal.error)
            self._check_device(refusal.error)
        except Exception as error:  # as in _begin
            log.exception("waiting for step %d of epoch %d failed", plan.step_id, plan.epoch)
            self._fail(run, plan, _error(plan, PlanErrorCode.DEVICE_FAILED, f"executor broke: {error!r}"))
            self._post(self._on_fatal, f"wait failed: {error!r}")
        else:
            if run.failed:
                self._fail(run, plan, _error(plan, PlanErrorCode.EPOCH_ENDED, "an earlier step of this epoch failed"))
                return
            message = encode_from_executor(result)
            chunks = tuple(chunk for output in result.outputs for chunk in output_chunks(result.epoch, output))
            message.result.output_bytes = sum(len(output.data) for output in result.outputs)
            self._answer(run, Answer(message, chunks, plan, result))
        finally:
            self._waiting_since_s = 0.0

    def _fail(self, run: EpochRun, plan: StepPlan, error: PlanError) -> None:
        if run.failed and error.code is not PlanErrorCode.EPOCH_ENDED:
            error = _error(plan, PlanErrorCode.EPOCH_ENDED, "an earlier step of this epoch failed")
        run.failed = run.ended = True
        self._answer(run, Answer(encode_from_executor(error), plan=plan))

    # -------------------------------------------------------------------------------------------------- both threads

    def _check_device(self, error: PlanError) -> None:
        if error.code is PlanErrorCode.DEVICE_FAILED:
            self._post(self._on_fatal, error.text)

    def _answer(self, run: EpochRun, answer: Answer) -> None:
        self._post(run.deliver, answer)

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            log.debug("the I/O loop is closed; an answer is dropped")


def _error(plan: StepPlan, code: PlanErrorCode, text: str) -> PlanError:
    return PlanError(plan.epoch, plan.step_id, code, text)


def _resolve(future: asyncio.Future[bool], kept: bool) -> None:
    if not future.done():
        future.set_result(kept)


def _reject(future: asyncio.Future[bool], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
