"""Who waits for the core to be empty, and until when. Loop thread."""

import asyncio
from collections.abc import Callable

from scheduler_svc.core.scheduler import Scheduler


class DrainWaits:
    """`end_rest` ends every live request and says how many they were; it is called when the first deadline passes."""

    def __init__(self, core: Scheduler, end_rest: Callable[[], int]) -> None:
        self._core = core
        self._end_rest = end_rest
        self._waits: list[asyncio.Future[int]] = []

    def start(self, deadline_s: float) -> asyncio.Future[int]:
        """Stops admission. Resolves, when no request is left, to how many the deadline ended."""
        self._core.drain()
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[int] = loop.create_future()
        self._waits.append(waiting)
        loop.call_later(deadline_s, self._deadline, waiting)
        self.check()
        return waiting

    def check(self) -> None:
        """A request may have been the last one."""
        if self._waits and not self._core.num_live:
            self._resolve(0)

    def _deadline(self, waiting: asyncio.Future[int]) -> None:
        if not waiting.done():
            waits, self._waits = self._waits, []  # `check` runs while the rest ends, and would answer 0
            unfinished = 0
            try:
                unfinished = self._end_rest()
            finally:  # whoever waits hears of it even when the core is broken
                self._waits = waits
                self._resolve(unfinished)

    def _resolve(self, unfinished: int) -> None:
        waits, self._waits = self._waits, []
        for waiting in waits:
            if not waiting.done():
                waiting.set_result(unfinished)
