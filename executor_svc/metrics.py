"""Counts what steps cost the executor, for Prometheus, and hands them on to tracing."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from common.messages import StepPlan, StepResult
from common.metrics.endpoint import MetricsServer
from common.metrics.histogram import Histogram
from executor_svc.session import StepTraceSink

if TYPE_CHECKING:
    from prometheus_client import Metric


class CountingSink:
    """A StepTraceSink; I/O thread. `tracing` None: nothing is handed on. `start`: seconds by part of the start, written
    by the loader's thread until the executor is ready; warm-up and capture are there and in no step's numbers."""

    def __init__(self, tracing: StepTraceSink | None, start: Mapping[str, float] | None = None) -> None:
        self._tracing = tracing
        self._start = {} if start is None else start
        self.steps: Counter[str] = Counter()  # by mode
        self.device = Histogram()
        self.prepare = Histogram()
        self.idle_s = 0.0
        self.tokens = 0
        self.row_errors = 0

    def on_step(self, plan: StepPlan, result: StepResult) -> None:
        timings = result.timings
        self.steps[result.mode.name.lower()] += 1
        self.device.add((timings.device_end_ns - timings.device_start_ns) / 1e9)
        self.prepare.add((timings.prepare_end_ns - timings.prepare_start_ns) / 1e9)
        self.idle_s += timings.device_idle_ns / 1e9
        self.tokens += plan.num_tokens
        self.row_errors += len(result.row_errors)
        if self._tracing is not None:
            self._tracing.on_step(plan, result)

    def families(self) -> Iterator["Metric"]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        start = GaugeMetricFamily("stepwire_start_seconds", "what the start took, by part", labels=["part"])
        for part, seconds in tuple(self._start.items()):
            start.add_metric([part], seconds)
        yield start

        steps = CounterMetricFamily("stepwire_device_steps", "steps by how they ran", labels=["mode"])
        for mode, count in self.steps.items():
            steps.add_metric([mode], count)
        yield steps
        for name, text, histogram in (
            ("stepwire_device_seconds", "the device's work of a step", self.device),
            ("stepwire_prepare_seconds", "the host's work before a step's launch", self.prepare),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.buckets(), sum_value=histogram.sum_s)
        for name, text, value in (
            ("stepwire_device_idle_seconds", "time before steps in which the device had nothing to do", self.idle_s),
            ("stepwire_device_tokens", "tokens computed", self.tokens),
            ("stepwire_row_errors", "rows given up, NaN for one", self.row_errors),
        ):
            yield CounterMetricFamily(name, text, value=value)


def serve_executor_metrics(listen: str, counts: CountingSink) -> MetricsServer:
    """On the I/O loop. Raises ConfigError when the address can not be had."""
    return MetricsServer(listen, counts.families)
