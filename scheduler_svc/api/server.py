"""Puts the public server together."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.grpc_options import PUBLIC_MAX_MESSAGE_BYTES, server_options
from scheduler_svc.api.admin import AdminServicer
from scheduler_svc.api.auth import BearerTokens
from scheduler_svc.api.calls import GRPC_LOG, no_lost_answer
from scheduler_svc.api.generation import Generation
from scheduler_svc.api.health import HealthMonitor, HealthServicer
from scheduler_svc.api.inference import InferenceServicer, add_inference
from scheduler_svc.api.listen import TlsFiles, open_port
from scheduler_svc.api.prompt import PromptReader, TextWorkers
from scheduler_svc.api.request_tracer import RequestTracer, SpanRequestTracer
from scheduler_svc.api.served_model import ServedModel, TextTokenizer
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.token_stream import StreamLimits
from stepwire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2

SWEEP_INTERVAL_S: Final = 1.0
PROBE_INTERVAL_S: Final = 5.0
MAX_PIECE_BYTES: Final = 1024 * 1024  # of one message of a stream, before its own overhead

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """How the public server runs. `listen`: any gRPC address; port 0 takes a free one. `also_listen`: more of them.

    `share_port`: other processes may listen there too.
    `max_prompt_bytes`: of a text, before it is tokenised. `max_buffered_bytes`: of results a client leaves unread.
    """

    listen: str = "127.0.0.1:50051"
    also_listen: tuple[str, ...] = ()
    share_port: bool = False
    max_message_bytes: int = PUBLIC_MAX_MESSAGE_BYTES
    tls: TlsFiles | None = None
    auth_tokens: tuple[str, ...] = ()
    slow_reader_s: float = 30.0
    max_buffered_bytes: int = 64 * 1024 * 1024
    max_prompt_bytes: int = 4 * 1024 * 1024
    allow_request_templates: bool = False
    tokenize_workers: int = 2
    max_tokenize_pending: int = 256
    drain_s: float = 30.0
    liveness_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    version: str = ""


class ApiServer:
    """The public server: `start`, then `stop`. Owned by the event loop it was made on."""

    def __init__(
        self, server: grpc.aio.Server, port: int, worker: ApiWorker, monitor: HealthMonitor, text_workers: TextWorkers
    ) -> None:
        self.server = server
        self.port = port
        self._worker = worker
        self._monitor = monitor
        self._text_workers = text_workers
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.server.start()
        self._tasks = [
            asyncio.create_task(_every(SWEEP_INTERVAL_S, self._sweep), name="api-sweep"),
            asyncio.create_task(_every(PROBE_INTERVAL_S, self._monitor.probe), name="api-probe"),
        ]

    async def stop(self, grace_s: float | None = None) -> None:
        """Not ready at once; calls get `grace_s` to end, then are cancelled. Idempotent. Drain the core before."""
        self._monitor.stop()
        await self.server.stop(grace_s)
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        self._text_workers.close()

    async def wait_for_termination(self) -> None:
        await self.server.wait_for_termination()

    async def _sweep(self) -> None:
        self._worker.check_streams()
        self._monitor.refresh()


def build_server(
    options: ApiOptions,
    worker: ApiWorker,
    tokenizer: TextTokenizer | None,
    model: ServedModel,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    tracer: RequestTracer | None = None,
    is_alive: Callable[[], bool] = lambda: True,
    spans_dropped: Callable[[], int] = lambda: 0,
) -> ApiServer:
    """The server with its port bound, not started. Call it on the event loop that will run it.

    `interceptors` run inside the token check. `tracer` None: attributes go to the span that is current in the call.
    `is_alive`: what the engine says of itself, for liveness. `spans_dropped`: for GetStats.
    Raises ConfigError: port taken, TLS files wrong.
    """
    logging.getLogger(GRPC_LOG).addFilter(no_lost_answer)
    auth = (BearerTokens(options.auth_tokens),) if options.auth_tokens else ()
    server = grpc.aio.server(
        interceptors=(*auth, *interceptors),
        options=server_options(options.max_message_bytes, share_port=options.share_port),
    )
    text_workers = TextWorkers(options.tokenize_workers, options.max_tokenize_pending)
    prompts = PromptReader(tokenizer, text_workers, options.max_prompt_bytes, options.allow_request_templates)
    piece_bytes = min(MAX_PIECE_BYTES, options.max_message_bytes // 2)
    limits = StreamLimits(int(options.slow_reader_s * 1e9), options.max_buffered_bytes, piece_bytes)
    generation = Generation(
        worker, prompts, tokenizer, model, tracer or SpanRequestTracer(), limits, options.max_message_bytes
    )
    health = HealthServicer()
    monitor = HealthMonitor(worker, health, options.liveness_timeout_s, options.stall_timeout_s, is_alive)
    add_inference(InferenceServicer(generation, prompts, worker, options.version), server)
    admin_pb2_grpc.add_AdminServicer_to_server(
        AdminServicer(worker, int(options.drain_s * 1000), spans_dropped), server
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    ]
    if (vllm_name := _add_vllm_engine(server, generation, worker, tokenizer, options.version)) is not None:
        names.append(vllm_name)
    reflection.enable_server_reflection(names, server)
    port = open_port(server, options.listen, options.tls)
    for address in options.also_listen:
        open_port(server, address, options.tls)
    return ApiServer(server, port, worker, monitor, text_workers)


def _add_vllm_engine(
    server: grpc.aio.Server, generation: Generation, worker: ApiWorker, tokenizer: TextTokenizer | None, version: str
) -> str | None:
    """The gateway's service, where its protocol package is installed; its full name."""
    try:
        from smg_grpc_proto import vllm_engine_pb2_grpc

        from scheduler_svc.api.vllm_engine import SERVICE_NAME, VllmEngineServicer
    except ImportError as error:
        _log.info("vllm.grpc.engine is not served: %s", error)
        return None
    servicer = VllmEngineServicer(generation, worker, tokenizer, version)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    return SERVICE_NAME


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:  # noqa: BLE001 - a failed round must not end the rounds after it
            _log.exception("housekeeping of the public API failed; it goes on")
