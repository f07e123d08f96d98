"""One bar at the foot of a terminal, drawn by rich; what is logged meanwhile goes above it. Loads no torch."""

import io
import logging
import sys
import threading
from typing import Any, Final, TextIO

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

# Counted one by one up to here; what is more is bytes.
_MOST_COUNTED = 100_000


class BarTeller:
    """A Teller (load_progress). Draws from its first call to `close`; one thread at a time calls it.

    While it draws, standard error and the log's handlers on it are an `_Above`.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._drawn: Progress | None = None
        self._task = TaskID(0)
        self._activity = ""
        self._above: _Above | None = None
        self._led: list[logging.StreamHandler[TextIO]] = []

    def tell(self, activity: str, done: int, total: int, detail: str) -> None:
        if self._drawn is None:
            self._begin()
        assert self._drawn is not None
        # Unknown, and one of one, are no measure of how far it is: the bar just moves.
        whole = total if total > 1 or done >= total > 0 else None
        if activity != self._activity or not done:  # times count anew; to `update`, None is the total there was
            self._drawn.remove_task(self._task)
            self._task = self._drawn.add_task(activity, total=whole, detail=detail)
            self._activity = activity
        self._drawn.update(self._task, total=whole, completed=done, detail=detail)

    def refresh(self) -> None:
        """Draws now; without, ten times a second."""
        if self._drawn is not None:
            self._drawn.refresh()

    def close(self) -> None:
        if self._drawn is None:
            return
        self._drawn.stop()
        if self._above is not None:
            self._above.end()
            if sys.stderr is self._above:
                sys.stderr = self._above.rich_proxied_file
        for handler in self._led:
            handler.setStream(sys.stderr)
        self._led, self._drawn, self._above, self._activity = [], None, None, ""

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
            redirect_stderr=False,
        )
        before = sys.stderr
        self._task = self._drawn.add_task("", total=None, detail="")
        self._drawn.start()
        if not self._console.is_terminal:  # nothing is drawn that lines could disturb
            return
        sys.stderr = self._above = _Above(self._console, before)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is before:
                handler.setStream(self._above)
                self._led.append(handler)


class _Above(io.TextIOBase):
    """Standard error while a bar is drawn: whole lines go above it and are left for the terminal to wrap, so that one
    that is copied from there is one line. (rich's own proxy breaks them, in the middle of words.) Any thread."""

    def __init__(self, console: Console, file: TextIO) -> None:
        self.rich_proxied_file: Final = file  # by this name rich finds what to write to
        self._console = console
        self._decoder = AnsiDecoder()
        self._rest = ""
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._console.print(self._decoder.decode_line(line), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """Nothing: a line is written when it is whole."""

    def fileno(self) -> int:
        return self.rich_proxied_file.fileno()

    def isatty(self) -> bool:
        return self.rich_proxied_file.isatty()

    def end(self) -> None:
        """What is no whole line goes out as it is: the bar is gone."""
        with self._lock:
            rest, self._rest = self._rest, ""
            self.rich_proxied_file.write(rest)
            self.rich_proxied_file.flush()


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        if task.total is None or task.total <= 1:
            return Text("")
        if task.total > _MOST_COUNTED:
            return Text(f"{task.completed / 1e6:,.0f}/{task.total / 1e6:,.0f} MB")
        return Text(f"{int(task.completed)}/{int(task.total)}")
