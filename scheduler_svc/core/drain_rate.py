"""How fast the queue empties, and when a refused caller should come back."""

from math import exp

_SPAN_NS = 10e9
_TICK_NS = 10_000_000  # admissions of so short a time count as one moment's
DEFAULT_RETRY_MS = 1000
_MIN_RETRY_MS = 100
_MAX_RETRY_MS = 60_000


class DrainRate:
    """Admissions per second, averaged with weights that fade over 10 s."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._last_ns = self._first_ns = -1

    def admitted(self, now_ns: int) -> None:
        """A request left the queue for its first time on an executor."""
        if self._first_ns < 0:
            self._first_ns = self._last_ns = now_ns
        if now_ns - self._last_ns >= _TICK_NS:
            self._weight, self._last_ns = self._faded(now_ns), now_ns
        self._weight += 1

    def per_second(self, now_ns: int) -> float:
        """0: nothing was admitted yet, or nothing for so long that it no longer counts."""
        if self._first_ns < 0:
            return 0.0
        seen = 1 - exp(-max(1e9, now_ns - self._first_ns) / _SPAN_NS)  # of the weight of an endless past
        return self._faded(now_ns) / (_SPAN_NS / 1e9 * seen)

    @property
    def last(self) -> float:
        """Admissions per second as of the last one."""
        return self.per_second(self._last_ns)

    def retry_after_ms(self, num_waiting: int, now_ns: int) -> int:
        """Until half of those who wait are gone: who comes back finds room, and the queue does not run dry meanwhile.
        Between 0.1 and 60 s; 1 s while nothing is measured."""
        rate = self.per_second(now_ns)
        if self._first_ns < 0:
            return DEFAULT_RETRY_MS
        wanted = num_waiting * 500 / rate if rate > 0 else float(_MAX_RETRY_MS)
        return int(max(_MIN_RETRY_MS, min(_MAX_RETRY_MS, wanted)))

    def _faded(self, now_ns: int) -> float:
        return self._weight * exp(-max(0, now_ns - self._last_ns) / _SPAN_NS) if self._weight else 0.0
