"""When one message for each token is more than the process can write, tokens wait a little for the next ones. Pure."""

from typing import Final

# Of the time between two steps: writing messages may take this share before tokens are held back.
MAX_SHARE: Final = 0.5
# Weight of the newest step in the averages.
NEW: Final = 0.2


class Pacer:
    """Compares what a step's messages cost with how often steps come. Told about each step and each round of writing.

    A token is held back for `interval_ns` at most, and only while the process is behind: that is, while writing a
    message for each token would take more than MAX_SHARE of its time. `interval_ns` 0: never.
    """

    def __init__(self, interval_ns: int) -> None:
        self.interval_ns = interval_ns
        self._step_ns = 0.0
        self._last_ns = 0
        self._message_ns = 0.0

    def on_step(self, now_ns: int, num_entries: int) -> bool:
        """A step brought something to `num_entries` streams. Whether it should be held back."""
        if self._last_ns:
            # A pause is no sign of slow steps: what counts is how fast they come when they do.
            step_ns = min(now_ns - self._last_ns, 2 * self._step_ns or now_ns - self._last_ns)
            self._step_ns += NEW * (step_ns - self._step_ns) if self._step_ns else step_ns
        self._last_ns = now_ns
        if not self.interval_ns or not self._step_ns or self._step_ns > self.interval_ns:
            return False
        return num_entries * self._message_ns > MAX_SHARE * self._step_ns

    def on_written(self, took_ns: int, num_messages: int) -> None:
        """One round of writing: from waking the readers until all of them had their turn."""
        if num_messages:
            message_ns = took_ns / num_messages
            self._message_ns += NEW * (message_ns - self._message_ns) if self._message_ns else message_ns
