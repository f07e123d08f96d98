"""The worker processes of a scheduler: started, watched, started again. Owner: the core process's event loop.

A worker that dies takes only its own connections with it. Its requests leave the core, and another process takes its
place and its addresses, under a new worker id, so that no key is ever used twice.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from common.config import EXIT_CONFIG
from common.errors import ConfigError, Unavailable
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine_loop import EngineLoop
from scheduler_svc.liveness import until_next_beat
from scheduler_svc.stream_parts import Backoff
from scheduler_svc.workers.addresses import Addresses, PortHolder
from scheduler_svc.workers.control import Setup
from scheduler_svc.workers.frames import signatures
from scheduler_svc.workers.remote import RemoteWorker

# A worker that lived this long starts again without a growing pause: without it a part of the API is gone, or all.
STABLE_S: Final = 10.0
# Until it serves: it loads a tokenizer.
START_S: Final = 120.0
# In one place, before any process served there.
START_ATTEMPTS: Final = 3
# Between the end of a worker's grace and SIGKILL.
STOP_MARGIN_S: Final = 3.0
MAX_WORKER_ID: Final = (1 << 16) - 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """`command`: starts a worker process; the number of its socket is added. `auth_tokens`: that all of them accept.
    Pauses double between the two."""

    command: Sequence[str]
    auth_tokens: tuple[str, ...] = field(default=(), repr=False)
    first_pause_s: float = 0.5
    max_pause_s: float = 5.0


class WorkerPool:
    """`addresses` are known from the start. `failed` resolves to what makes the service useless: ConfigError when a
    worker was told something wrong, Unavailable when none can be started."""

    def __init__(self, config: SchedulerConfig, engine: EngineLoop, options: PoolOptions) -> None:
        """Raises ConfigError for addresses that can not be had."""
        self._config = config
        self._engine = engine
        self._options = options
        self._ports = PortHolder()
        self._last_id = 0
        self._workers: dict[int, RemoteWorker] = {}  # by place
        self._keepers: list[asyncio.Task[None]] = []
        self._beats: asyncio.TimerHandle | None = None
        self._stopping = False
        self.failed: asyncio.Future[ConfigError | Unavailable] = asyncio.get_running_loop().create_future()
        self.addresses: Addresses = self._ports.addresses(config.listen, config.worker_listen, config.api_workers)

    async def start(self) -> None:
        """Returns when every worker serves, or `failed` is done."""
        places = range(self._config.api_workers)
        ready = [asyncio.Event() for _ in places]
        self._keepers = [asyncio.create_task(self._keep(place, ready[place])) for place in places]
        self._beat()

        async def all_ready() -> None:
            for event in ready:
                await event.wait()

        serving = asyncio.ensure_future(all_ready())
        either: list[asyncio.Future[Any]] = [serving, self.failed]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()

    async def stop(self, grace_s: float) -> None:
        """Calls get `grace_s` to write what they have. Returns when no worker is left, or only such that even killing
        does not end. Drain the core before."""
        self._stopping = True
        if self._beats is not None:
            self._beats.cancel()
        for place, keeper in enumerate(self._keepers):
            if place in self._workers:
                self._workers[place].stop(grace_s)
            else:
                keeper.cancel()
        if self._keepers:
            _, late = await asyncio.wait(self._keepers, timeout=grace_s + STOP_MARGIN_S)
            if late:
                for worker in self._workers.values():
                    worker.kill("did not end in time")
                _, left = await asyncio.wait(late, timeout=STOP_MARGIN_S)
                if left:
                    log.error("%d api workers are killed and have not ended; they are left behind", len(left))
        self._ports.close()

    def _beat(self) -> None:
        for worker in self._workers.values():
            worker.beat(self._engine.is_alive())
        loop = asyncio.get_running_loop()
        self._beats = loop.call_later(until_next_beat(loop.time()), self._beat)

    async def _keep(self, place: int, ready: asyncio.Event) -> None:
        """One place: process after process, until the pool stops."""
        backoff = Backoff(self._options.first_pause_s, self._options.max_pause_s)
        loop = asyncio.get_running_loop()
        attempts = 0
        while not self._stopping:
            started_s = loop.time()
            status = await self._run(place, ready)
            if self._stopping:
                return
            attempts += 1
            if status == EXIT_CONFIG and not (ready.is_set() and self._anyone_serves()):
                self._fail(ConfigError("an api worker can not start; it said why above"))
                return
            if not ready.is_set() and attempts >= START_ATTEMPTS:
                self._fail(Unavailable(f"an api worker died {attempts} times before it served"))
                return
            if loop.time() - started_s >= STABLE_S:
                backoff.reset()
            pause_s = backoff.next_s()
            log.error("api worker in place %d ended with status %d; another starts in %.1f s", place, status, pause_s)
            await asyncio.sleep(pause_s)

    def _anyone_serves(self) -> bool:
        """Then a file that was broken since the start is no reason to end their streams."""
        return any(worker.serves for worker in self._workers.values())

    async def _run(self, place: int, ready: asyncio.Event) -> int:
        """One process, from start to end."""
        if self._last_id == MAX_WORKER_ID:
            self._fail(Unavailable("no worker id is left: workers died too often"))
            return EXIT_CONFIG
        self._last_id += 1
        worker = RemoteWorker(
            Setup(
                signature=signatures(),
                worker_id=self._last_id,
                num_workers=self._config.api_workers,
                listen=self.addresses.of(place),
                config=self._config.model_dump_json(),
                auth_tokens=self._options.auth_tokens,
            ),
            self._engine,
        )
        self._workers[place] = worker
        limit = asyncio.get_running_loop().call_later(START_S, self._late, worker)
        worker.listening.add_done_callback(lambda serves: ready.set() if serves.result() else None)
        try:
            await worker.start(self._options.command)
            if self._stopping:
                worker.stop(0.0)
            return await worker.wait()
        except OSError as error:
            log.error("an api worker can not be started: %s", error)
            return -1
        finally:
            limit.cancel()
            del self._workers[place]

    def _late(self, worker: RemoteWorker) -> None:
        if not worker.listening.done():
            worker.kill(f"did not serve within {START_S:.0f} s")

    def _fail(self, error: ConfigError | Unavailable) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
