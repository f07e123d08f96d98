"""A plan in the making, and what is left of the step's budgets."""

from dataclasses import dataclass, field

import numpy as np

from common.messages import EMPTY_U32, MAX_EXTEND_TOKENS, U32, Admit, Extend, Sampling, StepPlan, u32
from scheduler_svc.core.executor_state import ExecutorState, Flight
from scheduler_svc.core.rows import I64
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.observer import StepRecord

_NONE: I64 = np.empty(0, dtype=np.int64)
_FIXED_BYTES = 512  # of an Admit or Extend, everything that is no column, generously


def _column(values: list[int]) -> U32:
    return u32(values) if values else EMPTY_U32


def sampling_bytes(sampling: Sampling) -> int:
    """An upper bound of what the sampling parameters take on the wire."""
    columns = 4 * len(sampling.stop_ids) + 8 * len(sampling.bias) + 4 * len(sampling.allowed_ids)
    return _FIXED_BYTES + columns + len(sampling.grammar.encode())


def admit_bytes(num_tokens: int, num_blocks: int, sampling: Sampling) -> int:
    return 4 * min(num_tokens, MAX_EXTEND_TOKENS) + 4 * num_blocks + sampling_bytes(sampling)


def extend_bytes(num_tokens: int) -> int:
    return 4 * num_tokens + _FIXED_BYTES


@dataclass(slots=True)
class Draft:
    """tokens, wire_bytes, output_bytes: what the step may still take. raw: rows wanting raw logits and the position of
    the token they choose. copies: (block, block it is copied to). leaders: sequences whose prompt this plan completes
    and that others wait for. blocks_owed: what rows that sit out wait for."""

    executor: ExecutorState
    tokens: int
    wire_bytes: int
    output_bytes: int
    decode: I64 = field(default_factory=lambda: _NONE)
    grants: tuple[I64, I64, I64] = field(default_factory=lambda: (_NONE, _NONE, _NONE))
    admits: list[Admit] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    sampling_prefills: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    leaders: list[Sequence] = field(default_factory=list)
    blocks_owed: int = 0
    raw: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, executor: ExecutorState) -> "Draft":
        return cls(executor, executor.max_tokens, executor.max_wire_bytes, executor.max_output_bytes)

    @property
    def step_id(self) -> int:
        return self.executor.next_step

    @property
    def is_empty(self) -> bool:
        work = len(self.decode) or self.prefills or len(self.grants[0]) or self.admits or self.extends
        return not work and not self.executor.releases

    def finish(self, now_ns: int, trace_context: bytes, waiting: int) -> StepRecord:
        """Makes the plan, books it as in flight and returns its record."""
        executor, rows = self.executor, self.executor.rows
        self.prefills.sort()
        self.raw.sort()
        prefill_rows = [row for row, _, _ in self.prefills]
        prefill_tokens = sum(count for _, _, count in self.prefills)
        plan = StepPlan(
            epoch=executor.epoch,
            step_id=self.step_id,
            sent_ns=now_ns,
            num_tokens=prefill_tokens + len(self.decode),
            trace_context=trace_context,
            release=_column(executor.releases),
            admit=tuple(self.admits),
            extend=tuple(self.extends),
            grant_rows=u32(self.grants[0]),
            grant_indices=u32(self.grants[1]),
            grant_blocks=u32(self.grants[2]),
            copy_sources=_column([source for source, _ in self.copies]),
            copy_targets=_column([target for _, target in self.copies]),
            prefill_rows=_column(prefill_rows),
            prefill_starts=_column([start for _, start, _ in self.prefills]),
            prefill_counts=_column([count for _, _, count in self.prefills]),
            decode_rows=u32(self.decode),
            raw_logits_rows=_column([row for row, _ in self.raw]),
            raw_logits_positions=_column([position for _, position in self.raw]),
        )
        decode_keys = rows.keys[self.decode]
        prefill_keys = rows.keys[prefill_rows] if prefill_rows else decode_keys[:0]
        decode_keys.flags.writeable = prefill_keys.flags.writeable = False
        record = StepRecord(
            executor_id=executor.id,
            plan=plan,
            planned_ns=now_ns,
            decode_keys=decode_keys,
            prefill_keys=prefill_keys,
            decode_tokens=len(self.decode),
            prefill_tokens=prefill_tokens,
            running=executor.num_running,
            waiting=waiting,
            free_blocks=executor.pool.available,
        )
        expected = plan.decode_rows
        if self.sampling_prefills:
            expected = u32(np.sort(np.concatenate([self.decode, np.array(self.sampling_prefills, dtype=np.int64)])))
        ends = tuple((row, start + count) for row, start, count in self.prefills)
        executor.flights.append(Flight(self.step_id, record, expected, ends))
        executor.releases = []
        executor.next_step += 1
        return record
