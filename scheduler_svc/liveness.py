"""Is the core alive? Pure: told once a second what moved, asked by the health servicer. And when that second begins."""

from typing import Final

BEAT_S: Final = 1.0
STUCK_AFTER_BEATS: Final = 10


def until_next_beat(now_s: float, interval_s: float = BEAT_S) -> float:
    """From `now_s`, of the loop's clock, to a whole number of intervals: half an interval to one and a half.

    All that a process does each second it does at the same moment: to wake from sleep costs it more than any of it.
    """
    left_s = interval_s - now_s % interval_s
    return left_s if left_s > interval_s / 2 else left_s + interval_s


class Liveness:
    """`heartbeat_ns`: when the loop last had a turn. Not alive: the loop did not turn for STUCK_AFTER_BEATS seconds, or
    for as long work waited on a connected executor and nothing was planned."""

    def __init__(self, now_ns: int) -> None:
        self.heartbeat_ns = now_ns
        self._steps = 0
        self._stuck_beats = 0

    def beat(self, now_ns: int, *, steps: int, in_flight: int, live: int, connected: bool) -> bool:
        """`steps`: results since start. `live`: requests. Returns whether work has just been found to be stuck."""
        self.heartbeat_ns = now_ns
        stuck = live > 0 and connected and not in_flight and steps == self._steps
        self._steps = steps
        self._stuck_beats = self._stuck_beats + 1 if stuck else 0
        return self._stuck_beats == STUCK_AFTER_BEATS

    def is_alive(self, now_ns: int) -> bool:
        return now_ns - self.heartbeat_ns < STUCK_AFTER_BEATS * BEAT_S * 1e9 and self._stuck_beats < STUCK_AFTER_BEATS
