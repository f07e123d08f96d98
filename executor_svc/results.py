"""From what the device wrote to a StepResult. Waiter thread; pure host code."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from common.messages import (
    Logprobs,
    Output,
    OutputKind,
    RowError,
    RowErrorCode,
    StepMode,
    StepPlan,
    StepResult,
    Timings,
    f32,
    u32,
)
from executor_svc.input_batch import Batch
from executor_svc.rows import HostRow
from executor_svc.step_inputs import FAILED, FINE, StepInputs

# An output with its place in the batch.
Placed = tuple[Logprobs, tuple[Output, ...]]


def make_result(
    plan: StepPlan,
    batch: Batch,
    rows: list[HostRow],
    values: NDArray[np.int64],
    placed: Placed,
    *,
    timings: Timings,
    mode: StepMode,
    bucket: int,
) -> StepResult:
    """values: [2, B], tokens and status by batch place."""
    tokens, status = values
    logprobs, outputs = placed
    emitted = batch.samples & (status == FINE)
    errors = tuple(
        RowError(rows[at].row, rows[at].admission_id, RowErrorCode.NOT_FINITE, "the model's numbers are not finite")
        for at in np.flatnonzero(status == FAILED).tolist()
    )
    return StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        emitted_rows=u32(batch.rows[emitted]),
        tokens=u32(tokens[emitted]),
        logprobs=logprobs,
        row_errors=errors,
        timings=timings,
        mode=mode,
        bucket=bucket,
        output_bytes=sum(len(output.data) for output in outputs),
        outputs=outputs,
    )


def collect_outputs(
    plan: StepPlan,
    batch: Batch,
    rows: list[HostRow],
    inputs: StepInputs | None,
    host: list[torch.Tensor],
    status: NDArray[np.int64],
) -> Placed:
    """host: the tensors of StepOutputs.tensors(), in that order. Failed and dead rows have no outputs."""
    if inputs is None or not host:
        return Logprobs(), ()
    remaining = iter([tensor.numpy() for tensor in host])
    outputs: list[Output] = []
    if inputs.raw_tokens is not None:
        outputs.extend(_raw_logits(plan, batch, rows, next(remaining), status))
    logprobs = Logprobs()
    if inputs.logprobs_at is not None:
        logprobs = _logprobs(batch, rows, (next(remaining), next(remaining), next(remaining)), status)
    for wish in inputs.prompts:
        chosen, ids, tops = next(remaining), next(remaining), next(remaining)
        if status[wish.at] == FINE:
            row = rows[wish.at]
            start = int(batch.starts[wish.at])
            position = start + 1 + wish.first - int(batch.offsets[wish.at])
            data = b"".join(
                np.float32(c).astype("<f4").tobytes() + i.astype("<u4").tobytes() + t.astype("<f4").tobytes()
                for c, i, t in zip(chosen, ids, tops, strict=True)
            )
            kind = OutputKind.PROMPT_LOGPROBS
            outputs.append(Output(plan.step_id, kind, row.row, row.admission_id, position, len(chosen), data))
    return logprobs, tuple(outputs)


def _raw_logits(
    plan: StepPlan, batch: Batch, rows: list[HostRow], logits: NDArray[np.float32], status: NDArray[np.int64]
) -> Iterator[Output]:
    places = np.searchsorted(batch.rows, plan.raw_logits_rows).tolist()
    for at, position, values in zip(places, plan.raw_logits_positions.tolist(), logits, strict=True):
        if status[at] == FINE:
            row = rows[at]
            data = values.astype("<f4").tobytes()
            yield Output(plan.step_id, OutputKind.RAW_LOGITS, row.row, row.admission_id, position, 1, data)


def _logprobs(
    batch: Batch,
    rows: list[HostRow],
    columns: tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]],
    status: NDArray[np.int64],
) -> Logprobs:
    chosen, ids, tops = columns
    wanting = [at for at in np.flatnonzero(batch.samples).tolist() if rows[at].sampling.num_logprobs]
    entries = [(place, at) for place, at in enumerate(wanting) if status[at] == FINE]
    counts = [min(rows[at].sampling.num_logprobs - 1, ids.shape[1]) for _, at in entries]
    sized = list(zip(entries, counts, strict=True))
    return Logprobs(
        rows=u32(int(batch.rows[at]) for _, at in entries),
        chosen=f32(float(chosen[place]) for place, _ in entries),
        top_counts=u32(counts),
        top_ids=u32(int(i) for (place, _), n in sized for i in ids[place, :n]),
        top_logprobs=f32(float(v) for (place, _), n in sized for v in tops[place, :n]),
    )
