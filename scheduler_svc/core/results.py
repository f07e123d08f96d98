"""Turns a StepResult into what the step's own record says it means."""

from dataclasses import replace

import numpy as np

from common.errors import ProtocolError
from common.frozen import step_message
from common.messages import U32, Output, OutputKind, RowError, StepResult
from scheduler_svc.core.executor_state import ExecutorState, Flight
from scheduler_svc.core.forks import forks_of
from scheduler_svc.core.row_set import SEVERAL, U8, U64, RowSet
from scheduler_svc.core.rows import I64, Bools, Rows
from scheduler_svc.messages import WORKER_SHIFT, Extras, FinishReason, TokenBatch, TopTokens


@step_message
class Collected:
    """What of a step counts. sampled: the rows whose tokens do; tokens and reasons in their order, reasons as
    FinishReason or 0. ended: entries with a reason, and which. row_errors: with those of forks, see `forks`."""

    flight: Flight
    sampled: RowSet
    tokens: U32
    reasons: U8
    ended: dict[int, FinishReason]
    row_errors: tuple[RowError, ...]


def collect(executor: ExecutorState, result: StepResult) -> Collected:
    """Checks `result` against the oldest step in flight, then books its tokens.

    Raises ProtocolError, with nothing changed, when the executor broke the protocol.
    """
    flight, is_eos = _checked(executor, result)
    rows = executor.rows
    executor.flights.popleft()
    executor.last_result = flight.step_id
    executor.steps += 1
    errors = _row_errors(executor, result, flight.step_id) if result.row_errors else ()
    for error in errors:
        rows.tainted[error.row] = True
    for row, start, count in flight.prefills:
        rows.prefilled[row] = start + count
        rows.recent.forget(row)
        executor.register(row, start + count)
    sampled, tokens = flight.sampled, result.tokens
    if executor.limbo or len(tokens) < len(sampled):  # some have ended meanwhile, or failed
        index = result.emitted_rows.astype(np.int64)
        accepted = rows.accept.take(index)
        if len(tokens) < len(sampled) or not accepted.all():
            sampled, tokens, is_eos = _set_of(executor, index[accepted]), tokens[accepted], is_eos[accepted]
            tokens.setflags(write=False)
    sampled.append(tokens)
    reasons, ended = _endings(executor, sampled, tokens, is_eos, flight.has_last_token)
    errors = tuple(e for e in errors if rows.accept[e.row]) if errors else ()
    return Collected(flight, sampled, tokens, reasons, ended, errors)


def _set_of(executor: ExecutorState, index: I64) -> RowSet:
    """Those who go on mostly are those who decode in a step planned since."""
    for flight in executor.flights:
        if len(flight.decode) == len(index) and np.array_equal(flight.decode.index, index):
            return flight.decode
    return RowSet.of(executor.rows, index)


def _row_errors(executor: ExecutorState, result: StepResult, step_id: int) -> tuple[RowError, ...]:
    """Those that are about rows' present occupants, and the same for forks of them."""
    admission = executor.rows.admission
    errors = tuple(e for e in result.row_errors if admission[e.row] == e.admission_id)
    return errors + tuple(
        replace(error, row=row, admission_id=int(admission[row]))
        for error in errors
        for row in forks_of(executor, error, step_id)
    )


def _checked(executor: ExecutorState, result: StepResult) -> tuple[Flight, Bools]:
    """The flight that `result` answers, and which of its tokens are EOS."""
    if not executor.flights or result.epoch != executor.epoch or result.step_id != executor.flights[0].step_id:
        raise ProtocolError(f"step_result: step {result.step_id} of epoch {result.epoch} is not the one awaited")
    flight, rows = executor.flights[0], executor.rows
    if len(result.tokens) != len(result.emitted_rows):
        raise ProtocolError("step_result: more than one token for a row without drafts", field="tokens")
    try:
        is_eos: Bools = executor.is_eos.take(result.tokens)
    except IndexError:
        text = f"step_result: token {int(result.tokens.max())} is outside the vocabulary"
        raise ProtocolError(text, field="tokens") from None
    if len(result.counts) and (result.counts != 1).any():
        raise ProtocolError("step_result: not one token for each row, without drafts", field="counts")
    if result.row_errors:
        _check_row_errors(rows, result)
    expected = flight.sampled.column
    if result.emitted_rows is not expected and result.emitted_rows.tobytes() != expected.tobytes():
        emitted, failed = set(result.emitted_rows.tolist()), {e.row for e in result.row_errors}
        asked = set(expected.tolist())
        silent = [r for r in asked - emitted - failed if rows.accept[r]]
        if silent or emitted - asked:
            raise ProtocolError(
                f"step_result: rows {silent} are silent and rows {sorted(emitted - asked)} emit unasked",
                field="emitted",
            )
    return flight, is_eos


def _check_row_errors(rows: Rows, result: StepResult) -> None:
    if any(e.row >= len(rows) for e in result.row_errors):
        raise ProtocolError("step_result: an error for a row that does not exist", field="row_errors")
    failed_rows = [e.row for e in result.row_errors if rows.admission[e.row] == e.admission_id]
    heard = [*failed_rows, *result.emitted_rows.tolist()] if failed_rows else []
    if len(set(heard)) < len(heard):
        raise ProtocolError("step_result: a row fails twice, or fails and emits", field="row_errors")


def _endings(
    executor: ExecutorState, sampled: RowSet, tokens: U32, is_eos: Bools, has_last_token: bool
) -> tuple[U8, dict[int, FinishReason]]:
    """Which sequences end with these tokens, their newest: reasons, and the entries that have one. Only those are
    looked at that a comparison of whole columns finds."""
    rows, index, may_end = executor.rows, sampled.index, is_eos
    has_eos = bool(np.count_nonzero(is_eos))
    if not (has_last_token or has_eos or rows.num_with_stops):
        return sampled.batch().no_reasons, {}
    if has_eos and rows.num_ignoring_eos:
        may_end = is_eos & ~rows.ignore_eos[index]
    if rows.num_with_stops:
        may_end = may_end | (rows.stops[index] == tokens[:, None]).any(axis=1)
    if has_last_token:
        may_end = may_end | (rows.low >= rows.final).take(index)
    entries = may_end.nonzero()[0]
    ending, at = entries.tolist(), index[entries].tolist()
    if has_eos or rows.num_with_stops:
        found = zip(ending, at, tokens[entries].tolist(), strict=True)
        reason_of = {entry: reason for entry, row, token in found if (reason := _end_reason(executor, row, token))}
    else:  # by their length alone
        reason_of = {entry: rows.end_reason[row] for entry, row in zip(ending, at, strict=True)}
    if not reason_of:
        return sampled.batch().no_reasons, {}
    reasons: U8 = np.zeros(len(index), dtype=np.uint8)
    for entry, reason in reason_of.items():
        reasons[entry] = reason
    reasons.setflags(write=False)
    return reasons, reason_of


def _end_reason(executor: ExecutorState, row: int, token: int) -> FinishReason | None:
    """Why the row's sequence ends with `token`, its newest. None: it goes on."""
    rows, length = executor.rows, int(executor.rows.low[row])
    if executor.is_eos[token] or rows.num_with_stops:
        sequence = rows.seqs[row]
        assert sequence is not None
        sampling = sequence.request.sampling
        if length > sequence.prompt_len + sampling.min_tokens:
            if executor.is_eos[token] and not sampling.ignore_eos:
                return FinishReason.EOS
            if token in sampling.stop_ids:
                return FinishReason.STOP_TOKEN
    return rows.end_reason[row] if length >= rows.final[row] else None


def batches(executor: ExecutorState, collected: Collected, result: StepResult) -> dict[int, TokenBatch]:
    """One TokenBatch per worker that has something to hear. Rows must not have been freed yet."""
    sampled, tokens, reasons = collected.sampled, collected.tokens, collected.reasons
    batch = sampled.batch()
    keys, counts, cached, worker = sampled.keys, batch.counts, batch.cached, batch.worker
    extras: dict[int, Extras] = {}
    if len(result.logprobs.rows) or result.outputs:
        silent, extras = _extras(executor, sampled.index, result)
        if silent:
            keys = np.concatenate([keys, executor.rows.keys[silent]])
            cached = np.concatenate([cached, executor.rows.cached[silent]])
            counts = np.concatenate([counts, np.zeros(len(silent), dtype=np.uint32)])
            reasons = np.concatenate([reasons, np.zeros(len(silent), dtype=np.uint8)])
            worker = SEVERAL
    if worker != SEVERAL:
        return {worker: TokenBatch(keys, counts, tokens, reasons, cached, extras)}
    if not len(keys):
        return {}
    workers = keys >> np.uint64(WORKER_SHIFT)
    found: dict[int, TokenBatch] = {}
    for worker in np.unique(workers).tolist():
        picked = np.flatnonzero(workers == worker)
        place = {int(entry): i for i, entry in enumerate(picked)}
        own = {place[entry]: extra for entry, extra in extras.items() if entry in place}
        # Entries without a token stand last, so the tokens' indices are those of the entries.
        own_tokens = tokens[picked[picked < len(tokens)]]
        found[worker] = _batch(keys[picked], counts[picked], own_tokens, reasons[picked], cached[picked], own)
    return found


def _batch(keys: U64, counts: U32, tokens: U32, reasons: U8, cached: U32, extras: dict[int, Extras]) -> TokenBatch:
    for column in (keys, counts, tokens, reasons, cached):
        column.setflags(write=False)
    return TokenBatch(keys, counts, tokens, reasons, cached, extras)


def _extras(executor: ExecutorState, index: I64, result: StepResult) -> tuple[list[int], dict[int, Extras]]:
    """Extras by entry, and the accepted rows that have some but no token in this step (their entries follow)."""
    rows = executor.rows
    entry_of = {row: entry for entry, row in enumerate(index.tolist())}
    tops: dict[int, TopTokens] = {}
    lp, offset = result.logprobs, 0
    for row, chosen, count in zip(lp.rows.tolist(), lp.chosen.tolist(), lp.top_counts.tolist(), strict=True):
        if row in entry_of:
            ids = tuple(lp.top_ids[offset : offset + count].tolist())
            tops[row] = TopTokens(chosen, ids, tuple(lp.top_logprobs[offset : offset + count].tolist()))
        offset += count
    outputs: dict[int, list[Output]] = {}
    silent: list[int] = []
    for output in result.outputs:
        row = output.row
        if row >= len(rows) or rows.admission[row] != output.admission_id or not rows.accept[row]:
            continue
        outputs.setdefault(row, []).append(output)
        if output.kind == OutputKind.PROMPT_LOGPROBS:
            sequence = rows.seqs[row]
            assert sequence is not None
            sequence.next_prompt_logprob = max(sequence.next_prompt_logprob, output.position + output.count)
        if row not in entry_of:
            entry_of[row] = len(index) + len(silent)
            silent.append(row)
    named = sorted(tops.keys() | outputs.keys())
    extras = {entry_of[row]: Extras((tops[row],) if row in tops else (), tuple(outputs.get(row, ()))) for row in named}
    return silent, extras
