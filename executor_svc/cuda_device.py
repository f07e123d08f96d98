"""CUDA as a Device; see executor_svc/streams.py."""

import threading
from collections.abc import Callable
from typing import Final

import torch

from common.clock import Clock, SystemClock
from executor_svc.kv_cache import cuda_free
from executor_svc.streams import Event, Fence, Stream


class CudaEvent:
    def __init__(self, device: "CudaDevice", event: torch.cuda.Event) -> None:
        self.event: Final = event
        self._device = device

    def time_ns(self) -> int:
        return self._device.time_ns_of(self.event)


class CudaMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        return cuda_free(self._device)

    def give_back(self) -> None:
        torch.cuda.empty_cache()


class CudaDevice:
    """One CUDA device. Enqueued work runs at once and launches its kernels on the stream."""

    # The base moves along: elapsed_time is a float32 of milliseconds, and the device's clock is its own, which may gain
    # or lose a tenth of a millisecond in a second (10 to 100 ppm: meta-pytorch/torchcomms, pull requests 2422, 2424).
    _REBASE_MS: Final = 1_000.0

    def __init__(self, index: int = 0, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        # cuDNN's attention builds a plan for each new shape, in the thread that launches: a steady step must not wait.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._streams: dict[Stream, torch.cuda.Stream] = {
            stream: torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            for stream in Stream
        }
        self._memory = CudaMemory(self._device)
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self._device)
        self._base.record(self._streams[Stream.COMPUTE])
        self._base.synchronize()
        self._base_ns = self._clock.monotonic_ns()
        self._least_lag_ns: int | None = None  # since the base moved; None: nothing seen

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def memory(self) -> CudaMemory:
        return self._memory

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
            # Not put back afterwards: all work is enqueued here, and the context manager costs as much as a launch.
            torch.cuda.set_stream(self._streams[stream])
            with torch.inference_mode():
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

    def host_fence(self, fence: Fence, event: Event | None) -> bool:
        if event is not None:
            assert isinstance(event, CudaEvent)
            try:
                if self._device.index:
                    # A thread begins on device 0, where waiting would make a context, of half a gigabyte.
                    torch.cuda.set_device(self._device)
                event.event.synchronize()
                if fence is Fence.RESULT_READY:
                    self._follow_clock(event.event, self._clock.monotonic_ns())
            except RuntimeError as error:
                self._failure = self._failure or error
                return False
        return True

    def time_ns_of(self, event: torch.cuda.Event) -> int:
        with self._lock:
            try:
                elapsed_ms = self._base.elapsed_time(event)
            except RuntimeError:  # the device failed; its times mean nothing
                return 0
            return self._base_ns + int(elapsed_ms * 1e6)

    def _follow_clock(self, event: torch.cuda.Event, now_ns: int) -> None:
        """`event` was met by `now_ns`, and some are noticed at once: by how much the quickest seems late, the device's
        clock is behind. One that seems to be yet to come shows how far it is ahead."""
        with self._lock:
            try:
                elapsed_ms = self._base.elapsed_time(event)
            except RuntimeError:  # the device failed since; what came before the event stands
                return
            time_ns = self._base_ns + int(elapsed_ms * 1e6)
            least_ns = now_ns - time_ns
            # What was seen before a pause says nothing of the clock behind it.
            if self._least_lag_ns is not None and elapsed_ms < 2 * self._REBASE_MS:
                least_ns = min(least_ns, self._least_lag_ns)
            if least_ns < 0:
                self._base_ns, time_ns, least_ns = self._base_ns + least_ns, time_ns + least_ns, 0
            self._least_lag_ns = least_ns
            if elapsed_ms > self._REBASE_MS:
                self._base, self._base_ns, self._least_lag_ns = event, time_ns + least_ns, None

    def synchronize(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            self._failure = self._failure or error

    def recover(self) -> None:
        self._failure = None

    def close(self) -> None:
        self.synchronize()
