"""The first steps, of padding alone: after them all is made that is made at its first use, and what memory steps and
graphs take is known.

A device with memory of its own goes through them twice. First with a cache of one block, to find what must be held back
from the cache: memory that steps took is measured, and of graphs that of three buckets, the largest, the one below it
and the smallest; every other bucket takes about as much as the latter two, because what graphs share lies in the memory
of the largest and the rest is the driver's, by the number of kernels. (Bytes by the size of weights and batch would
know neither the driver's part nor what torch's allocator leaves unused between its blocks.) Then with the real cache.

What is not tried: long contexts of a backend that gathers keys, beyond those graphs are made for. Memory for as many
rows as long as they may be is often more than the device has, where the cache holds no such step anyway.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.errors import ConfigError
from executor_svc.device_step import DeviceStep
from executor_svc.graph_cache import GraphCache, GraphShape
from executor_svc.load_progress import Progress
from executor_svc.memory_errors import lacks_memory
from executor_svc.streams import Device, DeviceMemory, Stream

log = logging.getLogger(__name__)

MIB = 1 << 20
# What a step runs with, for a cache of any size.
Steps = tuple[DeviceStep, GraphCache]


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes held back from the cache, for steps and for graphs."""

    steps: int
    graphs: int

    @property
    def total(self) -> int:
        return self.steps + self.graphs

    def __str__(self) -> str:
        return f"{self.steps} bytes are held back for steps and {self.graphs} for graphs"


@dataclass(frozen=True, slots=True)
class WarmUp:
    """`max_tokens`: of a step. `context`: of a row, which no chunk is longer than."""

    device: Device
    max_num_seqs: int
    max_tokens: int
    context: int
    say: Progress

    def measure(self, make: Callable[[], Steps], memory: DeviceMemory) -> Held:
        """What steps made by `make`, with the smallest cache, take. Nothing of them is left. Raises ConfigError."""
        held = self._try(make, memory)
        gc.collect()  # a step and its graphs hold each other
        memory.give_back()
        log.info("%s", held)
        return held

    def _try(self, make: Callable[[], Steps], memory: DeviceMemory) -> Held:
        free = memory.free_bytes()
        step, graphs = make()
        self._run_padding(step)
        steps = _at_least_0(free - memory.free_bytes())
        rows = graphs.row_buckets[::-1]
        if not rows:
            return Held(steps, 0)
        shared, sample, others = rows[:1], rows[1:2] + rows[2:][-1:], len(rows) - 1
        first = self._capture(step, graphs, shared, "measuring graphs")
        each = self._capture(step, graphs, sample, "measuring graphs")
        return Held(steps, first + -(-each * others // max(1, len(sample))))

    def run(self, step: DeviceStep, graphs: GraphCache, held: Held | None) -> None:
        """With the real cache. `held`: as measured. Raises ConfigError."""
        self._run_padding(step)
        if graphs.row_buckets:
            begin = time.perf_counter()
            taken = self._capture(step, graphs, graphs.row_buckets[::-1], "capturing graphs")
            seconds = time.perf_counter() - begin
            kept = "" if held is None else f"; {held.graphs / MIB:.1f} MiB were held back"
            log.info("%d graphs captured in %.1f s, %.1f MiB%s", graphs.num_graphs, seconds, taken / MIB, kept)

    def _run_padding(self, step: DeviceStep) -> None:
        """Steps of every kind, the largest among them; contexts are as short as can be."""
        has_memory = self.device.memory is not None

        def work() -> None:
            # Two: one that decodes beside a chunk, whose keys are split whatever the model.
            for rows in sorted({min(count, self.max_num_seqs) for count in (1, 2, 8, self.max_num_seqs)}, reverse=True):
                for full in (False, True) if has_memory else (False,):
                    step.run_padding(rows, full=full)
                    if has_memory:  # where kernels are compiled when they are first used, each for every way to call it
                        step.run_padding(rows, largest_chunks(rows, self.max_tokens, self.context), full=full)

        self.say("warming up", 0, 1)
        self._do(work, "the largest step")
        self.say("warming up", 1, 1)

    def _capture(self, step: DeviceStep, graphs: GraphCache, rows: Sequence[int], activity: str) -> int:
        """Graphs of buckets of `rows`, descending. Returns the bytes they took."""
        memory = _Taken(self.device.memory)

        def say(shape: GraphShape, done: int, total: int) -> None:
            detail = f"{shape.rows} rows, {shape.variant.name.lower()}"
            self.say(activity, done, total, detail if memory.own is None else f"{detail}, {memory.now() / MIB:.0f} MiB")

        def work() -> None:
            if not graphs.num_graphs:
                step.prepare_graphs(graphs.row_buckets[-1])
            graphs.capture(rows, step.body, self.device.torch_device, step.variants, say)

        self._do(work, "every graph")
        return memory.now()

    def _do(self, work: Callable[[], None], what: str) -> None:
        device = self.device
        device.enqueue(Stream.COMPUTE, work)
        device.synchronize()
        failure = device.failure
        if failure is not None and lacks_memory(failure):
            raise ConfigError(
                f"there is no memory for {what}: lower max_tokens_per_step ({self.max_tokens}), max_num_seqs "
                f"({self.max_num_seqs}) or the cache, or free memory: {failure}",
                field="max_tokens_per_step",
            ) from failure
        if failure is not None:
            raise ConfigError(f"warm-up failed: {failure}", field="device") from failure


@dataclass(slots=True)
class _Taken:
    """Bytes taken since it was made."""

    own: DeviceMemory | None
    _free: int = field(init=False)

    def __post_init__(self) -> None:
        self._free = 0 if self.own is None else self.own.free_bytes()

    def now(self) -> int:
        return 0 if self.own is None else _at_least_0(self._free - self.own.free_bytes())


def _at_least_0(taken: int) -> int:
    """Others use the device too, and may give memory back meanwhile."""
    return max(0, taken)


def largest_chunks(num_rows: int, max_tokens: int, context: int) -> list[int]:
    """Chunks of the first rows of the largest step that so many rows can make; one row, if there are several, has no
    chunk but decodes."""
    chunks: list[int] = []
    left = max_tokens - num_rows  # beyond a token of each
    while not chunks or (left > 0 and len(chunks) < num_rows - 1):
        chunks.append(max(1, min(left + 1, context)))
        left -= chunks[-1] - 1
    return chunks
