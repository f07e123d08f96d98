"""The toy executor's check of a whole plan before anything changes."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from common.messages import MAX_EXTEND_TOKENS, U32, Admit, ExecutorInfo, PlanErrorCode, Sampling, StepPlan
from executor_svc.step_executor import PlanRefused, refused


@dataclass(eq=False)
class ToyRow:
    """Device state of one row. `length`: known tokens; `filled`: those whose values are here; `computed`: in blocks."""

    admission_id: int
    sampling: Sampling
    prompt_len: int
    length: int
    filled: int
    computed: int
    tokens: U32
    table: NDArray[np.int64]
    dead: bool = False

    def wanted_prompt(self, start: int, end: int) -> tuple[int, int]:
        """First and last prompt position whose logprobs are wanted and whose predecessor is in [start, end); the first
        lies behind the last where there is none."""
        first = max(start + 1, self.sampling.prompt_logprobs_from)
        return first, min(end, self.prompt_len - 1) if self.sampling.num_prompt_logprobs else 0


class PlanCheck:
    """Checks one plan in the order it would be applied; `run` gives the rows the plan changes (None: released)."""

    def __init__(self, info: ExecutorInfo, rows: dict[int, ToyRow], seen: set[int], plan: StepPlan) -> None:
        self._info = info
        self._rows = rows
        self._seen = seen
        self._new: set[int] = set()
        self._plan = plan
        self._changed: dict[int, ToyRow | None] = {}

    def run(self) -> dict[int, ToyRow | None]:
        """Raises PlanRefused."""
        self._unsupported()
        self._release()
        for i, admit in enumerate(self._plan.admit):
            self._admit(admit, f"admit[{i}]")
        self._extend()
        self._grants()
        self._copies()
        samples = self._work()
        self._raw_logits(samples)
        return self._changed

    def _refuse(self, code: PlanErrorCode, text: str, field: str, **details: int) -> PlanRefused:
        return refused(self._plan, code, text, field=field, **details)

    def _row(self, row: int, field: str) -> ToyRow:
        state = self._changed[row] if row in self._changed else self._rows.get(row)
        if state is None:
            raise self._refuse(PlanErrorCode.UNKNOWN_ROW, f"row {row} is not in use", field, row=row)
        return state

    def _unsupported(self) -> None:
        plan = self._plan
        for name, used in (
            ("fork", plan.fork),
            ("set_token_rows", len(plan.set_token_rows)),
            ("draft_rows", len(plan.draft_rows)),
            ("raw_logits_rows", len(plan.raw_logits_rows) and "raw_logits" not in self._info.features),
        ):
            if used:
                raise self._refuse(PlanErrorCode.UNSUPPORTED, "not supported", name)

    def _release(self) -> None:
        for i, row in enumerate(self._plan.release.tolist()):
            self._row(row, f"release[{i}]")
            self._changed[row] = None

    def _admit(self, a: Admit, field: str) -> None:
        info, blame = self._info, {"row": a.row, "admission_id": a.admission_id}
        if a.row >= info.num_rows:
            raise self._refuse(PlanErrorCode.UNKNOWN_ROW, "no such row", f"{field}.row", limit=info.num_rows, **blame)
        if (self._changed[a.row] if a.row in self._changed else self._rows.get(a.row)) is not None:
            raise self._refuse(PlanErrorCode.ROW_BUSY, f"row {a.row} is in use", f"{field}.row", **blame)
        if len(a.blocks) > info.max_blocks_per_row or (len(a.blocks) and int(a.blocks.max()) >= info.num_blocks):
            raise self._refuse(PlanErrorCode.BLOCK_RANGE, "block out of range", f"{field}.blocks", **blame)
        if -(-a.computed_len // info.block_size) > len(a.blocks):
            raise self._refuse(PlanErrorCode.BLOCK_RANGE, "computed tokens without blocks", f"{field}.blocks", **blame)
        if a.length >= info.max_context:
            raise self._refuse(
                PlanErrorCode.BUDGET, "no room in the context", f"{field}.length", limit=info.max_context, **blame
            )
        s = a.sampling
        for part, used in (("sampling.grammar_kind", s.grammar_kind), ("sampling.adapter_id", s.adapter_id)):
            if used:
                raise self._refuse(PlanErrorCode.UNSUPPORTED, "not supported", f"{field}.{part}", **blame)
        for part, good in (
            ("admission_id", a.admission_id and not (a.admission_id in self._seen or a.admission_id in self._new)),
            ("length", a.length >= 1),
            ("tokens", 1 <= len(a.tokens) <= min(a.length, MAX_EXTEND_TOKENS)),
            ("tokens", not len(a.tokens) or int(a.tokens.max()) < info.vocab_size),
            ("prompt_len", 1 <= a.prompt_len <= a.length),
            ("computed_len", a.computed_len <= a.length - 1),
            ("sampling.max_tokens", s.max_tokens > a.length - a.prompt_len),
            ("sampling.temperature", np.isfinite(s.temperature) and s.temperature >= 0),
            ("sampling.top_p", 0 < s.top_p <= 1),
            ("sampling.min_p", 0 <= s.min_p <= 1),
            ("sampling.prompt_logprobs_from", not s.num_prompt_logprobs or s.prompt_logprobs_from >= 1),
        ):
            if not good:
                raise self._refuse(PlanErrorCode.MALFORMED, "does not make sense", f"{field}.{part}", **blame)
        self._new.add(a.admission_id)
        table = np.full(info.max_blocks_per_row, -1, dtype=np.int64)
        table[: len(a.blocks)] = a.blocks
        tokens = np.full(info.max_context + 1, info.vocab_size, dtype=np.uint32)
        self._changed[a.row] = ToyRow(
            a.admission_id, s, a.prompt_len, a.length, len(a.tokens), a.computed_len, tokens, table
        )

    def _extend(self) -> None:
        for i, e in enumerate(self._plan.extend):
            state = self._row(e.row, f"extend[{i}].row")
            good = state.filled == e.offset and 1 <= len(e.tokens) <= min(MAX_EXTEND_TOKENS, state.length - e.offset)
            if not good or int(e.tokens.max()) >= self._info.vocab_size:
                raise self._refuse(PlanErrorCode.MALFORMED, "not the next tokens of the row", f"extend[{i}]", row=e.row)
            self._changed[e.row] = replace(state, filled=e.offset + len(e.tokens))

    def _grants(self) -> None:
        plan = self._plan
        copied: set[int] = set()
        for i, (row, index, block) in enumerate(
            zip(plan.grant_rows.tolist(), plan.grant_indices.tolist(), plan.grant_blocks.tolist(), strict=True)
        ):
            state = self._row(row, f"grant_rows[{i}]")
            if index >= self._info.max_blocks_per_row:
                raise self._refuse(PlanErrorCode.BLOCK_RANGE, "past the table", f"grant_indices[{i}]", row=row)
            if block >= self._info.num_blocks:
                raise self._refuse(PlanErrorCode.BLOCK_RANGE, "no such block", f"grant_blocks[{i}]", row=row)
            if row not in copied:
                copied.add(row)
                state = replace(state, table=state.table.copy())
                self._changed[row] = state
            state.table[index] = block

    def _copies(self) -> None:
        for name, column in (("copy_sources", self._plan.copy_sources), ("copy_targets", self._plan.copy_targets)):
            if len(column) and int(column.max()) >= self._info.num_blocks:
                raise self._refuse(PlanErrorCode.BLOCK_RANGE, "no such block", name)

    def _work(self) -> dict[int, int]:
        """Checks prefill, decode and budgets. Returns row → position sampled in this step."""
        plan, info = self._plan, self._info
        prefill, decode = plan.prefill_rows.tolist(), plan.decode_rows.tolist()
        for name, rows in (("prefill_rows", prefill), ("decode", decode)):
            if any(a >= b for a, b in itertools.pairwise(rows)):
                raise self._refuse(PlanErrorCode.MALFORMED, "rows are not ascending", name)
        if set(prefill) & set(decode):
            raise self._refuse(PlanErrorCode.MALFORMED, "a row in both prefill and decode", "decode")
        if plan.num_tokens != int(plan.prefill_counts.sum()) + len(decode):
            raise self._refuse(PlanErrorCode.MALFORMED, "does not add up", "num_tokens")
        if plan.num_tokens > info.max_tokens_per_step:
            raise self._refuse(PlanErrorCode.BUDGET, "too many tokens", "num_tokens", limit=info.max_tokens_per_step)
        if len(prefill) + len(decode) > info.max_num_seqs:
            raise self._refuse(PlanErrorCode.BUDGET, "too many rows", "decode", limit=info.max_num_seqs)
        samples: dict[int, int] = {}
        for i, row in enumerate(prefill):
            state = self._row(row, f"prefill_rows[{i}]")
            start, count = int(plan.prefill_starts[i]), int(plan.prefill_counts[i])
            if not state.dead:
                good = start == state.computed and count >= 1 and start + count <= state.filled
                self._compute_check(state, row, good, start + count, f"prefill_counts[{i}]", samples)
        for row in decode:
            state = self._row(row, "decode")
            if not state.dead:
                good = state.computed == state.length - 1 and state.filled == state.length
                self._compute_check(state, row, good, state.length, "decode", samples)
        return samples

    def _compute_check(
        self, state: ToyRow, row: int, good: bool, end: int, field: str, samples: dict[int, int]
    ) -> None:
        blame = {"row": row, "admission_id": state.admission_id}
        if not good:
            raise self._refuse(PlanErrorCode.MALFORMED, "not the row's next tokens", field, **blame)
        size = self._info.block_size
        if (state.table[: -(-end // size)] < 0).any() or end > len(state.table) * size:
            raise self._refuse(PlanErrorCode.BLOCK_RANGE, "a slot without a block", field, **blame)
        if end == state.length:
            if state.length >= self._info.max_context:
                raise self._refuse(PlanErrorCode.BUDGET, "context", field, limit=self._info.max_context, **blame)
            if state.length - state.prompt_len >= state.sampling.max_tokens:
                raise self._refuse(PlanErrorCode.BUDGET, "max_tokens", field, limit=state.sampling.max_tokens, **blame)
            samples[row] = state.length

    def _raw_logits(self, samples: dict[int, int]) -> None:
        plan = self._plan
        size = len(plan.raw_logits_rows) * self._info.vocab_size * 4 + self._prompt_logprob_bytes()
        if size > self._info.max_output_bytes:
            raise self._refuse(
                PlanErrorCode.BUDGET, "too many bytes of output", "raw_logits_rows", limit=self._info.max_output_bytes
            )
        for i, (row, position) in enumerate(
            zip(plan.raw_logits_rows.tolist(), plan.raw_logits_positions.tolist(), strict=True)
        ):
            state = self._row(row, f"raw_logits_rows[{i}]")
            if not state.dead and samples.get(row) != position:
                raise self._refuse(
                    PlanErrorCode.MALFORMED, "not sampled in this step", f"raw_logits_positions[{i}]", row=row
                )

    def _prompt_logprob_bytes(self) -> int:
        plan, total = self._plan, 0
        for i, row in enumerate(plan.prefill_rows.tolist()):
            state, start = self._row(row, f"prefill_rows[{i}]"), int(plan.prefill_starts[i])
            first, last = state.wanted_prompt(start, start + int(plan.prefill_counts[i]))
            total += max(0, last + 1 - first) * (8 * state.sampling.num_prompt_logprobs - 4)
        return total
