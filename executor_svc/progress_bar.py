"""One bar at the foot of a terminal, drawn by rich; what is logged meanwhile goes above it. Loads no torch."""

import logging
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

# Counted one by one up to here; what is more is bytes.
_MOST_COUNTED = 100_000


class BarTeller:
    """A Teller (load_progress). Draws from its first call to `close`; one thread at a time calls it.

    While it draws, standard error and the log's handlers on it are rich's, which writes their lines above the bar.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._drawn: Progress | None = None
        self._task = TaskID(0)
        self._activity = ""
        self._led: list[logging.StreamHandler[TextIO]] = []

    def tell(self, activity: str, done: int, total: int, detail: str) -> None:
        if self._drawn is None:
            self._begin()
        assert self._drawn is not None
        if activity != self._activity:
            self._drawn.reset(self._task, description=activity)  # times count anew
            self._activity = activity
        # One of one is no measure of how far it is: the bar just moves.
        whole = total if total > 1 else 1 if done else None
        self._drawn.update(self._task, total=whole, completed=done, detail=detail)

    def refresh(self) -> None:
        """Draws now; without, ten times a second."""
        if self._drawn is not None:
            self._drawn.refresh()

    def close(self) -> None:
        if self._drawn is None:
            return
        self._drawn.stop()
        for handler in self._led:
            handler.setStream(sys.stderr)
        self._led, self._drawn, self._activity = [], None, ""

    def _begin(self) -> None:
        self._drawn = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            _Amount(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            expand=True,
            redirect_stdout=False,
        )
        before = sys.stderr
        self._task = self._drawn.add_task("", total=None, detail="")
        self._drawn.start()
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before and sys.stderr is not before:
                handler.setStream(sys.stderr)
                self._led.append(handler)


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        if task.total is None or task.total <= 1:
            return Text("")
        if task.total > _MOST_COUNTED:
            return Text(f"{task.completed / 1e6:,.0f}/{task.total / 1e6:,.0f} MB")
        return Text(f"{int(task.completed)}/{int(task.total)}")
