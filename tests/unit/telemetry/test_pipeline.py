"""Queue, thread, drops and a bounded end."""

import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry.context import new_trace
from common.telemetry.endpoint import otlp_endpoint
from common.telemetry.pipeline import BATCH_SPANS, SpanPipeline
from common.telemetry.provider import start_telemetry
from common.telemetry.spans import SpanFactory

SPANS = SpanFactory(Resource({"service.name": "test"}))


def some_spans(count: int) -> list[ReadableSpan]:
    return [SPANS.span(str(i), new_trace(), None, 1, 2, {}) for i in range(count)]


class StuckExporter(SpanExporter):
    """A collector that never answers, until the channel is closed."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.closed = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.closed.wait()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.closed.set()


class BatchSizes(InMemorySpanExporter):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sizes.append(len(spans))
        return super().export(spans)


def test_everything_queued_is_exported_in_small_batches() -> None:
    exporter = BatchSizes()
    pipeline = SpanPipeline(exporter, collect_s=0.01)
    pipeline.submit(lambda: some_spans(100), 100)
    pipeline.submit(lambda: some_spans(7), 7)
    assert pipeline.force_flush(10_000)
    assert (pipeline.exported, pipeline.dropped) == (107, 0)
    assert max(exporter.sizes) <= BATCH_SPANS
    pipeline.shutdown()


def test_spans_are_built_on_the_export_thread() -> None:
    builders: list[str] = []

    def build() -> Iterator[ReadableSpan]:
        builders.append(threading.current_thread().name)
        yield from some_spans(1)

    pipeline = SpanPipeline(InMemorySpanExporter(), collect_s=0.01)
    pipeline.submit(build, 1)
    pipeline.shutdown()
    assert builders == ["stepwire-telemetry"]


def test_a_full_queue_drops_and_counts() -> None:
    exporter = StuckExporter()
    pipeline = SpanPipeline(exporter, max_queue_spans=10, collect_s=0.01)
    pipeline.submit(lambda: some_spans(BATCH_SPANS), 1)
    assert exporter.called.wait(10)
    pipeline.submit(lambda: some_spans(8), 8)
    pipeline.submit(lambda: some_spans(8), 8)
    assert pipeline.dropped == 8
    pipeline.shutdown(timeout_s=0.3)
    assert pipeline.dropped == BATCH_SPANS + 8 + 8
    assert pipeline.exported == 0


def test_shutdown_cuts_off_a_collector_that_does_not_answer() -> None:
    exporter = StuckExporter()
    pipeline = SpanPipeline(exporter, collect_s=0.01)
    pipeline.submit(lambda: some_spans(3), 3)
    assert exporter.called.wait(10)
    closer = threading.Thread(target=pipeline.shutdown, daemon=True)
    closer.start()
    closer.join(2.5)  # the promise is 2 s; the rest is for a busy machine
    assert not closer.is_alive()
    assert pipeline.dropped == 3


def test_shutdown_flushes_once_and_later_spans_count_as_dropped() -> None:
    exporter = InMemorySpanExporter()
    pipeline = SpanPipeline(exporter, collect_s=60)
    pipeline.submit(lambda: some_spans(2), 2)
    pipeline.shutdown()
    pipeline.shutdown()
    assert len(exporter.get_finished_spans()) == 2
    pipeline.submit(lambda: some_spans(2), 2)
    assert pipeline.dropped == 2


def test_a_broken_span_does_not_end_the_thread() -> None:
    def broken() -> Iterator[ReadableSpan]:
        yield from some_spans(1)
        raise ValueError("no such span")

    pipeline = SpanPipeline(InMemorySpanExporter(), collect_s=0.01)
    pipeline.submit(broken, 2)
    pipeline.submit(lambda: some_spans(1), 1)
    assert pipeline.force_flush(10_000)
    assert pipeline.exported == 2
    pipeline.shutdown()


def test_unsampled_spans_are_not_queued() -> None:
    exporter = InMemorySpanExporter()
    pipeline = SpanPipeline(exporter)
    context = new_trace()
    pipeline.on_end(SPANS.span("no", type(context)(context.trace_id, context.span_id, 0), None, 1, 2, {}))
    pipeline.on_end(SPANS.span("yes", context, None, 1, 2, {}))
    pipeline.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["yes"]


@pytest.mark.parametrize(
    ("configured", "environ", "target"),
    [
        ("", {}, ""),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://c:4317"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317"}, "http://c:4317"),
        ("d:1", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://d:1"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://t:1", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"}, "https://t:1"),
        ("d:1", {"OTEL_SDK_DISABLED": "true"}, ""),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317", "OTEL_TRACES_EXPORTER": "none"}, ""),
    ],
)
def test_where_spans_go(configured: str, environ: dict[str, str], target: str) -> None:
    assert otlp_endpoint(configured, environ) == target


def test_unconfigured_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    before = set(threading.enumerate())
    assert start_telemetry("stepwire-scheduler", "i") is None
    assert set(threading.enumerate()) == before


def test_a_dead_collector_holds_nobody_up_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    telemetry = start_telemetry("stepwire-scheduler", "i", "127.0.0.1:1")
    assert telemetry is not None
    telemetry.pipeline.submit(lambda: some_spans(5), 5)
    closer = threading.Thread(target=telemetry.shutdown, daemon=True)
    closer.start()
    closer.join(2.5)
    assert not closer.is_alive()
    assert telemetry.pipeline.dropped == 5
