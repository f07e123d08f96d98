"""The waiting side of a token stream: one reader, woken by what the worker delivers."""

import asyncio

from common.errors import StepwireError
from scheduler_svc.token_stream import Piece, TokenStream


class RequestStream:
    """One request's stream as its call sees it. Owned by the worker's event loop; one reader at a time.

    Close it through `ApiWorker.close`, whatever happened: that is what ends the work.
    """

    def __init__(self, key: int, state: TokenStream, deadline_ns: int = 0) -> None:
        """`deadline_ns`: monotonic; 0: none."""
        self.key = key
        self.state = state
        self.deadline_ns = deadline_ns
        self.accepted = False
        self.core_done = False  # the core has ended this request, or was told to
        self._waiter: asyncio.Future[None] | None = None

    async def wait_accepted(self) -> None:
        """Returns when the core took the request. Raises the error it was refused with."""
        while not self.accepted:
            if self.state.error is not None:
                raise self.state.error
            await self._wait()

    async def next(self) -> Piece:
        """The next piece; the last one has `completion`. Raises the StepwireError the request ended with."""
        while (piece := self.state.take()) is None:
            await self._wait()
        return piece

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: StepwireError) -> None:
        self.state.fail(error)
        self.wake()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
