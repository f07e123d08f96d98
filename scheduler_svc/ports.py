"""How workers and the core process meet inside one process: messages in a bounded box, no shared object."""

from collections import deque
from collections.abc import Callable

from common.errors import Overloaded
from scheduler_svc.messages import ToCore, makes_room

MAX_PORT_MESSAGES = 4096


class LocalPort:
    """A CorePort in the core's own process; loop thread only.

    `wake` is called when the box was empty: the engine then empties it in its own turn.
    """

    def __init__(self, wake: Callable[[], None], max_messages: int = MAX_PORT_MESSAGES) -> None:
        self._wake = wake
        self._max_messages = max_messages
        self._box: deque[ToCore] = deque()

    def send(self, message: ToCore) -> None:
        """Never blocks. Raises Overloaded when the box is full; what `makes_room` always fits."""
        if len(self._box) >= self._max_messages and not makes_room(message):
            raise Overloaded(
                "the scheduler is too far behind to take more", limit=str(self._max_messages), retry_after_ms=1000
            )
        self._box.append(message)
        if len(self._box) == 1:
            self._wake()

    def take(self) -> list[ToCore]:
        """Everything sent so far, in order. For the engine loop."""
        messages = list(self._box)
        self._box.clear()
        return messages
