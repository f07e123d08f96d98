"""Tokens that are known before their Sequences have them: appending one to each in every step would touch them all."""

from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from common.messages import U32

SPAN = 1024  # steps
# Tokens of one row that lie side by side: so many steps in turn write to the same memory, which stays small and warm,
# and a row's tokens lie in so many times fewer places.
_TILE = 16
_NUM_TILES = SPAN // _TILE
# A row forgotten no longer ago than this has all its tokens, and what is promised of them is read in time: when the
# tile they begin in is begun anew, up to a tile before the first of them is overwritten.
SAFE_AGE = SPAN - _TILE
_NUM_FORGOTTEN = 64  # in so many steps all rows are forgotten once
_MAX_AGE = SAFE_AGE - _NUM_FORGOTTEN  # then forgetting begins, and a row's turn may come as the last
assert SPAN % _TILE == 0 and _MAX_AGE + _NUM_FORGOTTEN <= SAFE_AGE
_NONE = 0xFFFFFFFF  # no token: the row had none in that step


class RecentTokens:
    """The tokens that the last SAFE_AGE steps brought, or a few more. Of a row those count that came since it was last
    forgotten. room: after so many more steps some rows must be, see `oldest`."""

    def __init__(self, num_rows: int) -> None:
        self._tiles: U32 = np.full((_NUM_TILES, num_rows, _TILE), _NONE, dtype=np.uint32)
        self._since: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self._now = 0
        self._promised: dict[int, list[ReferenceType[Later]]] = {}  # by the first tile they are in
        self.room = _MAX_AGE

    def append(self, index: NDArray[np.int64], tokens: U32) -> None:
        """A step brought `tokens`, one for each row of `index`."""
        tile, place = divmod(self._now, _TILE)
        if not place and (promised := self._promised.pop(tile - _NUM_TILES, None)) is not None:
            _keep_promises(promised)
        newest = self._tiles[tile % _NUM_TILES, :, place]
        newest.fill(_NONE)
        newest[index] = tokens
        self._now += 1
        self.room -= 1

    def of(self, rows: list[int]) -> list[U32]:
        """A copy of the tokens of each of these rows."""
        since: list[int] = self._since[rows].tolist()
        first = min(since)
        return [
            _without_gaps(tokens[start - first :])
            for tokens, start in zip(self._read(rows, first, self._now), since, strict=True)
        ]

    def later(self, row: int, before: U32, start: int, end: int) -> "Later":
        """Of `before` with the tokens behind it that the row has now, those at [start, end)."""
        since = self._since.item(row)
        later = Later(self, row, since, self._now, before, start, end)
        self._promised.setdefault(since // _TILE, []).append(ref(later))
        return later

    def between(self, row: int, since: int, until: int) -> U32:
        """A copy of the row's tokens of these steps, none of which is overwritten."""
        return _without_gaps(self._read([row], since, until)[0])

    def _read(self, rows: list[int], since: int, until: int) -> U32:
        """[len(rows), steps], gaps and all."""
        first, end = since // _TILE, -(-until // _TILE)
        tiles = self._tiles[np.arange(first, end)[:, None] % _NUM_TILES, rows]
        steps: U32 = tiles.transpose(1, 0, 2).reshape(len(rows), -1)
        return steps[:, since - first * _TILE : until - first * _TILE]

    def keep_promises(self) -> None:
        """Nothing is asked of this object from now on."""
        for promised in self._promised.values():
            _keep_promises(promised)
        self._promised.clear()

    def forget(self, row: int) -> None:
        self._since[row] = self._now

    def oldest(self) -> list[int]:
        """The rows to forget when there is no more room: those that were not for longest."""
        found: list[int] = np.argsort(self._since, kind="stable")[: -(-len(self._since) // _NUM_FORGOTTEN)].tolist()
        return found

    def make_room(self) -> None:
        """The oldest were forgotten."""
        self.room = max(1, _MAX_AGE - self.oldest_age)

    @property
    def oldest_age(self) -> int:
        """Steps since the last row of all was forgotten."""
        return self._now - int(self._since.min(initial=self._now))

    @property
    def has_all(self) -> bool:
        """No tile is overwritten in which the tokens of a row or of a promise begin. For tests."""
        first = min([(self._now - self.oldest_age) // _TILE, *self._promised])
        return first + _NUM_TILES > (self._now - 1) // _TILE


class Later:
    """Tokens that are read when they are asked for, at the latest before they are overwritten; if nobody holds this any
    more by then, never."""

    __slots__ = ("__weakref__", "_before", "_end", "_recent", "_row", "_since", "_start", "_until")

    def __init__(
        self, recent: RecentTokens, row: int, since: int, until: int, before: U32, start: int, end: int
    ) -> None:
        self._recent: RecentTokens | None = recent
        self._row, self._since, self._until = row, since, until
        self._before, self._start, self._end = before, start, end

    def read(self) -> U32:
        if self._recent is not None:
            behind = self._recent.between(self._row, self._since, self._until)
            self._before = np.concatenate((self._before, behind))[self._start : self._end]
            self._recent = None
        return self._before


def _keep_promises(promised: list[ReferenceType[Later]]) -> None:
    for reference in promised:
        if (later := reference()) is not None:
            later.read()


def _without_gaps(tokens: U32) -> U32:
    found: U32 = tokens[tokens != _NONE]
    return found
