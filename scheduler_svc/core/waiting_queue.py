"""The one waiting queue: a heap by rank, with removal in constant time."""

import heapq

from scheduler_svc.core.sequence import Sequence, SequenceState


class WaitingQueue:
    """Every sequence that has no row and may take one. Nothing ever walks over it.

    `num_held` counts those that will be pushed later: see SequenceState.HELD. They are no part of the queue otherwise.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        self._tickets = 0
        self._waiting = 0
        self._num_tokens = 0
        self.num_held = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_tokens(self) -> int:
        """Known tokens of all that wait."""
        return self._num_tokens

    def hold(self, sequence: Sequence) -> None:
        """`sequence` is new and its leader's prompt comes first."""
        sequence.state = SequenceState.HELD
        self.num_held += 1

    def push(self, sequence: Sequence) -> None:
        assert sequence.ticket == 0
        self.num_held -= sequence.state == SequenceState.HELD
        self._tickets += 1
        sequence.ticket = self._tickets
        sequence.state = SequenceState.WAITING
        heapq.heappush(self._heap, (sequence.rank, self._tickets, sequence))
        self._waiting += 1
        self._num_tokens += sequence.length

    def peek(self) -> Sequence | None:
        """The first; the heap's head is never stale."""
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self._heap[0][2]
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        if sequence.state == SequenceState.HELD:
            self.num_held -= 1
            return
        assert sequence.ticket != 0
        sequence.ticket = 0
        self._waiting -= 1
        self._num_tokens -= sequence.length
        if len(self._heap) > 64 and self._waiting * 2 < len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][2].ticket != self._heap[0][1]:
            heapq.heappop(self._heap)
