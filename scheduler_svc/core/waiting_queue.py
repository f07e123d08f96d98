"""The one waiting queue. Nothing ever walks over it: each operation costs O(log n), and removal next to nothing."""

import heapq
from collections import deque
from itertools import islice

from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.sequence import Sequence, SequenceState

_MIN_STALE = 64
_Entry = tuple[int, int, Sequence]  # rank, ticket


class Lane:
    """By rank. Who comes behind all of the line joins it, as under most policies nearly everyone does: then a hundred
    thousand who wait cost the first no more than ten. Who comes out of order goes to a heap. Who was removed stays in
    either, unseen, until he comes up or half of all are such."""

    def __init__(self) -> None:
        self._line: deque[_Entry] = deque()
        self._heap: list[_Entry] = []
        self._waiting = 0
        self.first: _Entry | None = None  # never one that was removed

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_entries(self) -> int:
        """With those that were removed."""
        return len(self._line) + len(self._heap)

    def ahead(self, count: int) -> list[Sequence]:
        """Of the line's first `count` entries those that wait."""
        return [entry[2] for entry in islice(self._line, count) if not _is_stale(entry)]

    def push(self, rank: int, sequence: Sequence) -> None:
        entry, line = (rank, sequence.ticket, sequence), self._line
        if not line or line[-1] < entry:
            line.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        if self.first is None or entry < self.first:
            self.first = entry
        self._waiting += 1

    def remove(self) -> int:
        """A sequence of this lane lost its ticket. Returns how many wait now."""
        self._waiting -= 1
        if self.num_entries > _MIN_STALE and self._waiting * 2 < self.num_entries:
            self._line = deque(entry for entry in self._line if not _is_stale(entry))
            self._heap = [entry for entry in self._heap if not _is_stale(entry)]
            heapq.heapify(self._heap)
        line, heap = self._line, self._heap
        while line and _is_stale(line[0]):
            line.popleft()
        while heap and _is_stale(heap[0]):
            heapq.heappop(heap)
        self.first = min((entries[0] for entries in (line, heap) if entries), default=None)
        return self._waiting


def _is_stale(entry: _Entry) -> bool:
    return entry[2].ticket != entry[1]


class Lanes:
    """Lanes by turn. As turns only rise, the heap's entries are late at worst: they are set right when they come up."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[int, Lane] = {}
        self._order: list[tuple[float, int, int, Lane]] = []
        self._made = 0

    def push(self, lane_id: int, sequence: Sequence) -> None:
        lane = self._lanes.get(lane_id)
        if lane is None:
            lane = self._lanes[lane_id] = Lane()
            self._made += 1
            heapq.heappush(self._order, (self._policy.turn(lane_id), self._made, lane_id, lane))
        lane.push(sequence.rank, sequence)

    def remove(self, lane_id: int) -> None:
        lane = self._lanes[lane_id]
        if not lane.remove():
            del self._lanes[lane_id]
            if len(self._order) > _MIN_STALE and len(self._lanes) * 2 < len(self._order):
                self._order = [entry for entry in self._order if len(entry[3])]
                heapq.heapify(self._order)

    def ahead(self, lane_id: int, count: int) -> list[Sequence]:
        lane = self._lanes.get(lane_id)
        return [] if lane is None else lane.ahead(count)

    def first(self) -> tuple[float, Sequence] | None:
        """(turn, sequence) of the first of all."""
        while self._order:
            turn, made, lane_id, lane = self._order[0]
            if (first := lane.first) is None:
                heapq.heappop(self._order)
                continue
            now = self._policy.turn(lane_id)
            if now <= turn:
                return turn, first[2]
            heapq.heapreplace(self._order, (now, made, lane_id, lane))
        return None


class WaitingQueue:
    """Every sequence that has no row and may take one: usual prompts and long ones (over `long_tokens`; 0: none is),
    each in the policy's lanes, and before all of them those that must go first, whatever the policy: suspects (see
    `suspects`), one after the other, then, where the policy says so, the preempted.

    `num_held` counts those that will be pushed later: see SequenceState.HELD. They are no part of the queue otherwise.
    """

    def __init__(self, policy: Policy, long_tokens: int = 0) -> None:
        self._policy = policy
        self._long_tokens = long_tokens
        self._front = Lane()
        self._usual, self._long = Lanes(policy), Lanes(policy)
        self._in_lane: dict[int, int] = {}
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
        self._waiting += 1
        self._num_tokens += sequence.length
        if self._goes_first(sequence):
            self._front.push(-1 << 62 if sequence.is_suspect else sequence.rank, sequence)
            return
        lane = self._policy.lane(sequence.tenant)
        if lane not in self._in_lane:
            self._policy.joined(lane, self._least_turn())
        self._in_lane[lane] = self._in_lane.get(lane, 0) + 1
        self._side(sequence).push(lane, sequence)

    def peek(self, usual_only: bool = False) -> Sequence | None:
        """The first; with `usual_only` the first that is not long."""
        if self._front.first is not None:
            return self._front.first[2]
        usual = self._usual.first()
        long = None if usual_only or not self._long_tokens else self._long.first()
        if usual is None or long is None:
            found = usual or long
            return found[1] if found else None
        return min((usual, long), key=lambda entry: (entry[0], entry[1].rank, entry[1].ticket))[1]

    def ahead(self, count: int) -> list[Sequence]:
        """A few of those whose turn comes next, at most `count`: a guess, for work that may be done early."""
        first = self.peek()
        return [] if first is None else self._side(first).ahead(self._policy.lane(first.tenant), count)

    def remove(self, sequence: Sequence) -> None:
        if not sequence.ticket:
            assert sequence.state == SequenceState.HELD
            self.num_held -= 1
            return
        sequence.ticket = 0
        self._waiting -= 1
        self._num_tokens -= sequence.length
        if self._goes_first(sequence):
            self._front.remove()
            return
        lane = self._policy.lane(sequence.tenant)
        self._side(sequence).remove(lane)
        left = self._in_lane[lane] = self._in_lane[lane] - 1
        if not left:
            del self._in_lane[lane]
            self._policy.left(lane)

    def is_long(self, sequence: Sequence) -> bool:
        return 0 < self._long_tokens < sequence.length

    def _goes_first(self, sequence: Sequence) -> bool:
        """Does not change while the sequence waits."""
        return sequence.is_suspect or (self._policy.returns_first and sequence.was_admitted)

    def _side(self, sequence: Sequence) -> Lanes:
        return self._long if self._long_tokens and self.is_long(sequence) else self._usual

    def _least_turn(self) -> float | None:
        turns = [entry[0] for side in (self._usual, self._long) if (entry := side.first()) is not None]
        return min(turns, default=None)
