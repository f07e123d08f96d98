"""What is remembered of traced steps, and the spans made of it.

A window is written by the loop thread until it is complete; then the export thread alone reads it. Times in records
are scheduler monotonic ns, in spans wall-clock ns; the executor's own spans of live steps come from its own process.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import ReadableSpan

from common.messages import StepResult
from common.telemetry.context import TraceContext
from common.telemetry.executor_parts import executor_parts
from common.telemetry.spans import Attributes, SpanFactory, Value, link
from scheduler_svc.observer import StepRecord
from scheduler_svc.trace_policy import MAX_LINKS, MAX_STEP_SPANS

MS = 1e6


@dataclass(slots=True, eq=False)
class TracedStep:
    """`lost`: why no result will come; `result` then stays None."""

    context: TraceContext
    record: StepRecord
    schedule_start_ns: int
    sent_ns: int
    result: StepResult | None = None
    received_ns: int = 0
    updated_ns: int = 0
    clock_offset_ns: int = 0
    lost: str = ""

    @property
    def done(self) -> bool:
        return self.result is not None or bool(self.lost)

    def answer(self, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int) -> None:
        self.result = result
        self.received_ns = received_ns
        self.updated_ns = updated_ns
        self.clock_offset_ns = clock_offset_ns

    def lose(self, why: str, now_ns: int) -> None:
        self.lost = why
        self.received_ns = self.updated_ns = now_ns


@dataclass(slots=True, eq=False)
class Window:
    """Consecutive steps of one executor under one root span. `links`: by request key, where its spans hang."""

    root: TraceContext
    executor_id: int
    reason: str
    opened_ns: int
    last_plan_ns: int
    steps: list[TracedStep] = field(default_factory=list)
    links: dict[int, TraceContext] = field(default_factory=dict)
    in_flight: int = 0
    sealed: bool = False  # no further step joins

    @property
    def complete(self) -> bool:
        return self.sealed and not self.in_flight

    def add_link(self, key: int, request: TraceContext) -> bool:
        """False when the window has all the links it may have."""
        if key not in self.links:
            if len(self.links) >= MAX_LINKS:
                return False
            self.links[key] = request
        return True

    def max_spans(self) -> int:
        return 1 + MAX_STEP_SPANS * len(self.steps)


def window_spans(
    window: Window, spans: SpanFactory, wall_offset_ns: int, executor_spans: SpanFactory | None = None
) -> Iterator[ReadableSpan]:
    """Spans of a complete window with at least one step.

    `wall_offset_ns`: wall clock minus scheduler monotonic. `executor_spans`: also make the executor's spans, for a step
    that was not traced live.
    """
    steps = window.steps
    first, last = steps[0].record.plan.step_id, steps[-1].record.plan.step_id
    yield spans.span(
        f"steps {first}–{last}" if window.reason != "slow" else f"slow step {first}",
        window.root,
        None,
        min(s.schedule_start_ns for s in steps) + wall_offset_ns,
        max(s.updated_ns for s in steps) + wall_offset_ns,
        _window_attributes(window, first, last),
        links=[link(c) for c in window.links.values()],
        error=next((s.lost for s in steps if s.lost), ""),
    )
    for step in steps:
        yield from _step_spans(step, window.root, spans, wall_offset_ns, executor_spans)


def _window_attributes(window: Window, first: int, last: int) -> Attributes:
    results = [s.result for s in window.steps if s.result is not None]
    busy = sum(r.timings.device_end_ns - r.timings.device_start_ns for r in results)
    # The idle time before the first step lies before the window.
    idle = sum(r.timings.device_idle_ns for r in results[1:])
    return {
        "stepwire.window.reason": window.reason,
        "stepwire.executor_id": window.executor_id,
        "stepwire.epoch": window.steps[0].record.plan.epoch,
        "stepwire.first_step": first,
        "stepwire.last_step": last,
        "stepwire.num_steps": len(window.steps),
        "stepwire.tokens": sum(s.record.plan.num_tokens for s in window.steps),
        "stepwire.device_busy_ms": busy / MS,
        "stepwire.device_idle_ms": idle / MS,
    }


def _step_attributes(step: TracedStep) -> Attributes:
    record, plan = step.record, step.record.plan
    attributes: dict[str, Value] = {
        "stepwire.step_id": plan.step_id,
        "stepwire.epoch": plan.epoch,
        "stepwire.decode_tokens": record.decode_tokens,
        "stepwire.prefill_tokens": record.prefill_tokens,
        "stepwire.sequences": len(plan.decode_rows) + len(plan.prefill_rows),
        "stepwire.running": record.running,
        "stepwire.waiting": record.waiting,
        "stepwire.free_blocks": record.free_blocks,
    }
    if step.result is not None:
        attributes |= {
            "stepwire.bucket": step.result.bucket,
            "stepwire.mode": step.result.mode.name.lower(),
            "stepwire.device_idle_ms": step.result.timings.device_idle_ns / MS,
        }
    return attributes


def _step_spans(
    step: TracedStep,
    root: TraceContext,
    spans: SpanFactory,
    wall_offset_ns: int,
    executor_spans: SpanFactory | None,
) -> Iterator[ReadableSpan]:
    def part(name: str, start_ns: int, end_ns: int, factory: SpanFactory = spans) -> ReadableSpan:
        return factory.span(
            name, step.context.child(), step.context, start_ns + wall_offset_ns, end_ns + wall_offset_ns, {}
        )

    yield spans.span(
        f"step {step.record.plan.step_id}",
        step.context,
        root,
        step.schedule_start_ns + wall_offset_ns,
        step.updated_ns + wall_offset_ns,
        _step_attributes(step),
        error=step.lost,
    )
    yield part("plan", step.schedule_start_ns, step.sent_ns)
    if step.result is None:
        return
    timings, offset = step.result.timings, step.clock_offset_ns
    # The offset is an estimate: what it places outside the step's time on the wire is moved to its edge.
    arrived = min(max(timings.received_ns - offset, step.sent_ns), step.received_ns)
    if timings.received_ns:
        yield part("wire to executor", step.sent_ns, arrived)
    if timings.sent_ns:
        yield part("wire to scheduler", min(max(timings.sent_ns - offset, arrived), step.received_ns), step.received_ns)
    yield part("update", step.received_ns, step.updated_ns)
    if executor_spans is not None:
        for name, start_ns, end_ns in executor_parts(step.result):
            yield part(name, start_ns - offset, end_ns - offset, executor_spans)


def slow_step_window(root: TraceContext, step: TracedStep, requests: Sequence[tuple[int, TraceContext]]) -> Window:
    """A complete window of one step, made after it."""
    window = Window(root, step.record.executor_id, "slow", step.schedule_start_ns, step.sent_ns, [step], sealed=True)
    for key, context in requests:
        window.add_link(key, context)
    return window
