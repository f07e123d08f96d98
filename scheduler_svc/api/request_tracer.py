"""How the public calls tell tracing about a request, and the W3C trace context in gRPC metadata."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from opentelemetry import trace

from common.errors import StepwireError
from scheduler_svc.messages import Submit
from scheduler_svc.token_stream import Completion

TRACEPARENT: Final = "traceparent"
SAMPLED: Final = 0x01

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)

AttributeValue = str | int | float | bool | Sequence[str]


class RequestTracer(Protocol):
    """Told about each Generate call. Called on the event loop inside the call, where its span (if any) is current.

    `on_end` comes exactly once per `on_request`, but when a caller goes away perhaps outside the call's context: keep
    what `on_request` returned, it is handed back. Must be cheap and raise nothing.
    """

    def on_request(self, request: Submit, attributes: Mapping[str, AttributeValue]) -> object: ...

    def on_first_token(self, handle: object, elapsed_s: float) -> None: ...

    def on_end(self, handle: object, attributes: Mapping[str, AttributeValue], error: StepwireError | None) -> None: ...


class NoRequestTracer:
    """Traces nothing."""

    def on_request(self, request: Submit, attributes: Mapping[str, AttributeValue]) -> object:
        return None

    def on_first_token(self, handle: object, elapsed_s: float) -> None:
        pass

    def on_end(self, handle: object, attributes: Mapping[str, AttributeValue], error: StepwireError | None) -> None:
        pass


class SpanRequestTracer:
    """Writes onto the span that is current when the request starts: the one the gRPC instrumentation opened."""

    def on_request(self, request: Submit, attributes: Mapping[str, AttributeValue]) -> object:
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attributes(dict(attributes))
        return span

    def on_first_token(self, handle: object, elapsed_s: float) -> None:
        if isinstance(handle, trace.Span) and handle.is_recording():
            handle.add_event("first_token", {"stepwire.time_to_first_token_s": elapsed_s})

    def on_end(self, handle: object, attributes: Mapping[str, AttributeValue], error: StepwireError | None) -> None:
        if not isinstance(handle, trace.Span) or not handle.is_recording():
            return
        handle.set_attributes(dict(attributes))
        if error is not None:
            handle.set_attribute("error.type", error.reason)
            handle.set_status(trace.Status(trace.StatusCode.ERROR, error.message))


def request_attributes(request: Submit, model: str, operation: str = "text_completion") -> dict[str, AttributeValue]:
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "stepwire",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.response.id": request.request_id,
        "stepwire.prompt_tokens": len(request.prompt),
    }
    if request.children:
        attributes["gen_ai.request.choice.count"] = 1 + len(request.children)
    if sampling.max_tokens:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    return attributes


def completion_attributes(completions: Sequence[Completion]) -> dict[str, AttributeValue]:
    """Of the choices that finished, in this order; of their one prompt what the first computed."""
    if not completions:
        return {}
    return {
        "gen_ai.usage.input_tokens": completions[0].prompt_tokens,
        "gen_ai.usage.output_tokens": sum(completion.completion_tokens for completion in completions),
        "gen_ai.response.finish_reasons": tuple(completion.reason.name.lower() for completion in completions),
        "stepwire.cached_tokens": min(completion.cached_tokens for completion in completions),
    }


def trace_context(context: Any) -> tuple[bytes, str]:
    """The trace this call belongs to: (Submit.trace_context, the `traceparent` to send back); both may be empty.

    A current OpenTelemetry span wins; else the caller's own `traceparent`. Submit's is empty unless sampled.
    """
    current = trace.get_current_span().get_span_context()
    if current.is_valid:
        parent = f"00-{current.trace_id:032x}-{current.span_id:016x}-{current.trace_flags:02x}"
        return _packed(current.trace_id, current.span_id, current.trace_flags), parent
    for key, value in context.invocation_metadata() or ():
        if key == TRACEPARENT:
            return parse_traceparent(value if isinstance(value, str) else value.decode("ascii", "replace"))
    return b"", ""


def parse_traceparent(value: str) -> tuple[bytes, str]:
    """As `trace_context`. A malformed value is as good as none (W3C Trace Context, section 3.2.2)."""
    match = _TRACEPARENT.fullmatch(value.strip())
    if match is None:
        return b"", ""
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or int(trace_id, 16) == 0 or int(span_id, 16) == 0:
        return b"", ""
    return _packed(int(trace_id, 16), int(span_id, 16), int(flags, 16)), f"00-{trace_id}-{span_id}-{flags}"


def _packed(trace_id: int, span_id: int, flags: int) -> bytes:
    if not flags & SAMPLED:
        return b""
    return trace_id.to_bytes(16, "big") + span_id.to_bytes(8, "big") + bytes((flags & 0xFF,))
