"""Columns of numbers ↔ bytes, as the private protocol packs them. Pure functions; decoding raises ProtocolError naming
the field whose form is wrong."""

from enum import IntEnum
from functools import lru_cache
from typing import TypeVar

import numpy as np

from common import messages as m
from common.errors import ProtocolError

E = TypeVar("E", bound=IntEnum)

_U32 = np.dtype("<u4")
_F32 = np.dtype("<f4")


def pack_u32(column: m.U32) -> bytes:
    return column.tobytes() if column.dtype == _U32 else column.astype(_U32).tobytes()


def pack_f32(column: m.F32) -> bytes:
    return column.astype(_F32, copy=False).tobytes()


def unpack_u32(data: bytes, field: str) -> m.U32:
    """A read-only view of `data`. Raises ProtocolError when it is not whole values."""
    if not data:
        return m.EMPTY_U32
    if len(data) % 4:
        raise ProtocolError(f"{field}: {len(data)} bytes are not whole uint32 values", field=field)
    return np.frombuffer(data, dtype=_U32)


def unpack_f32(data: bytes, field: str) -> m.F32:
    """A read-only view of `data`. Raises ProtocolError when it is not whole values."""
    if not data:
        return m.EMPTY_F32
    if len(data) % 4:
        raise ProtocolError(f"{field}: {len(data)} bytes are not whole float32 values", field=field)
    return np.frombuffer(data, dtype=_F32)


# Most steps decode the rows of the step before, in the same read-only column: bitmaps are remembered, both ways.
_NUM_REMEMBERED = 8
_MAX_REMEMBERED_BYTES = 2048  # a peer's bitmap may be long
# The newest first; replaced as a whole, so that threads need no lock.
_packed: tuple[tuple[m.U32, bytes], ...] = ()


def pack_bitmap(rows: m.U32) -> bytes:
    """Bitmap with the bits of `rows` (ascending, read-only) set; as short as it can be."""
    global _packed
    if not len(rows):
        return b""
    for known, data in _packed:
        if known is rows:
            return data
    bits = np.zeros(int(rows[-1]) + 1, dtype=np.bool_)
    bits[rows.astype(np.intp)] = True
    data = np.packbits(bits, bitorder="little").tobytes()
    if not rows.flags.writeable:
        _packed = ((rows, data), *_packed[: _NUM_REMEMBERED - 1])
    return data


def unpack_bitmap(data: bytes) -> m.U32:
    """Ascending rows whose bit is set. Read-only; for bytes seen lately the column of then."""
    if not data:
        return m.EMPTY_U32
    return _remembered(data) if len(data) <= _MAX_REMEMBERED_BYTES else _unpack_bitmap(data)


def _unpack_bitmap(data: bytes) -> m.U32:
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").view(np.bool_)
    return m.u32(bits.nonzero()[0])


_remembered = lru_cache(maxsize=_NUM_REMEMBERED)(_unpack_bitmap)


def check_lengths(field: str, *columns: m.U32 | m.F32) -> None:
    """Raises ProtocolError when columns that belong together differ in length."""
    lengths = {len(c) for c in columns}
    if len(lengths) > 1:
        raise ProtocolError(f"{field}: columns differ in length: {[len(c) for c in columns]}", field=field)


def enum_of(kind: type[E], value: int, field: str) -> E:
    """Raises ProtocolError for a value `kind` does not have."""
    try:
        return kind(value)
    except ValueError:
        raise ProtocolError(f"{field}: unknown value {value}", field=field) from None
