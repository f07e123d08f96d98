"""One end of the socket between the core process and a worker process. Event loop only; nothing here waits."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from common.errors import ProtocolError
from scheduler_svc.workers.frames import FrameReader, FrameWriter


class Link(asyncio.Protocol):
    """Messages in the order they were sent, each exactly once, until the link is lost.

    `on_messages` gets what one reading brought; `on_lost` is called once, with why, when the other end is gone, speaks
    nonsense, or `close` was called. Writing never waits: what the other end has not read yet is `backlog` bytes.
    """

    def __init__(self, on_messages: Callable[[Sequence[Any]], None], on_lost: Callable[[str], None]) -> None:
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._writer = FrameWriter()
        self._transport: asyncio.WriteTransport | None = None
        self._why = ""

    @classmethod
    async def over(
        cls,
        sock: socket.socket,
        on_messages: Callable[[Sequence[Any]], None],
        on_lost: Callable[[str], None],
    ) -> "Link":
        """Takes the socket over."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(on_messages, on_lost), sock=sock)
        return link

    @property
    def backlog(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def send(self, message: object) -> None:
        """Does nothing once the link is lost."""
        if self._transport is not None:
            self._transport.write(self._writer.encode(message))

    def close(self, why: str) -> None:
        """Without sending what is still buffered."""
        self._why = self._why or why
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # ------------------------------------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are of no common class

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except ProtocolError as error:
            self.close(error.message)
            return
        if messages:
            self._on_messages(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost(self._why or (str(exc) if exc else "the other end is gone"))
