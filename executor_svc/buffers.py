"""Buffers that live as long as the runner: staging ring, output ring, device state of rows.

Ownership: the runner thread writes host sides; the streams named with each buffer touch device sides. Each lifetime
rule stands where its buffer is declared, with the Fence that enforces it.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.row_layout import RowLayout
from executor_svc.streams import Device, Event, Fence, Stream

_ALIGN = 64
_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}

Column = NDArray[np.int64] | NDArray[np.int32] | NDArray[np.float32]


class StagingSlot:
    """Everything one step brings to the device, packed into one upload. At its head the batch, int64 [max_rows].

    What the batch was when the slot was last uploaded stays there: the same again needs no upload.
    """

    def __init__(self, device: Device, dev: torch.Tensor, max_rows: int) -> None:
        self._device = device
        self.capacity = dev.shape[0]
        self._head = 8 * max_rows
        # Host side. Written by the runner thread; may be written again only after `uploaded` (STAGING_HOST_FREE).
        self._host = device.pinned(self.capacity)
        self._host_bytes = self._host.numpy()
        self._batch: NDArray[np.int64] = self._host_bytes[: self._head].view(np.int64)
        self._batch[:] = -1
        # Device side. Written by COPY_IN, read by COMPUTE; may be written again only after `consumed`
        # (STAGING_DEVICE_FREE), and read only after `uploaded` (STAGED).
        self._dev = dev
        self._dev_batch = dev[: self._head].view(torch.int64)
        self.uploaded: Event | None = None
        self.consumed: Event | None = None
        self._begin = self._used = self._head
        self._spills: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self) -> None:
        """Empties the slot for a new step; waits until its last upload has left the host side."""
        self._device.host_fence(Fence.STAGING_HOST_FREE, self.uploaded)
        self._begin = self._used = self._head
        self._spills = []

    def forget(self) -> None:
        """Nothing is taken to be on the device: an upload may have been left out."""
        self._batch[:] = -2

    def put_batch(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """The step's rows, at most max_rows. Returns their device side."""
        count = len(rows)
        if not np.array_equal(self._batch[:count], rows):
            self._batch[:count] = rows
            self._begin = 0
        return self._dev_batch[:count]

    def pad_batch(self, count: int, width: int) -> None:
        """-1 behind the `count` rows, up to `width`."""
        padding = self._batch[count:width]
        if not (padding == -1).all():
            padding[:] = -1
            self._begin = 0

    def put(self, values: Column) -> torch.Tensor:
        """Packs a column; returns its device side, which COMPUTE may read in this step only."""
        size = values.nbytes
        start = self._used
        if start + size > self.capacity:
            return self.put_apart(values)
        self._used = -(-(start + size) // _ALIGN) * _ALIGN
        self._host_bytes[start : start + size] = values.reshape(-1).view(np.uint8)
        return self._dev[start : start + size].view(_DTYPES[values.dtype]).view(values.shape)

    def put_apart(self, values: Column) -> torch.Tensor:
        """Like `put`, in memory of its own: for what does not fit."""
        host = self._device.pinned(values.nbytes)
        host.numpy()[:] = values.reshape(-1).view(np.uint8)
        dev = self._device.scratch(values.nbytes)
        self._spills.append((host, dev))
        return dev.view(_DTYPES[values.dtype]).view(values.shape)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to upload. Where there is not, nothing of an earlier upload is in flight either."""
        return self._begin < self._used or bool(self._spills)

    def upload(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Enqueues the copy to the device and makes COMPUTE wait for it. Returns memory the step must keep alive."""
        device, spills = self._device, self._spills
        begin, end = self._begin, min(self._used, self.capacity)
        device.fence(Fence.STAGING_DEVICE_FREE, Stream.COPY_IN, self.consumed)

        def copy() -> None:
            if begin < end:
                self._dev[begin:end].copy_(self._host[begin:end], non_blocking=True)
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
    """depth + 1 slots: one is written by the host while `depth` steps are in flight.

    batches: int64 [slots, max_rows], each slot's batch on the device, which is where graphs find it.
    """

    def __init__(self, device: Device, depth: int, capacity: int, max_rows: int) -> None:
        """capacity: bytes for columns beside the batch."""
        head = -(-8 * max_rows // _ALIGN) * _ALIGN
        data = device.zeros(depth + 1, head + -(-capacity // _ALIGN) * _ALIGN, dtype=torch.uint8)
        self.batches = data.view(torch.int64)[:, :max_rows]
        self.batches.fill_(-1)
        self.slots = [StagingSlot(device, dev, head // 8) for dev in data]

    def take(self, number: int) -> StagingSlot:
        slot = self.slots[number]
        slot.begin()
        return slot

    def forget(self) -> None:
        for slot in self.slots:
            slot.forget()


class OutputSlot:
    """What one step says of each of its rows: int64 [2, max_rows]: token and status, by place in the batch.

    A device side and a host side, of rings of their own. `number`: the device side's.
    """

    def __init__(self, device: Device, number: int, device_side: "_DeviceOutput", host_side: torch.Tensor) -> None:
        self._device = device
        self._device_side = device_side
        self._host = host_side
        self.number = number
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

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.copied: Event | None = None


class OutputRing:
    """depth + 1 device sides, depth + 2 host sides.

    A host side is written by COPY_OUT and read by the waiter only after that (RESULT_READY). It is written again by
    the step depth + 2 later, which the runner refuses to launch before the result was collected: `depth` steps are in
    flight, one is being read by the waiter, one is being launched. The device sides need no place for the one being
    read; where the copy out is late, COMPUTE waits for it. `values`: the device sides, int64 [depth + 1, 2, max_rows].
    """

    def __init__(self, device: Device, depth: int, max_rows: int) -> None:
        self._device = device
        self.values = device.zeros(depth + 1, 2, max_rows, dtype=torch.int64)
        self._device_sides = [_DeviceOutput(values) for values in self.values]
        self._host_sides = [
            device.pinned(2 * max_rows * 8).view(torch.int64).view(2, max_rows) for _ in range(depth + 2)
        ]
        self._taken = 0

    def take(self, number: int) -> OutputSlot:
        """`number`: the device side. Called before the step's work is enqueued on COMPUTE, which waits until it is
        free."""
        side = self._device_sides[number]
        host = self._host_sides[self._taken % len(self._host_sides)]
        self._taken += 1
        self._device.fence(Fence.OUTPUT_DEVICE_FREE, Stream.COMPUTE, side.copied)
        return OutputSlot(self._device, number, side, host)


class StepRings:
    """Staging and output ring, which take turns together, and where a graph finds its place in both.

    `cursor`: int64 [1], on the device: the slot of the next step that is a graph. A graph reads it and moves it on, so
    the host sets it only behind a step that was none. Touched by COMPUTE alone; `at` is what the host takes it to be,
    written by work on COMPUTE, None: unknown.
    """

    def __init__(self, device: Device, depth: int, staging_bytes: int, max_rows: int) -> None:
        self.num_slots = depth + 1
        self.staging = StagingRing(device, depth, staging_bytes, max_rows)
        self.output = OutputRing(device, depth, max_rows)
        self.cursor = device.zeros(1, dtype=torch.int64)
        self.at: int | None = None
        self._next = 0

    def next_number(self) -> int:
        """Of the slots the next step takes."""
        number = self._next
        self._next = (number + 1) % self.num_slots
        return number

    def forget(self) -> None:
        """After a failure: nobody knows what is where."""
        self.at = None
        self.staging.forget()


# Columns of RowState.floats and RowState.ints.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
SEED, TOP_K = range(2)


class RowState:
    """Device state by row. Row num_rows, the last, is the padding row: what padding reads and writes.

    Touched by COMPUTE alone, so its order is the plans' order. A row's values are complete after the scatter of the
    step that admits it; released rows keep stale values nobody reads. All fields of fixed size lie in one memory,
    `words`, where RowLayout says, so that one scatter writes whatever changes.
    """

    def __init__(self, device: Device, num_rows: int, max_blocks: int, null_block: int, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.num_rows = num_rows
        self.pad_row = num_rows
        total = num_rows + 1
        self.layout = layout = RowLayout(num_rows, max_blocks)
        self.words = device.zeros(layout.num_words, dtype=torch.int32)

        def field(start: int, size: int) -> torch.Tensor:
            return self.words[start : start + size * total]

        # Tokens known or sampled, from 1. The device owns it while a row decodes: sampling adds 1.
        self.length = field(layout.length, 2).view(torch.int64)
        self.length.fill_(1)
        # The token at length - 1, where the host gave it or the sampler wrote it.
        self.last_token = field(layout.last_token, 2).view(torch.int64)
        self.ints = field(layout.ints, 4).view(torch.int64).view(total, 2)
        # Shorter rows do not take the tokens that `stops` marks.
        self.min_length = field(layout.min_length, 2).view(torch.int64)
        self.floats = field(layout.floats, 6).view(torch.float32).view(total, 6)
        # What the row's logits are changed by before a token is chosen: RowNeeds PENALTIES, BIAS and MIN_TOKENS.
        self.changes = field(layout.changes, 1)
        # Not 0 when a row's numbers were not finite; such a row is padding until it is admitted anew.
        self.dead = field(layout.dead, 1)
        # Entries without a block name the null block.
        self.block_tables = field(layout.tables, max_blocks).view(total, max_blocks)
        self.block_tables.fill_(null_block)
        self.flat_tables = self.block_tables.view(-1)
        # By row and token, made when the first row needs them, which is no steady step, or in the warm-up.
        self.output_counts: torch.Tensor | None = None
        self.in_prompt: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.stops: torch.Tensor | None = None

    def ensure_penalties(self) -> tuple[torch.Tensor, torch.Tensor]:
        """output_counts: int32, in_prompt: bool, both [num_rows + 1, vocab]."""
        if self.output_counts is None or self.in_prompt is None:
            self.output_counts = self._by_token(torch.int32)
            self.in_prompt = self._by_token(torch.bool)
        return self.output_counts, self.in_prompt

    def ensure_masks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bias: float32, -inf for tokens a row may not take; stops: bool, tokens it may not end with yet. Both
        [num_rows + 1, vocab]."""
        if self.bias is None or self.stops is None:
            self.bias = self._by_token(torch.float32)
            self.stops = self._by_token(torch.bool)
        return self.bias, self.stops

    def _by_token(self, dtype: torch.dtype) -> torch.Tensor:
        return self._device.zeros(self.num_rows + 1, self._vocab_size, dtype=dtype)

    def effective(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows to work on: -1 and dead rows become the padding row."""
        rows = torch.where(rows < 0, self.pad_row, rows)
        return torch.where(self.dead[rows] != 0, self.pad_row, rows)
