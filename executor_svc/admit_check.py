"""The part of a plan's validation that is about sequences taking rows."""

import math

from common.messages import Admit, PlanErrorCode
from executor_svc.plan_view import PlanView
from executor_svc.step_executor import PlanRefused, refused

_MAX_SEED = (1 << 64) - 1


class AdmitCheck(PlanView):
    """Checks `admit`."""

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
