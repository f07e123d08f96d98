"""Counts of durations by length, cheap enough for every step."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

# Seconds; shared by all histograms, so that their series can be laid over each other.
BOUNDS_S: Final = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0,
)  # fmt: skip


class Histogram:
    """Not shared between threads."""

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """A bound belongs to the bucket below it, as Prometheus wants it."""
        self._counts[bisect_left(self._bounds_s, seconds)] += times
        self.sum_s += seconds * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it), the last without bound."""
        total, found = 0, []
        for bound, count in zip((*self._bounds_s, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return found
