"""The executor that runs a model on a device: plans in, tokens out, nothing waited for in between.

Threads: one calls everything but `PendingStep.wait`; another calls that. What they share is said at each field.
"""

import secrets
import threading
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from common.clock import Clock, SystemClock
from common.messages import ExecutorInfo, Hello, PlanErrorCode, StepMode, StepPlan, StepResult, Timings
from executor_svc.buffers import OutputSlot, RowState, StepRings
from executor_svc.device_step import DeviceStep
from executor_svc.graph_cache import GraphCache, GraphShape, Variant
from executor_svc.input_batch import Batch, make_batch
from executor_svc.kv_cache import KvCache
from executor_svc.memory_errors import lacks_memory
from executor_svc.plan_check import PlanCheck
from executor_svc.results import collect_outputs, make_result
from executor_svc.rows import HostRow, RowBook
from executor_svc.staging import Stager
from executor_svc.step_costs import StepCosts
from executor_svc.step_executor import PlanRefused, refused
from executor_svc.step_inputs import StepInputs, StepOutputs
from executor_svc.step_model import Model
from executor_svc.streams import Device, Event, Fence, Stream


@dataclass(slots=True, eq=False)
class LaunchedStep:
    """A step from launch to result. Made by the runner thread; read by the waiter once `done` is reached.

    `host_outputs` is filled by COPY_OUT. Everything the device still reads is referenced from here.
    """

    runner: "Runner"
    plan: StepPlan
    batch: Batch
    inputs: StepInputs | None
    rows: list[HostRow]
    slot: OutputSlot
    timings: Timings
    mode: StepMode
    bucket: int
    kept: list[object] = field(default_factory=list)
    outputs: StepOutputs = field(default_factory=StepOutputs)
    host_outputs: list[torch.Tensor] = field(default_factory=list)
    copied: bool = False
    copy_in_start: Event | None = None
    copy_in_end: Event | None = None
    device_start: Event | None = None
    device_end: Event | None = None
    done: Event | None = None
    abandoned: bool = False

    def wait(self) -> StepResult:
        return self.runner.collect(self)


class Runner:
    """A StepExecutor. Build it with `executor_svc.build.build_runner`."""

    def __init__(
        self,
        *,
        info: ExecutorInfo,
        device: Device,
        step: DeviceStep,
        cache: KvCache,
        state: RowState,
        graphs: GraphCache,
        rings: StepRings,
        clock: Clock | None = None,
    ) -> None:
        """`cache`, `state` and `rings` are the step's own; the rings' depth is that of the pipeline."""
        self._info = info
        self._device = device
        self._step = step
        self._graphs = graphs
        self.cache = cache
        self.state = state
        self._clock = clock or SystemClock()
        self._incarnation = secrets.randbits(64) | 1
        self._last_scheduler_id = b""
        self.pipeline_depth = rings.num_slots - 1
        self._max_pending = self.pipeline_depth + 2
        self._rings = rings
        self._book = RowBook(info.num_rows, info.max_blocks_per_row, info.block_size, info.max_context)
        self._stager = Stager(
            self._book, state.layout, info.eos_ids, info.vocab_size, self._on_released, self._take_dirty,
            with_places=not step.has_kernels,
        )  # fmt: skip
        self._epoch = 0
        self._next_step_id = 1
        self._ended = True  # set by both threads, only ever to True within an epoch
        self._torn = False  # a plan went into the book, but not wholly to the device
        self._closed = False
        # Guards what both threads touch: `failed` and `freed_blocks` of rows, the set below, and the pending steps.
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._pending: deque[LaunchedStep] = deque()
        self._last_device_end: Event | None = None  # the waiter's

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def tell_costs(self, costs: StepCosts) -> None:
        """Before anybody asked for `info`."""
        self._info = replace(
            self._info,
            decode_step_ns=costs.step_ns,
            decode_row_ns=costs.row_ns,
            prefill_token_ns=costs.token_ns,
        )

    @property
    def model(self) -> Model:
        """For reading."""
        return self._step.model

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def num_occupied_rows(self) -> int:
        return int(self._book.occupied.sum())

    def begin_epoch(self, hello: Hello) -> bool:
        self._device.synchronize()
        with self._lock:
            left = list(self._pending)
            self._pending.clear()
        for step in left:
            # Nobody will wait for these, but what they say of blocks still counts.
            step.abandoned = True
            self._note_failures(step, step.slot.host_values[1, : step.batch.num_rows])
        whole = self._device.failure is None and not self._torn
        self._device.recover()
        self._torn = False
        if not whole:
            self._rings.forget()
        for row in np.flatnonzero(self._book.occupied).tolist():
            self._on_released(self._book.release(row), self._book.blocks_of(row))
        self._book.clear()
        self._epoch, self._next_step_id, self._ended = hello.epoch, 1, False
        # Another scheduler may have written anything into blocks that this one believes its own.
        own = hello.scheduler_id == self._last_scheduler_id
        self._last_scheduler_id = hello.scheduler_id
        kept = whole and own and hello.keep_kv and hello.known_incarnation == self._incarnation
        if not kept:
            # A failed device may have left anything anywhere.
            self._stager.dirty_blocks.update(range(self._info.num_blocks) if not whole else ())
        return kept

    # ---------------------------------------------------------------------------------------------------- execute

    def execute(self, plan: StepPlan, received_ns: int) -> LaunchedStep:
        prepare_start_ns = self._clock.monotonic_ns()
        try:
            self._check(plan)
        except PlanRefused as refusal:
            if refusal.error.code is not PlanErrorCode.STALE_EPOCH:
                self._ended = True
            raise
        self._next_step_id += 1
        try:
            return self._launch(plan, received_ns, prepare_start_ns)
        except (RuntimeError, MemoryError) as error:  # for what the staging ring has no room for, say
            self._ended = self._torn = True
            if not lacks_memory(error):
                raise
            raise _refuse_failed(plan, error) from error

    def _check(self, plan: StepPlan) -> None:
        if self._closed or plan.epoch != self._epoch:
            raise refused(plan, PlanErrorCode.STALE_EPOCH, f"the epoch is {self._epoch}")
        if self._ended or self._device.failure is not None:
            raise refused(plan, PlanErrorCode.EPOCH_ENDED, "an earlier plan of this epoch failed")
        if plan.step_id != self._next_step_id:
            text = f"step {self._next_step_id} is next"
            raise refused(plan, PlanErrorCode.STEP_GAP, text, field="step_id", limit=self._next_step_id)
        if len(self._pending) >= self._max_pending:
            text = f"{len(self._pending)} steps wait to be collected"
            raise refused(plan, PlanErrorCode.BUDGET, text, limit=self._max_pending)
        PlanCheck(self._info, self._book, plan).run()

    def _launch(self, plan: StepPlan, received_ns: int, prepare_start_ns: int) -> LaunchedStep:
        device = self._device
        number = self._rings.next_number()
        staging = self._rings.staging.take(number)
        changes = self._stager.apply(plan, staging)
        batch = make_batch(plan, self._book)
        inputs = self._stager.inputs(plan, batch, staging) if batch.num_rows else None
        self._stager.advance(batch)
        shape = self._find_shape(batch, inputs)
        mode = StepMode.NONE if inputs is None else StepMode.EAGER
        if shape is not None:
            mode = StepMode.SPLIT if shape.variant is Variant.FORWARD else StepMode.GRAPH
            staging.pad_batch(batch.num_rows, shape.rows)
        slot = self._rings.output.take(number)
        step = LaunchedStep(
            runner=self,
            plan=plan,
            batch=batch,
            inputs=inputs,
            rows=self._book.rows[batch.rows].tolist(),
            slot=slot,
            timings=Timings(received_ns, prepare_start_ns, self._clock.monotonic_ns()),
            mode=mode,
            bucket=0 if shape is None else shape.rows,
        )
        if staging.has_news:
            step.copy_in_start = device.record(Stream.COPY_IN)
            step.kept.extend(staging.upload())
            step.copy_in_end = staging.uploaded

        def compute() -> None:
            if changes is not None:
                self._step.apply(changes)
            if inputs is not None:
                step.outputs = self._step.run(inputs, number, shape)

        def copy_out() -> None:
            for tensor in step.outputs.tensors():
                tensor = tensor.contiguous()
                host = device.pinned(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
                host.copy_(tensor, non_blocking=True)
                step.kept.append(tensor)
                step.host_outputs.append(host)
            step.copied = True

        step.device_start = device.record(Stream.COMPUTE)
        device.enqueue(Stream.COMPUTE, compute)
        step.device_end = device.record(Stream.COMPUTE)
        staging.finish(step.device_end)
        step.done = slot.download(step.device_end, batch.num_rows, copy_out)
        self._pending.append(step)
        step.timings = replace(step.timings, launched_ns=self._clock.monotonic_ns())
        return step

    def _find_shape(self, batch: Batch, inputs: StepInputs | None) -> GraphShape | None:
        if inputs is None or not batch.is_pure_decode:
            return None
        found = self._graphs.find(batch.num_rows, inputs.context, self._step.variant_for(inputs))
        return None if found is None else found[0]

    # ---------------------------------------------------------------------------------------------- waiter thread

    def collect(self, step: LaunchedStep) -> StepResult:
        """The body of PendingStep.wait."""
        reached = self._device.host_fence(Fence.RESULT_READY, step.done)
        if step.abandoned:
            raise refused(step.plan, PlanErrorCode.EPOCH_ENDED, "a new epoch began")
        failure = self._device.failure
        # It may have come with a later step (out of memory at its launch, say): then this one's outputs stand.
        if failure is not None and not (reached and step.copied):
            self._ended = True
            raise _refuse_failed(step.plan, failure)
        count = step.batch.num_rows
        values = step.slot.host_values[:, :count].copy()
        with self._lock:
            if step in self._pending:
                self._pending.remove(step)
        self._note_failures(step, values[1])
        return make_result(
            step.plan,
            step.batch,
            step.rows,
            values,
            collect_outputs(step.plan, step.batch, step.rows, step.inputs, step.host_outputs, values[1]),
            timings=self._timings(step),
            mode=step.mode,
            bucket=step.bucket,
        )

    def _note_failures(self, step: LaunchedStep, status: NDArray[np.int64]) -> None:
        """Blocks of failed rows may hold NaN; once such a row is released they count as dirty."""
        if step.inputs is None or bool(status.all()):
            return
        with self._lock:
            for at in np.flatnonzero(status == 0).tolist():
                row = step.rows[at]
                row.failed = True
                if row.freed_blocks is not None:
                    self._dirty.update(row.freed_blocks.tolist())

    def _on_released(self, row: HostRow, blocks: NDArray[np.int32]) -> None:
        with self._lock:
            row.freed_blocks = blocks
            if row.failed:
                self._dirty.update(blocks.tolist())

    def _take_dirty(self) -> set[int]:
        if not self._dirty:
            return set()
        with self._lock:
            taken, self._dirty = self._dirty, set()
        return taken

    def _timings(self, step: LaunchedStep) -> Timings:
        def at(event: Event | None) -> int:
            return 0 if event is None else event.time_ns()

        has_work = step.inputs is not None
        start, end = at(step.device_start), at(step.device_end)
        # Asked anew: between two steps the device may have set its clock.
        last_end = at(self._last_device_end)
        idle = max(0, start - last_end) if has_work and last_end else 0
        if has_work:
            self._last_device_end = step.device_end
        return replace(
            step.timings,
            copy_in_start_ns=at(step.copy_in_start),
            copy_in_end_ns=at(step.copy_in_end),
            device_start_ns=start if has_work else 0,
            device_end_ns=end if has_work else 0,
            copy_out_end_ns=at(step.done),
            device_idle_ns=idle,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._device.synchronize()
            self._device.close()


def _refuse_failed(plan: StepPlan, failure: BaseException) -> PlanRefused:
    text = f"{type(failure).__name__}: {failure}"
    code = PlanErrorCode.OUT_OF_MEMORY if lacks_memory(failure) else PlanErrorCode.DEVICE_FAILED
    return refused(plan, code, text)
