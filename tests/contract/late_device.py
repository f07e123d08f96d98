"""A device that does nothing until it must, and then in the worst order it may.

Work waits in its stream. When the host waits for an event, streams run by a priority drawn from the seed until that
event is reached; a stream stops at a fence until the event behind it is reached. Every such order is one a real device
could take. Seed 0 is late all the time; others are quick but for a spell somewhere, so that lateness strikes in the
middle of things. `without` turns one fence off: whoever would wait there does not.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable

import torch

from executor_svc.streams import Event, Fence, Stream

# Pieces of work for which a device that is late once stays so: three or four steps.
SPELL = 12


class LateEvent:
    def __init__(self) -> None:
        self.reached_at = 0

    def time_ns(self) -> int:
        return self.reached_at


class _Wait:
    def __init__(self, event: LateEvent) -> None:
        self.event = event


class LateDevice:
    """For one thread."""

    def __init__(self, seed: int = 0, *, without: Fence | None = None) -> None:
        self._rng = random.Random(seed)
        self._without = without
        start = self._rng.randrange(20, 160)
        self._late = range(1 << 60) if seed == 0 else range(start, start + SPELL)
        self._enqueued = 0
        self._queues: dict[Stream, deque[Callable[[], None] | LateEvent | _Wait]] = {s: deque() for s in Stream}
        self._orders = list(itertools.permutations(Stream))
        self._failure: BaseException | None = None
        self._ticks = 1
        self.num_waits: dict[Fence, int] = dict.fromkeys(Fence, 0)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "late"

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def memory(self) -> None:
        return None

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        self._queues[stream].append(work)
        self._enqueued += 1
        if self._enqueued not in self._late:
            self._run_all()

    def record(self, stream: Stream) -> LateEvent:
        event = LateEvent()
        self._queues[stream].append(event)
        return event

    def fence(self, fence: Fence, stream: Stream, event: Event | None) -> None:
        if event is not None and fence is not self._without:
            assert isinstance(event, LateEvent)
            self.num_waits[fence] += not event.reached_at
            self._queues[stream].append(_Wait(event))

    def host_fence(self, fence: Fence, event: Event | None) -> bool:
        if event is not None and fence is not self._without:
            assert isinstance(event, LateEvent)
            self.num_waits[fence] += not event.reached_at
            self._run_until(lambda: bool(event.reached_at))
        return True

    def synchronize(self) -> None:
        self._run_until(lambda: not any(self._queues.values()))

    def recover(self) -> None:
        self._failure = None

    def close(self) -> None:
        self.synchronize()

    def _run_all(self) -> None:
        while any(self._run_one(stream) for stream in Stream):
            pass

    def _run_until(self, reached: Callable[[], bool]) -> None:
        order = self._rng.choice(self._orders)
        while not reached():
            if self._rng.random() < 0.1:
                order = self._rng.choice(self._orders)
            if not any(self._run_one(stream) for stream in order):
                raise AssertionError("the streams wait for each other")

    def _run_one(self, stream: Stream) -> bool:
        """Runs the head of the stream; False where there is none or it has to wait."""
        queue = self._queues[stream]
        if not queue:
            return False
        head = queue[0]
        if isinstance(head, _Wait) and not head.event.reached_at:
            return False
        queue.popleft()
        self._ticks += 1
        if isinstance(head, LateEvent):
            head.reached_at = self._ticks
        elif not isinstance(head, _Wait) and self._failure is None:
            try:
                with torch.inference_mode():
                    head()
            except Exception as error:  # noqa: BLE001 - as a real device: the step that meets it fails
                self._failure = error
        return True
