"""The public server on a real socket, with a core that does what the test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.clock import Clock, SystemClock
from common.grpc_options import PUBLIC_MAX_MESSAGE_BYTES, channel_options
from scheduler_svc.api.server import ApiOptions, ApiServer, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import CoreState
from stepwire.v1 import admin_pb2_grpc, inference_pb2_grpc
from stepwire.v1 import inference_pb2 as pb
from tests.unit.api.fakes import MODEL, READY, ByteTokenizer, FakeCore, Script

LIMIT_S = 30.0
ANYWHERE = "127.0.0.1:0"
TOKENIZER = ByteTokenizer()


@dataclass
class Scene:
    """A running server and a client of it."""

    server: ApiServer
    core: FakeCore
    channel: grpc.aio.Channel

    @property
    def inference(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def admin(self) -> Any:
        return admin_pb2_grpc.AdminStub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    async def status(self, service: str = "") -> int:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    async def generate(self, request: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
        return [message async for message in self.inference.Generate(request, **call)]


@contextlib.asynccontextmanager
async def scene(
    script: Script | None = None,
    *,
    options: ApiOptions | None = None,
    tokenizer: ByteTokenizer | None = TOKENIZER,
    state: CoreState = READY,
    credentials: grpc.ChannelCredentials | None = None,
    channel_args: Sequence[tuple[str, Any]] | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    clock: Clock | None = None,
) -> AsyncIterator[Scene]:
    worker = ApiWorker(clock or SystemClock())
    core = FakeCore(worker, state, script)
    server = build_server(options or ApiOptions(listen=ANYWHERE), worker, tokenizer, MODEL, interceptors)
    await server.start()
    args = channel_options(PUBLIC_MAX_MESSAGE_BYTES) if channel_args is None else list(channel_args)
    target = f"localhost:{server.port}"
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=args)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=args)
    try:
        yield Scene(server, core, channel)
    finally:
        await channel.close()
        await server.stop()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it on a fresh event loop, for LIMIT_S at most."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that happens by itself; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - what is waited for is no event of this code
        await asyncio.sleep(0.002)


async def rest(call: Any) -> list[Any]:
    """The messages not read yet."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def failing(call: Any) -> grpc.aio.AioRpcError:
    """The error the call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            await rest(call)
        else:
            await call
    return caught.value


def details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    raise AssertionError(f"no details in {error}")


def reason(error: grpc.aio.AioRpcError) -> str:
    """ErrorInfo's reason."""
    info = error_details_pb2.ErrorInfo()
    assert details(error).details[0].Unpack(info)
    assert info.domain == "stepwire"
    return str(info.reason)


def violated_field(error: grpc.aio.AioRpcError) -> str:
    bad = error_details_pb2.BadRequest()
    assert details(error).details[1].Unpack(bad)
    return str(bad.field_violations[0].field)


def joined_text(messages: Sequence[pb.GenerateResponse]) -> str:
    return "".join(message.delta.text for message in messages)
