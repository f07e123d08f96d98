"""Columns of ascending rows ↔ bitmaps, as both streams carry them. Pure, but for a memory of the last ones."""

import numpy as np
from numpy.typing import NDArray

from common import messages as m

# Most steps decode the rows of the step before, in the same read-only column, and of the rows a plan asks nearly always
# all answer: bitmaps are remembered, both ways.
_NUM_REMEMBERED = 8
_MAX_REMEMBERED_BYTES = 2048  # a peer's bitmap may be long
# Read-only columns and their bitmaps, the newest first; replaced as a whole, so that threads need no lock.
_known: tuple[tuple[m.U32, bytes], ...] = ()


def _remember(rows: m.U32, data: bytes) -> None:
    global _known
    if len(data) <= _MAX_REMEMBERED_BYTES:
        _known = ((rows, data), *_known[: _NUM_REMEMBERED - 1])


def column_of(mask: NDArray[np.bool_], index: NDArray[np.int64]) -> m.U32:
    """The rows for which `mask` is true, which are `index`, as a read-only column. To pack it, or to unpack the same
    rows into it, costs next to nothing for a while."""
    rows: m.U32 = index.astype(np.uint32)
    rows.setflags(write=False)
    _remember(rows, np.packbits(mask, bitorder="little").tobytes().rstrip(b"\0"))
    return rows


def pack_bitmap(rows: m.U32) -> bytes:
    """Bitmap with the bits of `rows` (ascending, read-only) set; as short as it can be."""
    if not len(rows):
        return b""
    for column, data in _known:
        if column is rows:
            return data
    bits = np.zeros(int(rows[-1]) + 1, dtype=np.bool_)
    bits[rows.astype(np.intp)] = True
    data = np.packbits(bits, bitorder="little").tobytes()
    if not rows.flags.writeable:
        _remember(rows, data)
    return data


def unpack_bitmap(data: bytes) -> m.U32:
    """Ascending rows whose bit is set. Read-only; for bytes seen lately the column of then."""
    if not data:
        return m.EMPTY_U32
    for column, known in _known:
        if known == data:
            return column
    bits = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").view(np.bool_)
    rows = m.u32(bits.nonzero()[0])
    _remember(rows, data)
    return rows
