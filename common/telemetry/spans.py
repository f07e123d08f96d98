"""Spans made after the fact, from recorded times.

The SDK's own way (start a span, end it) costs some 40 µs a span on the thread that has better things to do, and lets
nobody choose the span id beforehand, which a step needs: its id travels in the plan. So the threads that serve only
record times, and the export thread builds finished `ReadableSpan`s, which is what an exporter takes anyway.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.clock import Clock
from common.telemetry.context import TraceContext

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

_OK = Status(StatusCode.UNSET)


def package_version() -> str:
    try:
        return version("stepwire")
    except PackageNotFoundError:  # run from a plain checkout
        return "0"


def wall_offset_ns(clock: Clock) -> int:
    """Wall clock minus monotonic clock, now.

    The two can't be read at one moment; of a few tries the one counts in which the least time passed between them.
    """
    tries = []
    for _ in range(5):
        before = clock.monotonic_ns()
        wall = clock.wall_ns()
        after = clock.monotonic_ns()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


def span_context(context: TraceContext, *, remote: bool = False) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote=remote, trace_flags=TraceFlags(context.flags))


class SpanFactory:
    """Builds spans of one service. Times are wall-clock ns since the Unix epoch."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self._scope = InstrumentationScope("stepwire", package_version())

    def span(
        self,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes,
        *,
        links: Sequence[Link] = (),
        events: Sequence[Event] = (),
        error: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
        remote_parent: bool = False,
    ) -> ReadableSpan:
        """A finished span. A span that would end before it starts (clocks of two machines) gets length zero."""
        return ReadableSpan(
            name=name,
            context=span_context(context),
            parent=span_context(parent, remote=remote_parent) if parent else None,
            resource=self.resource,
            attributes=dict(attributes),
            events=events,
            links=links,
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else _OK,
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=self._scope,
        )


def link(context: TraceContext, attributes: Attributes | None = None) -> Link:
    return Link(span_context(context, remote=True), dict(attributes or {}))
