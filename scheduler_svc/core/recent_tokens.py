"""Tokens that are known before their Sequences have them: appending one to each in every step would touch them all."""

from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import NDArray

from common.messages import U32

SPAN = 1024  # steps
_NUM_FORGOTTEN = 128  # in so many steps all rows are forgotten once
_NONE = 0xFFFFFFFF  # no token: the row had none in that step


class RecentTokens:
    """The tokens that the last SPAN steps brought, those of one step side by side: written in one place, and read, from
    many, only when somebody asks. Of a row those count that came since it was last forgotten. room: after so many more
    steps some rows must be, see `oldest`."""

    def __init__(self, num_rows: int) -> None:
        self._tokens: U32 = np.full((SPAN, num_rows), _NONE, dtype=np.uint32)
        self._since: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self._now = 0
        self._promised: dict[int, list[ReferenceType[Later]]] = {}  # by the first step they are of
        self.room = SPAN - _NUM_FORGOTTEN

    def append(self, index: NDArray[np.int64], tokens: U32) -> None:
        """A step brought `tokens`, one for each row of `index`."""
        if (promised := self._promised.pop(self._now - SPAN, None)) is not None:
            _keep_promises(promised)
        newest = self._tokens[self._now % SPAN]
        newest.fill(_NONE)
        newest[index] = tokens
        self._now += 1
        self.room -= 1

    def of(self, rows: list[int]) -> list[U32]:
        """A copy of the tokens of each of these rows."""
        since: list[int] = self._since[rows].tolist()
        first = min(since)
        steps = np.arange(first, self._now) % SPAN
        found = self._tokens[steps[:, None], rows].T
        return [_without_gaps(tokens[start - first :]) for tokens, start in zip(found, since, strict=True)]

    def later(self, row: int, before: U32, start: int, end: int) -> "Later":
        """Of `before` with the tokens behind it that the row has now, those at [start, end)."""
        since = self._since.item(row)
        later = Later(self, row, since, self._now, before, start, end)
        self._promised.setdefault(since, []).append(ref(later))
        return later

    def between(self, row: int, since: int, until: int) -> U32:
        """A copy of the row's tokens of these steps, which are among the last SPAN."""
        return _without_gaps(self._tokens[np.arange(since, until) % SPAN, row])

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
        self.room = max(1, SPAN - _NUM_FORGOTTEN - self.oldest_age)

    @property
    def oldest_age(self) -> int:
        """Steps since the last row of all was forgotten."""
        return self._now - int(self._since.min(initial=self._now))


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
