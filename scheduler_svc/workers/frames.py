"""Messages between core and worker processes as frames: uint32 length, one byte kind, body."""

import hashlib
import struct
import sys
import typing
from typing import Any, Final

from common.errors import ProtocolError
from scheduler_svc.messages import FromCore, ToCore, TokenBatch
from scheduler_svc.workers.batches import BatchReader, BatchWriter
from scheduler_svc.workers.codec import Reader, codec_of, signature
from scheduler_svc.workers.control import FromPool, ToPool

# Above any prompt the public API takes, and twice what one step may bring beside tokens and logprobs: the core plans no
# more than MAX_STEP_OUTPUT_BYTES of it, whatever an executor says it can make.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
MAX_STEP_OUTPUT_BYTES: Final = MAX_FRAME_BYTES // 2

KINDS: Final[tuple[Any, ...]] = tuple(
    kind for union in (ToCore, FromCore, FromPool, ToPool) for kind in typing.get_args(union)
)
_HEAD: Final = struct.Struct("<IB")
_LENGTH: Final = 4
_CODECS: Final = [codec_of(kind) for kind in KINDS]
_NUMBER: Final = {kind: number for number, kind in enumerate(KINDS)}
_BATCH_NUMBER: Final = _NUMBER[TokenBatch]


def signatures() -> str:
    """Changes with every change to a message: code that was replaced under a running core is noticed by it."""
    return hashlib.sha256("\n".join([sys.byteorder, *map(signature, KINDS)]).encode()).hexdigest()


class FrameWriter:
    """One end's messages as frames, in the order they are sent."""

    def __init__(self) -> None:
        self._batches = BatchWriter()

    def encode(self, message: object) -> bytes:
        """The whole frame. Raises KeyError for what is no message."""
        number = _NUMBER[type(message)]
        if isinstance(message, TokenBatch):
            body = self._batches.pack(message)
            return b"".join([_HEAD.pack(1 + sum(map(len, body)), number), *body])
        out = bytearray(_HEAD.size)
        _CODECS[number][0](out, message)
        _HEAD.pack_into(out, 0, len(out) - _LENGTH, number)
        return bytes(out)


class FrameReader:
    """Cuts what one FrameWriter wrote into messages."""

    def __init__(self) -> None:
        self._batches = BatchReader()
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
            messages.append(self.decode(bytes(self._buffer[at + _LENGTH : at + self._wanted])))
            at += self._wanted
            self._wanted = _LENGTH
        del self._buffer[:at]
        return messages

    def decode(self, frame: bytes) -> Any:
        """A message from its frame without the length. Raises ProtocolError: no message of ours."""
        if not frame or frame[0] >= len(KINDS):
            raise ProtocolError("a message of unknown kind between core and worker")
        reader = Reader(frame, 1)
        try:
            if frame[0] == _BATCH_NUMBER:
                return self._batches.unpack(frame)
            message = _CODECS[frame[0]][1](reader)
        except (ValueError, TypeError, IndexError) as error:
            raise ProtocolError(f"a malformed message between core and worker: {error}") from error
        if reader.at != len(frame):
            raise ProtocolError("a message between core and worker goes on after its end")
        return message
