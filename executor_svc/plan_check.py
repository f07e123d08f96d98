"""Validation of a plan: complete, before anything changes.

A plan that `PlanCheck` lets through is applied without further checks.
"""

import numpy as np

from common.messages import MAX_EXTEND_TOKENS, PlanErrorCode
from common.prompt_positions import prompt_position_bytes, prompt_positions
from executor_svc.admit_check import AdmitCheck
from executor_svc.rows import NO_BLOCK


class PlanCheck(AdmitCheck):
    """Validates one plan against the book of rows. `run` raises PlanRefused and changes nothing."""

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
        """Of the wanted positions; others make no output."""
        plan, total = self._plan, 0
        for row, start, count in zip(
            plan.prefill_rows.tolist(), plan.prefill_starts.tolist(), plan.prefill_counts.tolist(), strict=True
        ):
            sampling, prompt_len = self._sampling(row)
            if n := sampling.num_prompt_logprobs:
                wanted = prompt_positions(sampling.prompt_logprobs_from, start, start + count, prompt_len)
                total += len(wanted) * prompt_position_bytes(n)
        return total
