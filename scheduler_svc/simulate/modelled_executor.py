"""An executor that computes nothing: it takes plans in order, knows how long each would take, and emits tokens."""

from dataclasses import dataclass

import numpy as np

from common.messages import EMPTY_U32, U32, StepPlan, StepResult, Timings, u32
from scheduler_svc.simulate.step_model import StepModel
from scheduler_svc.simulate.trace import I64


@dataclass(frozen=True, slots=True, eq=False)
class ModelledStep:
    """Virtual times of one step; `context_tokens` as in step_model.Cost. admitted_tokens: length of the sequences that
    got a row; cached_tokens: of those, found in the prefix cache."""

    result: StepResult
    start_ns: int
    end_ns: int
    context_tokens: int
    admitted_tokens: int
    cached_tokens: int


class ModelledExecutor:
    """Runs plans one after the other. Knows of them what a device would: lengths of rows, by row."""

    def __init__(self, model: StepModel) -> None:
        info = model.info()
        self._model = model
        self._length: I64 = np.zeros(info.num_rows, dtype=np.int64)
        self._zeros: U32 = u32(np.zeros(info.num_rows, dtype=np.uint32))
        self._free_ns = 0

    def execute(self, plan: StepPlan, received_ns: int) -> ModelledStep:
        length = self._length
        admitted = cached = 0
        for admit in plan.admit:
            length[admit.row] = admit.length
            admitted += admit.length
            cached += admit.computed_len
        emitted, prefill_tokens, context = plan.decode_rows, 0, 0
        if len(emitted):
            context = int(length[emitted].sum())
            length[emitted] += 1
        if len(plan.prefill_rows):
            prefill_tokens = int(plan.prefill_counts.sum())
            ends = plan.prefill_starts.astype(np.int64) + plan.prefill_counts
            context += int(ends.sum())
            sampling = plan.prefill_rows[ends == length[plan.prefill_rows]]
            if len(sampling):
                length[sampling] += 1
                emitted = u32(np.sort(np.concatenate([emitted, sampling])))
        start_ns = max(received_ns, self._free_ns)
        end_ns = start_ns + self._model.step_ns(len(plan.decode_rows), prefill_tokens, context)
        idle_ns, self._free_ns = start_ns - self._free_ns, end_ns
        result = StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            emitted_rows=emitted if len(emitted) else EMPTY_U32,
            tokens=self._zeros[: len(emitted)],
            timings=Timings(
                received_ns=received_ns,
                launched_ns=received_ns,  # without it the pipeline's depth would find nothing to follow
                device_start_ns=start_ns,
                device_end_ns=end_ns,
                sent_ns=end_ns,
                device_idle_ns=idle_ns,
            ),
        )
        return ModelledStep(result, start_ns, end_ns, context, admitted, cached)
