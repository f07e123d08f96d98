"""A load client that costs next to nothing: gRPC streams spoken as plain HTTP/2 frames, messages left as bytes.

    python -P -m bench.streaming_client ADDRESS CHANNELS STREAMS MAX_TOKENS SEED OUT

Opens STREAMS streams over CHANNELS connections and reads them to their end. OUT (.npy) gets one row for each token:
its stream, its arrival (monotonic ns) and its delay since the step's result (ns). A client made with grpc takes 40 µs
for a message; on the machine under test it would be what is measured.
"""

import asyncio
import json
import random
import struct
import sys
import time
from typing import Final

import numpy as np
import uvloop

from bench.streaming_executor import TICK_NS, VOCAB
from stepwire.v1 import inference_pb2 as pb

DATA: Final = 0
HEADERS: Final = 1
RST_STREAM: Final = 3
SETTINGS: Final = 4
PING: Final = 6
GOAWAY: Final = 7
ACK: Final = 1
END_STREAM: Final = 1
END_HEADERS: Final = 4
WINDOW: Final = (1 << 31) - 1
PATH: Final = "/stepwire.v1.Inference/Generate"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field, not indexed and not compressed."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def request(seed: int, max_tokens: int) -> bytes:
    rng = random.Random(seed)
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[rng.randrange(1, VOCAB) for _ in range(16)]),
        sampling=pb.SamplingParams(temperature=0),
        stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True),
    ).SerializeToString()
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
    """One connection and its streams, from the first request to the last trailer."""

    def __init__(self, host: str, place: int, requests: list[bytes], arrivals: list[tuple[int, int, int]]) -> None:
        self._requests = requests
        self._arrivals = arrivals
        self._host = host
        self._place = place << 32
        self._open = 0
        self._rest = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        settings = struct.pack(">HIHI", 0x4, WINDOW, 0x5, (1 << 24) - 1)
        hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings)
        self._write(hello + frame(8, 0, 0, struct.pack(">I", WINDOW - 65535)))
        fields = {
            ":method": "POST", ":scheme": "http", ":path": PATH, ":authority": self._host,
            "te": "trailers", "content-type": "application/grpc",
        }  # fmt: skip
        head = b"".join(literal(name, value) for name, value in fields.items())
        for index, body in enumerate(self._requests):
            stream = 2 * index + 1
            self._write(frame(HEADERS, END_HEADERS, stream, head) + frame(DATA, END_STREAM, stream, body))
            self._open += 1

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
            elif kind in (RST_STREAM, GOAWAY):
                self.done.set_exception(RuntimeError(f"the server gave up: {data[at + 9 : at + 9 + size]!r}"))
            elif kind in (SETTINGS, PING) and not flags & ACK:
                self._write(frame(kind, ACK, 0, data[at + 9 : at + 9 + size] if kind == PING else b""))
            at += 9 + size
        self._rest = data[at:]
        if not self._open and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the connection broke: {exc}"))

    def _take(self, stream: int, payload: bytes, now_ns: int) -> None:
        """Messages are small, so none is cut over two frames."""
        at = 0
        while at < len(payload):
            size = int.from_bytes(payload[at + 1 : at + 5], "big")
            for token in token_ids(payload[at + 5 : at + 5 + size]):
                self._arrivals.append((self._place + stream, now_ns, (now_ns // TICK_NS - token) % VOCAB * TICK_NS))
            at += 5 + size
        if at != len(payload):
            raise RuntimeError("a message is cut over two frames")

    def _write(self, data: bytes) -> None:
        self._transport.write(data)  # type: ignore[attr-defined]


async def run(address: str, channels: int, streams: int, max_tokens: int, seed: int) -> list[tuple[int, int, int]]:
    host, _, port = address.rpartition(":")
    arrivals: list[tuple[int, int, int]] = []
    requests = [request(seed + i, max_tokens) for i in range(streams)]
    loop = asyncio.get_running_loop()
    connections = [Connection(address, i, requests[i::channels], arrivals) for i in range(channels)]
    for connection in connections:
        await loop.create_connection(lambda protocol=connection: protocol, host, int(port))  # type: ignore[misc]
    await asyncio.gather(*(connection.done for connection in connections))
    return arrivals


def main(argv: list[str]) -> int:
    address, channels, streams, max_tokens, seed, out = argv
    start_ns = time.monotonic_ns()
    arrivals = uvloop.run(run(address, int(channels), int(streams), int(max_tokens), int(seed)))
    np.save(out, np.array(arrivals, np.int64).reshape(-1, 3))
    share = time.process_time_ns() / (time.monotonic_ns() - start_ns)
    print(json.dumps({"tokens": len(arrivals), "cpu_share": round(share, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
