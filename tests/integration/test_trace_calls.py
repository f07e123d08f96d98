"""Server spans of the public API over real sockets: parents, status, attributes, and who gets none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from common.clock import SystemClock
from common.telemetry.context import TraceContext, new_trace, unpack
from common.telemetry.endpoint import SCHEDULER_SERVICE
from common.telemetry.provider import telemetry
from scheduler_svc.api.server import ApiOptions, build_server
from scheduler_svc.api.worker import ApiWorker
from scheduler_svc.messages import Submit
from scheduler_svc.tracing import TracingOptions, tracing_into
from stepwire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from stepwire.v1 import inference_pb2 as pb
from tests.unit.api.fakes import MODEL, ByteTokenizer, FakeCore, Script, forever, say

LIMIT_S = 30.0


class Traced:
    """A served API and what it exported."""

    def __init__(self, channel: grpc.aio.Channel, core: FakeCore, spans: Callable[[], list[ReadableSpan]]) -> None:
        self.channel = channel
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.core = core
        self.spans = spans

    async def wait_for(self, count: int) -> list[ReadableSpan]:
        await until(lambda: len(self.spans()) >= count)
        return self.spans()

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.core.sent if isinstance(message, Submit)]


@contextlib.asynccontextmanager
async def serving(script: Script, options: TracingOptions | None = None) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    into = telemetry(SCHEDULER_SERVICE, "s1", exporter, collect_s=0.01)
    tracing = tracing_into(into, options or TracingOptions(), SystemClock())
    worker = ApiWorker(SystemClock())
    core = FakeCore(worker, script=script)
    server = build_server(
        ApiOptions(listen="127.0.0.1:0"),
        worker,
        ByteTokenizer(),
        MODEL,
        interceptors=tracing.interceptors,
        tracer=tracing.request_tracer,
    )
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Traced(channel, core, lambda: list(exporter.get_finished_spans()))
    finally:
        await server.stop()
        tracing.shutdown()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that happens by itself; the test's deadline bounds it."""
    while not condition():  # noqa: ASYNC110 - nothing signals what the exporter or the core has seen
        await asyncio.sleep(0.005)


def carried(parent: TraceContext) -> tuple[tuple[str, str], ...]:
    return (("traceparent", parent.traceparent),)


def test_generate_hangs_below_its_caller_and_passes_its_span_to_the_core() -> None:
    async def test() -> None:
        async with serving(say("hello")) as api:
            caller = new_trace()
            call = api.stub.Generate(pb.GenerateRequest(text="hi", request_id="r-7"), metadata=carried(caller))
            messages = [m async for m in call]
            assert messages[-1].HasField("finished")
            (span,) = await api.wait_for(1)
            context = span.get_span_context()
            assert context is not None and span.parent is not None
            assert (context.trace_id, span.parent.span_id) == (caller.trace_id, caller.span_id)
            assert span.kind is SpanKind.SERVER and span.status.status_code is StatusCode.UNSET
            (submit,) = api.submits
            assert unpack(submit.trace_context) == TraceContext(context.trace_id, context.span_id, 1)
            trailing = dict(await call.trailing_metadata())
            assert trailing["traceparent"] == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
            attributes = dict(span.attributes or {})
            assert attributes["gen_ai.response.id"] == "r-7"
            assert attributes["gen_ai.usage.input_tokens"] == 3
            assert attributes["gen_ai.usage.output_tokens"] == messages[-1].finished.usage.completion_tokens
            assert attributes["gen_ai.response.finish_reasons"] == ("eos",)
            assert attributes["rpc.method"] == "Generate"

    run(test)


def test_a_call_without_traceparent_starts_a_trace() -> None:
    async def test() -> None:
        async with serving(say("hello")) as api:
            assert [m async for m in api.stub.Generate(pb.GenerateRequest(text="hi"))]
            (span,) = await api.wait_for(1)
            assert span.parent is None

    run(test)


def test_an_unsampled_caller_gets_no_span_and_no_core_trace() -> None:
    async def test() -> None:
        async with serving(say("hello")) as api:
            caller = new_trace()
            silent = TraceContext(caller.trace_id, caller.span_id, 0)
            call = api.stub.Generate(pb.GenerateRequest(text="hi"), metadata=carried(silent))
            assert [m async for m in call]
            assert dict(await call.trailing_metadata())["traceparent"] == silent.traceparent
            assert [m async for m in api.stub.Generate(pb.GenerateRequest(text="hi"), metadata=carried(caller))]
            assert len(await api.wait_for(1)) == 1
            assert [bool(s.trace_context) for s in api.submits] == [False, True]

    run(test)


def test_a_trace_that_is_full_gets_no_more_spans() -> None:
    async def test() -> None:
        async with serving(say("x")) as api:
            caller = new_trace()
            for _ in range(40):
                call = api.stub.Generate(pb.GenerateRequest(text="hi"), metadata=carried(caller))
                assert [m async for m in call]
            sampled = [s for s in api.submits if s.trace_context]
            # The stand-in core gives nothing back, so each call holds all the spans it might have had.
            assert 1 < len(sampled) <= 25
            assert len(await api.wait_for(len(sampled))) == len(sampled)

    run(test)


def test_the_ratio_leaves_requests_out() -> None:
    async def test() -> None:
        async with serving(say("x"), TracingOptions(sample_ratio=0.0)) as api:
            assert [m async for m in api.stub.Generate(pb.GenerateRequest(text="hi"))]
            assert [m async for m in api.stub.Generate(pb.GenerateRequest(text="hi"), metadata=carried(new_trace()))]
            assert len(await api.wait_for(1)) == 1
            assert [bool(s.trace_context) for s in api.submits] == [False, True]

    run(test)


@pytest.mark.parametrize("reads", [0, 1, 3])
def test_a_cancelled_stream_says_so(reads: int, caplog: pytest.LogCaptureFixture) -> None:
    """Also when it is cancelled while a message is written; and OpenTelemetry has nothing to complain of."""

    async def test() -> None:
        async with serving(forever) as api:
            call = api.stub.Generate(pb.GenerateRequest(text="hi"), metadata=carried(new_trace()))
            for _ in range(reads):
                await call.read()
            if not reads:
                await call.wait_for_connection()
                await until(lambda: bool(api.submits))
            call.cancel()
            (span,) = await api.wait_for(1)
            assert span.status.status_code is StatusCode.ERROR
            assert (span.attributes or {})["error.type"] == "ABORTED"

    run(test)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_a_deadline_that_passes_is_no_caller_who_went_away() -> None:
    async def test() -> None:
        async with serving(forever) as api:
            call = api.stub.Generate(pb.GenerateRequest(text="hi"), metadata=carried(new_trace()), timeout=0.3)
            with pytest.raises(grpc.aio.AioRpcError):
                [m async for m in call]
            (span,) = await api.wait_for(1)
            assert span.status.status_code is StatusCode.ERROR
            assert (span.attributes or {})["error.type"] == "DEADLINE"

    run(test)


def test_a_refused_request_carries_its_status() -> None:
    async def test() -> None:
        async with serving(say("x")) as api:
            call = api.stub.Generate(
                pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(temperature=-1)), metadata=carried(new_trace())
            )
            with pytest.raises(grpc.aio.AioRpcError):
                [m async for m in call]
            (span,) = await api.wait_for(1)
            attributes = dict(span.attributes or {})
            assert attributes["rpc.grpc.status_code"] == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert attributes["error.type"] == "INVALID_INPUT"
            assert str(attributes["stepwire.error"]).startswith("sampling.temperature is -1")

    run(test)


def test_health_and_admin_calls_have_no_spans() -> None:
    async def test() -> None:
        async with serving(say("x")) as api:
            await health_pb2_grpc.HealthStub(api.channel).Check(health_pb2.HealthCheckRequest())
            with contextlib.suppress(grpc.aio.AioRpcError):
                await admin_pb2_grpc.AdminStub(api.channel).GetStats(admin_pb2.GetStatsRequest())
            await api.stub.Tokenize(pb.TokenizeRequest(text="hi"), metadata=carried(new_trace()))
            (span,) = await api.wait_for(1)
            assert (span.attributes or {})["rpc.method"] == "Tokenize"

    run(test)
