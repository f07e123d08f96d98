"""When to look at which request again: a heap, so that nobody walks over those that wait."""

import heapq

_MIN_STALE = 64


class Timers:
    """At most one time per key. What was replaced or cleared stays in the heap, unseen, until it comes up or half of
    the heap is such."""

    def __init__(self) -> None:
        self._when: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._when)

    @property
    def next_ns(self) -> int:
        """Not later than the first time; 0: there is none."""
        return self._heap[0][0] if self._heap else 0

    def set(self, key: int, when_ns: int) -> None:
        self._when[key] = when_ns
        heapq.heappush(self._heap, (when_ns, key))
        self._tidy()

    def clear(self, key: int) -> None:
        if self._when.pop(key, None) is not None:
            self._tidy()

    def due(self, now_ns: int) -> list[int]:
        """Takes out the keys whose time has come."""
        found = []
        while self._heap and self._heap[0][0] <= now_ns:
            when_ns, key = heapq.heappop(self._heap)
            if self._when.get(key) == when_ns:
                del self._when[key]
                found.append(key)
        return found

    def _tidy(self) -> None:
        if len(self._heap) > _MIN_STALE and len(self._when) * 2 < len(self._heap):
            self._heap = [(when_ns, key) for key, when_ns in self._when.items()]
            heapq.heapify(self._heap)
