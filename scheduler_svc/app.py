"""The scheduler process: core and engine loop on one event loop; the api worker and its public server are on it, too,
unless `api_workers` moves them to processes of their own.

The pieces that depend on the model are given to `serve`; scheduler_svc/__main__.py loads them, tests bring their own.
"""

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from common.clock import Clock, SystemClock
from common.config import EXIT_CONFIG
from common.errors import ConfigError, Unavailable
from common.serving import bound_address, write_address
from scheduler_svc.api.auth import read_tokens
from scheduler_svc.api.listen import TlsFiles
from scheduler_svc.api.pacer import Pacer
from scheduler_svc.api.served_model import ServedModel, TextTokenizer
from scheduler_svc.api.server import ApiOptions, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.config import SchedulerConfig, weights_of
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.pipeline_depth import MAX_ADAPTED
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine_loop import EngineLoop, EngineOptions
from scheduler_svc.executor_client import StreamOptions
from scheduler_svc.executor_driver import DriverOptions
from scheduler_svc.metrics.beside import Beside
from scheduler_svc.metrics.observer import MetricsObserver
from scheduler_svc.metrics.serving import serve_scheduler_metrics
from scheduler_svc.tracing import Tracing
from scheduler_svc.workers.addresses import Addresses
from scheduler_svc.workers.frames import MAX_STEP_OUTPUT_BYTES
from scheduler_svc.workers.pool import PoolOptions, WorkerPool

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
# A signal that comes again this soon is the same one, sent to a process and to its group.
REPEAT_S: Final = 1.0
# After a drain every request is over; calls that only still write their last message get this long.
LAST_WRITES_S: Final = 2.0
SWITCH_INTERVAL_S: Final = 1e-4
GC_THRESHOLD: Final = 50_000
WORKER_COMMAND: Final = (sys.executable, "-P", "-m", "scheduler_svc.workers")


@dataclass(frozen=True, slots=True)
class Parts:
    """What depends on the model. `tokenizer` None: token ids only."""

    model: ServedModel
    tokenizer: TextTokenizer | None
    tracing: Tracing = field(default_factory=Tracing)
    stream: StreamOptions = field(default_factory=StreamOptions)
    version: str = ""


async def serve(config: SchedulerConfig, parts: Parts, worker_command: Sequence[str] = WORKER_COMMAND) -> int:
    """Runs the scheduler until SIGTERM, SIGINT or its death; returns the exit status.

    `worker_command` starts an api worker's process; with `api_workers` the parts' tokenizer is not needed here.
    """
    # Beside a thread in pure Python (span export) the loop thread would else wait 5 ms each time it wakes.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    clock = SystemClock()
    core = Scheduler(core_config(config))
    driver = DriverOptions(secrets.token_bytes(16), core.config.pipeline_depth, parts.stream)
    options = EngineOptions(config.executors, driver, parts.model.model_hash)
    counts = MetricsObserver() if config.metrics_listen else None
    observer = parts.tracing.observer if counts is None else Beside(parts.tracing.observer, counts)
    engine = EngineLoop(core, options, clock, observer, lambda: parts.tracing.dropped)
    metrics = None
    try:
        if counts is not None:
            metrics = serve_scheduler_metrics(config.metrics_listen, engine, counts)
        api = (
            WorkerPool(config, engine, PoolOptions(worker_command, auth_tokens(config)))
            if config.api_workers
            else _LocalApi(config, parts, engine, clock)
        )
    except ConfigError as error:
        log.error("%s", error.message)
        return EXIT_CONFIG
    try:
        return await _run(config, engine, api)
    finally:
        if metrics is not None:
            await metrics.close()


class _Api(Protocol):
    """What serves the callers, in this process or in others."""

    @property
    def addresses(self) -> Addresses: ...

    @property
    def failed(self) -> "asyncio.Future[ConfigError | Unavailable]":
        """Resolves to why nobody can be served any more."""
        ...

    async def start(self) -> None:
        """Returns when callers are served, or `failed` is done."""
        ...

    async def stop(self, grace_s: float) -> None: ...


class _LocalApi:
    """The api worker in the core's own process."""

    def __init__(self, config: SchedulerConfig, parts: Parts, engine: EngineLoop, clock: Clock) -> None:
        """Raises ConfigError."""
        worker = ApiWorker(
            clock, max_unread_bytes=config.max_unread_bytes, pacer=Pacer(int(config.stream_interval_ms * 1e6))
        )
        worker.connect(engine.add_worker(worker))
        self._server = build_server(
            api_options(config, parts.version, auth_tokens(config)),
            worker,
            parts.tokenizer,
            parts.model,
            parts.tracing.interceptors,
            parts.tracing.request_tracer,
            is_alive=engine.is_alive,
        )
        self.addresses = Addresses(bound_address(config.listen, self._server.port), ())
        self.failed: asyncio.Future[ConfigError | Unavailable] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        await self._server.stop(grace_s)


async def _run(config: SchedulerConfig, engine: EngineLoop, api: _Api) -> int:
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    _stop_on_signals(stop)
    start = asyncio.ensure_future(api.start())
    await _first_of(stop, start)
    if start.done():
        start.result()
    if api.failed.done() or stop.done():
        await api.stop(0.0)
        if not api.failed.done():
            return EXIT_OK
        log.error("%s", api.failed.result().message)
        return EXIT_CONFIG if isinstance(api.failed.result(), ConfigError) else EXIT_FAILED
    addresses = api.addresses.listing()
    log.info("listening on %s, executors: %s", ", ".join(addresses), ", ".join(config.executors))
    if config.address_file is not None:
        try:
            write_address(config.address_file, "\n".join(addresses))
        except ConfigError as error:
            log.error("%s", error.message)
            await api.stop(0.0)
            return EXIT_CONFIG
    engine.start()
    quieten_collector()
    await _first_of(stop, engine.failed, api.failed)
    if engine.failed.done() or api.failed.done():
        cause = engine.failed if engine.failed.done() else api.failed
        log.critical("the core is dead: %r", cause.result())
        await api.stop(0.0)
        await engine.stop()
        return EXIT_FAILED
    log.info("draining for at most %.1f s: %s", config.drain_s, stop.result())
    drain = asyncio.ensure_future(engine.drain(config.drain_s))
    await _first_of(drain, engine.failed)
    if not drain.done():
        drain.cancel()
    elif unfinished := drain.result():
        log.warning("%d requests were ended unfinished", unfinished)
    await api.stop(LAST_WRITES_S)
    await engine.stop()
    return EXIT_FAILED if engine.failed.done() else EXIT_OK


def quieten_collector() -> None:
    """What was made so far lives as long as the process, so the collector need not walk it again. What comes and goes
    with each token is freed by its count: with the usual threshold of 700 a step of a thousand streams would have every
    live stream walked several times over to find nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)


def core_config(config: SchedulerConfig) -> CoreConfig:
    return CoreConfig(
        pipeline_depth=config.pipeline_depth or MAX_ADAPTED,
        adapt_pipeline_depth=not config.pipeline_depth,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_output_bytes=MAX_STEP_OUTPUT_BYTES,
        enable_prefix_cache=config.enable_prefix_cache,
        policy=config.policy,
        max_queue_time_ms=config.max_queue_time_ms,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_partial_prefills=config.max_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        target_itl_ms=config.target_itl_ms,
        prefill_share=config.prefill_share,
        priority_aging_ms=config.priority_aging_ms,
        tenant_weights=weights_of(config.tenant_weights),
        input_token_weight=config.input_token_weight,
        output_token_weight=config.output_token_weight,
        isolate_tenants=config.isolate_tenants,
        max_preemptions=config.max_preemptions,
    )


def auth_tokens(config: SchedulerConfig) -> tuple[str, ...]:
    """What the service accepts as long as it runs; none: everybody. Raises ConfigError for a file that can not be
    read."""
    return read_tokens(config.auth_tokens_file) if config.auth_tokens_file is not None else ()


def api_options(
    config: SchedulerConfig, version: str, tokens: tuple[str, ...], shared: Sequence[str] = ()
) -> ApiOptions:
    """`shared`: where an api worker listens, with others."""
    tls = None
    if config.tls_cert is not None and config.tls_key is not None:
        tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)
    return ApiOptions(
        listen=shared[0] if shared else config.listen,
        also_listen=tuple(shared[1:]),
        share_port=bool(shared),
        max_message_bytes=config.max_message_bytes,
        tls=tls,
        auth_tokens=tokens,
        slow_reader_s=config.slow_reader_s,
        allow_request_templates=config.allow_request_templates,
        drain_s=config.drain_s,
        version=version,
    )


def _stop_on_signals(stop: "asyncio.Future[str]") -> None:
    """The first signal asks to drain, a later one leaves at once."""
    loop = asyncio.get_running_loop()
    signalled_s = 0.0

    def on_signal(number: int) -> None:
        nonlocal signalled_s
        if not stop.done():
            stop.set_result(signal.Signals(number).name)
            signalled_s = loop.time()
        elif loop.time() - signalled_s > REPEAT_S:
            log.warning("signalled again: leaving at once")
            os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


async def _first_of(*futures: "asyncio.Future[Any]") -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
