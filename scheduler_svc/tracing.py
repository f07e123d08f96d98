"""Tracing of the scheduler process: what `app` needs, in one call.

Loads OpenTelemetry's SDK, exporter and instrumentation only when tracing is configured.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from common.clock import Clock, SystemClock
from common.telemetry.endpoint import EXECUTOR_SERVICE, SCHEDULER_SERVICE, otlp_endpoint
from scheduler_svc.api.request_tracer import NoRequestTracer, RequestTracer
from scheduler_svc.observer import NoObserver, StepObserver

if TYPE_CHECKING:
    from common.telemetry.provider import Telemetry
    from scheduler_svc.trace_observer import TracingObserver


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """`endpoint` empty: OTEL_EXPORTER_OTLP_ENDPOINT. `instance_id` empty: host name and process id.

    `sample_ratio`: share of requests traced whose caller made no decision, of which at most `roots_per_s` a second.
    `slow_step_ms`: steps longer than this get a trace of their own; 0: those five times as long as usual.
    `share`: how many processes take calls; each keeps to its part of the limits.
    """

    endpoint: str = ""
    instance_id: str = ""
    window_interval_s: float = 5.0
    sample_ratio: float = 1.0
    roots_per_s: float = 10.0
    slow_step_ms: float = 0.0
    share: int = 1


@dataclass(frozen=True, slots=True)
class Tracing:
    """What the parts of the process are given. Switched off, it watches nothing and `shutdown` returns at once."""

    observer: StepObserver = field(default_factory=NoObserver)
    interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    request_tracer: RequestTracer = field(default_factory=NoRequestTracer)
    _telemetry: "Telemetry | None" = None
    _observer: "TracingObserver | None" = None
    _clock: Clock = field(default_factory=SystemClock)

    @property
    def enabled(self) -> bool:
        return self._telemetry is not None

    @property
    def dropped(self) -> int:
        """Spans lost so far, for Stats.spans_dropped."""
        return self._telemetry.pipeline.dropped if self._telemetry is not None else 0

    def shutdown(self) -> None:
        """Ends what is open and flushes, for at most 2 s. Blocks; call it last, on the loop thread. Idempotent."""
        if self._observer is not None:
            self._observer.close(self._clock.monotonic_ns())
        if self._telemetry is not None:
            self._telemetry.shutdown()


def build_tracing(options: TracingOptions, clock: Clock | None = None) -> Tracing:
    """Tracing as configured; switched off, and without a thread, when no endpoint is."""
    if not otlp_endpoint(options.endpoint, os.environ):
        return Tracing()
    from common.telemetry.provider import start_telemetry

    telemetry = start_telemetry(SCHEDULER_SERVICE, options.instance_id, options.endpoint)
    return Tracing() if telemetry is None else tracing_into(telemetry, options, clock or SystemClock())


def tracing_into(telemetry: "Telemetry", options: TracingOptions, clock: Clock) -> Tracing:
    """Tracing that ends in `telemetry`, which the result owns."""
    from common.telemetry.provider import service_resource
    from common.telemetry.spans import SpanFactory
    from scheduler_svc.api.request_tracer import SpanRequestTracer
    from scheduler_svc.trace_calls import CallSampler, server_interceptor
    from scheduler_svc.trace_observer import TracingObserver
    from scheduler_svc.trace_policy import (
        MAX_REQUEST_SPANS,
        MAX_TRACE_SPANS,
        SECOND_NS,
        SlowSteps,
        TraceAllowance,
        WindowLimits,
        WindowPolicy,
    )

    allowance = TraceAllowance(
        int(options.share * SECOND_NS / options.roots_per_s),
        max_trace_spans=max(MAX_REQUEST_SPANS, MAX_TRACE_SPANS // options.share),
    )
    interval_ns = int(options.window_interval_s * SECOND_NS)
    observer = TracingObserver(
        telemetry.pipeline,
        telemetry.spans,
        SpanFactory(service_resource(EXECUTOR_SERVICE, "rebuilt by the scheduler")),
        clock,
        WindowPolicy(WindowLimits(interval_ns)),
        SlowSteps(interval_ns, threshold_ns=int(options.slow_step_ms * 1e6)),
        allowance,
    )
    sampler = CallSampler(allowance, options.sample_ratio, clock)
    return Tracing(
        observer,
        (server_interceptor(telemetry.provider, sampler),),
        SpanRequestTracer(),
        telemetry,
        observer,
        clock,
    )
