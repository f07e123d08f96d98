"""The waiting side of token streams: one reader, woken by what the worker delivers."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from common.errors import StepwireError
from scheduler_svc.token_stream import Piece, TokenStream


class Bell:
    """Wakes one reader. Shared by the streams it reads. A ring that nobody waits for is kept until somebody does."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[bytes | None] | None = None

    @property
    def is_awaited(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def ring(self) -> None:
        """There may be something to take."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        else:
            self._rung = True

    def hand_over(self, message: bytes) -> None:
        """To the reader; only while it `is_awaited`."""
        assert self._waiter is not None
        self._waiter.set_result(message)

    def wait(self) -> "asyncio.Future[bytes | None]":
        """For the next ring, or the message handed over instead of it. (No coroutine: this runs for every token.)"""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        if self._rung:
            self._rung = False
            waiter.set_result(None)
        return waiter


class RequestStream:
    """One key's stream as its call sees it. Owned by the worker's event loop; one reader at a time.

    `encode`: set by a reader that wants a token which comes while it waits as a finished message: (text, ids) to bytes.
    Close it through `ApiWorker.close`, whatever happened: that is what ends the work.
    """

    __slots__ = ("accepted", "bell", "core_done", "deadline_ns", "encode", "key", "state")

    def __init__(self, key: int, state: TokenStream, deadline_ns: int = 0, bell: Bell | None = None) -> None:
        """`deadline_ns`: monotonic; 0: none."""
        self.key = key
        self.state = state
        self.deadline_ns = deadline_ns
        self.bell = bell or Bell()
        self.encode: Callable[[str, Sequence[int]], bytes] | None = None
        self.accepted = False
        self.core_done = False  # the core has ended this request, or was told to

    def offer(self, token: int, now_ns: int) -> bool:
        """One token in the usual case: text and ids are all that is wanted and the reader keeps up. False: it is
        another, and the stream's `feed` has to take the entry.

        Most tokens come this way. Text and message are made here, not by the reader, because here it happens for all
        streams of a step in one loop, with code and tables in the CPU's caches, and saves the reader a look.
        """
        bell = self.bell
        if self.encode is None or not bell.is_awaited:
            if not self.state.feed_token(token, now_ns):
                return False
            bell.ring()
            return True
        text = self.state.pass_token(token)
        if text is None:
            return False
        bell.hand_over(self.encode(text, (token,)))
        return True

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
        self.bell = streams[0].bell
        self._unfinished = deque(enumerate(streams))

    @property
    def finished(self) -> bool:
        """Every choice's last piece was taken."""
        return not self._unfinished

    def take(self) -> tuple[int, Piece] | None:
        """(choice, its next piece); a choice's last piece has `completion`. None: nothing is there; `bell` tells when.
        Raises the StepwireError that the first of them to fail ended with."""
        for _ in range(len(self._unfinished)):
            index, stream = self._unfinished[0]
            piece = stream.state.take()
            if piece is not None and piece.completion is not None:
                self._unfinished.popleft()
            else:
                self._unfinished.rotate(-1)
            if piece is not None:
                return index, piece
        return None
