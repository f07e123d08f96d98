"""The CPU as a Device; see executor_svc/streams.py."""

import math
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from common.clock import Clock, SystemClock
from executor_svc.host_memory import HUGE_PAGE, huge_zeros
from executor_svc.streams import DeviceMemory, Event, Fence, Stream

# What vector loads like best, bytes.
_ALIGNMENT: Final = 64
# From this size on memory comes in huge pages.
_HUGE: Final = 16 * HUGE_PAGE


class CpuEvent:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done = threading.Event()
        self._time_ns = 0

    def set(self) -> None:
        self._time_ns = self._clock.monotonic_ns()
        self._done.set()

    def wait(self) -> None:
        self._done.wait()

    def time_ns(self) -> int:
        return self._time_ns


class CpuDevice:
    """The CPU as a device: one thread runs the work of all streams in the order it was enqueued.

    That order satisfies every fence between streams, so those cost nothing here; host fences are real.
    """

    def __init__(self, *, threads: int = 0, cpu: int | None = None, clock: Clock | None = None) -> None:
        """threads: that one operation may use; 0: torch's own choice. cpu: the processor the thread keeps to."""
        self._clock = clock or SystemClock()
        self._threads = threads
        self._cpu = cpu
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | CpuEvent | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="cpu-device", daemon=True)
        self._worker.start()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def memory(self) -> DeviceMemory | None:
        return None

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        # torch.zeros writes every byte; the system hands out pages that are zero already, and only when touched, so a
        # cache of gigabytes is there at once.
        size = math.prod(shape) * dtype.itemsize
        if size >= _HUGE:
            return huge_zeros(size).view(dtype).view(shape)
        raw = torch.from_numpy(np.zeros(size + _ALIGNMENT, dtype=np.uint8))
        start = -raw.data_ptr() % _ALIGNMENT
        return raw[start : start + size].view(dtype).view(shape)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def record(self, stream: Stream) -> CpuEvent:
        event = CpuEvent(self._clock)
        self._queue.put(event)
        return event

    def fence(self, fence: Fence, stream: Stream, event: Event | None) -> None:
        """Nothing: see the class."""

    def host_fence(self, fence: Fence, event: Event | None) -> bool:
        if event is not None:
            assert isinstance(event, CpuEvent)
            event.wait()
        return True

    def synchronize(self) -> None:
        self.record(Stream.COMPUTE).wait()

    def recover(self) -> None:
        self._failure = None

    def close(self) -> None:
        if self._worker.is_alive():
            self._queue.put(None)
            self._worker.join()

    def _work(self) -> None:
        if self._cpu is not None:
            os.sched_setaffinity(0, {self._cpu})  # of this thread alone
        if self._threads:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                if isinstance(item, CpuEvent):
                    item.set()
                elif self._failure is None:
                    try:
                        item()
                    except Exception as error:  # noqa: BLE001 - whatever the step met ends the epoch, in its result
                        self._failure = error
                # A closure that is kept until the next one comes would keep its buffers too.
                item = None
