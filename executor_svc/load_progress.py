"""How loading is told in the log. Loads no torch."""

import logging

from common.clock import Clock, SystemClock

log = logging.getLogger(__name__)


class LogProgress:
    """A Progress that logs the beginning and end of each activity, and what takes long every `every_s`."""

    def __init__(self, every_s: float = 2.0, clock: Clock | None = None) -> None:
        self._every_ns = int(every_s * 1e9)
        self._clock = clock or SystemClock()
        self._activity = ""
        self._last_ns = 0

    def __call__(self, activity: str, done: int, total: int) -> None:
        now_ns = self._clock.monotonic_ns()
        if activity == self._activity and done < total and now_ns - self._last_ns < self._every_ns:
            return
        self._activity, self._last_ns = activity, now_ns
        log.info("%s%s", activity, f": {100 * done // total} %" if total else "")
