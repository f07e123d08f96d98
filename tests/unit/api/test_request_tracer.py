"""traceparent in and out, and what a request's span is told."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from common.errors import RequestAborted
from common.messages import Sampling, u32
from scheduler_svc.api.request_tracer import (
    SpanRequestTracer,
    completion_attributes,
    parse_traceparent,
    request_attributes,
    trace_context,
)
from scheduler_svc.messages import FinishReason, Submit
from scheduler_svc.token_stream import Completion

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PACKED = bytes.fromhex(TRACE + SPAN + "01")


class Call:
    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata


def test_a_sampled_traceparent_is_passed_on_and_back() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    assert trace_context(Call(("x", "y"), ("traceparent", parent))) == (PACKED, parent)
    assert trace_context(Call(("traceparent", parent.encode()))) == (PACKED, parent)


def test_an_unsampled_one_only_back() -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-00") == (b"", f"00-{TRACE}-{SPAN}-00")


def test_a_later_version_may_carry_more() -> None:
    assert parse_traceparent(f"01-{TRACE}-{SPAN}-01-extra")[0] == PACKED


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-0\u0661",
    ],
)
def test_a_malformed_one_is_as_good_as_none(value: str) -> None:
    assert parse_traceparent(value) == (b"", "")


def test_a_current_span_wins() -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("rpc") as span:
        packed, parent = trace_context(Call(("traceparent", f"00-{TRACE}-{SPAN}-01")))
        context = span.get_span_context()
        flags = context.trace_flags
        assert flags.sampled
        assert parent == f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
        assert packed == context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big") + bytes((flags,))


def test_the_requests_span_gets_attributes_and_status() -> None:
    tracer = SpanRequestTracer()
    submit = Submit(1, "r", u32([1, 2]), Sampling(seed=1, max_tokens=9, temperature=0.5), 0)
    completion = Completion(FinishReason.EOS, 2, 1, 5)
    with TracerProvider().get_tracer("test").start_as_current_span("rpc") as span:
        handle = tracer.on_request(submit, request_attributes(submit, "m"))
        tracer.on_first_token(handle, 0.25)
        tracer.on_end(handle, completion_attributes([completion]), RequestAborted("aborted"))
    attributes = span.attributes  # type: ignore[attr-defined]
    assert attributes["gen_ai.request.model"] == "m"
    assert attributes["gen_ai.request.max_tokens"] == 9
    assert attributes["gen_ai.usage.input_tokens"] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("eos",)
    assert attributes["error.type"] == "ABORTED"
    assert span.status.status_code is trace.StatusCode.ERROR  # type: ignore[attr-defined]
    assert span.events[0].name == "first_token"  # type: ignore[attr-defined]
    tracer.on_end(handle, {}, None)  # the span has ended: nothing happens, nothing is logged


def test_without_a_span_nothing_happens() -> None:
    tracer = SpanRequestTracer()
    submit = Submit(1, "r", u32([1]), Sampling(seed=1, max_tokens=0), 0)
    handle = tracer.on_request(submit, request_attributes(submit, "m"))
    tracer.on_first_token(handle, 0.1)
    tracer.on_end(handle, {}, RequestAborted("gone"))
    assert handle is trace.INVALID_SPAN
