"""Buffers that live as long as the runner: staging ring, output ring, device state of rows.

Ownership: the runner thread writes host sides; the streams named with each buffer touch device sides. Each lifetime
rule stands where its buffer is declared, with the Fence that enforces it.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.streams import Device, Event, Fence, Stream

_ALIGN = 64
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}

Column = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32]


class StagingSlot:
    """Everything one step brings to the device, packed into one upload."""

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self.capacity = capacity
        # Host side. Written by the runner thread; may be written again only after `uploaded` (STAGING_HOST_FREE).
        self._host = device.pinned(capacity)
        self._host_bytes = self._host.numpy()
        # Device side. Written by COPY_IN, read by COMPUTE; may be written again only after `consumed`
        # (STAGING_DEVICE_FREE), and read only after `uploaded` (STAGED).
        self._dev = device.zeros(capacity, dtype=torch.uint8)
        self.uploaded: Event | None = None
        self.consumed: Event | None = None
        self._used = 0
        self._spills: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """Empties the slot for a new step; waits until its last upload has left the host side."""
        self._device.host_fence(Fence.STAGING_HOST_FREE, self.uploaded)
        self._used = 0
        self._spills = []

    def put(self, values: Column) -> torch.Tensor:
        """Packs a column; returns its device side, which COMPUTE may read in this step only."""
        size = values.nbytes
        start = self._used
        if start + size > self.capacity:
            return self.put_lasting(values)
        self._used = -(-(start + size) // _ALIGN) * _ALIGN
        self._host_bytes[start : start + size] = values.reshape(-1).view(np.uint8)
        return self._dev[start : start + size].view(_DTYPES[values.dtype]).view(values.shape)

    def put_lasting(self, values: Column) -> torch.Tensor:
        """Like `put`, in memory of its own that lives while referenced: for admissions, and for what does not fit."""
        host = self._device.pinned(values.nbytes)
        host.numpy()[:] = values.reshape(-1).view(np.uint8)
        dev = self._device.scratch(values.nbytes)
        self._spills.append((host, dev))
        return dev.view(_DTYPES[values.dtype]).view(values.shape)

    def upload(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Enqueues the copy to the device and makes COMPUTE wait for it. Returns memory the step must keep alive."""
        device, used, spills = self._device, min(self._used, self.capacity), self._spills
        device.fence(Fence.STAGING_DEVICE_FREE, Stream.COPY_IN, self.consumed)

        def copy() -> None:
            if used:
                self._dev[:used].copy_(self._host[:used], non_blocking=True)
            for host, dev in spills:
                dev.copy_(host, non_blocking=True)

        device.enqueue(Stream.COPY_IN, copy)
        self.uploaded = device.record(Stream.COPY_IN)
        device.fence(Fence.STAGED, Stream.COMPUTE, self.uploaded)
        return spills

    def finish(self, event: Event) -> None:
        """`event`: the end of the step's work on COMPUTE, the slot's last reader."""
        self.consumed = event


class StagingRing:
    """depth + 1 slots: one is written by the host while `depth` steps are in flight."""

    def __init__(self, device: Device, depth: int, capacity: int) -> None:
        self._slots = [StagingSlot(device, capacity) for _ in range(depth + 1)]
        self._next = 0

    def take(self) -> StagingSlot:
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.begin()
        return slot


class OutputSlot:
    """What one step says of each of its rows: int64 [2, max_rows]: token and status, by place in the batch.

    A device side and a host side, of rings of their own.
    """

    def __init__(self, device: Device, device_side: "_DeviceOutput", host_side: torch.Tensor) -> None:
        self._device = device
        self._device_side = device_side
        self._host = host_side
        self.dev = device_side.values
        self.host_values: NDArray[np.int64] = host_side.numpy()

    def download(self, written: Event, num_rows: int, more: Callable[[], None]) -> Event:
        """Enqueues the copy to the host, if there is a row, and `more` copies. Returns the event behind them."""
        device, dev, host = self._device, self.dev, self._host
        device.fence(Fence.OUTPUT_WRITTEN, Stream.COPY_OUT, written)

        def copy() -> None:
            if num_rows:
                # All of it, because it is contiguous: a copy of some columns goes through memory that is not pinned,
                # and the thread that launches it waits for the whole step.
                host.copy_(dev, non_blocking=True)
            more()

        device.enqueue(Stream.COPY_OUT, copy)
        copied = device.record(Stream.COPY_OUT)
        self._device_side.copied = copied
        return copied


class _DeviceOutput:
    """Written by COMPUTE, read by COPY_OUT once written (OUTPUT_WRITTEN); written again only after `copied`
    (OUTPUT_DEVICE_FREE)."""

    def __init__(self, device: Device, max_rows: int) -> None:
        self.values = device.zeros(2, max_rows, dtype=torch.int64)
        self.copied: Event | None = None


class OutputRing:
    """depth + 1 device sides, depth + 2 host sides.

    A host side is written by COPY_OUT and read by the waiter only after that (RESULT_READY). It is written again by
    the step depth + 2 later, which the runner refuses to launch before the result was collected: `depth` steps are in
    flight, one is being read by the waiter, one is being launched. The device sides need no place for the one being
    read; where the copy out is late, COMPUTE waits for it.
    """

    def __init__(self, device: Device, depth: int, max_rows: int) -> None:
        self._device = device
        self._device_sides = [_DeviceOutput(device, max_rows) for _ in range(depth + 1)]
        self._host_sides = [
            device.pinned(2 * max_rows * 8).view(torch.int64).view(2, max_rows) for _ in range(depth + 2)
        ]
        self._taken = 0

    def take(self) -> OutputSlot:
        """Called before the step's work is enqueued on COMPUTE, which waits until the slot is free."""
        side = self._device_sides[self._taken % len(self._device_sides)]
        host = self._host_sides[self._taken % len(self._host_sides)]
        self._taken += 1
        self._device.fence(Fence.OUTPUT_DEVICE_FREE, Stream.COMPUTE, side.copied)
        return OutputSlot(self._device, side, host)


# Columns of RowState.floats and RowState.ints.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
SEED, TOP_K = range(2)


class RowState:
    """Device state by row. Row num_rows, the last, is the padding row: what padding reads and writes.

    Touched by COMPUTE alone, so its order is the plans' order. A row's values are complete after the scatter of the
    step that admits it; released rows keep stale values nobody reads.
    """

    def __init__(self, device: Device, num_rows: int, max_blocks: int, null_block: int, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.num_rows = num_rows
        self.pad_row = num_rows
        total = num_rows + 1
        # Tokens known or sampled, from 1. The device owns it while a row decodes: sampling adds 1.
        self.length = device.zeros(total, dtype=torch.int64)
        self.length.fill_(1)
        # The token at length - 1, where the host gave it or the sampler wrote it.
        self.last_token = device.zeros(total, dtype=torch.int64)
        # Set when a row's numbers were not finite; such a row is padding until it is admitted anew.
        self.dead = device.zeros(total, dtype=torch.bool)
        # Entries without a block name the null block.
        self.block_tables = device.zeros(total, max_blocks, dtype=torch.int32)
        self.block_tables.fill_(null_block)
        self.flat_tables = self.block_tables.view(-1)
        self.floats = device.zeros(total, 6, dtype=torch.float32)
        self.ints = device.zeros(total, 2, dtype=torch.int64)
        # Penalty state; made when the first row with penalties is admitted, which is no steady step.
        self.output_counts: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None

    def ensure_penalties(self) -> tuple[torch.Tensor, torch.Tensor]:
        """output_counts: int32, in_prompt: bool, both [num_rows + 1, vocab]."""
        if self.output_counts is None or self.in_prompt is None:
            self.output_counts = self._device.zeros(self.num_rows + 1, self._vocab_size, dtype=torch.int32)
            self.in_prompt = self._device.zeros(self.num_rows + 1, self._vocab_size, dtype=torch.bool)
        return self.output_counts, self.in_prompt

    def effective(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows to work on: -1 and dead rows become the padding row."""
        rows = torch.where(rows < 0, self.pad_row, rows)
        return torch.where(self.dead[rows], self.pad_row, rows)
