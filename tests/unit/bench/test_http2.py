"""The load client keeps to what may run at once and to the server's window, and reads what comes in pieces."""

import asyncio
import struct
from typing import Any

import pytest

from bench.http2 import (
    DATA,
    END_STREAM,
    FIRST_WINDOW,
    HEADERS,
    MAX_FRAME,
    PING,
    RST_STREAM,
    WINDOW_UPDATE,
    Connection,
    frame,
    prefixed,
)
from stepwire.v1 import inference_pb2 as pb


class Transport:
    """Keeps what was written, as (kind, flags, stream, payload)."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        self.closed = True

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        data, found = self.data.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), []
        self.data = b""
        while data:
            size = int.from_bytes(data[:3], "big")
            stream = int.from_bytes(data[5:9], "big")
            found.append((data[3], data[4], stream, data[9 : 9 + size]))
            data = data[9 + size :]
        return found


def connected(requests: list[bytes], at_once: int) -> tuple[Connection, Transport]:
    connection, transport = Connection("somewhere:1", 3, requests, at_once), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    transport.frames()
    connection.begin()
    return connection, transport


def streams(transport: Transport) -> list[int]:
    return [stream for kind, _, stream, _ in transport.frames() if kind == DATA]


def message(*ids: int) -> bytes:
    return prefixed(pb.GenerateResponse(delta=pb.Delta(token_ids=ids)).SerializeToString())


def run(test: Any) -> None:
    async def main() -> None:
        test()

    asyncio.run(main())


def test_no_more_than_asked_for_run_at_once() -> None:
    def test() -> None:
        connection, transport = connected([b"a", b"b", b"c"], 2)
        assert streams(transport) == [1, 3]
        connection.data_received(frame(HEADERS, END_STREAM, 3, b""))
        assert streams(transport) == [5]
        connection.data_received(frame(HEADERS, END_STREAM, 1, b"") + frame(HEADERS, END_STREAM, 5, b""))
        assert connection.done.done() and transport.closed
        assert [stream for stream, _ in connection.sent] == [(3 << 32) + n for n in (1, 3, 5)]

    run(test)


def test_requests_wait_for_the_servers_window() -> None:
    def test() -> None:
        body = b"x" * MAX_FRAME
        connection, transport = connected([body] * 5, 5)
        assert len(streams(transport)) == FIRST_WINDOW // MAX_FRAME == 3
        connection.data_received(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", MAX_FRAME)))  # of one stream
        assert streams(transport) == []
        connection.data_received(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2 * MAX_FRAME)))
        assert len(streams(transport)) == 2
        assert not connection.done.done()

    run(test)


def test_tokens_are_read_however_they_are_cut() -> None:
    def test() -> None:
        connection, _ = connected([b"a"], 1)
        data = frame(DATA, 0, 1, message(5, 300)) + frame(DATA, 0, 1, message(70000) + message(1))
        for at in range(len(data)):
            connection.data_received(data[at : at + 1])
        assert [token for _, _, token in connection.arrivals] == [5, 300, 70000, 1]

    run(test)


def test_pings_are_answered() -> None:
    def test() -> None:
        connection, transport = connected([b"a"], 1)
        transport.frames()
        connection.data_received(frame(PING, 0, 0, b"12345678"))
        assert transport.frames() == [(PING, 1, 0, b"12345678")]

    run(test)


def test_a_server_that_gives_up_is_an_error() -> None:
    def test() -> None:
        connection, _ = connected([b"a"], 1)
        connection.data_received(frame(RST_STREAM, 0, 1, b"\0\0\0\2"))
        with pytest.raises(RuntimeError, match="gave up"):
            connection.done.result()
        other, _ = connected([b"a"], 1)
        other.connection_lost(None)
        with pytest.raises(RuntimeError, match="broke"):
            other.done.result()

    run(test)


def test_a_request_over_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="one frame"):
        prefixed(bytes(MAX_FRAME))
