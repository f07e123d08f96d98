"""The public server over real sockets, with a core that does what the test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from common.clock import SystemClock
from scheduler_svc.api.server import ApiOptions, ApiServer, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import Cancel, Finish
from stepwire.v1 import inference_pb2 as pb
from stepwire.v1 import inference_pb2_grpc
from tests.unit.api.fakes import MODEL, ByteTokenizer, FakeCore, Script, forever, say

LIMIT_S = 20.0


@contextlib.asynccontextmanager
async def serving(
    script: Script | None = None, options: ApiOptions | None = None, tokenizer: ByteTokenizer | None = ByteTokenizer()
) -> AsyncIterator[tuple[ApiServer, FakeCore]]:
    worker = ApiWorker(SystemClock())
    core = FakeCore(worker, script=script)
    server = build_server(options or ApiOptions(listen="127.0.0.1:0"), worker, tokenizer, MODEL)
    await server.start()
    try:
        yield server, core
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def calling(script: Script | None = None, **kwargs: Any) -> AsyncIterator[tuple[Any, FakeCore]]:
    async with (
        serving(script, **kwargs) as (server, core),
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        yield inference_pb2_grpc.InferenceStub(channel), core


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that happens by itself; the test's deadline bounds it."""
    while not condition():
        await asyncio.sleep(0.002)


async def failing(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
            info = error_details_pb2.ErrorInfo()
            assert status.details[0].Unpack(info)
            return info
    raise AssertionError("no details")


def test_generate_streams_text_in_order() -> None:
    async def test() -> None:
        async with calling(say("Grüße, 世界 🎉")) as (stub, core):
            messages = [m async for m in stub.Generate(pb.GenerateRequest(text="hi"))]
            assert messages[0].HasField("started") and not messages[0].HasField("delta")
            assert messages[0].started.prompt_tokens == 3
            assert "".join(m.delta.text for m in messages) == "Grüße, 世界 🎉"
            assert [m.HasField("finished") for m in messages].count(True) == 1
            finished = messages[-1].finished
            assert finished.reason == pb.FINISH_REASON_EOS and finished.stop_token_id == 256
            assert finished.usage.completion_tokens == sum(len(m.delta.token_ids) for m in messages)
            assert core.of(Cancel) == [] and core.of(Finish) == []
            assert core.worker.num_streams == 0

    run(test)


def test_one_message_without_stream() -> None:
    async def test() -> None:
        async with calling(say("whole")) as (stub, _):
            request = pb.GenerateRequest(text="hi", stream=False, stop=pb.StopConditions(max_tokens=9))
            (message,) = [m async for m in stub.Generate(request)]
            assert message.delta.text == "whole"
            assert message.started.seed == message.started.seed
            assert message.finished.usage.completion_tokens == 6

    run(test)


def test_cancelling_ends_the_work_at_once() -> None:
    async def test() -> None:
        async with calling(forever) as (stub, core):
            call = stub.Generate(pb.GenerateRequest(text="hi"))
            await call.read()
            await call.read()
            call.cancel()
            await until(lambda: len(core.of(Cancel)) == 1)
            assert core.live == {} and core.worker.num_streams == 0

    run(test)
