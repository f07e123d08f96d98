"""Which steps and requests are traced: pure decisions, no OpenTelemetry, time comes in as a value.

Owned by the loop thread, except TraceAllowance, which api workers ask too.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

MAX_TRACE_SPANS = 500
MAX_REQUEST_SPANS = 20  # Generate, queue, 16 prefill chunks, the merged rest, decode; the promise is 40
MAX_STEP_SPANS = 10
MAX_WINDOW_STEPS = 32
MAX_LINKS = 64

SECOND_NS = 1_000_000_000


class TokenBucket:
    """A rate with a burst: one token per `interval_ns`, at most `capacity` saved up."""

    def __init__(self, interval_ns: int, capacity: int) -> None:
        if interval_ns <= 0 or capacity <= 0:
            raise ValueError(f"interval {interval_ns} ns and capacity {capacity} must be positive")
        self._interval_ns = interval_ns
        self._capacity = capacity
        self._full_at_ns: int | None = None  # when the bucket is full again; None: never used

    def tokens(self, now_ns: int) -> int:
        if self._full_at_ns is None or now_ns >= self._full_at_ns:
            return self._capacity
        missing = -((now_ns - self._full_at_ns) // self._interval_ns)  # rounded up
        return self._capacity - missing

    def try_take(self, now_ns: int, keep: int = 0) -> bool:
        """Takes a token when more than `keep` are there."""
        if self.tokens(now_ns) <= keep:
            return False
        start = now_ns if self._full_at_ns is None else max(now_ns, self._full_at_ns)
        self._full_at_ns = start + self._interval_ns
        return True

    def give_back(self) -> None:
        """Undoes one try_take."""
        if self._full_at_ns is not None:
            self._full_at_ns -= self._interval_ns

    def next_ns(self, now_ns: int, keep: int = 0) -> int:
        """When `try_take` with this `keep` can succeed."""
        if self._full_at_ns is None or self.tokens(now_ns) > keep:
            return now_ns
        return self._full_at_ns - (self._capacity - keep - 1) * self._interval_ns


@dataclass(frozen=True, slots=True)
class WindowLimits:
    interval_ns: int = 5 * SECOND_NS  # windows per time, in the long run
    max_steps: int = MAX_WINDOW_STEPS
    max_gap_ns: int = SECOND_NS  # a longer pause between two plans ends the window


class WindowPolicy:
    """Decides, before each plan, whether a window opens, goes on or closes.

    Two tokens can be saved up. Periodic windows leave one of them, so that a sampled request that arrives finds one
    for its first window; in the long run both together stay within one per interval.
    """

    def __init__(self, limits: WindowLimits) -> None:
        self._limits = limits
        self._bucket = TokenBucket(limits.interval_ns, 2)
        self._quiet_until_ns = 0
        self._fresh: set[int] = set()  # sampled requests that just came: the next step may be their first
        self._waiting: set[int] = set()  # sampled requests that run and were in no window yet

    def request_came(self, key: int) -> None:
        self._fresh.add(key)
        self._quiet_until_ns = 0

    def request_runs(self, key: int) -> None:
        """The first step of a sampled request was planned outside any window."""
        self._fresh.discard(key)
        self._waiting.add(key)
        self._quiet_until_ns = 0

    def request_seen(self, key: int) -> None:
        """The request is in a window, or gone: it asks for no other."""
        self._fresh.discard(key)
        self._waiting.discard(key)

    def may_open(self, now_ns: int) -> str:
        """Opens a window and says why: "request" or "periodic"; empty: not now."""
        if now_ns < self._quiet_until_ns:
            return ""
        wanted = bool(self._fresh or self._waiting)
        keep = 0 if wanted else 1
        if not self._bucket.try_take(now_ns, keep):
            self._quiet_until_ns = self._bucket.next_ns(now_ns, keep)
            return ""
        # A request still queued when this window closes asks again at its first step, not before: else requests in a
        # long queue would spend every window on steps they are not in.
        self._fresh.clear()
        return "request" if wanted else "periodic"

    def unused(self) -> None:
        """The window just closed had no step."""
        self._bucket.give_back()

    def is_over(self, now_ns: int, num_steps: int, last_plan_ns: int) -> bool:
        """Whether the next plan no longer belongs to a window of `num_steps` steps."""
        return num_steps >= self._limits.max_steps or now_ns - last_plan_ns > self._limits.max_gap_ns


class SlowSteps:
    """Finds steps that took far longer than others like them, at a bounded rate.

    A step's time runs from its sending, or from the result before it where that came later, to its own result: the
    time it held up the pipeline. `threshold_ns` 0: slow is `factor` times the average of its kind and `min_ns`; steps
    with and without prefill are two kinds, those with prefill are compared per prefill token.
    """

    WARM_UP = 32

    def __init__(
        self,
        interval_ns: int = 5 * SECOND_NS,
        threshold_ns: int = 0,
        factor: float = 5.0,
        min_ns: int = 20_000_000,
    ) -> None:
        self._bucket = TokenBucket(interval_ns, 1)
        self._threshold_ns = threshold_ns
        self._factor = factor
        self._min_ns = min_ns
        self._decode = _Average()
        self._prefill = _Average()

    def is_slow(self, now_ns: int, took_ns: int, prefill_tokens: int) -> bool:
        """Also learns from the step."""
        if self._threshold_ns:
            return took_ns >= self._threshold_ns and self._bucket.try_take(now_ns)
        average = self._prefill if prefill_tokens else self._decode
        per = took_ns / (prefill_tokens or 1)
        usual, count = average.value, average.count
        # A step counts into the average as at most twice the usual, or one stall would hide the next.
        average.add(min(per, 2 * usual) if count >= self.WARM_UP else per)
        if count < self.WARM_UP or took_ns < self._min_ns or per < self._factor * usual:
            return False
        return self._bucket.try_take(now_ns)


class _Average:
    """Mean of the first values, exponential after."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, 64)


class TraceAllowance:
    """Which requests are sampled: all whose caller asks for it, some of the others, none past MAX_TRACE_SPANS a trace.

    A call reserves the spans it may need of its trace and a request gives back what it did not use. Thread-safe.
    """

    MAX_TRACES = 1024  # remembered; an older one starts anew, which only a trace of many hours notices

    def __init__(
        self, interval_ns: int = SECOND_NS // 10, burst: int = 20, max_trace_spans: int = MAX_TRACE_SPANS
    ) -> None:
        self._max_trace_spans = max_trace_spans
        self._lock = threading.Lock()
        self._bucket = TokenBucket(interval_ns, burst)
        self._used: OrderedDict[int, int] = OrderedDict()

    def allows_root(self, now_ns: int) -> bool:
        """A request that belongs to no trace yet."""
        with self._lock:
            return self._bucket.try_take(now_ns)

    def reserve(self, trace_id: int, num_spans: int) -> bool:
        """For a call in the caller's trace. False: the trace has no room for them."""
        with self._lock:
            used = self._used.get(trace_id, 0) + num_spans
            if used > self._max_trace_spans:
                return False
            self._used[trace_id] = used
            self._used.move_to_end(trace_id)
            if len(self._used) > self.MAX_TRACES:
                self._used.popitem(last=False)
            return True

    def give_back(self, trace_id: int, num_spans: int) -> None:
        with self._lock:
            if trace_id in self._used:
                self._used[trace_id] -= num_spans
