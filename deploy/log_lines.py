"""What the services write under `stepwire up`: lines above, and on a terminal one bar at its foot."""

import contextlib
from collections.abc import Iterator

from deploy.terminal import err, printable
from executor_svc.load_progress import Teller, told_by


class LogLines:
    """What the services write, one line after the other; held back while an answer is being written.

    `bar`: draws what lines of progress tell, at the foot of the terminal; None: they are lines as others are.
    """

    def __init__(self, bar: Teller | None = None) -> None:
        self._held: list[str] | None = None
        self._bar = bar

    def write(self, name: str, line: str) -> None:
        if self._bar is not None and (told := told_by(line)) is not None:
            self._show(self._bar, *told)
            return
        text = f"{name:<9} | {printable(line)}"
        if self._held is None:
            err(text)
        else:
            self._held.append(text)

    def close(self) -> None:
        """Ends the bar: what it showed is over."""
        if self._bar is not None:
            self._bar.close()

    def _show(self, bar: Teller, activity: str, done: int, total: int, detail: str) -> None:
        if not activity:
            bar.close()
        elif self._held is None:
            bar.tell(printable(activity), done, total, printable(detail))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.close()
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for text in held:
                err(text)
