"""Which public calls get a server span. The span itself is made by OpenTelemetry's gRPC instrumentation."""

import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import grpc
from opentelemetry import trace
from opentelemetry.context import attach
from opentelemetry.instrumentation.grpc import aio_server_interceptor
from opentelemetry.sdk.trace import TracerProvider

from common.clock import Clock
from common.telemetry.context import TraceContext, new_trace, parse_traceparent
from common.telemetry.spans import span_context
from scheduler_svc.trace_policy import MAX_REQUEST_SPANS, TraceAllowance

# Long-running or frequent calls (health, reflection, WatchSteps, GetStats) would be noise.
TRACED_METHODS: Final = frozenset(
    {
        "/stepwire.v1.Inference/Generate",
        "/stepwire.v1.Inference/Tokenize",
        "/stepwire.v1.Inference/Detokenize",
        "/stepwire.v1.Inference/ApplyChatTemplate",
        "/stepwire.v1.Inference/Abort",
        "/vllm.grpc.engine.VllmEngine/Generate",
        "/vllm.grpc.engine.VllmEngine/Abort",
    }
)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class CallSampler:
    """Decides before the call runs, so that an unsampled one is not wrapped at all and costs nothing per message.

    The caller's decision (`traceparent`) counts, within the spans its trace may have; calls without one are sampled at
    `ratio`, and no faster than the allowance says.
    """

    def __init__(self, allowance: TraceAllowance, ratio: float, clock: Clock) -> None:
        self._allowance = allowance
        self._ratio = ratio
        self._clock = clock
        self._random = random.Random()

    def decide(self, traceparent: str, max_spans: int) -> TraceContext | None:
        """None: sampled. Else the context, not sampled, under which the call runs.

        `max_spans`: how many the call makes at most.
        """
        parent = parse_traceparent(traceparent) if traceparent else None
        if parent is None:
            if self._random.random() < self._ratio and self._allowance.allows_root(self._clock.monotonic_ns()):
                return None
            root = new_trace()
            return TraceContext(root.trace_id, root.span_id, 0)
        if parent.sampled and self._allowance.reserve(parent.trace_id, max_spans):
            return None
        return TraceContext(parent.trace_id, parent.span_id, 0)


def server_interceptor(provider: TracerProvider, sampler: CallSampler) -> grpc.aio.ServerInterceptor:
    """Wraps sampled calls of TRACED_METHODS in a server span that is current while the call runs."""
    return _Interceptor(aio_server_interceptor(tracer_provider=provider), sampler)  # type: ignore[no-untyped-call]


class _Interceptor(grpc.aio.ServerInterceptor):
    def __init__(self, instrumentation: grpc.aio.ServerInterceptor, sampler: CallSampler) -> None:
        self._instrumentation = instrumentation
        self._sampler = sampler

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if handler_call_details.method not in TRACED_METHODS:
            return await continuation(handler_call_details)
        header = next((v for k, v in handler_call_details.invocation_metadata or () if k == "traceparent"), "")
        unsampled = self._sampler.decide(
            header if isinstance(header, str) else header.decode("ascii", "replace"),
            MAX_REQUEST_SPANS if handler_call_details.method.endswith("/Generate") else 1,
        )
        if unsampled is None:
            return await self._in_span(continuation, handler_call_details)
        # The handler runs in this task, so it sees the decision, and the context dies with the task.
        attach(trace.set_span_in_context(trace.NonRecordingSpan(span_context(unsampled, remote=True))))
        return await continuation(handler_call_details)

    async def _in_span(self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """gRPC leaves the generator of a stream suspended when its call is cancelled while a message is being written.
        The garbage collector would then end the span, outside the context it was begun in, which OpenTelemetry logs as
        an error. A coroutine that writes is cancelled with its call, and ends both generators where they were begun."""
        served: list[AsyncGenerator[Any, None]] = []

        async def remembering(details: grpc.HandlerCallDetails) -> Any:
            handler = await continuation(details)
            if handler is None or not handler.response_streaming:
                return handler

            def begin(request: Any, context: Any) -> AsyncGenerator[Any, None]:
                served.append(handler.unary_stream(request, context))
                return served[0]

            return grpc.unary_stream_rpc_method_handler(
                begin, handler.request_deserializer, handler.response_serializer
            )

        handler: Any = await self._instrumentation.intercept_service(remembering, handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler

        async def write_all(request: Any, context: Any) -> None:
            in_span = handler.unary_stream(request, context)
            try:
                async for message in in_span:
                    await context.write(message)
            finally:
                for stream in (*served, in_span):  # what serves the call first: it writes its end onto the span
                    await stream.aclose()

        return grpc.unary_stream_rpc_method_handler(
            write_all, handler.request_deserializer, handler.response_serializer
        )
