"""One worker process as the core sees it. Event loop only."""

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from typing import Any, Final

from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.messages import WORKER_SHIFT, Cancel, Finish, FromCore, Submit
from scheduler_svc.workers.control import Beat, BeatAnswer, Listening, Setup, Stop
from scheduler_svc.workers.link import Link

# What a worker may leave unread: about half a minute of a thousand busy streams, and so many steps full of bulk output.
MAX_BACKLOG_BYTES: Final = 32 * 1024 * 1024
MAX_BACKLOG_STEPS: Final = 8
# Beats sent without hearing anything: its event loop stands still. (Counted, so that a core that stood still blames
# nobody.)
MAX_UNANSWERED_BEATS: Final = 30
# An answer wakes the core, and a worker says something every few seconds anyway: after so many silent beats one asks.
ASKING_BEAT: Final = 10
# For a process to end once its link is gone.
LINGER_S: Final = 2.0

log = logging.getLogger(__name__)


class RemoteWorker:
    """A WorkerPort to a process of its own, from start to end; the next process in its place is another worker.

    The core never waits for it: when it does not read, or does not answer beats, it is killed. `listening` resolves
    once it serves, or to False when it is gone first.
    """

    def __init__(self, setup: Setup, engine: EngineLoop) -> None:
        self._setup = setup
        self._engine = engine
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._unanswered = 0
        self._stopping = False
        self.listening: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def worker_id(self) -> int:
        return self._setup.worker_id

    @property
    def serves(self) -> bool:
        return self.listening.done() and self.listening.result()

    async def start(self, command: Sequence[str]) -> None:
        """Starts `command`, with the number of its end of the socket as last argument. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command, str(theirs.fileno()), stdin=asyncio.subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
                )
            except OSError:
                ours.close()
                raise
        self._link = await Link.over(ours, self._on_messages, self._on_lost)
        self._link.send(self._setup)
        self._engine.add_worker(self)  # the state is the next it hears, so that it can serve as soon as it listens

    async def wait(self) -> int:
        """The process's exit status. When this returns the core has forgotten the worker and freed what it had."""
        assert self._process is not None, "started"
        status = await self._process.wait()
        if self._link is not None:
            self._link.close(f"its process ended with status {status}")
        self._engine.remove_worker(self.worker_id)
        if not self.listening.done():
            self.listening.set_result(False)
        return status

    def beat(self, alive: bool) -> None:
        """Once a second. Not answered, and not asked, while it loads what it needs: that has a limit of its own."""
        if self._link is None or not self._link.is_open or not self.serves:
            return
        if self._unanswered >= MAX_UNANSWERED_BEATS:
            self._drop(f"did not answer {self._unanswered} beats")
            return
        self._unanswered += 1
        self._link.send(Beat(alive, answer=self._unanswered % ASKING_BEAT == 0))

    def stop(self, grace_s: float) -> None:
        """Asks it to end; `wait` tells when it has."""
        self._stopping = True
        if self._link is not None:
            self._link.send(Stop(grace_s))

    def kill(self, why: str) -> None:
        if self._process is not None and self._process.returncode is None:
            log.error("api worker %d %s: it is killed", self.worker_id, why)
            self._process.send_signal(signal.SIGKILL)

    # ----------------------------------------------------------------------------------------------------- WorkerPort

    def deliver(self, message: FromCore) -> None:
        link = self._link
        if link is None:
            return
        if link.backlog > MAX_BACKLOG_BYTES and link.backlog > self._max_backlog():
            self._drop(f"left {link.backlog} bytes unread")
            return
        link.send(message)

    def _max_backlog(self) -> int:
        return MAX_BACKLOG_BYTES + MAX_BACKLOG_STEPS * self._engine.max_output_bytes

    # ---------------------------------------------------------------------------------------------------------- link

    def _on_messages(self, messages: Sequence[Any]) -> None:
        requests = []
        self._unanswered = 0
        for message in messages:
            match message:
                case BeatAnswer():
                    pass
                case Listening():
                    if not self.listening.done():
                        self.listening.set_result(True)
                case Submit() | Cancel() | Finish() if not self._owns(message):
                    self._drop("used the key of another worker")
                    return
                case _:
                    requests.append(message)
        if requests:
            self._engine.take(requests)

    def _owns(self, message: Submit | Cancel | Finish) -> bool:
        keys = message.keys if isinstance(message, Submit) else (message.key,)
        return all(key >> WORKER_SHIFT == self.worker_id for key in keys)

    def _drop(self, why: str) -> None:
        if self._link is not None:
            self._link.close(why)
        self.kill(why)

    def _on_lost(self, why: str) -> None:
        """Most often its process is about to end, with a status worth knowing; it must not live on without the core."""
        self._engine.remove_worker(self.worker_id)
        if not self._stopping:
            asyncio.get_running_loop().call_later(LINGER_S, self.kill, f"is lost: {why}")
