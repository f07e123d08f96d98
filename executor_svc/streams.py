"""Devices as the runner sees them: three streams, events, copies, and fences with names.

Each step uses the streams in this order: COPY_IN brings the staging slot to the device, COMPUTE runs the step,
COPY_OUT brings its outputs back. Work on one stream runs in the order it was enqueued; between streams, and between a
stream and the host, nothing is ordered but by a fence. Every fence that protects a buffer's lifetime is one call with
its name, so that tests/contract can turn each off and see tokens change.
"""

import math
import queue
import threading
from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

import numpy as np
import torch

from common.clock import Clock, SystemClock

# What vector loads like best, bytes.
_ALIGNMENT: Final = 64


class Stream(Enum):
    COPY_IN = "copy in"
    COMPUTE = "compute"
    COPY_OUT = "copy out"


class Fence(Enum):
    """Each protects one buffer from one hazard. "Waits" names who waits for what."""

    STAGING_HOST_FREE = "the host waits for a staging slot's upload before it writes the slot again"
    STAGING_DEVICE_FREE = "COPY_IN waits for the step that read a staging slot before it uploads into it again"
    STAGED = "COMPUTE waits for the upload of the step's staging slot"
    OUTPUT_WRITTEN = "COPY_OUT waits for the step that writes the output slot"
    OUTPUT_DEVICE_FREE = "COMPUTE waits for an output slot's copy to the host before it writes the slot again"
    RESULT_READY = "the host waits for the copy of a step's outputs before it reads them"


class Event(Protocol):
    """A point in a stream."""

    def time_ns(self) -> int:
        """When the device got there, in the host's monotonic ns. Only after the event was waited for."""
        ...


class Device(Protocol):
    """Where steps run. All methods but `host_fence` are called by the runner thread alone."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What the first failed work raised. Work enqueued later is skipped until `recover`. Any thread."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] host memory that copies may read or write at any later time."""
        ...

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory for the life of the device."""
        ...

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] device memory that any stream may use as long as the tensor is referenced."""
        ...

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        """Runs `work`, which may launch device operations, on `stream`. Never raises what `work` raises."""
        ...

    def record(self, stream: Stream) -> Event:
        """The point after everything enqueued on `stream` so far."""
        ...

    def fence(self, fence: Fence, stream: Stream, event: Event | None) -> None:
        """`stream` goes on only after `event`; None: nothing to wait for."""
        ...

    def host_fence(self, fence: Fence, event: Event | None) -> None:
        """Blocks the calling thread, outside the GIL, until `event`."""
        ...

    def synchronize(self) -> None:
        """Blocks until all work is done."""
        ...

    def recover(self) -> None:
        """Forgets `failure`."""
        ...

    def close(self) -> None: ...


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

    def __init__(self, *, threads: int = 0, clock: Clock | None = None) -> None:
        """threads: that one operation may use; 0: torch's own choice."""
        self._clock = clock or SystemClock()
        self._threads = threads
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

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        # torch.zeros writes every byte; the system hands out pages that are zero already, and only when touched, so a
        # cache of gigabytes costs nothing until it is used.
        size = math.prod(shape) * dtype.itemsize
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

    def host_fence(self, fence: Fence, event: Event | None) -> None:
        if event is not None:
            assert isinstance(event, CpuEvent)
            event.wait()

    def synchronize(self) -> None:
        self.record(Stream.COMPUTE).wait()

    def recover(self) -> None:
        self._failure = None

    def close(self) -> None:
        if self._worker.is_alive():
            self._queue.put(None)
            self._worker.join()

    def _work(self) -> None:
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


class CudaEvent:
    def __init__(self, device: "CudaDevice", event: torch.cuda.Event) -> None:
        self.event: Final = event
        self._device = device

    def time_ns(self) -> int:
        return self._device.time_ns_of(self.event)


class CudaDevice:
    """One CUDA device. Enqueued work runs at once and launches its kernels on the stream."""

    # elapsed_time is a float32 of milliseconds: the base moves along so that it keeps its microseconds.
    _REBASE_MS: Final = 5_000.0

    def __init__(self, index: int = 0, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._streams: dict[Stream, torch.cuda.Stream] = {
            stream: torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for stream in Stream
        }
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        self._base.record(self._streams[Stream.COMPUTE])
        self._base.synchronize()
        self._base_ns = self._clock.monotonic_ns()

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def stream_of(self, stream: Stream) -> torch.cuda.Stream:
        return self._streams[stream]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=self._device)
        torch.cuda.synchronize(self._device)
        return tensor

    def scratch(self, num_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._streams[Stream.COPY_IN]):
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for stream in (Stream.COMPUTE, Stream.COPY_OUT):
            tensor.record_stream(self._streams[stream])
        return tensor

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        if self._failure is not None:
            return
        try:
            with torch.inference_mode(), torch.cuda.stream(self._streams[stream]):
                work()
        except Exception as error:  # noqa: BLE001 - whatever the step met ends the epoch, in its result
            self._failure = error

    def record(self, stream: Stream) -> CudaEvent:
        # Blocking: a waiting host thread sleeps instead of spinning.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._streams[stream])
        return CudaEvent(self, event)

    def fence(self, fence: Fence, stream: Stream, event: Event | None) -> None:
        if event is not None:
            assert isinstance(event, CudaEvent)
            self._streams[stream].wait_event(event.event)

    def host_fence(self, fence: Fence, event: Event | None) -> None:
        if event is not None:
            assert isinstance(event, CudaEvent)
            try:
                event.event.synchronize()
            except RuntimeError as error:
                self._failure = self._failure or error

    def time_ns_of(self, event: torch.cuda.Event) -> int:
        with self._lock:
            try:
                elapsed_ms = self._base.elapsed_time(event)
            except RuntimeError:  # the device failed; its times mean nothing
                return 0
            time_ns = self._base_ns + int(elapsed_ms * 1e6)
            if elapsed_ms > self._REBASE_MS:
                self._base, self._base_ns = event, time_ns
            return time_ns

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            self._failure = self._failure or error

    def recover(self) -> None:
        self._failure = None

    def close(self) -> None:
        self.synchronize()
