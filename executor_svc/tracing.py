"""The executor's own spans of traced steps, exported by this process under its own service name.

Their parent is the scheduler's span of the step, whose ids came in the plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan

from common.clock import Clock, SystemClock
from common.messages import StepPlan, StepResult
from common.telemetry.context import TraceContext, unpack
from common.telemetry.endpoint import EXECUTOR_SERVICE
from common.telemetry.executor_parts import MAX_PARTS, executor_parts
from common.telemetry.provider import Telemetry, start_telemetry
from common.telemetry.spans import SpanFactory, Value, wall_offset_ns


@dataclass(frozen=True, slots=True)
class ExecutorTracing:
    """A StepTraceSink. `on_step` is called on the I/O thread and only queues; spans are built on the export thread."""

    telemetry: Telemetry
    clock: Clock

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        if not plan.trace_context:
            return
        context = unpack(plan.trace_context)
        if context is not None and context.sampled:
            spans, clock = self.telemetry.spans, self.clock
            self.telemetry.pipeline.submit(lambda: _step_spans(context, plan, result, spans, clock), MAX_PARTS)

    @property
    def dropped(self) -> int:
        return self.telemetry.pipeline.dropped

    def shutdown(self) -> None:
        """Flushes for at most 2 s. Blocks; call it last."""
        self.telemetry.shutdown()


def build_sink(endpoint: str = "", instance_id: str = "", clock: Clock | None = None) -> ExecutorTracing | None:
    """Tracing as configured by `endpoint` or OTEL_EXPORTER_OTLP_ENDPOINT; None, and no thread, when neither is set.

    `instance_id` empty: host name and process id.
    """
    telemetry = start_telemetry(EXECUTOR_SERVICE, instance_id, endpoint)
    return None if telemetry is None else ExecutorTracing(telemetry, clock or SystemClock())


def _step_spans(
    parent: TraceContext, plan: StepPlan, result: StepResult, spans: SpanFactory, clock: Clock
) -> Iterator[ReadableSpan]:
    offset_ns = wall_offset_ns(clock)
    for name, start_ns, end_ns in executor_parts(result):
        attributes: dict[str, Value] = {"stepwire.step_id": plan.step_id}
        if name == "device run":
            attributes |= {
                "stepwire.tokens": plan.num_tokens,
                "stepwire.mode": result.mode.name.lower(),
                "stepwire.bucket": result.bucket,
                "stepwire.device_idle_ms": result.timings.device_idle_ns / 1e6,
            }
        yield spans.span(
            name,
            parent.child(),
            parent,
            start_ns + offset_ns,
            end_ns + offset_ns,
            attributes,
            remote_parent=True,
        )
