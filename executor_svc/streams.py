"""Devices as the runner sees them: three streams, events, copies, and fences with names.

Each step uses the streams in this order: COPY_IN brings the staging slot to the device, COMPUTE runs the step,
COPY_OUT brings its outputs back. Work on one stream runs in the order it was enqueued; between streams, and between a
stream and the host, nothing is ordered but by a fence. Every fence that protects a buffer's lifetime is one call with
its name, so that tests/contract can turn each off and see tokens change.
"""

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch


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


class DeviceMemory(Protocol):
    """Memory of a device's own. For the runner thread."""

    def free_bytes(self) -> int:
        """Bytes nobody has taken. What torch keeps for later counts as taken."""
        ...

    def give_back(self) -> None:
        """What torch keeps and nothing uses becomes free."""
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

    @property
    def memory(self) -> DeviceMemory | None:
        """None: steps run in the host's memory, where nothing of it is held back for them."""
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

    def host_fence(self, fence: Fence, event: Event | None) -> bool:
        """Blocks the calling thread, outside the GIL, until `event`. False: the device failed before it got there, or
        so hard that nobody can say; `failure` tells how."""
        ...

    def synchronize(self) -> None:
        """Blocks until all work is done."""
        ...

    def recover(self) -> None:
        """Forgets `failure`."""
        ...

    def close(self) -> None: ...
