"""What the start is at and what each part of it took. Loads no torch.

Told in one of three ways: as a bar on a terminal, as lines of the log elsewhere, or as JSON lines to a parent that
draws the bar (`stepwire up`, whose terminal both services' logs share).
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol, TextIO

from common.clock import Clock, SystemClock

log = logging.getLogger(__name__)

# What no activity names: imports, device, buffers.
OTHER = "other"
# A line of JSON begins so; nothing else that a service writes does.
JSON_MARK: Final = '{"activity": '


class Progress(Protocol):
    """A common.model_files Progress that may say more."""

    def __call__(self, activity: str, done: int, total: int, detail: str = "") -> None:
        """`done` of `total` (bytes, graphs, ...); total 0: unknown. `detail`: what it is at, for people."""
        ...


def no_progress(activity: str, done: int, total: int, detail: str = "") -> None:
    """Tells nobody."""


class Teller(Protocol):
    """Where progress is shown."""

    def tell(self, activity: str, done: int, total: int, detail: str) -> None: ...

    def close(self) -> None:
        """Nothing more comes. May be called again."""
        ...


class StartProgress:
    """A Progress that counts time for the activity named last, from its first call to its end or to the next one's
    first call. `close` in any case, or a terminal keeps the bar: nothing is shown after it, though the thread that
    loads may go on telling when the process is about to leave."""

    def __init__(self, teller: Teller | None = None, clock: Clock | None = None) -> None:
        """teller: None: the log."""
        self._clock = clock or SystemClock()
        self._teller = teller or LogTeller(clock=self._clock)
        self._counting = OTHER
        self._counted_ns = self._clock.monotonic_ns()
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()  # of the teller
        self._is_closed = False

    def __call__(self, activity: str, done: int, total: int, detail: str = "") -> None:
        self._count(OTHER if done >= total > 0 else _part(activity))
        with self._lock:
            if not self._is_closed:
                self._teller.tell(activity, done, total, detail)

    @property
    def seconds(self) -> Mapping[str, float]:
        """By activity, up to the last call; grows until `finish`."""
        return self._seconds

    def finish(self) -> None:
        """The start is over: says what it took, part by part, so that none of it is taken for a step's."""
        self._count(OTHER)
        self.close()
        parts = ", ".join(f"{activity} {seconds:.2f} s" for activity, seconds in self._seconds.items())
        log.info("started in %.2f s: %s", sum(self._seconds.values()), parts)

    def close(self) -> None:
        """For good. Any thread."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._teller.close()

    def _count(self, then: str) -> None:
        now_ns = self._clock.monotonic_ns()
        spent = (now_ns - self._counted_ns) / 1e9
        self._seconds[self._counting] = self._seconds.get(self._counting, 0.0) + spent
        self._counting, self._counted_ns = then, now_ns


class _Sometimes:
    """Lets through the beginning and end of each activity, and what takes long every `every_s`."""

    def __init__(self, every_s: float, clock: Clock | None) -> None:
        self._every_ns = int(every_s * 1e9)
        self._clock = clock or SystemClock()
        self._activity = ""
        self._last_ns = 0

    def is_due(self, activity: str, done: int, total: int) -> bool:
        now_ns = self._clock.monotonic_ns()
        if activity == self._activity and done < total and now_ns - self._last_ns < self._every_ns:
            return False
        self._activity, self._last_ns = activity, now_ns
        return True


class LogTeller:
    def __init__(self, every_s: float = 2.0, clock: Clock | None = None) -> None:
        self._sometimes = _Sometimes(every_s, clock)

    def tell(self, activity: str, done: int, total: int, detail: str) -> None:
        if self._sometimes.is_due(activity, done, total):
            log.info("%s%s", activity, f": {100 * done // total} %" if total else "")

    def close(self) -> None:
        """Nothing: lines stay."""


class JsonTeller:
    """One object a line, which `told_by` reads; the last one names no activity."""

    def __init__(self, stream: TextIO | None = None, every_s: float = 0.1, clock: Clock | None = None) -> None:
        self._stream = stream or sys.stderr
        self._sometimes = _Sometimes(every_s, clock)

    def tell(self, activity: str, done: int, total: int, detail: str) -> None:
        if self._sometimes.is_due(activity, done, total):
            self._write({"activity": activity, "done": done, "total": total, "detail": detail})

    def close(self) -> None:
        self._write({"activity": "", "done": 0, "total": 0, "detail": ""})

    def _write(self, told: dict[str, Any]) -> None:
        self._stream.write(json.dumps(told) + "\n")
        self._stream.flush()


def told_by(line: str) -> tuple[str, int, int, str] | None:
    """What a line of a JsonTeller says: the arguments of `tell`; None: it is another line. Activity "": the end."""
    if not line.startswith(JSON_MARK):
        return None
    try:
        told = json.loads(line)
        return str(told["activity"]), int(told["done"]), int(told["total"]), str(told["detail"])
    except (ValueError, KeyError, TypeError):
        return None


def make_teller(how: Literal["auto", "log", "json"]) -> Teller:
    """`how`: as configured; auto: a bar where standard error is a terminal."""
    if how == "json":
        return JsonTeller()
    if how == "auto" and has_terminal():
        from executor_svc.progress_bar import BarTeller  # only now: a service without a terminal needs no rich

        return BarTeller()
    return LogTeller()


def has_terminal() -> bool:
    """Whether standard error is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb", "unknown")


def _part(activity: str) -> str:
    """Without the model's name, which would make a metric's label of it."""
    return "loading" if activity.startswith("loading ") else activity
