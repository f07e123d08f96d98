"""How loading is told in the log, and what each part of it took. Loads no torch."""

import logging
from collections.abc import Mapping

from common.clock import Clock, SystemClock

log = logging.getLogger(__name__)

# What no activity names: imports, device, buffers.
OTHER = "other"


class LogProgress:
    """A Progress that logs the beginning and end of each activity, and what takes long every `every_s`.

    Time counts for the activity named last, from its first call to its end or to the next one's first call.
    """

    def __init__(self, every_s: float = 2.0, clock: Clock | None = None) -> None:
        self._every_ns = int(every_s * 1e9)
        self._clock = clock or SystemClock()
        self._activity = ""
        self._last_ns = 0
        self._counting = OTHER
        self._counted_ns = self._clock.monotonic_ns()
        self._seconds: dict[str, float] = {}

    def __call__(self, activity: str, done: int, total: int) -> None:
        now_ns = self._clock.monotonic_ns()
        self._count(now_ns, OTHER if done >= total > 0 else _part(activity))
        if activity == self._activity and done < total and now_ns - self._last_ns < self._every_ns:
            return
        self._activity, self._last_ns = activity, now_ns
        log.info("%s%s", activity, f": {100 * done // total} %" if total else "")

    @property
    def seconds(self) -> Mapping[str, float]:
        """By activity, up to the last call; grows until `finish`."""
        return self._seconds

    def finish(self) -> None:
        """The start is over: says what it took, part by part, so that none of it is taken for a step's."""
        self._count(self._clock.monotonic_ns(), OTHER)
        parts = ", ".join(f"{activity} {seconds:.2f} s" for activity, seconds in self._seconds.items())
        log.info("started in %.2f s: %s", sum(self._seconds.values()), parts)

    def _count(self, now_ns: int, then: str) -> None:
        spent = (now_ns - self._counted_ns) / 1e9
        self._seconds[self._counting] = self._seconds.get(self._counting, 0.0) + spent
        self._counting, self._counted_ns = then, now_ns


def _part(activity: str) -> str:
    """Without the model's name, which would make a metric's label of it."""
    return "loading" if activity.startswith("loading ") else activity
