"""The 25 bytes of trace context that travel in StepPlan and Submit: 16 bytes trace id, 8 bytes span id, 1 byte flags.

Loads no OpenTelemetry: both services read plans whether or not they export anything.
"""

import random
import struct
from dataclasses import dataclass

from common.errors import ProtocolError

TRACE_CONTEXT_BYTES = 25
SAMPLED = 1

_FORMAT = struct.Struct(">QQQB")
_LOW = (1 << 64) - 1
_random = random.SystemRandom()
# Ids need to differ, not to be secret; reading the system's source for each span would cost a system call.
_ids = random.Random(_random.getrandbits(256))


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a span hangs. Both ids are non-zero."""

    trace_id: int
    span_id: int
    flags: int = SAMPLED

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        """The W3C header value."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    def pack(self) -> bytes:
        return _FORMAT.pack(self.trace_id >> 64, self.trace_id & _LOW, self.span_id, self.flags)

    def child(self) -> "TraceContext":
        """A new span id in the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.flags)


def unpack(data: bytes) -> TraceContext | None:
    """None for no bytes. Raises ProtocolError for another length than 25 or a zero id."""
    if not data:
        return None
    if len(data) != TRACE_CONTEXT_BYTES:
        raise ProtocolError(f"trace_context: {len(data)} bytes, not {TRACE_CONTEXT_BYTES}", field="trace_context")
    high, low, span_id, flags = _FORMAT.unpack(data)
    trace_id = high << 64 | low
    if not trace_id or not span_id:
        raise ProtocolError("trace_context: an id is zero", field="trace_context")
    return TraceContext(trace_id, span_id, flags)


def parse_traceparent(value: str) -> TraceContext | None:
    """The context of a W3C traceparent header; None when it is malformed, as the standard wants it ignored then."""
    parts = value.strip().split("-")
    if len(parts) < 4 or [len(p) for p in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        context = TraceContext(int(parts[1], 16), int(parts[2], 16), int(parts[3], 16))
    except ValueError:
        return None
    return context if context.trace_id and context.span_id else None


def new_span_id() -> int:
    return _ids.getrandbits(64) or 1


def new_trace() -> TraceContext:
    """A new sampled trace and the id of its root span."""
    return TraceContext(_ids.getrandbits(128) or 1, new_span_id())
