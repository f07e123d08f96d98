"""A StepExecutor with real block storage and no model.

It writes each computed token into its slot through the row's block table and derives the next token from the sequence
READ BACK through that table, so that a wrong block, row, table or fence changes tokens. Like a device with slow
copies, it repeats a step's writes when the step's result is collected: a block or row given away while a step that
names it is in flight is overwritten, which is what limbo must prevent.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from common.messages import (
    F32,
    U32,
    Admit,
    ExecutorInfo,
    Extend,
    Hello,
    Output,
    OutputKind,
    PlanErrorCode,
    RowError,
    RowErrorCode,
    StepMode,
    StepPlan,
    StepResult,
    u32,
)
from executor_svc.step_executor import PlanRefused, refused
from tests.fakes.toy_tokens import (
    best,
    choose_token,
    log_softmax,
    logprob_columns,
    made_up_timings,
    prompt_record,
    toy_logits,
)
from tests.fakes.toy_validation import PlanCheck, ToyRow

POISON = 0xFFFFFFFF


def toy_info(**overrides: object) -> ExecutorInfo:
    """A small executor; any field of ExecutorInfo may be given."""
    values: dict[str, object] = {
        "model_id": "toy",
        "model_hash": "toy-0",
        "vocab_size": 1000,
        "eos_ids": (2,),
        "num_rows": 80,
        "max_num_seqs": 16,
        "max_blocks_per_row": 64,
        "block_size": 4,
        "num_blocks": 256,
        "max_tokens_per_step": 64,
        "max_context": 256,
        "numerics": "exact",
        "features": ("raw_logits", "prompt_logprobs", "logprobs"),
        "device": "toy",
    }
    values.update(overrides)
    if "max_context" not in overrides:
        values["max_context"] = int(str(values["max_blocks_per_row"])) * int(str(values["block_size"]))
    return ExecutorInfo(**values)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Step:
    """One pending step. `writes`: (slots, tokens) of the storage; `sampled`: (row, position, token); `copied`: (slots,
    tokens) of the blocks it copied from, as far as the copies are used."""

    executor: "ToyExecutor"
    result: StepResult
    plan: StepPlan
    writes: list[tuple[NDArray[np.int64], U32]] = field(default_factory=list)
    sampled: list[tuple[int, int, int]] = field(default_factory=list)
    copied: list[tuple[NDArray[np.int64], U32]] = field(default_factory=list)
    errors: list[RowError] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    logprobs: list[tuple[int, float, U32, F32]] = field(default_factory=list)

    def wait(self) -> StepResult:
        return self.executor.collect(self)


class ToyExecutor:
    """See the module. Thread-safe as the seam demands (execute and wait in different threads).

    eos_chance: how often a token is EOS. nan_token: a sequence that contains it gets a row error instead of a token.
    fail_rows: rows that get a row error when next computed (tests add to it). fail_steps: step ids whose wait raises
    DEVICE_FAILED. on_wait: called with the plan, outside the lock, before a result is given (to delay it).
    keep_kv: whether this executor agrees to keep blocks. corrupt_reads counts sequences whose tokens read back through
    the block table were not the row's; limbo_violations rows taken while a step naming them was in flight, and blocks
    written while a step that copies from them was.
    """

    def __init__(
        self,
        info: ExecutorInfo | None = None,
        *,
        eos_chance: float = 0.0,
        nan_token: int | None = None,
        incarnation: int = 0x70F,
        keep_kv: bool = True,
        max_depth: int = 8,
        on_wait: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self._info = info or toy_info()
        self._incarnation = incarnation
        self.eos_chance = eos_chance
        self.nan_token = nan_token
        self._on_wait = on_wait
        self._lock = threading.Lock()
        self._storage: U32 = np.full(self._info.num_blocks * self._info.block_size, POISON, dtype=np.uint32)
        self._rows: dict[int, ToyRow] = {}
        self._pending: list[_Step] = []
        self._seen_admissions: set[int] = set()  # of the present scheduler, which never uses one twice
        self._scheduler_id = b""
        self._epoch = 0
        self._ended = True
        self._next_step = 1
        self._depth = 1
        self._max_depth = max_depth
        self.keep_kv = keep_kv
        self.fail_rows: set[int] = set()
        self.fail_steps: set[int] = set()
        self.corrupt_reads = 0
        self.limbo_violations = 0
        self.closed = False

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def rows_in_use(self) -> int:
        return len(self._rows)

    def forget_admissions(self) -> None:
        """All that a toy keeps of what is over: from now on an admission id used twice is noticed among later ones."""
        with self._lock:
            self._seen_admissions.clear()

    def begin_epoch(self, hello: Hello) -> bool:
        with self._lock:
            for step in self._pending:
                self._finish_writes(step)
            self._pending.clear()
            self._rows.clear()
            own = hello.scheduler_id == self._scheduler_id
            if not own:
                self._scheduler_id = hello.scheduler_id
                self._seen_admissions.clear()
            kept = own and self.keep_kv and hello.keep_kv and hello.known_incarnation == self._incarnation
            if not kept:
                self._storage[:] = POISON
            self._epoch, self._ended, self._next_step = hello.epoch, False, 1
            self._depth = min(hello.pipeline_depth, self._max_depth)
            return kept

    def execute(self, plan: StepPlan, received_ns: int) -> _Step:
        with self._lock:
            try:
                rows = self._checked(plan)
            except PlanRefused:
                if plan.epoch == self._epoch:
                    self._ended = True
                raise
            copied = self._apply(plan, rows)
            step = self._compute(plan, received_ns)
            step.copied = copied
            self._pending.append(step)
            return step

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._ended = True
            self._rows.clear()
            self._pending.clear()

    def collect(self, step: _Step) -> StepResult:
        """The body of PendingStep.wait."""
        if self._on_wait is not None:
            self._on_wait(step.plan)
        with self._lock:
            if step in self._pending:
                self._finish_writes(step)
                self._pending.remove(step)
            if step.plan.step_id in self.fail_steps:
                self._ended = True
                raise refused(step.plan, PlanErrorCode.DEVICE_FAILED, "the toy device was told to fail")
            return step.result

    def _finish_writes(self, step: _Step) -> None:
        self.limbo_violations += sum(not np.array_equal(self._storage[s], tokens) for s, tokens in step.copied)
        for slots, tokens in step.writes:
            self._storage[slots] = tokens
        for row, position, token in step.sampled:
            if row in self._rows:
                self._rows[row].tokens[position] = token

    # ------------------------------------------------------------------------------------------------------- plan

    def _checked(self, plan: StepPlan) -> dict[int, ToyRow | None]:
        if plan.epoch != self._epoch:
            raise refused(plan, PlanErrorCode.STALE_EPOCH, f"the epoch is {self._epoch}")
        if self._ended:
            raise refused(plan, PlanErrorCode.EPOCH_ENDED, "an earlier plan of this epoch failed")
        if plan.step_id != self._next_step:
            raise refused(plan, PlanErrorCode.STEP_GAP, f"expected step {self._next_step}", limit=self._next_step)
        if len(self._pending) >= self._depth:
            raise refused(plan, PlanErrorCode.BUDGET, "too many plans in flight", limit=self._depth)
        return PlanCheck(self._info, self._rows, self._seen_admissions, plan).run()

    def _apply(self, plan: StepPlan, rows: dict[int, ToyRow | None]) -> list[tuple[NDArray[np.int64], U32]]:
        self._next_step += 1
        named = {int(r) for s in self._pending for r in (*s.plan.decode_rows.tolist(), *s.plan.prefill_rows.tolist())}
        self.limbo_violations += sum(1 for a in plan.admit if a.row in named)
        for row, state in rows.items():
            if state is None:
                del self._rows[row]
            else:
                self._rows[row] = state
        for admit in plan.admit:
            self._write_known(admit)
        for extend in plan.extend:
            self._write_known(extend)
        self._seen_admissions.update(a.admission_id for a in plan.admit)
        size = self._info.block_size
        blocks = self._storage.reshape(-1, size)
        copied = []
        for source, target in zip(plan.copy_sources.tolist(), plan.copy_targets.tolist(), strict=True):
            blocks[target] = blocks[source]
            for admit in plan.admit:
                for index in np.flatnonzero(admit.blocks == target).tolist():
                    slots = source * size + np.arange(min(size, admit.computed_len - index * size))
                    copied.append((slots, self._storage[slots]))
        return copied

    def _write_known(self, piece: Admit | Extend) -> None:
        offset = piece.offset if isinstance(piece, Extend) else 0
        self._rows[piece.row].tokens[offset : offset + len(piece.tokens)] = piece.tokens

    def _slots(self, state: ToyRow, start: int, end: int) -> NDArray[np.int64]:
        positions = np.arange(start, end)
        size = self._info.block_size
        slots: NDArray[np.int64] = state.table[positions // size].astype(np.int64) * size + positions % size
        return slots

    # ---------------------------------------------------------------------------------------------------- compute

    def _compute(self, plan: StepPlan, received_ns: int) -> _Step:
        step = _Step(self, StepResult(plan.epoch, plan.step_id), plan)
        columns = zip(
            plan.prefill_rows.tolist(), plan.prefill_starts.tolist(), plan.prefill_counts.tolist(), strict=True
        )
        work = [*columns, *((row, self._rows[row].length - 1, 1) for row in plan.decode_rows.tolist())]
        for row, start, count in sorted(work):
            if not self._rows[row].dead:
                self._compute_row(step, row, start, count)
        step.result = replace(
            step.result,
            emitted_rows=u32(row for row, _, _ in step.sampled),
            tokens=u32(token for _, _, token in step.sampled),
            logprobs=logprob_columns(step.logprobs),
            row_errors=tuple(step.errors),
            timings=made_up_timings(received_ns),
            mode=StepMode.EAGER if work else StepMode.NONE,
            output_bytes=sum(len(o.data) for o in step.outputs),
            outputs=tuple(step.outputs),
        )
        return step

    def _compute_row(self, step: _Step, row: int, start: int, count: int) -> None:
        """Writes the tokens of [start, start + count) and, where they reach the last known one, adds the next."""
        state = self._rows[row]
        tokens = state.tokens[start : start + count].copy()
        slots = self._slots(state, start, start + count)
        self._storage[slots] = tokens
        step.writes.append((slots, tokens))
        state.computed = start + count
        sequence = self._storage[self._slots(state, 0, state.computed)]
        self.corrupt_reads += not np.array_equal(sequence, state.tokens[: state.computed])
        if row in self.fail_rows or (self.nan_token is not None and self.nan_token in sequence):
            self.fail_rows.discard(row)
            state.dead = True
            step.errors.append(RowError(row, state.admission_id, RowErrorCode.NOT_FINITE, "the toy logits are NaN"))
            return
        step.outputs += self._prompt_logprobs(step.plan.step_id, row, state, sequence, start)
        if state.computed == state.length:
            self._sample(step, row, state, sequence)

    def _sample(self, step: _Step, row: int, state: ToyRow, sequence: U32) -> None:
        info, sampling, position = self._info, state.sampling, state.length
        token = choose_token(sequence, state.prompt_len, sampling, info.vocab_size, info.eos_ids, self.eos_chance)
        raw = row in step.plan.raw_logits_rows
        if raw or sampling.num_logprobs:
            logits = toy_logits(sequence, info.vocab_size, info.eos_ids)
            if raw:
                data, kind = logits.astype("<f4").tobytes(), OutputKind.RAW_LOGITS
                step.outputs.append(Output(step.plan.step_id, kind, row, state.admission_id, position, 1, data))
            if sampling.num_logprobs:
                lps = log_softmax(logits)
                top = best(lps, sampling.num_logprobs - 1)
                step.logprobs.append((row, float(lps[token]), top, lps[top]))
        state.tokens[position] = token
        step.sampled.append((row, position, token))
        state.length = state.filled = position + 1

    def _prompt_logprobs(self, step_id: int, row: int, state: ToyRow, sequence: U32, start: int) -> list[Output]:
        """Records of the wanted prompt positions whose predecessor was computed in [start, len(sequence))."""
        n = state.sampling.num_prompt_logprobs
        first, last = state.wanted_prompt(start, len(sequence))
        if first > last:
            return []
        data = b"".join(
            prompt_record(
                sequence[:position], int(state.tokens[position]), n, self._info.vocab_size, self._info.eos_ids
            )
            for position in range(first, last + 1)
        )
        count = last - first + 1
        return [Output(step_id, OutputKind.PROMPT_LOGPROBS, row, state.admission_id, first, count, data)]


def crashed(executor: ToyExecutor, info: ExecutorInfo | None = None) -> ToyExecutor:
    """A fresh process in place of `executor`: the same settings, another incarnation, nothing kept."""
    return ToyExecutor(
        info or executor.info,
        eos_chance=executor.eos_chance,
        nan_token=executor.nan_token,
        incarnation=executor.incarnation + 1,
        keep_kv=executor.keep_kv,
    )
