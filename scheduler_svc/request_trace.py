"""What is remembered of a sampled request in the core, and the spans made of it.

Written by the loop thread until the request ends; then the export thread alone reads it. At most 19 spans: queue, 16
prefill chunks, the merged rest, decode; with the Generate span 20, whatever the length.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.sdk.trace import Event, ReadableSpan

from common.telemetry.context import TraceContext
from common.telemetry.spans import SpanFactory, Value, link
from scheduler_svc.messages import FinishReason
from scheduler_svc.trace_policy import MAX_LINKS

MAX_CHUNK_SPANS = 16
MAX_EVENTS = 32
MAX_CORE_SPANS = MAX_CHUNK_SPANS + 3
MS = 1e6


@dataclass(slots=True)
class Chunk:
    """Prompt positions [position, position + count) computed in one step; merged ones: in `steps` steps."""

    start_ns: int
    end_ns: int
    position: int
    count: int
    step_id: int
    recompute: bool
    steps: int = 1


@dataclass(slots=True, eq=False)
class RequestTrace:
    """Times are scheduler monotonic ns; 0: has not happened. `context`: of the Generate span."""

    key: int
    request_id: str
    context: TraceContext
    arrival_ns: int
    prompt_tokens: int
    planned_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    tokens: int = 0
    batches: int = 0
    chunks_in_flight: int = 0
    num_chunks: int = 0
    executor_id: int = -1
    recomputing: bool = False
    num_recomputes: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    merged: Chunk | None = None
    events: list[tuple[str, int, dict[str, Value]]] = field(default_factory=list)
    windows: list[TraceContext] = field(default_factory=list)
    end_ns: int = 0
    reason: FinishReason | None = None
    error: str = ""

    def planned(self, executor_id: int, now_ns: int) -> None:
        """A prefill chunk of it was planned."""
        if not self.planned_ns:
            self.planned_ns = now_ns
        elif self.first_token_ns and not self.recomputing:
            # Tokens were delivered and now it prefills again: it was preempted, or its executor was lost.
            self.recomputing = True
            self.num_recomputes += 1
            self.event("readmitted", now_ns, {"stepwire.paused_ms": (now_ns - self.last_token_ns) / MS})
        self.executor_id = executor_id
        self.chunks_in_flight += 1

    @property
    def complete(self) -> bool:
        """It ended and no result that names it is awaited."""
        return bool(self.end_ns) and not self.chunks_in_flight

    def computed(self, chunk: Chunk) -> None:
        """The result of a prefill chunk came."""
        self.num_chunks += 1
        self.chunks_in_flight -= 1
        if len(self.chunks) < MAX_CHUNK_SPANS:
            self.chunks.append(chunk)
        elif self.merged is None:
            self.merged = chunk
        else:
            merged = self.merged
            merged.start_ns = min(merged.start_ns, chunk.start_ns)
            merged.end_ns = max(merged.end_ns, chunk.end_ns)
            merged.count += chunk.count
            merged.steps += 1

    def emitted(self, count: int, now_ns: int) -> None:
        if not self.first_token_ns:
            self.first_token_ns = now_ns
            self.event("first token", now_ns, {})
        self.recomputing = False
        self.last_token_ns = now_ns
        self.tokens += count
        self.batches += 1

    def event(self, name: str, now_ns: int, attributes: dict[str, Value]) -> None:
        """Events past MAX_EVENTS are left out; the counts still tell of them."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((name, now_ns, attributes))

    def joined(self, window: TraceContext) -> None:
        """A step of it is in the window."""
        if len(self.windows) < MAX_LINKS and (not self.windows or self.windows[-1] is not window):
            self.windows.append(window)

    def num_spans(self) -> int:
        """How many spans `request_spans` makes."""
        return 1 + len(self.chunks) + (self.merged is not None) + bool(self.first_token_ns)


def request_spans(trace: RequestTrace, spans: SpanFactory, wall_offset_ns: int) -> Iterator[ReadableSpan]:
    """Spans of a request that ended. `wall_offset_ns`: wall clock minus scheduler monotonic."""
    parent = trace.context
    yield spans.span(
        "queue",
        parent.child(),
        parent,
        trace.arrival_ns + wall_offset_ns,
        (trace.planned_ns or trace.end_ns) + wall_offset_ns,
        {"stepwire.request_id": trace.request_id, "gen_ai.usage.input_tokens": trace.prompt_tokens},
        error=trace.error if not trace.planned_ns else "",
    )
    for chunk in (*trace.chunks, *([trace.merged] if trace.merged else [])):
        name = "prefill" if chunk.steps == 1 else f"prefill, {chunk.steps} more chunks"
        yield spans.span(
            name,
            parent.child(),
            parent,
            chunk.start_ns + wall_offset_ns,
            chunk.end_ns + wall_offset_ns,
            {
                "stepwire.step_id": chunk.step_id,
                "stepwire.position": chunk.position,
                "stepwire.tokens": chunk.count,
                "stepwire.steps": chunk.steps,
                "stepwire.recompute": chunk.recompute,
            },
        )
    if trace.first_token_ns:
        yield _decode_span(trace, spans, wall_offset_ns)


def _decode_span(trace: RequestTrace, spans: SpanFactory, wall_offset_ns: int) -> ReadableSpan:
    attributes: dict[str, Value] = {
        "stepwire.request_id": trace.request_id,
        "stepwire.executor_id": trace.executor_id,
        "stepwire.prefill_chunks": trace.num_chunks,
        "stepwire.recomputes": trace.num_recomputes,
        "stepwire.token_batches": trace.batches,
        "stepwire.time_to_first_token_ms": (trace.first_token_ns - trace.arrival_ns) / MS,
        "gen_ai.usage.output_tokens": trace.tokens,
    }
    if trace.tokens > 1:
        between = (trace.last_token_ns - trace.first_token_ns) / (trace.tokens - 1)
        attributes["stepwire.time_per_token_ms"] = between / MS
    if trace.reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [trace.reason.name.lower()]
    if trace.error:
        attributes["error.type"] = trace.error
    # From the result of the prefill that chose the first token, which is when the first token is there.
    return spans.span(
        "decode",
        trace.context.child(),
        trace.context,
        trace.first_token_ns + wall_offset_ns,
        trace.end_ns + wall_offset_ns,
        attributes,
        links=[link(w) for w in trace.windows],
        events=[Event(name, attributes=a, timestamp=at + wall_offset_ns) for name, at, a in trace.events],
        error=trace.error,
    )
