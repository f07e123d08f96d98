"""The waiting side of token streams: one reader, woken by what the worker delivers."""

import asyncio
from collections import deque
from collections.abc import Sequence

from common.errors import StepwireError
from scheduler_svc.token_stream import Piece, TokenStream


class Bell:
    """Wakes one reader. Shared by the streams it reads."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class RequestStream:
    """One key's stream as its call sees it. Owned by the worker's event loop; one reader at a time.

    Close it through `ApiWorker.close`, whatever happened: that is what ends the work.
    """

    def __init__(self, key: int, state: TokenStream, deadline_ns: int = 0, bell: Bell | None = None) -> None:
        """`deadline_ns`: monotonic; 0: none."""
        self.key = key
        self.state = state
        self.deadline_ns = deadline_ns
        self.bell = bell or Bell()
        self.accepted = False
        self.core_done = False  # the core has ended this request, or was told to

    async def wait_accepted(self) -> None:
        """Returns when the core took the request. Raises the error it was refused with."""
        while not self.accepted:
            if self.state.error is not None:
                raise self.state.error
            await self.bell.wait()

    async def next(self) -> Piece:
        """The next piece; the last one has `completion`. Raises the StepwireError the request ended with."""
        while (piece := self.state.take()) is None:
            await self.bell.wait()
        return piece

    def wake(self) -> None:
        self.bell.ring()

    def fail(self, error: StepwireError) -> None:
        self.state.fail(error)
        self.wake()


class Choices:
    """The streams of one request, which share a bell, read as one: whoever has something, in turn."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        """`streams`: by choice index."""
        self._bell = streams[0].bell
        self._unfinished = deque(enumerate(streams))

    @property
    def finished(self) -> bool:
        """Every choice's last piece was taken."""
        return not self._unfinished

    async def next(self) -> tuple[int, Piece]:
        """(choice, its next piece); a choice's last piece has `completion`. Raises the StepwireError that the first of
        them to fail ended with."""
        while True:
            for _ in range(len(self._unfinished)):
                index, stream = self._unfinished[0]
                piece = stream.state.take()
                if piece is not None and piece.completion is not None:
                    self._unfinished.popleft()
                else:
                    self._unfinished.rotate(-1)
                if piece is not None:
                    return index, piece
            await self._bell.wait()
