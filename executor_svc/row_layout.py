"""Where the fields of a row's device state lie: what the host must know to change them. No torch."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Fields begin at multiples of 64 bytes.
_ALIGN: Final = 16

# Words of one row: (field, words), in the order of RowRecord's columns and of the memory.
_FIELDS: Final = (
    ("length", 2), ("last_token", 2), ("ints", 4), ("min_length", 2), ("floats", 6), ("changes", 1), ("dead", 1),
)  # fmt: skip


@dataclass(slots=True, eq=False)
class RowRecord:
    """What n rows are admitted with. int64 [n]: length, last_token, seeds, top_k, min_length; float32 [n, 6]: floats;
    int32 [n]: changes. See RowState."""

    length: NDArray[np.int64]
    last_token: NDArray[np.int64]
    seeds: NDArray[np.int64]
    top_k: NDArray[np.int64]
    min_length: NDArray[np.int64]
    floats: NDArray[np.float32]
    changes: NDArray[np.int32]

    def words(self) -> NDArray[np.int32]:
        """int32 [n, words of a row]; alive."""
        wide = np.stack((self.length, self.last_token, self.seeds, self.top_k, self.min_length), axis=1)
        flags = np.stack((self.changes, np.zeros_like(self.changes)), axis=1)
        return np.concatenate((wide.view(np.int32), self.floats.view(np.int32), flags), axis=1)


class RowLayout:
    """Offsets in words of four bytes, each field by row. Little-endian, as both sides are."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        total = num_rows + 1
        offsets: dict[str, int] = {}
        end = 0
        for name, size in (*_FIELDS, ("tables", max_blocks)):
            offsets[name] = end
            end = -(-(end + size * total) // _ALIGN) * _ALIGN
        self.num_words = end
        self.length = offsets["length"]
        self.last_token = offsets["last_token"]
        self.ints = offsets["ints"]
        self.min_length = offsets["min_length"]
        self.floats = offsets["floats"]
        self.changes = offsets["changes"]
        self.dead = offsets["dead"]
        self.tables = offsets["tables"]
        self._strides = np.concatenate([np.full(size, size, np.int64) for _, size in _FIELDS])
        self._starts = np.concatenate([offsets[name] + np.arange(size, dtype=np.int64) for name, size in _FIELDS])

    def record_places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n, words of a row]: where RowRecord.words go."""
        places: NDArray[np.int64] = rows[:, None] * self._strides + self._starts
        return places

    def last_token_places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 [n, 2]."""
        return rows[:, None] * 2 + np.arange(self.last_token, self.last_token + 2)

    def table_places(self, flat: NDArray[np.int64]) -> NDArray[np.int64]:
        """flat: row * max_blocks + index."""
        return flat + self.tables
