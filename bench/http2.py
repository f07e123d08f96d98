"""gRPC streams spoken as plain HTTP/2 frames, messages left as bytes: a load client that costs next to nothing.

One made with grpc takes 40 µs for a message; on the machine under test it would be what is measured.
"""

import asyncio
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

DATA: Final = 0
HEADERS: Final = 1
RST_STREAM: Final = 3
SETTINGS: Final = 4
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
ACK: Final = 1
END_STREAM: Final = 1
END_HEADERS: Final = 4
WINDOW: Final = (1 << 31) - 1
# What RFC 9113 gives before anybody says otherwise: bytes that may be on their way, and bytes of one frame.
FIRST_WINDOW: Final = 65535
MAX_FRAME: Final = 16384
PATH: Final = "/stepwire.v1.Inference/Generate"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field, not indexed and not compressed."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def prefixed(message: bytes) -> bytes:
    """A gRPC message, not compressed. Raises ValueError for one that does not fit into one frame."""
    if len(message) + 5 > MAX_FRAME:
        raise ValueError(f"a request of {len(message)} bytes: this client sends one frame of {MAX_FRAME} at most")
    return struct.pack(">BI", 0, len(message)) + message


def token_ids(message: bytes) -> list[int]:
    """Of a GenerateResponse. Only what is looked for is read: field 2 (delta), in it field 2 (packed ids)."""
    at, end = 0, len(message)
    while at < end:
        tag = message[at]
        size, at = varint(message, at + 1)
        if tag == 0x12:
            stop = at + size
            while at < stop:
                tag = message[at]
                size, at = varint(message, at + 1)
                if tag == 0x12:
                    return packed(message, at, at + size)
                at += size
        at += size
    return []


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def packed(data: bytes, at: int, end: int) -> list[int]:
    values = []
    while at < end:
        value, at = varint(data, at)
        values.append(value)
    return values


class Connection(asyncio.Protocol):
    """One connection and its streams, from `begin` to the last trailer.

    `sent`: (stream, monotonic ns); `arrivals`: (stream, monotonic ns, token id). Streams are numbered from
    `place` << 32.
    """

    def __init__(self, host: str, place: int, requests: Sequence[bytes], at_once: int) -> None:
        """`requests`: as `prefixed` makes them, all to be sent, `at_once` of them at any time."""
        self.sent: list[tuple[int, int]] = []
        self.arrivals: list[tuple[int, int, int]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting = deque(requests)
        self._at_once = at_once
        self._host = host
        self._place = place << 32
        self._next_stream = 1
        self._open = 0
        self._window = FIRST_WINDOW
        self._rest = b""

    def begin(self) -> None:
        """Sends the first requests."""
        self._fill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        settings = struct.pack(">HIHI", 0x4, WINDOW, 0x5, (1 << 24) - 1)
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings)
        self._write(hello + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - FIRST_WINDOW)))
        fields = {
            ":method": "POST", ":scheme": "http", ":path": PATH, ":authority": self._host,
            "te": "trailers", "content-type": "application/grpc",
        }  # fmt: skip
        self._head = b"".join(literal(name, value) for name, value in fields.items())

    def _fill(self) -> None:
        """As many requests as may run and as the server's window takes."""
        while self._waiting and self._open < self._at_once and len(self._waiting[0]) <= self._window:
            body, stream = self._waiting.popleft(), self._next_stream
            self.sent.append((self._place + stream, time.monotonic_ns()))
            self._write(frame(HEADERS, END_HEADERS, stream, self._head) + frame(DATA, END_STREAM, stream, body))
            self._next_stream += 2
            self._open += 1
            self._window -= len(body)
        if not self._open and not self._waiting and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        data = self._rest + data if self._rest else data
        at = 0
        while len(data) - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            if len(data) - at - 9 < size:
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == DATA:
                self._take(int.from_bytes(data[at + 5 : at + 9], "big"), data[at + 9 : at + 9 + size], now_ns)
            elif kind == HEADERS and flags & END_STREAM:
                self._open -= 1
                self._fill()
            elif kind == WINDOW_UPDATE and data[at + 5 : at + 9] == b"\0\0\0\0":
                self._window += int.from_bytes(data[at + 9 : at + 13], "big")
                self._fill()
            elif kind in (RST_STREAM, GOAWAY):
                self._fail(f"the server gave up: {data[at + 9 : at + 9 + size]!r}")
            elif kind in (SETTINGS, PING) and not flags & ACK:
                self._write(frame(kind, ACK, 0, data[at + 9 : at + 9 + size] if kind == PING else b""))
            at += 9 + size
        self._rest = data[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke: {exc}")

    def _fail(self, text: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(text))

    def _take(self, stream: int, payload: bytes, now_ns: int) -> None:
        """Messages are small, so none is cut over two frames."""
        at = 0
        while at < len(payload):
            size = int.from_bytes(payload[at + 1 : at + 5], "big")
            for token in token_ids(payload[at + 5 : at + 5 + size]):
                self.arrivals.append((self._place + stream, now_ns, token))
            at += 5 + size
        if at != len(payload):
            raise RuntimeError("a message is cut over two frames")

    def _write(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


async def connect(address: str, shares: Sequence[Sequence[bytes]], at_once: Sequence[int]) -> list[Connection]:
    """One connection for each share of requests, made and not begun."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    connections = [Connection(address, place, *own) for place, own in enumerate(zip(shares, at_once, strict=True))]
    for connection in connections:
        await loop.create_connection(lambda protocol=connection: protocol, host, int(port))  # type: ignore[misc]
    return connections
