"""TokenBatch, the one message of every step, as a frame's body: columns one after the other, read without copying.

Most steps bring one token to the requests of the step before: such a batch says so and is little but its tokens. Both
ends of a link therefore remember the batch before, and each message of a link is read exactly once, in order.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.errors import ProtocolError
from common.messages import U32
from scheduler_svc.messages import Extras, TokenBatch
from scheduler_svc.workers.codec import Reader, codec_of

# flags, entries, tokens, bytes of extras. With the kind before them the columns start at a multiple of 8.
_HEAD: Final = struct.Struct("<B2xIII")
_START: Final = 1 + _HEAD.size
# Flags: which columns a body holds. Without the first, keys, counts and cached are those of the batch before; without
# the second nobody ends.
_HAS_REQUESTS: Final = 1
_HAS_REASONS: Final = 2
_put_extras, _get_extras = codec_of(Mapping[int, Extras])


@dataclass(slots=True)
class BatchWriter:
    """The sending end: what the batch before said of its requests."""

    _requests: tuple[bytes, bytes, bytes] = (b"", b"", b"")

    def pack(self, batch: TokenBatch) -> list[bytes | bytearray]:
        """The body in pieces."""
        requests = (batch.keys.tobytes(), batch.counts.tobytes(), batch.cached.tobytes())
        reasons = batch.reasons.tobytes()
        has = 0
        pieces: list[bytes | bytearray] = [b""]
        if requests != self._requests:
            has |= _HAS_REQUESTS
            pieces.extend(requests)
            self._requests = requests
        pieces.append(batch.tokens.tobytes())
        if reasons.count(0) != len(reasons):
            has |= _HAS_REASONS
            pieces.append(reasons)
        extras = bytearray()
        if batch.extras:
            _put_extras(extras, batch.extras)
            pieces.append(extras)
        pieces[0] = _HEAD.pack(has, len(batch.keys), len(batch.tokens), len(extras))
        return pieces


@dataclass(slots=True)
class _Requests:
    """Columns that a batch may have in common with the one before. num_tokens: the sum of counts."""

    keys: NDArray[np.uint64]
    counts: U32
    cached: U32
    no_reasons: NDArray[np.uint8]
    num_tokens: int


class BatchReader:
    """The receiving end."""

    def __init__(self) -> None:
        self._requests = _requests(b"", 0, 0)

    def unpack(self, frame: bytes) -> TokenBatch:
        """From a frame whose first byte is its kind. Raises ProtocolError: the link is of no use any more."""
        if len(frame) < _START:
            raise ProtocolError("a batch of tokens ends too early")
        has, entries, tokens, extra_bytes = _HEAD.unpack_from(frame, 1)
        of_requests = 16 * entries if has & _HAS_REQUESTS else 0
        of_reasons = entries if has & _HAS_REASONS else 0
        if (
            has > _HAS_REQUESTS | _HAS_REASONS
            or len(frame) != _START + of_requests + 4 * tokens + of_reasons + extra_bytes
        ):
            raise ProtocolError("a batch of tokens is not as long as its columns")
        if of_requests or not entries:
            self._requests = _requests(frame, entries, _START)
        requests = self._requests
        if len(requests.keys) != entries or requests.num_tokens != tokens:
            raise ProtocolError("a batch of tokens counts other tokens than it holds")
        tokens_at = _START + of_requests
        reasons_at = tokens_at + 4 * tokens
        extras: Mapping[int, Extras] = {}
        if extra_bytes:
            reader = Reader(frame, reasons_at + of_reasons)
            extras = _get_extras(reader)
            if reader.at != len(frame):
                raise ProtocolError("a batch of tokens goes on after its end")
        return TokenBatch(
            keys=requests.keys,
            counts=requests.counts,
            tokens=np.frombuffer(frame, np.uint32, tokens, tokens_at),
            reasons=np.frombuffer(frame, np.uint8, entries, reasons_at) if of_reasons else requests.no_reasons,
            cached=requests.cached,
            extras=extras,
        )


def _requests(frame: bytes, entries: int, at: int) -> _Requests:
    counts_at = at + 8 * entries
    counts = np.frombuffer(frame, np.uint32, entries, counts_at)
    no_reasons: NDArray[np.uint8] = np.zeros(entries, np.uint8)
    no_reasons.setflags(write=False)
    return _Requests(
        keys=np.frombuffer(frame, np.uint64, entries, at),
        counts=counts,
        cached=np.frombuffer(frame, np.uint32, entries, counts_at + 4 * entries),
        no_reasons=no_reasons,
        num_tokens=int(counts.sum(dtype=np.int64)),
    )
