"""From a plan to a batch: complete validation first, then the batch's columns. Pure host code, no torch operations.

`PlanCheck` changes nothing; a plan it lets through is applied without further checks.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.messages import MAX_EXTEND_TOKENS, U32, Admit, ExecutorInfo, PlanErrorCode, Sampling, StepPlan
from executor_svc.rows import NO_BLOCK, RowBook
from executor_svc.step_executor import PlanRefused, refused

I64 = NDArray[np.int64]

_MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of one step, ascending. All int64.

    rows, starts, counts, lengths: by batch position; start and length as before the step. offsets: [n + 1], of each
    row's tokens in the step. samples: bool, by batch position. A pure decode step has one token per row.
    """

    rows: I64
    starts: I64
    counts: I64
    lengths: I64
    offsets: I64
    samples: NDArray[np.bool_]
    is_prefill: NDArray[np.bool_]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def is_pure_decode(self) -> bool:
        return not bool(self.is_prefill.any())


def make_batch(plan: StepPlan, book: RowBook) -> Batch:
    """After the plan was applied to `book`."""
    decode = plan.decode_rows.astype(np.int64)
    if not len(plan.prefill_rows):
        lengths = book.length[decode]
        ones = np.ones(len(decode), np.int64)
        true = np.ones(len(decode), np.bool_)
        return Batch(decode, lengths - 1, ones, lengths, np.arange(len(decode) + 1), true, ~true)
    rows = np.concatenate([plan.prefill_rows.astype(np.int64), decode])
    starts = np.concatenate([plan.prefill_starts.astype(np.int64), book.length[decode] - 1])
    counts = np.concatenate([plan.prefill_counts.astype(np.int64), np.ones(len(decode), np.int64)])
    is_prefill = np.arange(len(rows)) < len(plan.prefill_rows)
    order = np.argsort(rows)
    rows, starts, counts, is_prefill = rows[order], starts[order], counts[order], is_prefill[order]
    lengths = book.length[rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return Batch(rows, starts, counts, lengths, offsets, starts + counts == lengths, is_prefill)


class PlanCheck:
    """Validates one plan against the book of rows. `run` raises PlanRefused and changes nothing."""

    def __init__(self, info: ExecutorInfo, book: RowBook, plan: StepPlan) -> None:
        self._info = info
        self._book = book
        self._plan = plan
        self._released: set[int] = set()
        self._new_admissions: set[int] = set()
        self._admitted: dict[int, Admit] = {}
        self._filled: dict[int, int] = {}
        self._grants: dict[tuple[int, int], int] = {}

    def run(self) -> None:
        self._check_unsupported()
        self._check_release()
        for index, admit in enumerate(self._plan.admit):
            self._check_admit(index, admit)
        self._check_extend()
        self._check_grants()
        self._check_copies()
        self._check_prefill()
        self._check_decode()
        self._check_totals()
        self._check_raw_logits()

    # ---------------------------------------------------------------------------------------------------- helpers

    def _refuse(
        self, code: PlanErrorCode, field: str, text: str, *, row: int | None = None, limit: int = 0
    ) -> PlanRefused:
        return refused(self._plan, code, text, field=field, row=row, admission_id=self._admission_of(row), limit=limit)

    def _admission_of(self, row: int | None) -> int:
        if row is None or row >= self._info.num_rows:
            return 0
        if row in self._admitted:
            return self._admitted[row].admission_id
        state = self._book.rows[row]
        return 0 if state is None else state.admission_id

    def _is_occupied(self, row: int) -> bool:
        if row in self._admitted:
            return True
        return row < self._info.num_rows and bool(self._book.occupied[row]) and row not in self._released

    def _need_row(self, row: int, field: str) -> None:
        if row >= self._info.num_rows:
            raise self._refuse(
                PlanErrorCode.UNKNOWN_ROW, field, f"there are rows 0 to {self._info.num_rows - 1}",
                row=row, limit=self._info.num_rows,
            )  # fmt: skip
        if not self._is_occupied(row):
            raise self._refuse(PlanErrorCode.UNKNOWN_ROW, field, f"no sequence is in row {row}", row=row)

    def _need_same_length(self, **columns: U32) -> None:
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            name = next(iter(sizes))
            raise self._refuse(PlanErrorCode.MALFORMED, name, f"columns differ in length: {sizes}")

    def _need_ascending(self, field: str, rows: U32) -> None:
        if len(rows) > 1 and not bool((rows[1:] > rows[:-1]).all()):
            raise self._refuse(PlanErrorCode.MALFORMED, field, "rows are not ascending")

    def _need_blocks(self, field: str, blocks: U32, row: int | None = None) -> None:
        if len(blocks) and int(blocks.max()) >= self._info.num_blocks:
            index = int(np.argmax(blocks >= self._info.num_blocks))
            raise self._refuse(
                PlanErrorCode.BLOCK_RANGE, f"{field}[{index}]", f"there is no block {int(blocks[index])}",
                row=row, limit=self._info.num_blocks,
            )  # fmt: skip

    def _need_tokens(self, field: str, tokens: U32, row: int) -> None:
        if len(tokens) and int(tokens.max()) >= self._info.vocab_size:
            index = int(np.argmax(tokens >= self._info.vocab_size))
            raise self._refuse(
                PlanErrorCode.MALFORMED, f"{field}[{index}]", f"{int(tokens[index])} is not in the vocabulary",
                row=row, limit=self._info.vocab_size,
            )  # fmt: skip

    def _length(self, row: int) -> int:
        admit = self._admitted.get(row)
        return admit.length if admit is not None else int(self._book.length[row])

    def _computed(self, row: int) -> int:
        admit = self._admitted.get(row)
        return admit.computed_len if admit is not None else int(self._book.computed[row])

    def _known(self, row: int) -> int:
        """Tokens of the row the host has."""
        if row in self._filled:
            return self._filled[row]
        admit = self._admitted.get(row)
        return len(admit.tokens) if admit is not None else self._book.row(row).filled

    def _announced(self, row: int) -> int:
        """Tokens the host has or is to get; those after it were sampled and are on the device."""
        admit = self._admitted.get(row)
        return admit.length if admit is not None else len(self._book.row(row).tokens)

    def _sampling(self, row: int) -> tuple[Sampling, int]:
        admit = self._admitted.get(row)
        if admit is not None:
            return admit.sampling, admit.prompt_len
        state = self._book.row(row)
        return state.sampling, state.prompt_len

    def _need_room(self, field: str, row: int) -> None:
        """The row may have one token more."""
        sampling, prompt_len = self._sampling(row)
        limit, length = min(prompt_len + sampling.max_tokens, self._info.max_context), self._length(row)
        if length >= limit:
            text = f"row {row} has {length} tokens: its max_tokens or the context is used up"
            raise self._refuse(PlanErrorCode.BUDGET, field, text, row=row, limit=limit)

    def _need_block_for(self, field: str, row: int, first: int, last: int) -> None:
        """The row's table must have a block for each position first..last."""
        size = self._info.block_size
        admit = self._admitted.get(row)
        for index in range(first // size, last // size + 1):
            if (row, index) in self._grants:
                continue
            if admit is not None:
                if index < len(admit.blocks):
                    continue
            elif index < self._info.max_blocks_per_row and self._book.tables[row, index] != NO_BLOCK:
                continue
            raise self._refuse(
                PlanErrorCode.BLOCK_RANGE, field, f"row {row} has no block for positions from {index * size}",
                row=row, limit=index,
            )  # fmt: skip

    # ----------------------------------------------------------------------------------------------------- fields

    def _check_unsupported(self) -> None:
        plan = self._plan
        for field, present in (
            ("fork", bool(plan.fork)),
            ("set_token_rows", len(plan.set_token_rows) > 0),
            ("set_token_tokens", len(plan.set_token_tokens) > 0),
            ("draft_rows", len(plan.draft_rows) > 0),
            ("draft_counts", len(plan.draft_counts) > 0),
        ):
            if present:
                raise self._refuse(PlanErrorCode.UNSUPPORTED, field, "this executor has no such feature yet")

    def _check_release(self) -> None:
        for index, row in enumerate(self._plan.release.tolist()):
            self._need_row(row, f"release[{index}]")
            self._released.add(row)

    def _check_admit(self, index: int, admit: Admit) -> None:
        info, field, row = self._info, f"admit[{index}]", admit.row

        def malformed(name: str, text: str, limit: int = 0) -> PlanRefused:
            return refused(
                self._plan, PlanErrorCode.MALFORMED, text,
                field=f"{field}.{name}", row=row, admission_id=admit.admission_id, limit=limit,
            )  # fmt: skip

        if row >= info.num_rows:
            self._need_row(row, f"{field}.row")
        if self._is_occupied(row):
            text = f"row {row} holds admission {self._admission_of(row)}"
            raise refused(
                self._plan, PlanErrorCode.ROW_BUSY, text,
                field=f"{field}.row", row=row, admission_id=admit.admission_id,
            )  # fmt: skip
        self._admitted[row] = admit
        live = self._book.admissions - {self._book.row(released).admission_id for released in self._released}
        if not admit.admission_id or admit.admission_id in live or admit.admission_id in self._new_admissions:
            raise malformed("admission_id", f"{admit.admission_id} is 0 or in use")
        self._new_admissions.add(admit.admission_id)
        if admit.length < 1:
            raise malformed("length", "a sequence has at least one token")
        if admit.length >= info.max_context:
            raise self._refuse(
                PlanErrorCode.BUDGET, f"{field}.length", f"{admit.length} tokens leave no room for one more",
                row=row, limit=info.max_context,
            )  # fmt: skip
        if not 1 <= admit.prompt_len <= admit.length:
            raise malformed("prompt_len", f"{admit.prompt_len} is not in 1 to length, {admit.length}", admit.length)
        if admit.computed_len > admit.length - 1:
            raise malformed("computed_len", f"{admit.computed_len} is not below length, {admit.length}", admit.length)
        if len(admit.tokens) > admit.length:
            raise malformed("tokens", f"{len(admit.tokens)} tokens for a length of {admit.length}", admit.length)
        self._need_tokens(f"{field}.tokens", admit.tokens, row)
        if len(admit.blocks) > info.max_blocks_per_row:
            raise self._refuse(
                PlanErrorCode.BLOCK_RANGE, f"{field}.blocks", f"{len(admit.blocks)} blocks for one row",
                row=row, limit=info.max_blocks_per_row,
            )  # fmt: skip
        self._need_blocks(f"{field}.blocks", admit.blocks, row)
        if admit.computed_len > len(admit.blocks) * info.block_size:
            raise self._refuse(
                PlanErrorCode.BLOCK_RANGE, f"{field}.blocks", f"too few for {admit.computed_len} computed tokens",
                row=row, limit=len(admit.blocks),
            )  # fmt: skip
        self._check_sampling(f"{field}.sampling", admit)

    def _check_sampling(self, field: str, admit: Admit) -> None:
        sampling, vocab, row = admit.sampling, self._info.vocab_size, admit.row
        if sampling.grammar_kind or sampling.grammar:
            raise self._refuse(PlanErrorCode.UNSUPPORTED, f"{field}.grammar_kind", "no grammars yet", row=row)
        if sampling.adapter_id:
            raise self._refuse(PlanErrorCode.UNSUPPORTED, f"{field}.adapter_id", "no adapters yet", row=row)

        def need(holds: bool, name: str, text: str) -> None:
            if not holds:
                raise self._refuse(PlanErrorCode.MALFORMED, f"{field}.{name}", text, row=row)

        finite = math.isfinite
        need(finite(sampling.temperature) and sampling.temperature >= 0, "temperature", "not a finite number from 0")
        need(finite(sampling.top_p) and 0 < sampling.top_p <= 1, "top_p", "not in (0, 1]")
        need(finite(sampling.min_p) and 0 <= sampling.min_p <= 1, "min_p", "not in [0, 1]")
        generated = admit.length - admit.prompt_len
        need(sampling.max_tokens > generated, "max_tokens", f"{sampling.max_tokens}; there are {generated} already")
        need(0 <= sampling.top_k < 1 << 32, "top_k", "not a uint32")
        need(0 <= sampling.seed <= _MAX_SEED, "seed", "not a uint64")
        penalty = sampling.repetition_penalty
        need(finite(penalty) and penalty > 0, "repetition_penalty", "not a finite number above 0")
        need(finite(sampling.presence_penalty), "presence_penalty", "not finite")
        need(finite(sampling.frequency_penalty), "frequency_penalty", "not finite")
        need(all(0 <= i < vocab for i in sampling.stop_ids), "stop_ids", "an id is not in the vocabulary")
        need(all(0 <= i < vocab for i, _ in sampling.bias), "bias_ids", "an id is not in the vocabulary")
        need(all(finite(v) for _, v in sampling.bias), "bias_values", "a value is not finite")
        need(all(0 <= i < vocab for i in sampling.allowed_ids), "allowed_ids", "an id is not in the vocabulary")
        need(0 <= sampling.num_logprobs <= vocab + 1, "num_logprobs", "more than the vocabulary")
        need(0 <= sampling.num_prompt_logprobs <= vocab + 1, "num_prompt_logprobs", "more than the vocabulary")
        if sampling.num_prompt_logprobs:
            need(sampling.prompt_logprobs_from >= 1, "prompt_logprobs_from", "position 0 has no logprob")

    def _check_extend(self) -> None:
        for index, extend in enumerate(self._plan.extend):
            field, row = f"extend[{index}]", extend.row
            self._need_row(row, f"{field}.row")
            if len(extend.tokens) > MAX_EXTEND_TOKENS:
                raise self._refuse(
                    PlanErrorCode.BUDGET, f"{field}.tokens", f"{len(extend.tokens)} tokens in one piece",
                    row=row, limit=MAX_EXTEND_TOKENS,
                )  # fmt: skip
            known, announced = self._known(row), self._announced(row)
            if extend.offset != known:
                raise self._refuse(
                    PlanErrorCode.MALFORMED, f"{field}.offset", f"{extend.offset}; the row has {known} tokens",
                    row=row, limit=known,
                )  # fmt: skip
            end = extend.offset + len(extend.tokens)
            if end > announced:
                raise self._refuse(
                    PlanErrorCode.MALFORMED, f"{field}.tokens", f"up to {end}; {announced} were announced",
                    row=row, limit=announced,
                )  # fmt: skip
            self._need_tokens(f"{field}.tokens", extend.tokens, row)
            self._filled[row] = end

    def _check_grants(self) -> None:
        plan, info = self._plan, self._info
        self._need_same_length(
            grant_rows=plan.grant_rows, grant_indices=plan.grant_indices, grant_blocks=plan.grant_blocks
        )
        if not len(plan.grant_rows):
            return
        for index, (row, at, block) in enumerate(
            zip(plan.grant_rows.tolist(), plan.grant_indices.tolist(), plan.grant_blocks.tolist(), strict=True)
        ):
            self._need_row(row, f"grant_rows[{index}]")
            if at >= info.max_blocks_per_row:
                raise self._refuse(
                    PlanErrorCode.BLOCK_RANGE, f"grant_indices[{index}]", f"a row has {info.max_blocks_per_row} blocks",
                    row=row, limit=info.max_blocks_per_row,
                )  # fmt: skip
            if block >= info.num_blocks:
                raise self._refuse(
                    PlanErrorCode.BLOCK_RANGE, f"grant_blocks[{index}]", f"there is no block {block}",
                    row=row, limit=info.num_blocks,
                )  # fmt: skip
            self._grants[row, at] = block

    def _check_copies(self) -> None:
        plan = self._plan
        self._need_same_length(copy_sources=plan.copy_sources, copy_targets=plan.copy_targets)
        self._need_blocks("copy_sources", plan.copy_sources)
        self._need_blocks("copy_targets", plan.copy_targets)

    def _check_prefill(self) -> None:
        plan = self._plan
        self._need_same_length(
            prefill_rows=plan.prefill_rows, prefill_starts=plan.prefill_starts, prefill_counts=plan.prefill_counts
        )
        self._need_ascending("prefill_rows", plan.prefill_rows)
        for index, (row, start, count) in enumerate(
            zip(plan.prefill_rows.tolist(), plan.prefill_starts.tolist(), plan.prefill_counts.tolist(), strict=True)
        ):
            self._need_row(row, f"prefill_rows[{index}]")
            computed, length, end = self._computed(row), self._length(row), start + count
            if count < 1:
                raise self._refuse(PlanErrorCode.MALFORMED, f"prefill_counts[{index}]", "an empty chunk", row=row)
            if start != computed:
                raise self._refuse(
                    PlanErrorCode.MALFORMED, f"prefill_starts[{index}]", f"{start}; {computed} tokens are computed",
                    row=row, limit=computed,
                )  # fmt: skip
            if end > length:
                raise self._refuse(
                    PlanErrorCode.MALFORMED, f"prefill_counts[{index}]", f"up to {end}; the row has {length} tokens",
                    row=row, limit=length,
                )  # fmt: skip
            known = self._known(row)
            # The last known token of a row that has sampled is on the device; all others must be here.
            sampled = length > self._announced(row) and known == self._announced(row)
            if end > (length if sampled and start >= known else known):
                raise self._refuse(
                    PlanErrorCode.MALFORMED, f"prefill_counts[{index}]", f"tokens from {known} were not sent yet",
                    row=row, limit=known,
                )  # fmt: skip
            if end == length:
                self._need_room(f"prefill_counts[{index}]", row)
            self._need_block_for(f"prefill_rows[{index}]", row, start, end - 1)
            sampling, prompt_len = self._sampling(row)
            if sampling.num_prompt_logprobs and known < min(end + 1, prompt_len):
                raise self._refuse(
                    PlanErrorCode.MALFORMED, f"prefill_counts[{index}]",
                    f"prompt logprobs need the token at {end}, which was not sent yet", row=row, limit=known,
                )  # fmt: skip

    def _check_decode(self) -> None:
        rows, info = self._plan.decode_rows, self._info
        self._need_ascending("decode", rows)
        if not len(rows):
            return
        if int(rows[-1]) >= info.num_rows:
            self._need_row(int(rows[-1]), "decode")
        prefill = set(self._plan.prefill_rows.tolist())
        book = self._book
        last = book.length[rows] - 1
        at = np.minimum(last // info.block_size, info.max_blocks_per_row - 1)
        fine = book.occupied[rows] & (book.computed[rows] == last) & (book.tables[rows, at] != NO_BLOCK)
        fine &= (last + 1 < book.max_length[rows]) & book.complete[rows]
        if bool(fine.all()) and not (self._released or self._admitted or prefill):
            return
        for index in range(len(rows)):
            row = int(rows[index])
            if row in prefill:
                raise self._refuse(PlanErrorCode.MALFORMED, "decode", f"row {row} is prefilled too", row=row)
            if not fine[index] or row in self._released or row in self._admitted:
                self._check_decode_row(row)

    def _check_decode_row(self, row: int) -> None:
        self._need_row(row, "decode")
        length, computed = self._length(row), self._computed(row)
        if computed != length - 1:
            raise self._refuse(
                PlanErrorCode.MALFORMED, "decode", f"row {row} has computed {computed} of {length} tokens",
                row=row, limit=length - 1,
            )  # fmt: skip
        if self._known(row) < min(self._announced(row), length):
            raise self._refuse(
                PlanErrorCode.MALFORMED, "decode", f"row {row} lacks tokens from {self._known(row)}", row=row
            )
        self._need_room("decode", row)
        self._need_block_for("decode", row, length - 1, length - 1)

    def _check_totals(self) -> None:
        plan, info = self._plan, self._info
        total = int(plan.prefill_counts.sum(dtype=np.uint64)) + len(plan.decode_rows)
        if total != plan.num_tokens:
            raise self._refuse(
                PlanErrorCode.MALFORMED, "num_tokens", f"{plan.num_tokens}; the plan's rows sum to {total}", limit=total
            )
        if total > info.max_tokens_per_step:
            raise self._refuse(
                PlanErrorCode.BUDGET, "num_tokens", f"{total} tokens in one step", limit=info.max_tokens_per_step
            )
        num_rows = len(plan.prefill_rows) + len(plan.decode_rows)
        if num_rows > info.max_num_seqs:
            raise self._refuse(PlanErrorCode.BUDGET, "decode", f"{num_rows} rows in one step", limit=info.max_num_seqs)

    def _check_raw_logits(self) -> None:
        plan, info = self._plan, self._info
        self._need_same_length(raw_logits_rows=plan.raw_logits_rows, raw_logits_positions=plan.raw_logits_positions)
        output_bytes = self._prompt_logprob_bytes()
        if len(plan.raw_logits_rows):
            ranges = {
                row: (start, start + count)
                for row, start, count in zip(
                    plan.prefill_rows.tolist(), plan.prefill_starts.tolist(), plan.prefill_counts.tolist(), strict=True
                )
            }
            ranges |= {row: (self._length(row) - 1, self._length(row)) for row in plan.decode_rows.tolist()}
            seen: set[tuple[int, int]] = set()
            for index, (row, position) in enumerate(
                zip(plan.raw_logits_rows.tolist(), plan.raw_logits_positions.tolist(), strict=True)
            ):
                self._need_row(row, f"raw_logits_rows[{index}]")
                first, end = ranges.get(row, (0, 0))
                if not first < position <= end or (row, position) in seen:
                    raise self._refuse(
                        PlanErrorCode.MALFORMED, f"raw_logits_positions[{index}]",
                        f"this step makes no logits for position {position} of row {row}, or they were asked for twice",
                        row=row, limit=end,
                    )  # fmt: skip
                seen.add((row, position))
            output_bytes += len(seen) * info.vocab_size * 4
        if output_bytes > info.max_output_bytes:
            raise self._refuse(
                PlanErrorCode.BUDGET, "raw_logits_rows", f"{output_bytes} output bytes in one step",
                limit=info.max_output_bytes,
            )  # fmt: skip

    def _prompt_logprob_bytes(self) -> int:
        total = 0
        for row, count in zip(self._plan.prefill_rows.tolist(), self._plan.prefill_counts.tolist(), strict=True):
            n = self._sampling(row)[0].num_prompt_logprobs
            if n:
                total += count * (4 + 8 * (n - 1))
        return total
