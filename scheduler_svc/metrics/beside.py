"""Two watchers of the same steps, each guarded on its own."""

from common.messages import StepResult
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.guarded_observer import GuardedObserver
from scheduler_svc.messages import FinishReason, Submit
from scheduler_svc.observer import StepObserver, StepRecord


class Beside:
    """Tracing, which alone says what a plan's trace context is, and metrics, which need neither plans nor tokens."""

    def __init__(self, tracing: StepObserver, metrics: StepObserver) -> None:
        self._tracing = GuardedObserver(tracing)
        self._metrics = GuardedObserver(metrics)

    def on_submit(self, request: Submit, now_ns: int) -> None:
        self._tracing.on_submit(request, now_ns)
        self._metrics.on_submit(request, now_ns)

    def trace_context(self, executor_id: int, now_ns: int) -> bytes:
        return self._tracing.trace_context(executor_id, now_ns)

    def on_plan(self, record: StepRecord, schedule_start_ns: int, sent_ns: int) -> None:
        self._tracing.on_plan(record, schedule_start_ns, sent_ns)

    def on_tokens(self, key: int, count: int, now_ns: int) -> None:
        self._tracing.on_tokens(key, count, now_ns)

    def on_delivered(self, outcome: StepOutcome, now_ns: int) -> None:
        self._metrics.on_delivered(outcome, now_ns)

    def on_result(
        self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
    ) -> None:
        self._tracing.on_result(record, result, received_ns, updated_ns, clock_offset_ns)
        self._metrics.on_result(record, result, received_ns, updated_ns, clock_offset_ns)

    def on_end(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
        self._tracing.on_end(key, reason, error, now_ns)
        self._metrics.on_end(key, reason, error, now_ns)

    def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
        self._tracing.on_executor(executor_id, event, detail, now_ns)
        self._metrics.on_executor(executor_id, event, detail, now_ns)
