"""From recorded events to the collector: one bounded queue, one thread.

Why not the SDK's batch processor: it does not say how many spans it dropped, its shutdown waits up to 30 s for a dead
collector, and it takes finished spans only, while ours are built on the export thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

Build = Callable[[], Iterable[ReadableSpan]]

SHUTDOWN_TIMEOUT_S = 2.0
# Building and encoding a span takes some 30 µs of Python, so a batch holds up another thread for 1-2 ms at the very
# worst, and the thread lets go of the GIL between batches.
BATCH_SPANS = 32
MAX_QUEUE_SPANS = 8192
COLLECT_S = 0.5

_log = logging.getLogger(__name__)


class SpanPipeline(SpanProcessor):
    """Queue and export thread. `submit` and `on_end` may be called from any thread and never wait for the network.

    The thread sleeps without a timeout while there is nothing to do. Its priority is not lowered: a low-priority thread
    that is descheduled while it holds the GIL would hold up the very threads it should make way for.
    """

    def __init__(
        self, exporter: SpanExporter, *, max_queue_spans: int = MAX_QUEUE_SPANS, collect_s: float = COLLECT_S
    ) -> None:
        self._exporter = exporter
        self._max_queue_spans = max_queue_spans
        self._collect_s = collect_s
        self._lock = threading.Lock()
        self._queue: deque[tuple[Build, int]] = deque()
        self._queued_spans = 0
        self._exported = 0
        self._dropped = 0
        self._busy = False
        self._closing = threading.Event()
        self._abandoned = False
        self._work = threading.Event()
        self._idle = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="stepwire-telemetry", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Spans that never reached the collector: queue full, export failed, or left behind at shutdown."""
        return self._dropped

    @property
    def exported(self) -> int:
        return self._exported

    def submit(self, build: Build, num_spans: int) -> None:
        """Queues spans to be built on the export thread. `num_spans`: how many there will be, at most."""
        with self._lock:
            if self._closing.is_set() or self._queued_spans + num_spans > self._max_queue_spans:
                self._dropped += num_spans
                return
            self._queue.append((build, num_spans))
            self._queued_spans += num_spans
        if not self._work.is_set():
            self._work.set()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is not None and context.trace_flags.sampled:
            self.submit(lambda: (span,), 1)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Waits until everything queued so far was exported or given up. False when that took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._queue and not self._busy, timeout_millis / 1000)

    def shutdown(self, timeout_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Exports what is queued, for `timeout_s` at most; then cuts the exporter off. Idempotent."""
        if self._closing.is_set():
            return
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._work.set()
        self._thread.join(max(timeout_s - 0.25, 0.0))
        self._abandoned = True
        self._exporter.shutdown()  # closes the channel, which ends a call in flight and a retry's wait
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            self._dropped += self._queued_spans
            self._queue.clear()
            self._queued_spans = 0
        if self._dropped:
            _log.warning("%d spans were dropped, %d exported", self._dropped, self._exported)

    # ------------------------------------------------------------------------------------------------ export thread

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._closing.wait(self._collect_s)
            self._work.clear()
            self._drain()
            with self._idle:
                self._idle.notify_all()
                if self._closing.is_set() and (self._abandoned or not self._queue):
                    return

    def _drain(self) -> None:
        batch: list[ReadableSpan] = []
        while not self._abandoned:
            with self._lock:
                if not self._queue:
                    break
                build, num_spans = self._queue.popleft()
                self._queued_spans -= num_spans
                self._busy = True
            try:
                for span in build():
                    batch.append(span)
                    if len(batch) >= BATCH_SPANS:
                        self._export(batch)
                        batch = []
            except Exception:  # noqa: BLE001 - a bug in one kind of span must not end the others
                _log.exception("building up to %d spans failed", num_spans)
        if batch:
            self._export(batch)
        with self._lock:
            self._busy = False

    def _export(self, batch: list[ReadableSpan]) -> None:
        try:
            ok = not self._abandoned and self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # noqa: BLE001 - whatever a third-party exporter raises must not end the thread
            _log.exception("exporting %d spans failed", len(batch))
            ok = False
        with self._lock:
            if ok:
                self._exported += len(batch)
            else:
                self._dropped += len(batch)
        if not self._closing.is_set():
            time.sleep(0)
