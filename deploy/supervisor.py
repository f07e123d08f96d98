"""Keeps one executor and one scheduler running, as `stepwire up` does.

The executor is started first and restarted with growing pauses when it dies: the scheduler holds every request
meanwhile. A scheduler that dies ends everything, for nothing is left to save. A child that leaves with EXIT_CONFIG was
told something wrong, so starting it again can't help. Stopping goes the other way round: scheduler, then executor.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from common.config import EXIT_CONFIG
from common.errors import StepwireError
from deploy.child_process import ChildProcess, Lines

EXIT_FAILED: Final = 1
POLL_S: Final = 0.2
# A signal that comes again this soon is the same one, sent to a process and to its group.
REPEAT_S: Final = 1.0

Probe = Callable[[], Awaitable[bool]]
Note = Callable[[str], None]


class SupervisorError(StepwireError):
    """What was supervised can't go on; `exit_status` is what the process should leave with."""

    status = "FAILED_PRECONDITION"
    reason = "SUPERVISOR"

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class Stopped(Exception):
    """Somebody asked to stop (SIGINT, SIGTERM), or the terminal went away (SIGHUP)."""


@dataclass(frozen=True, slots=True)
class Service:
    """How one service is run.

    `command`: asked for before each start, so that a restart can differ (a port once drawn stays).
    `ready`: whether it serves. `stop_s`: seconds it gets between SIGTERM and SIGKILL.
    """

    name: str
    command: Callable[[], Sequence[str]]
    ready: Probe
    stop_s: float


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Pauses double from `first_s` to `max_s`; a run of `stable_s` starts over.

    An executor that was never ready gets `attempts` starts in all.
    """

    first_s: float = 0.5
    max_s: float = 30.0
    stable_s: float = 60.0
    attempts: int = 3

    def pause(self, failures: int) -> float:
        """Seconds before the start that follows `failures` failures in a row."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 16))


class Supervisor:
    """Owner of both children; everything on one event loop, on the main thread.

    async with Supervisor(executor, scheduler, ...).running() as supervisor:
        ...                      # both are ready
        await supervisor.watch() # until something ends
    """

    def __init__(
        self,
        executor: Service,
        scheduler: Service,
        *,
        bound: Probe,
        lines: Lines,
        note: Note,
        ready_s: float,
        policy: RestartPolicy | None = None,
    ) -> None:
        """`bound`: whether the executor has its address, which the scheduler's command needs."""
        self._executor = executor
        self._scheduler = scheduler
        self._bound = bound
        self._lines = lines
        self._note = note
        self._ready_s = ready_s
        self._policy = policy or RestartPolicy()
        self._children: dict[str, ChildProcess] = {}
        self._executor_task: asyncio.Task[None] | None = None
        self._scheduler_task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._signalled_s = 0.0
        self.restarts = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Supervisor"]:
        """Both children started and ready; stopped on the way out, whatever the way.

        Raises SupervisorError when they can't be, or not within `ready_s`; Stopped when told to stop meanwhile.
        """
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            try:
                async with asyncio.timeout(self._ready_s):
                    self._executor_task = asyncio.create_task(self._keep_executor(), name="executor")
                    await self.until(self._poll(self._bound))
                    self._scheduler_task = asyncio.create_task(self._run_scheduler(), name="scheduler")
                    await self.until(self._poll(self._scheduler.ready))
            except TimeoutError:
                raise SupervisorError(f"not ready within {self._ready_s:.0f} s", EXIT_FAILED) from None
            yield self
        finally:
            await self._stop_all()
            for number in numbers:
                loop.remove_signal_handler(number)

    async def watch(self) -> None:
        """Returns never; raises Stopped or SupervisorError."""
        await self.until(asyncio.Event().wait())

    async def until(self, work: Awaitable[object]) -> None:
        """Awaits `work` unless a service ends or somebody says stop first; that raises as `watch` does."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        services = [task for task in (self._executor_task, self._scheduler_task) if task is not None]
        try:
            await asyncio.wait([working, stopping, *services], return_when=asyncio.FIRST_COMPLETED)
            for task in services:
                if task.done():
                    task.result()
            if stopping.done():
                raise Stopped
            await working
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    # ---------------------------------------------------------------------------------------------------- children

    async def _keep_executor(self) -> None:
        """Starts the executor again and again. Raises SupervisorError when that is no use."""
        loop = asyncio.get_running_loop()
        failures = 0
        was_ready = False
        while True:
            started = loop.time()
            child = await self._start(self._executor)
            watcher = asyncio.create_task(self._poll(self._executor.ready))
            status = await child.wait()
            was_ready = was_ready or (watcher.done() and not watcher.cancelled())
            watcher.cancel()
            if status == EXIT_CONFIG:
                raise SupervisorError("the executor can not start; it said why above", EXIT_CONFIG)
            failures = 1 if was_ready and loop.time() - started >= self._policy.stable_s else failures + 1
            if not was_ready and failures >= self._policy.attempts:
                raise SupervisorError(f"the executor died {failures} times before it was ready", EXIT_FAILED)
            pause = self._policy.pause(failures)
            self._note(f"the executor ended ({describe_status(status)}); starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)
            self.restarts += 1

    async def _run_scheduler(self) -> None:
        child = await self._start(self._scheduler)
        status = await child.wait()
        if status == EXIT_CONFIG:
            raise SupervisorError("the scheduler can not start; it said why above", EXIT_CONFIG)
        raise SupervisorError(f"the scheduler ended ({describe_status(status)})", EXIT_FAILED)

    async def _start(self, service: Service) -> ChildProcess:
        child = await ChildProcess.start(service.name, service.command(), self._lines)
        self._children[service.name] = child
        return child

    async def _poll(self, probe: Probe) -> None:
        while not await probe():  # noqa: ASYNC110 - it is another process that changes
            await asyncio.sleep(POLL_S)

    async def _stop_all(self) -> None:
        """Scheduler first, so that it can end its requests while the executor still answers."""
        for task, service in ((self._scheduler_task, self._scheduler), (self._executor_task, self._executor)):
            if task is None:
                continue
            task.cancel()  # from here on its end is no surprise, and the executor is not restarted
            with contextlib.suppress(asyncio.CancelledError, SupervisorError):
                await task
            child = self._children.get(service.name)
            if child is not None and child.returncode is None:
                self._note(f"stopping the {service.name}")
                await child.stop(service.stop_s)

    def _on_signal(self, number: signal.Signals) -> None:
        """The first asks to stop, a later one that is no echo of it stops at once."""
        now_s = asyncio.get_running_loop().time()
        if not self._stop.is_set():
            self._signalled_s = now_s
        elif number != signal.SIGHUP and now_s - self._signalled_s > REPEAT_S:
            self._note("stopping at once")
            for child in self._children.values():
                child.kill()
        self._stop.set()


def describe_status(status: int) -> str:
    """ "exit 3", or the signal's name."""
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
