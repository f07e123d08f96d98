"""Columns of numbers ↔ bytes, as the private protocol packs them. Pure functions; decoding raises ProtocolError naming
the field whose form is wrong."""

from enum import IntEnum
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
