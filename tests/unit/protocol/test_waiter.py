"""The waiter waits outside the GIL and wakes the I/O loop once for each result; nobody polls."""

import asyncio
import ctypes
import os
import select
import selectors
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from common.messages import Hello, StepPlan, StepResult, u32
from executor_svc.cpu_device import CpuDevice
from executor_svc.cuda_device import CudaDevice, CudaEvent
from executor_svc.step_executor import PendingStep
from executor_svc.step_threads import Answer, EpochRun, StepThreads
from executor_svc.streams import Event, Fence
from tests.contract.executors import tiny_runner
from tests.contract.plans import GREEDY, admit, prefill
from tests.unit.protocol.test_step_threads import Scripted, ScriptedStep

DEADLINE_S = 20.0


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class NativeWait:
    """Blocks in the C library until another thread calls `wake`, as an event's wait does in the driver.

    `library`: ctypes.CDLL lets go of the GIL for the time of a call, as torch does for an event; ctypes.PyDLL keeps it.
    """

    def __init__(self, library: ctypes.CDLL, deadline_ms: int) -> None:
        self._library = library
        self._deadline_ms = deadline_ms
        self._woken_fd, self._wake_fd = os.pipe()
        self.entered_fd, self._enter_fd = os.pipe()
        self.was_woken: bool | None = None

    def synchronize(self) -> None:
        one = _PollFd(self._woken_fd, select.POLLIN, 0)
        self._library.write(self._enter_fd, b".", 1)
        self.was_woken = self._library.poll(ctypes.byref(one), 1, self._deadline_ms) == 1

    def wake(self) -> None:
        os.write(self._wake_fd, b".")

    def close(self) -> None:
        for fd in (self._woken_fd, self._wake_fd, self.entered_fd, self._enter_fd):
            os.close(fd)


class EventDevice(CpuDevice):
    """Waits for results as CudaDevice does, whose event is the native wait until that has been met once."""

    def __init__(self, native: NativeWait) -> None:
        super().__init__(threads=1)
        self._native: NativeWait | None = native
        self._cuda = CudaDevice.__new__(CudaDevice)  # for its wait alone: there is no CUDA
        self._cuda._device = torch.device("cuda", 0)
        self.num_waits = 0

    def host_fence(self, fence: Fence, event: Event | None) -> bool:
        if fence is Fence.RESULT_READY:
            self.num_waits += 1
            native, self._native = self._native, None
            if native is not None:
                stand_in: Any = native
                # Another fence: the clock is followed at results, and this event has no time.
                assert self._cuda.host_fence(Fence.STAGING_HOST_FREE, CudaEvent(self._cuda, stand_in))
        return super().host_fence(fence, event)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * DEADLINE_S):
            await test()

    asyncio.run(bounded())


async def waited_natively(native: NativeWait) -> tuple[int, int]:
    """Two steps, the second handed in while the waiter is in the native wait for the first, which ends only once the
    second is launched. Returns how many results came and how often the waiter waited."""
    loop = asyncio.get_running_loop()
    device = EventDevice(native)
    executor = tiny_runner(numerics="fast", device=device)
    entered, launched, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    answers: list[Answer] = []
    fatal: list[str] = []

    def deliver(answer: Answer) -> None:
        answers.append(answer)
        if len(answers) == 2:
            done.set()

    class Watched:
        """Says when the second step is launched."""

        info, incarnation, begin_epoch, close = (
            executor.info,
            executor.incarnation,
            executor.begin_epoch,
            executor.close,
        )

        def execute(self, plan: StepPlan, received_ns: int) -> PendingStep:
            step = executor.execute(plan, received_ns)
            if plan.step_id == 2:
                loop.call_soon_threadsafe(launched.set)
            return step

    threads = StepThreads(Watched(), loop, fatal.append)
    threads.start()
    run = EpochRun(Hello(b"s" * 16, 1, 4, 0, 0), deliver)
    await threads.begin_epoch(run)
    loop.add_reader(native.entered_fd, entered.set)
    first = admit(0, [4, 5, 6], list(range(4)), sampling=GREEDY)
    chunk = prefill((0, 0, 3))
    threads.step(run, StepPlan(1, 1, 0, 3, admit=(first,), **chunk), 0)  # type: ignore[arg-type]
    await entered.wait()
    loop.remove_reader(native.entered_fd)
    threads.step(run, StepPlan(1, 2, 0, 1, decode_rows=u32([0])), 0)
    await launched.wait()
    native.wake()
    await done.wait()
    assert await threads.stop(DEADLINE_S) and not fatal
    return sum(answer.result is not None for answer in answers), device.num_waits


def test_loop_and_runner_go_on_while_the_waiter_waits() -> None:
    native = NativeWait(ctypes.CDLL(None), int(1000 * DEADLINE_S))

    async def test() -> None:
        assert await waited_natively(native) == (2, 2)
        assert native.was_woken, "nobody ran while the waiter waited"

    run(test)
    native.close()


@contextmanager
def nobody_asks_for_the_gil() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(DEADLINE_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_a_waiter_that_keeps_the_gil_would_be_found() -> None:
    native = NativeWait(ctypes.PyDLL(None), 200)

    async def test() -> None:
        with nobody_asks_for_the_gil():  # between the waiter's two native calls
            assert await waited_natively(native) == (2, 2)
        assert native.was_woken is False

    run(test)
    native.close()


class CountingSelector(selectors.DefaultSelector):
    """Counts how often a loop that had nothing to do was woken, and keeps until when it would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.num_wakes = 0
        self.timeouts: list[float | None] = []
        self.asleep = threading.Event()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        self.timeouts.append(timeout)
        self.asleep.set()
        ready = super().select(timeout)
        self.asleep.clear()
        self.num_wakes += 1
        return ready


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts what other threads hand it."""

    num_handed = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> asyncio.Handle:  # type: ignore[override]
        self.num_handed += 1
        return super().call_soon_threadsafe(*args, **options)


class Gated(Scripted):
    """Each step ends when its gate opens."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.gates = [threading.Event() for _ in range(num_steps)]

    def execute(self, plan: StepPlan, received_ns: int) -> PendingStep:
        super().execute(plan, received_ns)
        return GatedStep(self, plan, "")


class GatedStep(ScriptedStep):
    def wait(self) -> StepResult:
        assert isinstance(self._owner, Gated)
        assert self._owner.gates[self._plan.step_id - 1].wait(DEADLINE_S)
        return super().wait()


def test_each_result_wakes_the_loop_once_and_nothing_else_does() -> None:
    num_steps, hour = 6, 3600.0
    selector = CountingSelector()

    async def test() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        executor = Gated(num_steps)
        told = [threading.Event() for _ in range(num_steps)]
        delivered: list[int] = []

        def deliver(answer: Answer) -> None:
            assert answer.result is not None
            delivered.append(answer.result.step_id)
            told[answer.result.step_id - 1].set()

        fatal: list[str] = []
        threads = StepThreads(executor, loop, fatal.append, step_limit_s=10 * hour)
        threads.start()
        run = EpochRun(Hello(b"s" * 16, 1, 4, 0, 0), deliver)
        await threads.begin_epoch(run)
        for step in range(num_steps):
            threads.step(run, StepPlan(1, step + 1, 0, 0), 0)
        finished: asyncio.Future[list[tuple[int, int]]] = loop.create_future()
        first_sleep = len(selector.timeouts)

        def open_gates() -> list[tuple[int, int]]:
            """Returns how often each result woke the loop, and how much it handed to it."""
            wakes = []
            for gate, came in zip(executor.gates, told, strict=True):
                assert selector.asleep.wait(DEADLINE_S)
                before = selector.num_wakes, loop.num_handed
                gate.set()
                assert came.wait(DEADLINE_S)
                # The loop sleeps again once all that the result woke has run.
                assert selector.asleep.wait(DEADLINE_S)
                wakes.append((selector.num_wakes - before[0], loop.num_handed - before[1]))
            return wakes

        def watch() -> None:  # its waits are the test's deadline: a timer would be one more that wakes the loop
            try:
                loop.call_soon_threadsafe(finished.set_result, open_gates())
            except AssertionError as error:
                loop.call_soon_threadsafe(finished.set_exception, error)

        threading.Thread(target=watch, daemon=True).start()
        assert await finished == [(1, 1)] * num_steps
        assert delivered == executor.waited == list(range(1, num_steps + 1)) and not fatal
        # Meanwhile it had no timer but its next look at the step's limit.
        sleeps = selector.timeouts[first_sleep:]
        assert len(sleeps) == num_steps + 1
        assert all(timeout is not None and timeout > hour / 2 for timeout in sleeps)
        assert await threads.stop(DEADLINE_S)

    with asyncio.Runner(loop_factory=lambda: CountingLoop(selector)) as runner:
        runner.run(test())
