"""Messages between core and worker processes as frames: uint32 length, one byte kind, body.

TokenBatch, the one message of every step, is packed by hand: columns one after the other, read without copying.
"""

import hashlib
import struct
import sys
import typing
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from common.errors import ProtocolError
from scheduler_svc.messages import Extras, FromCore, ToCore, TokenBatch
from scheduler_svc.workers.codec import Reader, codec_of, signature
from scheduler_svc.workers.control import FromPool, ToPool

# Above anything an executor may send in one step (its output budget) and any prompt the public API takes.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024

KINDS: Final[tuple[Any, ...]] = tuple(
    kind for union in (ToCore, FromCore, FromPool, ToPool) for kind in typing.get_args(union)
)
# 3 bytes after the kind let the batch's columns start at a multiple of 8.
_BATCH: Final = struct.Struct("<3xIII")  # entries, tokens, bytes of extras
_HEAD: Final = struct.Struct("<IB")
_LENGTH: Final = 4
_CODECS: Final = [codec_of(kind) for kind in KINDS]
_NUMBER: Final = {kind: number for number, kind in enumerate(KINDS)}
_BATCH_NUMBER: Final = _NUMBER[TokenBatch]
_put_extras, _get_extras = codec_of(Mapping[int, Extras])


def signatures() -> str:
    """Changes with every change to a message: code that was replaced under a running core is noticed by it."""
    return hashlib.sha256("\n".join([sys.byteorder, *map(signature, KINDS)]).encode()).hexdigest()


def encode(message: object) -> bytes:
    """The whole frame. Raises KeyError for what is no message."""
    number = _NUMBER[type(message)]
    if isinstance(message, TokenBatch):
        return _encode_batch(message)
    out = bytearray(_HEAD.size)
    _CODECS[number][0](out, message)
    _HEAD.pack_into(out, 0, len(out) - 4, number)
    return bytes(out)


def decode(frame: bytes) -> Any:
    """A message from its frame without the length. Raises ProtocolError: no message of ours."""
    if not frame or frame[0] >= len(KINDS):
        raise ProtocolError("a message of unknown kind between core and worker")
    if frame[0] == _BATCH_NUMBER:
        return _decode_batch(frame)
    reader = Reader(frame, 1)
    try:
        message = _CODECS[frame[0]][1](reader)
    except (ValueError, TypeError, IndexError) as error:
        raise ProtocolError(f"a malformed message between core and worker: {error}") from error
    if reader.at != len(frame):
        raise ProtocolError("a message between core and worker goes on after its end")
    return message


def _encode_batch(batch: TokenBatch) -> bytes:
    extras = bytearray()
    if batch.extras:
        _put_extras(extras, batch.extras)
    columns = (batch.keys, batch.counts, batch.cached, batch.tokens, batch.reasons)
    head = _BATCH.pack(len(batch.keys), len(batch.tokens), len(extras))
    body: list[bytes | bytearray] = [head, *[bytes(column) for column in columns], extras]
    return b"".join([_HEAD.pack(1 + sum(map(len, body)), _BATCH_NUMBER), *body])


def _decode_batch(frame: bytes) -> TokenBatch:
    start = 1 + _BATCH.size
    if len(frame) < start:
        raise ProtocolError("a batch of tokens ends too early")
    entries, tokens, extra_bytes = _BATCH.unpack_from(frame, 1)
    if len(frame) != start + 17 * entries + 4 * tokens + extra_bytes:
        raise ProtocolError("a batch of tokens is not as long as its columns")
    counts_at = start + 8 * entries
    tokens_at = counts_at + 8 * entries
    reasons_at = tokens_at + 4 * tokens
    counts = np.frombuffer(frame, np.uint32, entries, counts_at)
    if int(counts.sum(dtype=np.int64)) != tokens:
        raise ProtocolError("a batch of tokens counts other tokens than it holds")
    extras: Mapping[int, Extras] = {}
    if extra_bytes:
        extras = _get_extras(Reader(frame, reasons_at + entries))
    return TokenBatch(
        keys=np.frombuffer(frame, np.uint64, entries, start),
        counts=counts,
        tokens=np.frombuffer(frame, np.uint32, tokens, tokens_at),
        reasons=np.frombuffer(frame, np.uint8, entries, reasons_at),
        cached=np.frombuffer(frame, np.uint32, entries, counts_at + 4 * entries),
        extras=extras,
    )


class FrameReader:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = _LENGTH  # bytes, before anything can be taken off the buffer

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes. Raises ProtocolError: the stream is of no use any more."""
        self._buffer += data
        messages: list[Any] = []
        at = 0
        while len(self._buffer) - at >= self._wanted:
            size = int.from_bytes(self._buffer[at : at + _LENGTH], "little")
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a message of {size} bytes between core and worker", limit=str(MAX_FRAME_BYTES))
            self._wanted = _LENGTH + size
            if len(self._buffer) - at < self._wanted:
                break
            messages.append(decode(bytes(self._buffer[at + _LENGTH : at + self._wanted])))
            at += self._wanted
            self._wanted = _LENGTH
        del self._buffer[:at]
        return messages
