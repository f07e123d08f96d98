"""A plan in the making, and what is left of the step's budgets."""

from collections.abc import Collection
from dataclasses import dataclass, field

from common.messages import EMPTY_U32, MAX_EXTEND_TOKENS, U32, Admit, Extend, Sampling, StepPlan, u32
from scheduler_svc.core.executor_state import ExecutorState, Flight
from scheduler_svc.core.row_set import RowSet
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.observer import StepRecord

_FIXED_BYTES = 512  # of an Admit or Extend, everything that is no column, generously


def _columns(entries: Collection[tuple[int, ...]], width: int) -> tuple[U32, ...]:
    """Entries of `width` values each as so many columns."""
    if not entries:
        return (EMPTY_U32,) * width
    return tuple([u32(column) for column in zip(*entries, strict=True)])


def admit_bytes(num_tokens: int, num_blocks: int, sampling: Sampling) -> int:
    """An upper bound of what an Admit takes on the wire."""
    columns = len(sampling.stop_ids) + 2 * len(sampling.bias) + len(sampling.allowed_ids) + len(sampling.grammar)
    return _FIXED_BYTES + 4 * (min(num_tokens, MAX_EXTEND_TOKENS) + num_blocks + columns)


def extend_bytes(num_tokens: int) -> int:
    return 4 * num_tokens + _FIXED_BYTES


@dataclass(slots=True)
class Draft:
    """tokens, wire_bytes, output_bytes: what the step may still take. raw: rows wanting raw logits and the position of
    the token they choose. copies: (block, block it is copied to). leaders: sequences whose prompt this plan completes
    and that others wait for. has_last_token: see Flight. blocks_owed: what rows that sit out wait for."""

    executor: ExecutorState
    step_id: int
    tokens: int
    wire_bytes: int
    output_bytes: int
    decode: RowSet
    grants: tuple[U32, U32, U32] | None = None  # rows, table indices, blocks
    admits: list[Admit] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)
    sampling_prefills: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    leaders: list[Sequence] = field(default_factory=list)
    has_last_token: bool = False
    blocks_owed: int = 0
    raw: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, executor: ExecutorState) -> "Draft":
        e = executor
        return cls(e, e.next_step, e.max_tokens, e.max_wire_bytes, e.max_output_bytes, e.no_rows)

    @property
    def is_empty(self) -> bool:
        work = len(self.decode.index) or self.prefills or self.grants is not None or self.admits or self.extends
        return not work and not self.executor.releases

    def finish(self, now_ns: int, trace_context: bytes, waiting: int) -> StepRecord:
        """Makes the plan, books it as in flight and returns its record."""
        executor, decode, num_decodes = self.executor, self.decode, len(self.decode.index)
        grant_rows, grant_indices, grant_blocks = self.grants or (EMPTY_U32, EMPTY_U32, EMPTY_U32)
        copy_sources, copy_targets = _columns(self.copies, 2)
        prefill_rows, prefill_starts, prefill_counts = _columns(sorted(self.prefills), 3)
        prefill_tokens = sum([count for _, _, count in self.prefills])
        raw_logits_rows, raw_logits_positions = _columns(sorted(self.raw), 2) if self.raw else (EMPTY_U32, EMPTY_U32)
        plan = StepPlan(
            epoch=executor.epoch,
            step_id=self.step_id,
            sent_ns=now_ns,
            num_tokens=prefill_tokens + num_decodes,
            trace_context=trace_context,
            release=u32(executor.releases) if executor.releases else EMPTY_U32,
            admit=tuple(self.admits),
            extend=tuple(self.extends),
            grant_rows=grant_rows,
            grant_indices=grant_indices,
            grant_blocks=grant_blocks,
            copy_sources=copy_sources,
            copy_targets=copy_targets,
            set_token_rows=EMPTY_U32,
            set_token_tokens=EMPTY_U32,
            prefill_rows=prefill_rows,
            prefill_starts=prefill_starts,
            prefill_counts=prefill_counts,
            decode_rows=decode.column,
            draft_rows=EMPTY_U32,
            draft_counts=EMPTY_U32,
            raw_logits_rows=raw_logits_rows,
            raw_logits_positions=raw_logits_positions,
        )
        prefill_keys = executor.no_rows.keys
        if self.prefills:
            prefill_keys = executor.rows.keys.take(prefill_rows)
            prefill_keys.setflags(write=False)
        record = StepRecord(
            executor_id=executor.id,
            plan=plan,
            planned_ns=now_ns,
            decode_keys=decode.keys,
            prefill_keys=prefill_keys,
            decode_tokens=num_decodes,
            prefill_tokens=prefill_tokens,
            running=executor.num_running,
            waiting=waiting,
            free_blocks=executor.pool.available,
        )
        flight = Flight(self.step_id, record, decode, self.sampling_prefills, self.prefills, self.has_last_token)
        executor.flights.append(flight)
        executor.releases = []
        executor.next_step += 1
        return record
