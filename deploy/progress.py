"""Progress of long work on standard error: one moving line on a terminal, a line per quarter elsewhere."""

import sys
from typing import TextIO


class ProgressLine:
    """A common.model_files Progress, of bytes unless another `unit` is named. Owned by one thread.

    `done` ends the moving line.
    """

    def __init__(self, stream: TextIO | None = None, unit: str = "MB") -> None:
        self._stream = stream or sys.stderr
        self._unit = unit
        self._moving = self._stream.isatty()
        self._activity = ""
        self._quarter = -1
        self._width = 0

    def __call__(self, activity: str, done: int, total: int) -> None:
        if activity != self._activity:
            self.done()
            self._activity, self._quarter = activity, -1
        if total <= 0:
            text, quarter = activity, 0
        else:
            amounts = f"{done / 1e6:.1f} of {total / 1e6:.1f}" if self._unit == "MB" else f"{done:,} of {total:,}"
            text = f"{activity}  {100 * done // total:3d} %  ({amounts} {self._unit})"
            quarter = 4 * done // total
        if self._moving:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        elif quarter > self._quarter:
            self._stream.write(text + "\n")
        self._quarter = max(quarter, self._quarter)
        self._stream.flush()

    def done(self) -> None:
        if self._moving and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0
