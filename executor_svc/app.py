"""The executor process: binds first, loads next, serves until told to stop.

The pieces are given to `serve`; executor_svc/__main__.py chooses the real ones, tests the toy.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.config import EXIT_CONFIG
from common.errors import ConfigError, ModelError
from common.grpc_options import PRIVATE_MAX_MESSAGE_BYTES, server_options
from common.serving import bound_address, refuse_served_path, write_address
from executor_svc.metrics import CountingSink, serve_executor_metrics
from executor_svc.servicer import SERVICE_NAME, ExecutorServicer
from executor_svc.session import SessionLimits, StepTraceSink
from executor_svc.step_executor import StepExecutor
from executor_svc.step_threads import StepThreads
from stepwire.executor.v1 import executor_pb2_grpc as pb_grpc

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1

# A signal that comes again this soon is the same one, sent to a process and to its group.
REPEAT_S: Final = 1.0
# A waking thread otherwise waits up to 5 ms for the GIL beside pure-Python work.
SWITCH_INTERVAL_S: Final = 1e-4


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`listen`: host:port (port 0: any free one) or unix:path. `address_file` gets the bound address. `metrics_listen`
    empty: no metrics."""

    listen: str
    drain_s: float = 10.0
    address_file: Path | None = None
    limits: SessionLimits = field(default_factory=SessionLimits)
    metrics_listen: str = ""


async def serve(
    options: ServeOptions,
    build: Callable[[], StepExecutor],
    trace: StepTraceSink | None = None,
    start: Mapping[str, float] | None = None,
) -> int:
    """Runs the executor until SIGTERM, SIGINT or its death; returns the exit status.

    `build` makes the executor, in a thread of its own, while the port already answers UNAVAILABLE. `start`: seconds by
    part of what it does, for the metrics; may grow while it runs.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    counts = CountingSink(trace, start) if options.metrics_listen else None
    process = _Process(options, ExecutorServicer(options.limits, trace=counts or trace))
    metrics = None
    try:
        await process.listen()
        if counts is not None:
            metrics = serve_executor_metrics(options.metrics_listen, counts)
        return await process.run(build)
    except (ConfigError, ModelError) as error:
        log.error("%s", error.message)
        return EXIT_CONFIG
    finally:
        await process.close()
        if metrics is not None:
            await metrics.close()


class _Process:
    """Owner of server, health and threads; everything on the I/O loop."""

    def __init__(self, options: ServeOptions, servicer: ExecutorServicer) -> None:
        self._options = options
        self._servicer = servicer
        self._server = grpc.aio.server(options=server_options(PRIVATE_MAX_MESSAGE_BYTES))
        self._health = health.aio.HealthServicer()
        self._threads: StepThreads | None = None
        self._signalled_s = 0.0
        self._fatal = ""  # what killed the executor, also while it drains
        self._stop: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

    async def listen(self) -> None:
        """Binds, serves health and UNAVAILABLE. Raises ConfigError when the address can not be had."""
        pb_grpc.add_ExecutorServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        address = bind(self._server, self._options.listen)
        await self._server.start()
        log.info("listening on %s", address)
        if self._options.address_file is not None:
            write_address(self._options.address_file, address)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def run(self, build: Callable[[], StepExecutor]) -> int:
        loading = in_daemon_thread(build, "loader")
        either: set[asyncio.Future[Any]] = {loading, self._stop}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._stop.done():
            executor = loading.result()
            self._threads = StepThreads(executor, asyncio.get_running_loop(), self._on_fatal)
            self._threads.start()
            # What was made so far lives as long as the process: the collector need not walk it again.
            gc.collect()
            gc.freeze()
            self._servicer.attach(executor, self._threads)
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)
            log.info("ready: %s on %s", executor.info.model_id, executor.info.device)
        status, reason = await self._stop
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        if status == EXIT_OK:
            log.info("draining for at most %.1f s: %s", self._options.drain_s, reason)
            await self._servicer.drain(reason, self._options.drain_s)
            if self._fatal:
                log.critical("the executor died while it drained: %s", self._fatal)
                status = EXIT_FAILED
        else:
            log.critical("the executor is dead: %s", reason)
            await self._servicer.stop(grpc.StatusCode.INTERNAL, f"the executor is dead: {reason}")
        return status

    async def close(self) -> None:
        await self._server.stop(1.0)
        if self._threads is not None and not await self._threads.stop(2.0):
            log.warning("the device is still busy; leaving it")

    def _on_signal(self, number: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._stop.done():
            self._stop.set_result((EXIT_OK, signal.Signals(number).name))
            self._signalled_s = now_s
        elif now_s - self._signalled_s > REPEAT_S:
            log.warning("signalled again: leaving at once")
            os._exit(128 + number)

    def _on_fatal(self, reason: str) -> None:
        self._fatal = self._fatal or reason
        if not self._stop.done():
            self._stop.set_result((EXIT_FAILED, reason))

    async def _set_health(self, status: int) -> None:
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)


def bind(server: grpc.aio.Server, listen: str) -> str:
    """Binds and returns the address clients can use. Raises ConfigError naming it when it is taken or wrong."""
    refuse_served_path(listen)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"can not listen on {listen}: it is taken or not ours ({error})", field="listen") from None
    return bound_address(listen, port)


def in_daemon_thread(build: Callable[[], StepExecutor], name: str) -> asyncio.Future[StepExecutor]:
    """Like asyncio.to_thread, but a process that is told to stop meanwhile need not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[StepExecutor] = loop.create_future()

    def settle(executor: StepExecutor | None, error: BaseException | None) -> None:
        if done.done():
            return
        if executor is not None:
            done.set_result(executor)
        else:
            done.set_exception(error or RuntimeError("no executor"))

    def work() -> None:
        try:
            executor = build()
        except BaseException as error:  # noqa: BLE001 - carried to the loop, which raises it there
            outcome: tuple[StepExecutor | None, BaseException | None] = (None, error)
        else:
            outcome = (executor, None)
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            log.debug("loaded after the loop closed")

    threading.Thread(target=work, name=name, daemon=True).start()
    return done
