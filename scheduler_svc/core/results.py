"""Turns a StepResult into what the step's own record says it means."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import ProtocolError
from common.messages import U32, Output, OutputKind, RowError, StepResult, u32
from scheduler_svc.core.executor_state import ExecutorState, Flight
from scheduler_svc.core.rows import I64, RECENT
from scheduler_svc.messages import WORKER_SHIFT, Extras, FinishReason, TokenBatch, TopTokens

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What of a step counts. rows, tokens, reasons: one entry per accepted token, reasons as FinishReason or 0."""

    flight: Flight
    rows: I64
    tokens: U32
    reasons: U8
    row_errors: tuple[RowError, ...]


def collect(executor: ExecutorState, result: StepResult) -> Collected:
    """Checks `result` against the oldest step in flight, then books its tokens.

    Raises ProtocolError, with nothing changed, when the executor broke the protocol.
    """
    flight = _checked(executor, result)
    rows = executor.rows
    executor.flights.popleft()
    executor.last_result = flight.step_id
    executor.steps += 1
    if flight.step_id > executor.failed_step:  # further than where the last epoch broke off
        executor.fruitless_epochs = 0
    errors = tuple(e for e in result.row_errors if rows.admission[e.row] == e.admission_id)
    for error in errors:
        rows.tainted[error.row] = True
    for row, end in flight.prefills:
        rows.prefilled[row] = end
        executor.register(row, end)
    index: I64 = result.emitted_rows.astype(np.int64)
    tokens = result.tokens
    if executor.limbo:  # only there do sequences wait that have ended
        accepted = rows.accept[index]
        index, tokens = index[accepted], tokens[accepted]
    reasons = _append(executor, index, tokens)
    return Collected(flight, index, tokens, reasons, tuple(e for e in errors if rows.accept[e.row]))


def _checked(executor: ExecutorState, result: StepResult) -> Flight:
    if not executor.flights or result.epoch != executor.epoch or result.step_id != executor.flights[0].step_id:
        raise ProtocolError(f"step_result: step {result.step_id} of epoch {result.epoch} is not the one awaited")
    flight, rows = executor.flights[0], executor.rows
    if len(result.tokens) != len(result.emitted_rows):
        raise ProtocolError("step_result: more than one token for a row without drafts", field="tokens")
    assert executor.info is not None
    if len(result.tokens) and int(result.tokens.max()) >= executor.info.vocab_size:
        raise ProtocolError(f"step_result: token {int(result.tokens.max())} is outside the vocabulary", field="tokens")
    if len(result.counts) and (result.counts != 1).any():
        raise ProtocolError("step_result: not one token for each row, without drafts", field="counts")
    if any(e.row >= len(rows) for e in result.row_errors):
        raise ProtocolError("step_result: an error for a row that does not exist", field="row_errors")
    failed_rows = [e.row for e in result.row_errors if rows.admission[e.row] == e.admission_id]
    heard = [*failed_rows, *result.emitted_rows.tolist()] if failed_rows else []
    if len(set(heard)) < len(heard):
        raise ProtocolError("step_result: a row fails twice, or fails and emits", field="row_errors")
    if result.emitted_rows.tobytes() != flight.expected.tobytes():
        emitted, failed = set(result.emitted_rows.tolist()), {e.row for e in result.row_errors}
        expected = set(flight.expected.tolist())
        silent = [r for r in expected - emitted - failed if rows.accept[r]]
        if silent or emitted - expected:
            raise ProtocolError(
                f"step_result: rows {silent} are silent and rows {sorted(emitted - expected)} emit unasked",
                field="emitted",
            )
    return flight


def _append(executor: ExecutorState, index: I64, tokens: U32) -> U8:
    """Books one token for each row and tells which sequences it ends."""
    rows = executor.rows
    assert executor.info is not None
    reasons: U8 = np.zeros(len(index), dtype=np.uint8)
    if not len(index):
        return reasons
    position = rows.low[index]
    length = position + 1
    rows.low[index] = length
    filled = rows.recent_len[index]
    rows.recent[index, filled] = tokens
    rows.recent_len[index] = filled + 1
    if int(filled.max()) == RECENT - 1:
        for row in index[filled == RECENT - 1].tolist():
            rows.flush(row)
    at_end = length >= rows.final[index]
    if at_end.any():
        reasons[at_end] = rows.end_reason[index[at_end]]
    if rows.num_with_stops:
        hit = (rows.stops[index] == tokens[:, None]).any(axis=1) & rows.has_stops[index]
        reasons[hit & (position >= rows.min_end[index])] = FinishReason.STOP_TOKEN
    for eos_id in executor.info.eos_ids:
        hit = tokens == eos_id
        if hit.any():
            reasons[hit & (position >= rows.min_end[index]) & ~rows.ignore_eos[index]] = FinishReason.EOS
    return reasons


def batches(executor: ExecutorState, collected: Collected, result: StepResult) -> dict[int, TokenBatch]:
    """One TokenBatch per worker that has something to hear. Rows must not have been freed yet."""
    index, tokens, reasons = collected.rows, collected.tokens, collected.reasons
    counts: NDArray[np.uint32] = np.ones(len(index), dtype=np.uint32)
    extras: dict[int, Extras] = {}
    if len(result.logprobs.rows) or result.outputs:
        silent, extras = _extras(executor, index, result)
        if silent:
            index = np.concatenate([index, np.array(silent, dtype=np.int64)])
            counts = np.concatenate([counts, np.zeros(len(silent), dtype=np.uint32)])
            reasons = np.concatenate([reasons, np.zeros(len(silent), dtype=np.uint8)])
    if not len(index):
        return {}
    keys = executor.rows.keys[index]
    cached = executor.rows.cached[index]
    workers = keys >> np.uint64(WORKER_SHIFT)
    if (workers == workers[0]).all():
        return {int(workers[0]): _batch(keys, counts, tokens, reasons, cached, extras)}
    found: dict[int, TokenBatch] = {}
    for worker in np.unique(workers).tolist():
        picked = np.flatnonzero(workers == worker)
        place = {int(entry): i for i, entry in enumerate(picked)}
        own = {place[entry]: extra for entry, extra in extras.items() if entry in place}
        # Entries without a token stand last, so the tokens' indices are those of the entries.
        own_tokens = tokens[picked[picked < len(tokens)]]
        found[worker] = _batch(keys[picked], counts[picked], own_tokens, reasons[picked], cached[picked], own)
    return found


def _batch(
    keys: NDArray[np.uint64], counts: U32, tokens: U32, reasons: U8, cached: U32, extras: dict[int, Extras]
) -> TokenBatch:
    for column in (keys, reasons):
        column.flags.writeable = False
    return TokenBatch(keys, u32(counts), u32(tokens), reasons, u32(cached), extras)


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
