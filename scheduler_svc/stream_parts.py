"""The small machines of the scheduler's end of the step protocol. Pure: time comes in as a value."""

from collections import deque
from statistics import median

from common.clock import Clock
from common.errors import ProtocolError
from common.messages import Output, OutputChunk, Timings


class Backoff:
    """Delays between attempts: `first_s`, doubling up to `max_s`, until `reset`."""

    def __init__(self, first_s: float = 0.1, max_s: float = 2.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def next_s(self) -> float:
        delay_s = self._next_s
        self._next_s = min(self._next_s * 2, self._max_s)
        return delay_s

    def reset(self) -> None:
        self._next_s = self._first_s


class ClockEstimate:
    """Round trip and clock offset from the last `window` pings, or steps in their place.

    The offset is the one measured by the quickest ping: its error is at most half that round trip. The round trip told
    is the median, without the time the executor held the ping, or the step.
    """

    def __init__(self, window: int = 16) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=window)  # (rtt_ns, offset_ns)
        self.rtt_ns = 0
        self.offset_ns = 0

    def add(self, sent_ns: int, peer_received_ns: int, peer_sent_ns: int, received_ns: int) -> None:
        """One ping: our clock, the executor's, the executor's, ours."""
        rtt_ns = max(0, (received_ns - sent_ns) - (peer_sent_ns - peer_received_ns))
        offset_ns = ((peer_received_ns - sent_ns) + (peer_sent_ns - received_ns)) // 2
        self._samples.append((rtt_ns, offset_ns))
        self.rtt_ns = int(median(rtt for rtt, _ in self._samples))
        self.offset_ns = min(self._samples)[1]


class Exchange:
    """One step of each interval is taken for a ping: its result says when its plan came in and when it left itself.

    Where a step went there and back since the interval began, a ping would tell neither side anything new.
    """

    def __init__(self) -> None:
        self._awaited = True  # the interval's first plan
        self._step_id = self._sent_ns = 0
        self._done = False

    def start_interval(self) -> bool:
        """Returns whether a step was exchanged in the interval that ends."""
        done, self._done = self._done, False
        self._awaited, self._step_id = True, 0
        return done

    def sent(self, step_id: int, clock: Clock) -> None:
        if self._awaited:
            self._awaited = False
            self._step_id, self._sent_ns = step_id, clock.monotonic_ns()

    def answered(self, step_id: int, timings: Timings, estimate: ClockEstimate, clock: Clock) -> None:
        """Feeds `estimate`. An executor that tells no times is pinged instead."""
        if step_id == self._step_id and timings.received_ns and timings.sent_ns:
            self._done = True
            estimate.add(self._sent_ns, timings.received_ns, timings.sent_ns, clock.monotonic_ns())


class OutputJoiner:
    """Puts the chunks of the Outputs stream together again, step by step.

    Raises ProtocolError from `add` for a chunk that does not continue its output.
    """

    def __init__(self) -> None:
        self._open: dict[int, dict[tuple[int, int, int, int], tuple[OutputChunk, list[bytes], int]]] = {}
        self._bytes: dict[int, int] = {}

    def add(self, chunk: OutputChunk) -> None:
        outputs = self._open.setdefault(chunk.step_id, {})
        key = (chunk.kind, chunk.row, chunk.admission_id, chunk.position)
        first, pieces, size = outputs.get(key, (chunk, [], 0))
        if chunk.offset != size or size + len(chunk.data) > first.total_bytes:
            raise ProtocolError(
                f"output chunk of step {chunk.step_id}, row {chunk.row}: offset {chunk.offset} after {size} bytes",
                field="output_chunk.offset",
            )
        pieces.append(chunk.data)
        outputs[key] = (first, pieces, size + len(chunk.data))
        self._bytes[chunk.step_id] = self._bytes.get(chunk.step_id, 0) + len(chunk.data)

    def has(self, step_id: int, num_bytes: int) -> bool:
        """Whether all of the step's bulk bytes are here."""
        return self._bytes.get(step_id, 0) >= num_bytes

    def take(self, step_id: int) -> tuple[Output, ...]:
        """The step's outputs in the order they began. Raises ProtocolError when one is not whole."""
        self._bytes.pop(step_id, None)
        whole = []
        for chunk, pieces, size in self._open.pop(step_id, {}).values():
            if size != chunk.total_bytes:
                raise ProtocolError(
                    f"output of step {step_id}, row {chunk.row}: {size} of {chunk.total_bytes} bytes",
                    field="output_chunk.total_bytes",
                )
            whole.append(
                Output(
                    step_id=step_id,
                    kind=chunk.kind,
                    row=chunk.row,
                    admission_id=chunk.admission_id,
                    position=chunk.position,
                    count=chunk.count,
                    data=b"".join(pieces),
                )
            )
        return tuple(whole)
