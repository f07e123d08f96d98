"""A worker process: public server, tokenising, detokenising and stop strings, for one end of a socket to the core.

It lives exactly as long as its core: it leaves when the core says so and when the core is gone. SIGTERM and SIGINT are
the core's to hear, which drains first; a signal to the whole process group must not cut its streams.
"""

import asyncio
import contextlib
import ctypes
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import uvloop

from common.clock import Clock, SystemClock
from common.config import EXIT_CONFIG
from common.errors import ConfigError, ModelError, Overloaded, Unavailable
from scheduler_svc.api.pacer import Pacer
from scheduler_svc.api.server import ApiServer, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.app import (
    EXIT_FAILED,
    EXIT_OK,
    LAST_WRITES_S,
    SWITCH_INTERVAL_S,
    Parts,
    api_options,
    quieten_collector,
)
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.liveness import BEAT_S, STUCK_AFTER_BEATS
from scheduler_svc.messages import ToCore, makes_room
from scheduler_svc.workers.control import Beat, BeatAnswer, Listening, Setup, Stop
from scheduler_svc.workers.frames import signatures
from scheduler_svc.workers.link import Link

PR_SET_PDEATHSIG: Final = 1
# What the core may leave unread before callers are told to come back: thousands of prompts.
MAX_BACKLOG_BYTES: Final = 32 * 1024 * 1024

log = logging.getLogger(__name__)


class RemoteCore:
    """A CorePort to the core process, and what is known of the core's health. Event loop only."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._alive = True
        self._beat_ns = clock.monotonic_ns()

    def send(self, message: ToCore) -> None:
        """See CorePort. Raises Unavailable, too: the core is gone."""
        if not makes_room(message):
            if not self._link.is_open:
                raise Unavailable("the scheduler's core is gone", retry_after_ms=1000)
            if self._link.backlog > MAX_BACKLOG_BYTES:
                raise Overloaded("the scheduler is too far behind to take more", retry_after_ms=1000)
        self._link.send(message)

    def is_alive(self) -> bool:
        """For liveness: the core says so, and said so lately."""
        late_ns = self._clock.monotonic_ns() - self._beat_ns
        return self._alive and late_ns < STUCK_AFTER_BEATS * BEAT_S * 1e9

    def on_beat(self, beat: Beat) -> None:
        self._alive = beat.alive
        self._beat_ns = self._clock.monotonic_ns()
        if beat.answer:
            self._link.send(BeatAnswer())


class _Process:
    """Owner of everything in the process; on its event loop."""

    def __init__(self, make_parts: Callable[[SchedulerConfig], Parts]) -> None:
        self._make_parts = make_parts
        self._clock = SystemClock()
        self._early: list[Any] = []  # came before there was a worker to take it
        self._worker: ApiWorker | None = None
        self._core: RemoteCore | None = None
        self._setup: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
        self._stop: asyncio.Future[Stop | None] = asyncio.get_running_loop().create_future()

    async def run(self, sock: socket.socket) -> int:
        link = await Link.over(sock, self._on_messages, self._on_lost)
        either: list[asyncio.Future[Any]] = [self._setup, self._stop]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._setup.done():
            return EXIT_FAILED
        setup = self._setup.result()
        if setup.signature != signatures():
            log.error("the code on disk is no longer the core's: restart the scheduler")
            return EXIT_CONFIG
        config = SchedulerConfig.model_validate_json(setup.config)
        try:
            parts = self._make_parts(config)
            server = self._connect(link, setup, config, parts)
        except (ConfigError, ModelError) as error:
            log.error("%s", error.message)
            return EXIT_CONFIG
        try:
            return await self._serve(link, server)
        finally:
            parts.tracing.shutdown()

    def _connect(self, link: Link, setup: Setup, config: SchedulerConfig, parts: Parts) -> ApiServer:
        core = RemoteCore(link, self._clock)
        pacer = Pacer(int(config.stream_interval_ms * 1e6))
        unread = config.max_unread_bytes // setup.num_workers
        worker = ApiWorker(self._clock, setup.worker_id, max_unread_bytes=unread, pacer=pacer)
        worker.connect(core)
        self._core, self._worker = core, worker
        early, self._early = self._early, []
        self._on_messages(early)
        return build_server(
            api_options(config, parts.version, setup.auth_tokens, setup.listen),
            worker,
            parts.tokenizer,
            parts.model,
            parts.tracing.interceptors,
            parts.tracing.request_tracer,
            is_alive=core.is_alive,
            spans_dropped=lambda: parts.tracing.dropped,
        )

    async def _serve(self, link: Link, server: ApiServer) -> int:
        await server.start()
        quieten_collector()
        link.send(Listening())
        stop = await self._stop
        await server.stop(LAST_WRITES_S if stop is None else stop.grace_s)
        link.close("this worker ends")
        return EXIT_FAILED if stop is None else EXIT_OK

    def _on_messages(self, messages: Sequence[Any]) -> None:
        for message in messages:
            match message:
                case Setup():
                    self._setup.set_result(message)
                case Stop():
                    if not self._stop.done():
                        self._stop.set_result(message)
                case _ if self._worker is None or self._core is None:
                    self._early.append(message)
                case Beat():
                    self._core.on_beat(message)
                case _:
                    self._worker.deliver(message)

    def _on_lost(self, why: str) -> None:
        if self._worker is not None:
            self._worker.core_lost()
        if not self._stop.done():
            log.error("the core is lost: %s", why)
            self._stop.set_result(None)


def run_worker(fd: int, make_parts: Callable[[SchedulerConfig], Parts]) -> int:
    """The whole life of the process around the inherited socket `fd`; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)

    async def main() -> int:
        return await _Process(make_parts).run(sock)

    return uvloop.run(main())


def _die_with_parent() -> None:
    """A core that was killed leaves no worker behind, even one whose loop stands still (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
