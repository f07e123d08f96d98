"""The asynchronous client against the scripted server."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest

import stepwire_client as sw
from stepwire_client._gen.stepwire.v1 import inference_pb2 as pb
from tests.unit.client.fake_server import FakeInference, answer, fail, retry_info, serving
from tests.unit.client.test_client import FAST, endless

Scenario = Callable[[FakeInference, sw.AsyncClient], Awaitable[None]]


def run(scenario: Scenario, num_channels: int = 1) -> None:
    """Runs `scenario` with a server and a client, within a deadline."""

    async def body(server: FakeInference, address: str) -> None:
        async with sw.AsyncClient(address, retry=FAST, deadline=20, num_channels=num_channels) as client:
            await asyncio.wait_for(scenario(server, client), 30)

    with serving() as (server, address):
        asyncio.run(body(server, address))


async def heard_cancel(server: FakeInference) -> None:
    assert await asyncio.to_thread(server.cancelled.wait, 10), "the server never heard of it"


def test_events_texts_and_completion() -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        events = [event async for event in client.generate("Hi", seed=9, request_id="r")]
        assert events[0] == sw.Started("r", 3, 9)
        assert events[-1] == sw.Finished(sw.FinishReason.EOS, sw.Usage(3, 1, 2), 2)
        assert "".join([text async for text in client.generate(token_ids=[1]).texts()]) == "Hello world"
        with pytest.raises(ValueError, match="n > 1"):
            assert [text async for text in client.generate(token_ids=[1], n=2).texts()] == []
        assert (await client.complete("Hi")).text == "Hello world"
        assert (await client.chat([{"role": "user", "content": "u"}])).token_ids == (5, 6)

    run(scenario)


def test_unary_calls() -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        server.model_failures = [lambda context: fail(context, grpc.StatusCode.UNAVAILABLE, "later", retry_info(1))]
        assert (await client.model_info()).model == "toy"
        assert await client.tokenize("ab") == sw.Tokens((97, 98), ("a", "b"))
        assert await client.detokenize([97]) == "a"
        assert (await client.apply_chat_template([sw.Message("user", "x")])).text == "<user>x"
        assert await client.abort("live")
        assert (await client.stats()).running == 2
        assert await client.drain(5) == 5
        assert [step.step_id async for step in client.watch_steps(3)] == [1, 2, 3]
        assert await client.health() is sw.Health.SERVING
        assert await client.health("no.such.Service") is sw.Health.SERVICE_UNKNOWN

    run(scenario)


def test_many_at_once_over_several_channels() -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.complete("x") for _ in range(12)))
        assert {a.text for a in answers} == {"Hello world"}
        assert len(server.peers) == 3

    run(scenario, num_channels=3)


def test_retry_then_typed_error() -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            if len(server.requests) < 3:
                fail(context, grpc.StatusCode.UNAVAILABLE, "later")
            yield from answer(request, context)

        server.script = script
        assert (await client.complete("x")).text == "Hello world"
        assert len(server.requests) == 3
        server.script = lambda request, context: iter([pb.GenerateResponse(started=pb.Started(request_id="r"))])
        with pytest.raises(sw.BrokenStream):
            await client.complete("x")

    run(scenario)


@pytest.mark.parametrize("how", ["with", "close", "drop", "task"])
def test_leaving_a_stream_cancels_the_call(how: str) -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        server.script = endless

        async def read_for_ever() -> None:
            async for _ in client.generate("x"):
                pass

        if how == "with":
            async with client.generate("x") as stream:
                await anext(stream)
        elif how == "close":
            stream = client.generate("x")
            await anext(stream)
            stream.close()
            with pytest.raises(sw.Cancelled):
                while True:
                    await anext(stream)
        elif how == "drop":
            stream = client.generate("x")
            await anext(stream)
            del stream
        else:
            task = asyncio.create_task(read_for_ever())
            assert await asyncio.to_thread(server.arrived.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await heard_cancel(server)

    run(scenario)


def test_closing_from_another_task_ends_the_reader() -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        def silent(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            yield pb.GenerateResponse(started=pb.Started(request_id="r"))
            server.cancelled.wait(10)

        server.script = silent
        stream = client.generate("x")
        await anext(stream)
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.close()
        with pytest.raises(sw.Cancelled):
            await reader

    run(scenario)


def test_closing_ends_the_pause_before_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        pausing = asyncio.Event()

        def long_pause(*_: object) -> float:
            pausing.set()
            return 3600.0

        def down(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            fail(context, grpc.StatusCode.UNAVAILABLE, "down")
            yield from ()

        monkeypatch.setattr("stepwire_client.aio.pause_before_retry", long_pause)
        server.script = down
        stream = client.generate("x")
        reader = asyncio.ensure_future(anext(stream))
        await pausing.wait()
        stream.close()
        with pytest.raises(sw.Cancelled):
            await reader
        assert len(server.requests) == 1

    run(scenario)


def test_deadline() -> None:
    async def scenario(server: FakeInference, client: sw.AsyncClient) -> None:
        server.script = endless
        with pytest.raises(sw.DeadlineExceeded):
            async for _ in client.generate("x", deadline=0.3):
                pass

    run(scenario)


def test_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError):
        sw.AsyncClient()
