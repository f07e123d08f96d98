"""An engine loop in miniature that drives a StepObserver, with an executor whose clock is shifted."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.clock import ManualClock
from common.messages import Sampling, StepMode, StepPlan, StepResult, Timings, u32
from common.telemetry.context import TraceContext, new_trace
from common.telemetry.endpoint import SCHEDULER_SERVICE
from common.telemetry.provider import telemetry
from executor_svc.tracing import ExecutorTracing
from scheduler_svc.messages import Child, FinishReason, Submit
from scheduler_svc.observer import StepRecord
from scheduler_svc.tracing import TracingOptions, tracing_into

OFFSET_NS = 77_000_000_000
STEP_NS = 10_000_000


@dataclass
class FakeLoop:
    """Depth 2. Every request decodes in every step, after its prefill steps."""

    options: TracingOptions = field(default_factory=TracingOptions)
    executor_id: int = 0

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.exporter = InMemorySpanExporter()
        self.executor_exporter = InMemorySpanExporter()
        self.tracing = tracing_into(
            telemetry(SCHEDULER_SERVICE, "s1", self.exporter, collect_s=0.01), self.options, self.clock
        )
        self.executor = ExecutorTracing(
            telemetry("stepwire-executor", "e1", self.executor_exporter, collect_s=0.01), self.clock
        )
        self.observer = self.tracing.observer
        self.prefills: dict[int, deque[int]] = {}
        self.running: list[int] = []
        self.sampling: set[tuple[int, int]] = set()  # (step, key): the last chunk of the key's prompt
        self.ending: set[int] = set()
        self.in_flight: deque[StepRecord] = deque()
        self.step_id = 0
        self.device_free_ns = 0
        self.step_ns = STEP_NS

    def submit(
        self, key: int, *, sampled: bool = True, chunks: int = 1, children: tuple[Child, ...] = ()
    ) -> TraceContext | None:
        now = self.clock.monotonic_ns()
        context = new_trace() if sampled else None
        self.observer.on_submit(
            Submit(
                key,
                f"r{key}",
                u32(range(8 * chunks)),
                Sampling(seed=1, max_tokens=10),
                now - 1_000_000,
                trace_context=context.pack() if context else b"",
                children=children,
            ),
            now,
        )
        self.prefills[key] = deque(range(chunks))
        return context

    def end(self, key: int, reason: FinishReason | None = FinishReason.EOS, error: str = "") -> None:
        self.running = [k for k in self.running if k != key]
        self.prefills.pop(key, None)
        self.observer.on_end(key, reason, error, self.clock.monotonic_ns())

    def end_with_token(self, key: int) -> None:
        """The next token of it is the last."""
        self.ending.add(key)

    def plan(self) -> None:
        now = self.clock.monotonic_ns()
        trace_context = self.observer.trace_context(self.executor_id, now)
        prefill = [(key, chunks.popleft()) for key, chunks in self.prefills.items() if chunks]
        decode = [key for key in self.running if key not in dict(prefill)]
        self.step_id += 1
        plan = StepPlan(
            1,
            self.step_id,
            now + 200_000,
            len(decode) + 8 * len(prefill),
            trace_context,
            prefill_rows=u32(key for key, _ in prefill),
            prefill_starts=u32(8 * chunk for _, chunk in prefill),
            prefill_counts=u32(8 for _ in prefill),
            decode_rows=u32(decode),
        )
        record = StepRecord(
            self.executor_id,
            plan,
            now,
            np.array(decode, dtype=np.uint64),
            np.array([key for key, _ in prefill], dtype=np.uint64),
            len(decode),
            8 * len(prefill),
            len(decode) + len(prefill),
            0,
            100,
        )
        self.clock.advance_ns(200_000)
        self.observer.on_plan(record, now, self.clock.monotonic_ns())
        self.in_flight.append(record)
        for key, _ in prefill:
            if not self.prefills[key]:
                self.sampling.add((self.step_id, key))
                self.running.append(key)

    def result(self) -> None:
        record = self.in_flight.popleft()
        received = record.plan.sent_ns + 100_000
        start = max(received, self.device_free_ns)
        idle = start - self.device_free_ns if self.device_free_ns else 0
        self.device_free_ns = start + self.step_ns
        end = self.device_free_ns
        at = OFFSET_NS
        result = StepResult(
            1,
            record.plan.step_id,
            timings=Timings(
                received + at,
                received + at,
                received + at + 50_000,
                received + at + 50_000,
                received + at + 60_000,
                received + at + 70_000,
                start + at,
                end + at,
                end + at + 20_000,
                end + at + 30_000,
                idle,
            ),
            mode=StepMode.EAGER,
            bucket=4,
        )
        self.executor.on_step(record.plan, result)
        now = max(self.clock.monotonic_ns(), end + 130_000)
        self.clock.advance_ns(now - self.clock.monotonic_ns())
        done = [key for key in record.prefill_keys.tolist() if (record.plan.step_id, key) in self.sampling]
        for key in (*record.decode_keys.tolist(), *done):
            if key in self.running:
                self.observer.on_tokens(key, 1, now)
            if key in self.ending:
                self.end(key)
        self.clock.advance_ns(100_000)
        self.observer.on_result(record, result, now, self.clock.monotonic_ns(), OFFSET_NS)

    def steps(self, count: int) -> None:
        """`count` steps, two in flight."""
        for _ in range(count):
            while len(self.in_flight) < 2:
                self.plan()
            self.result()

    def drain(self) -> None:
        while self.in_flight:
            self.result()

    def spans(self) -> list[ReadableSpan]:
        """All spans of the scheduler so far, and the executor's."""
        assert self.tracing._telemetry is not None
        assert self.tracing._telemetry.pipeline.force_flush(10_000)
        assert self.executor.telemetry.pipeline.force_flush(10_000)
        return [*self.exporter.get_finished_spans(), *self.executor_exporter.get_finished_spans()]

    def close(self) -> None:
        self.tracing.shutdown()
        self.executor.shutdown()


def trace_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time
