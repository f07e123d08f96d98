"""Time as a parameter: production code asks a Clock, tests turn a ManualClock by hand."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where times come from. All values are nanoseconds."""

    def monotonic_ns(self) -> int: ...

    def wall_ns(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that moves only when told to. For tests and simulation; owned by one thread."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self._now_ns = start_ns

    def monotonic_ns(self) -> int:
        return self._now_ns

    def wall_ns(self) -> int:
        return self._now_ns + 1_700_000_000_000_000_000

    def advance_ns(self, ns: int) -> None:
        """Moves the clock forward. Raises ValueError for a negative step."""
        if ns < 0:
            raise ValueError(f"a clock does not go back: {ns}")
        self._now_ns += ns
