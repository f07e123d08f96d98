"""Columns of ascending rows ↔ bitmaps, as both streams carry them. Pure, but for a memory of the last ones."""

import numpy as np
from numpy.typing import NDArray

from common import messages as m

# Most steps decode the rows of the step before, in the same read-only column, and of the rows a plan asks nearly always
# all answer: bitmaps are remembered, both ways.
_NUM_REMEMBERED = 8
_MAX_REMEMBERED_BYTES = 2048  # a peer's bitmap may be long
_Known = tuple[tuple[m.U32, bytes], ...]
# What to pack a column into, what to unpack bytes into; the newest first, replaced as a whole, so that threads need no
# lock.
_packed: _Known = ()
_unpacked: _Known = ()


def _with(known: _Known, rows: m.U32, data: bytes) -> _Known:
    return ((rows, data), *known[: _NUM_REMEMBERED - 1])


def column_of(mask: NDArray[np.bool_], index: NDArray[np.int64]) -> m.U32:
    """The rows for which `mask` is true, which are `index`, as a read-only column. To pack it, or to unpack the same
    rows into it, costs next to nothing for a while."""
    global _packed, _unpacked
    rows: m.U32 = index.astype(np.uint32)
    rows.setflags(write=False)
    if len(mask) <= 8 * _MAX_REMEMBERED_BYTES:
        data = np.packbits(mask, bitorder="little").tobytes().rstrip(b"\0")
        _packed, _unpacked = _with(_packed, rows, data), _with(_unpacked, rows, data)
    return rows


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
        _packed = _with(_packed, rows, data)
    return data


def unpack_bitmap(data: bytes) -> m.U32:
    """Ascending rows whose bit is set. Read-only; for bytes seen lately the column of then."""
    global _unpacked
    if not data:
        return m.EMPTY_U32
    for rows, known in _unpacked:
        if known == data:
            return rows
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").view(np.bool_)
    rows = m.u32(bits.nonzero()[0])
    if len(data) <= _MAX_REMEMBERED_BYTES:
        _unpacked = _with(_unpacked, rows, data)
    return rows
