"""The StepObserver that records steps and sampled requests, and hands finished records to the export thread.

Everything here runs on the loop thread. An untraced step costs a few comparisons; a traced one some list work; spans
are built elsewhere.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.clock import Clock
from common.messages import StepResult
from common.telemetry.context import TraceContext, new_trace, unpack
from common.telemetry.pipeline import SpanPipeline
from common.telemetry.spans import SpanFactory, wall_offset_ns
from scheduler_svc.core.outcome import StepOutcome
from scheduler_svc.messages import FinishReason, Submit
from scheduler_svc.observer import StepRecord
from scheduler_svc.request_trace import MAX_CORE_SPANS, Chunk, RequestTrace, request_spans
from scheduler_svc.step_windows import TracedStep, Window, slow_step_window, window_spans
from scheduler_svc.trace_policy import (
    MAX_STEP_SPANS,
    SlowSteps,
    TraceAllowance,
    WindowPolicy,
)

PLANS_REMEMBERED = 16


@dataclass(slots=True, eq=False)
class _Executor:
    """What is open at one executor. `context`: given out for the plan being made."""

    window: Window | None = None
    context: TraceContext | None = None
    last_result_ns: int = 0


class TracingObserver:
    """Owner of every open window and request trace.

    `executor_spans` makes the executor's spans of slow steps: the scheduler builds those itself, since it learns only
    afterwards that a step was slow.
    """

    def __init__(
        self,
        pipeline: SpanPipeline,
        spans: SpanFactory,
        executor_spans: SpanFactory,
        clock: Clock,
        windows: WindowPolicy,
        slow: SlowSteps,
        allowance: TraceAllowance,
    ) -> None:
        self._pipeline = pipeline
        self._spans = spans
        self._executor_spans = executor_spans
        self._clock = clock
        self._policy = windows
        self._slow = slow
        self._allowance = allowance
        self._executors: dict[int, _Executor] = {}
        self._requests: dict[int, RequestTrace] = {}
        self._steps: dict[bytes, tuple[Window, TracedStep]] = {}
        self._closing: set[Window] = set()  # sealed, with steps in flight
        self._live: set[int] = set()
        self._plans: deque[tuple[StepRecord, int, int]] = deque(maxlen=PLANS_REMEMBERED)

    # ----------------------------------------------------------------------------------------------------- requests

    def on_submit(self, request: Submit, now_ns: int) -> None:
        self._live.update(request.keys)
        if not request.trace_context:
            return
        context = unpack(request.trace_context)
        if context is None or not context.sampled:
            return
        self._requests[request.key] = RequestTrace(
            request.key, request.request_id, context, request.arrival_ns, len(request.prompt)
        )
        self._policy.request_came(request.key)

    def on_delivered(self, outcome: StepOutcome, now_ns: int) -> None:
        """A trace wants sampled requests alone: see on_tokens."""

    def on_tokens(self, key: int, count: int, now_ns: int) -> None:
        if count and (request := self._requests.get(key)) is not None:
            request.emitted(count, now_ns)

    def on_end(self, key: int, reason: FinishReason | None, error: str, now_ns: int) -> None:
        self._live.discard(key)
        request = self._requests.get(key)
        if request is not None:
            self._policy.request_seen(key)
            request.end_ns, request.reason, request.error = now_ns, reason, error
            self._export_request_if_complete(request)
        if not self._live:
            self._seal_idle()

    def _export_request_if_complete(self, request: RequestTrace) -> None:
        """The tokens of a step, and the ends they bring, are told before the step's result is."""
        if not request.complete:
            return
        del self._requests[request.key]
        num_spans = request.num_spans()
        self._allowance.give_back(request.context.trace_id, MAX_CORE_SPANS - num_spans)
        spans, clock = self._spans, self._clock
        self._pipeline.submit(lambda: request_spans(request, spans, wall_offset_ns(clock)), num_spans)

    # -------------------------------------------------------------------------------------------------------- steps

    def trace_context(self, executor_id: int, now_ns: int) -> bytes:
        state = self._executors.get(executor_id)
        if state is None:
            state = self._executors[executor_id] = _Executor()
        window = state.window
        if window is not None and self._policy.is_over(now_ns, len(window.steps), window.last_plan_ns):
            self._seal(state, window)
            window = None
        if window is None:
            reason = self._policy.may_open(now_ns)
            if not reason:
                state.context = None
                return b""
            window = state.window = Window(new_trace(), executor_id, reason, now_ns, now_ns)
        state.context = window.root.child()
        return state.context.pack()

    def on_plan(self, record: StepRecord, schedule_start_ns: int, sent_ns: int) -> None:
        self._plans.append((record, schedule_start_ns, sent_ns))
        traced = record.plan.trace_context
        if self._requests and len(record.prefill_keys):
            for request in self._sampled(record.prefill_keys):
                if not request.planned_ns and not traced:
                    self._policy.request_runs(request.key)
                request.planned(record.executor_id, record.planned_ns)
        if traced:
            self._join(traced, record, schedule_start_ns, sent_ns)

    def _join(self, traced: bytes, record: StepRecord, schedule_start_ns: int, sent_ns: int) -> None:
        state = self._executors.get(record.executor_id)
        if state is None or state.window is None or state.context is None or state.context.pack() != traced:
            return  # the window was closed between the question and the plan
        window, context, state.context = state.window, state.context, None
        step = TracedStep(context, record, schedule_start_ns, sent_ns)
        window.steps.append(step)
        window.in_flight += 1
        window.last_plan_ns = sent_ns
        self._steps[traced] = (window, step)
        if self._requests:
            for keys in (record.prefill_keys, record.decode_keys):
                for request in self._sampled(keys):
                    if window.add_link(request.key, request.context):
                        request.joined(window.root)
                    self._policy.request_seen(request.key)

    def on_result(
        self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
    ) -> None:
        state = self._executors.get(record.executor_id)
        if state is None:
            return
        start_ns = max(record.plan.sent_ns or record.planned_ns, state.last_result_ns)
        state.last_result_ns = received_ns
        slow = self._slow.is_slow(received_ns, received_ns - start_ns, record.prefill_tokens)
        traced = record.plan.trace_context
        if traced and (found := self._steps.pop(traced, None)) is not None:
            window, step = found
            step.answer(result, received_ns, updated_ns, clock_offset_ns)
            self._landed(window)
        elif slow:
            self._export_slow(record, result, received_ns, updated_ns, clock_offset_ns)
        if self._requests and len(record.prefill_keys):
            self._computed(record, received_ns)

    def _computed(self, record: StepRecord, received_ns: int) -> None:
        plan = record.plan
        columns = zip(
            record.prefill_keys.tolist(), plan.prefill_starts.tolist(), plan.prefill_counts.tolist(), strict=True
        )
        for key, position, count in columns:
            request = self._requests.get(key)
            if request is not None:
                again = bool(request.num_recomputes)
                request.computed(Chunk(record.planned_ns, received_ns, position, count, plan.step_id, again))
                self._export_request_if_complete(request)

    def _export_slow(
        self, record: StepRecord, result: StepResult, received_ns: int, updated_ns: int, clock_offset_ns: int
    ) -> None:
        remembered = next((p for p in self._plans if p[0] is record), None)
        start_ns, sent_ns = remembered[1:] if remembered else (record.planned_ns, record.planned_ns)
        root = new_trace()
        step = TracedStep(root.child(), record, start_ns, sent_ns)
        step.answer(result, received_ns, updated_ns, clock_offset_ns)
        requests = [
            (r.key, r.context) for keys in (record.prefill_keys, record.decode_keys) for r in self._sampled(keys)
        ]
        window = slow_step_window(root, step, requests)
        for key, _ in requests:
            if key in window.links:
                self._requests[key].joined(root)
        spans, clock, executor_spans = self._spans, self._clock, self._executor_spans
        self._pipeline.submit(
            lambda: window_spans(window, spans, wall_offset_ns(clock), executor_spans), 1 + MAX_STEP_SPANS
        )

    def _sampled(self, keys: NDArray[np.uint64]) -> Iterable[RequestTrace]:
        requests = self._requests
        if not requests:
            return ()
        return [request for key in keys.tolist() if (request := requests.get(key)) is not None]

    # ------------------------------------------------------------------------------------------------------ windows

    def on_executor(self, executor_id: int, event: str, detail: str, now_ns: int) -> None:
        for request in self._requests.values():
            if request.executor_id == executor_id:
                request.event(f"executor {event}", now_ns, {"stepwire.detail": detail})
        if event not in ("lost", "epoch_ended"):
            return
        for request in [r for r in self._requests.values() if r.executor_id == executor_id]:
            request.chunks_in_flight = 0
            self._export_request_if_complete(request)
        state = self._executors.get(executor_id)
        if state is not None and state.window is not None:
            self._seal(state, state.window)
        for traced, (window, step) in list(self._steps.items()):
            if window.executor_id == executor_id:
                del self._steps[traced]
                step.lose(f"executor {event}: {detail}", now_ns)
                self._landed(window)

    def close(self, now_ns: int) -> None:
        """Exports what is open: the process stops."""
        for executor_id in list(self._executors):
            self.on_executor(executor_id, "lost", "the scheduler stops", now_ns)
        for key, request in list(self._requests.items()):
            if not request.end_ns:
                self.on_end(key, None, "the scheduler stops", now_ns)

    def _landed(self, window: Window) -> None:
        window.in_flight -= 1
        if not self._live and not window.in_flight:
            self._seal_idle()
        if window.complete and window in self._closing:
            self._export_window(window)

    def _seal_idle(self) -> None:
        """No request is left: no plan may come for hours, and the windows should not wait for it."""
        for state in self._executors.values():
            if state.window is not None and state.window.steps and not state.window.in_flight:
                self._seal(state, state.window)

    def _seal(self, state: _Executor, window: Window) -> None:
        state.window = state.context = None
        window.sealed = True
        if not window.steps:
            self._policy.unused()
            return
        self._closing.add(window)
        if window.complete:
            self._export_window(window)

    def _export_window(self, window: Window) -> None:
        self._closing.discard(window)
        spans, clock = self._spans, self._clock
        self._pipeline.submit(lambda: window_spans(window, spans, wall_offset_ns(clock)), window.max_spans())
