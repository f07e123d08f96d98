"""What the recorded events become: windows, request traces, slow steps, and their limits."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from scheduler_svc.messages import Child, FinishReason
from scheduler_svc.tracing import Tracing, TracingOptions, build_tracing
from tests.unit.telemetry.fake_loop import FakeLoop, span_id, times, trace_id


@pytest.fixture
def loop() -> Iterator[FakeLoop]:
    fake = FakeLoop()
    yield fake
    fake.close()


def windows(spans: list[ReadableSpan]) -> list[ReadableSpan]:
    return [s for s in spans if s.name.startswith("steps ")]


def of_trace(spans: list[ReadableSpan], root: ReadableSpan) -> list[ReadableSpan]:
    return [s for s in spans if trace_id(s) == trace_id(root)]


def attribute(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


def test_a_window_shows_both_services_under_each_step(loop: FakeLoop) -> None:
    loop.submit(1)
    loop.steps(40)
    loop.drain()
    spans = loop.spans()
    (root,) = windows(spans)
    assert root.name == "steps 1–32" and root.parent is None
    assert attribute(root, "stepwire.window.reason") == "request"
    members = of_trace(spans, root)
    by_parent = defaultdict(list)
    for span in members:
        if span.parent is not None:
            by_parent[span.parent.span_id].append(span)
    steps = by_parent[span_id(root)]
    assert [s.name for s in sorted(steps, key=times)] == [f"step {n}" for n in range(1, 33)]
    for step in steps:
        parts = {s.name: s for s in by_parent[span_id(step)]}
        assert set(parts) == {
            "plan", "wire to executor", "host prepare", "copy in", "device run", "copy out", "answer",
            "wire to scheduler", "update",
        }  # fmt: skip
        for name, part in parts.items():
            service = (
                "executor" if name in ("host prepare", "copy in", "device run", "copy out", "answer") else "scheduler"
            )
            assert part.resource.attributes["service.name"] == f"stepwire-{service}"
        ordered = [parts[n] for n in ("plan", "wire to executor", "wire to scheduler", "update")]
        assert all(times(a)[1] <= times(b)[0] for a, b in pairwise(ordered))
        assert times(step) == (times(parts["plan"])[0], times(parts["update"])[1])
    assert len(members) <= 500
    assert max(len(parts) for key, parts in by_parent.items() if key != span_id(root)) + 1 <= 10


def test_a_window_waits_for_every_choice_of_a_request(loop: FakeLoop) -> None:
    loop.submit(1, children=(Child(2, 9),))
    loop.steps(5)
    loop.drain()
    loop.end(1)
    assert not windows(loop.spans()), "choice 1 still runs"
    loop.end(2)
    assert len(windows(loop.spans())) == 1


def test_consecutive_steps_overlap_in_time(loop: FakeLoop) -> None:
    loop.submit(1)
    loop.steps(40)
    steps = sorted((s for s in loop.spans() if s.name.startswith("step ")), key=times)
    overlapping = [(a, b) for a, b in pairwise(steps) if times(b)[0] < times(a)[1]]
    assert len(overlapping) == len(steps) - 1


def test_a_step_says_what_was_in_it(loop: FakeLoop) -> None:
    loop.submit(1, chunks=3)
    loop.submit(2)
    loop.steps(34)
    step = next(s for s in loop.spans() if s.name == "step 2")
    assert step.attributes is not None
    assert {k.removeprefix("stepwire."): v for k, v in step.attributes.items()} == {
        "step_id": 2,
        "epoch": 1,
        "decode_tokens": 1,
        "prefill_tokens": 8,
        "sequences": 2,
        "running": 2,
        "waiting": 0,
        "free_blocks": 100,
        "bucket": 4,
        "mode": "eager",
        "device_idle_ms": 0.0,
    }


def test_window_and_request_link_to_each_other(loop: FakeLoop) -> None:
    context = loop.submit(1)
    assert context is not None
    loop.submit(2, sampled=False)
    loop.steps(40)
    loop.end(1)
    loop.end(2)
    loop.drain()
    spans = loop.spans()
    (root,) = windows(spans)
    assert [(link.context.trace_id, link.context.span_id) for link in root.links] == [
        (context.trace_id, context.span_id)
    ]
    (decode,) = [s for s in spans if s.name == "decode"]
    assert [(link.context.trace_id, link.context.span_id) for link in decode.links] == [(trace_id(root), span_id(root))]


def test_a_window_has_at_most_64_links(loop: FakeLoop) -> None:
    for key in range(1, 101):
        loop.submit(key)
    loop.steps(40)
    (root,) = windows(loop.spans())
    assert len(root.links) == 64


def test_a_request_becomes_queue_prefill_decode(loop: FakeLoop) -> None:
    context = loop.submit(1, chunks=3)
    assert context is not None
    loop.steps(12)
    loop.end(1, FinishReason.MAX_TOKENS)
    loop.drain()
    spans = [s for s in loop.spans() if trace_id(s) == context.trace_id]
    assert [s.name for s in spans] == ["queue", "prefill", "prefill", "prefill", "decode"]
    assert {s.parent.span_id for s in spans if s.parent} == {context.span_id}
    assert [attribute(s, "stepwire.position") for s in spans[1:4]] == [0, 8, 16]
    decode = spans[-1]
    assert attribute(decode, "gen_ai.usage.output_tokens") == 10
    assert attribute(decode, "gen_ai.response.finish_reasons") == ["max_tokens"]
    assert [e.name for e in decode.events] == ["first token"]
    assert decode.status.status_code is StatusCode.UNSET
    assert times(spans[0])[1] <= times(spans[1])[0]


def test_a_request_that_ends_with_its_first_token_keeps_its_prefill(loop: FakeLoop) -> None:
    context = loop.submit(1)
    assert context is not None
    loop.plan()
    loop.end_with_token(1)
    loop.result()
    spans = [s for s in loop.spans() if trace_id(s) == context.trace_id]
    assert [s.name for s in spans] == ["queue", "prefill", "decode"]


def test_long_prompts_merge_their_chunks(loop: FakeLoop) -> None:
    context = loop.submit(1, chunks=50)
    assert context is not None
    loop.steps(60)
    loop.end(1)
    spans = [s for s in loop.spans() if trace_id(s) == context.trace_id]
    names = Counter(s.name for s in spans)
    assert names == {"queue": 1, "prefill": 16, "prefill, 34 more chunks": 1, "decode": 1}
    merged = next(s for s in spans if "more" in s.name)
    assert attribute(merged, "stepwire.tokens") == 34 * 8


def test_4000_tokens_make_no_large_trace(loop: FakeLoop) -> None:
    contexts = [loop.submit(key) for key in (1, 2, 3)]
    loop.steps(4001)
    for key in (1, 2, 3):
        loop.end(key, FinishReason.MAX_TOKENS)
    loop.drain()
    sizes = Counter(trace_id(s) for s in loop.spans())
    assert max(sizes.values()) <= 500
    assert loop.tracing.dropped == 0
    for context in contexts:
        assert context is not None
        assert sizes[context.trace_id] + 1 <= 40
    assert 8 <= len(windows(loop.spans())) <= 11, "40 s: one window per 5 s and the first"


def test_an_ended_engine_leaves_no_window_open(loop: FakeLoop) -> None:
    loop.submit(1)
    loop.steps(5)
    loop.end(1)
    assert not windows(loop.spans())
    loop.drain()
    assert [w.name for w in windows(loop.spans())] == ["steps 1–6"]


def test_a_pause_ends_a_window(loop: FakeLoop) -> None:
    loop.submit(1)
    loop.steps(5)
    loop.drain()
    loop.clock.advance_ns(2_000_000_000)
    loop.steps(1)
    assert [w.name for w in windows(loop.spans())] == ["steps 1–6"]


def test_preemption_shows_as_an_event_and_recomputed_chunks(loop: FakeLoop) -> None:
    context = loop.submit(1)
    assert context is not None
    loop.steps(5)
    loop.drain()
    loop.running.remove(1)
    loop.prefills[1].extend((0, 1))
    loop.steps(5)
    loop.end(1)
    spans = [s for s in loop.spans() if trace_id(s) == context.trace_id]
    decode = spans[-1]
    assert [e.name for e in decode.events] == ["first token", "readmitted"]
    assert attribute(decode, "stepwire.recomputes") == 1
    assert [attribute(s, "stepwire.recompute") for s in spans if s.name == "prefill"] == [False, True, True]


def test_a_lost_executor_ends_steps_and_windows_and_marks_requests(loop: FakeLoop) -> None:
    context = loop.submit(1)
    assert context is not None
    loop.steps(5)
    loop.observer.on_executor(0, "lost", "connection reset", loop.clock.monotonic_ns())
    loop.in_flight.clear()
    loop.end(1, None, "ExecutorLost")
    spans = loop.spans()
    (root,) = windows(spans)
    assert root.status.status_code is StatusCode.ERROR
    lost = [s for s in of_trace(spans, root) if s.status.status_code is StatusCode.ERROR and s is not root]
    assert [s.name for s in lost] == ["step 6"]
    decode = next(s for s in spans if s.name == "decode")
    assert "executor lost" in [e.name for e in decode.events]
    assert decode.status.description == "ExecutorLost"
    assert attribute(decode, "error.type") == "ExecutorLost"


def test_events_are_bounded(loop: FakeLoop) -> None:
    loop.submit(1)
    loop.steps(3)
    for _ in range(100):
        loop.observer.on_executor(0, "draining", "", loop.clock.monotonic_ns())
    loop.end(1)
    decode = next(s for s in loop.spans() if s.name == "decode")
    assert len(decode.events) <= 32


def test_a_request_that_never_ran_has_a_failed_queue_span(loop: FakeLoop) -> None:
    context = loop.submit(1)
    assert context is not None
    loop.clock.advance_ns(1_000_000)
    loop.end(1, None, "DeadlinePassed")
    (queue,) = [s for s in loop.spans() if trace_id(s) == context.trace_id]
    assert queue.name == "queue" and queue.status.description == "DeadlinePassed"


def test_a_slow_step_is_rebuilt_with_the_executors_part() -> None:
    loop = FakeLoop(TracingOptions(window_interval_s=1000.0))
    loop.submit(1)
    loop.steps(200)
    loop.step_ns = 500_000_000
    loop.steps(1)
    loop.step_ns = 10_000_000
    loop.steps(5)
    spans = loop.spans()
    (root,) = [s for s in spans if s.name.startswith("slow step")]
    members = {s.name: s for s in of_trace(spans, root)}
    assert {"device run", "copy in", "update", "wire to executor"} <= set(members)
    assert members["device run"].resource.attributes["service.name"] == "stepwire-executor"
    assert len(members) <= 11
    step = next(s for name, s in members.items() if name.startswith("step "))
    for span in members.values():
        assert times(step)[0] <= times(span)[0] <= times(span)[1] <= times(step)[1]
    assert len(root.links) == 1
    loop.close()


def test_shutdown_exports_what_is_open(loop: FakeLoop) -> None:
    loop.submit(1)
    loop.steps(5)
    loop.tracing.shutdown()
    names = {s.name for s in loop.exporter.get_finished_spans()}
    assert {"steps 1–6", "decode", "queue"} <= names


def test_unsampled_requests_leave_nothing_but_windows(loop: FakeLoop) -> None:
    loop.submit(1, sampled=False)
    loop.steps(40)
    loop.end(1)
    loop.drain()
    assert {s.name for s in loop.spans() if s.parent is None} == {"steps 1–32"}


def test_switched_off_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    tracing = build_tracing(TracingOptions())
    assert not tracing.enabled and tracing.interceptors == () and tracing.dropped == 0
    assert type(tracing.observer) is type(Tracing().observer)
    tracing.shutdown()
