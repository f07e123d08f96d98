"""An executor that computes nothing: each step takes a fixed time, and each token tells when its result was made.

Token ids are the monotonic clock in ticks of TICK_NS, modulo the vocabulary: a client on the same machine knows from
the token alone how long ago its step ended, up to WRAP_NS.
"""

import secrets
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.messages import ExecutorInfo, Hello, PlanErrorCode, StepMode, StepPlan, StepResult, Timings, u32
from executor_svc.step_executor import refused

VOCAB: Final = 1 << 16
TICK_NS: Final = 20_000
WRAP_NS: Final = VOCAB * TICK_NS
BLOCK_SIZE: Final = 16


def ticks(now_ns: int) -> int:
    return now_ns // TICK_NS % VOCAB


@dataclass(eq=False)
class _Step:
    executor: "ClockExecutor"
    plan: StepPlan
    rows: NDArray[np.int64]
    received_ns: int

    def wait(self) -> StepResult:
        end_ns = self.executor.next_end_ns()
        while (left_ns := end_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / 1e9)
        tokens = np.full(len(self.rows), ticks(time.monotonic_ns()), np.uint32)
        timings = Timings(self.received_ns)
        return StepResult(
            self.plan.epoch, self.plan.step_id, u32(self.rows), u32(tokens), timings=timings, mode=StepMode.EAGER
        )


class ClockExecutor:
    """A StepExecutor. Checks nothing but the epoch: only for plans of a scheduler that is known to be right."""

    def __init__(self, max_num_seqs: int, step_ns: int) -> None:
        self._step_ns = step_ns
        self._end_ns = 0
        self._epoch = 0
        self._length = np.zeros(max_num_seqs + 64, np.int64)
        self.incarnation = secrets.randbits(63) | 1
        self.info = ExecutorInfo(
            model_id="clock",
            model_hash="clock",
            vocab_size=VOCAB,
            eos_ids=(0,),
            num_rows=max_num_seqs + 64,
            max_num_seqs=max_num_seqs,
            max_blocks_per_row=256,
            block_size=BLOCK_SIZE,
            num_blocks=max_num_seqs * 64,
            max_tokens_per_step=max_num_seqs * 32,
            max_context=256 * BLOCK_SIZE,
            device="clock",
        )

    def begin_epoch(self, hello: Hello) -> bool:
        self._epoch = hello.epoch
        return False

    def execute(self, plan: StepPlan, received_ns: int) -> _Step:
        """Raises PlanRefused for a plan of another epoch."""
        if plan.epoch != self._epoch:
            raise refused(plan, PlanErrorCode.STALE_EPOCH, f"the epoch is {self._epoch}")
        for admit in plan.admit:
            self._length[admit.row] = admit.length
        ends = plan.prefill_starts.astype(np.int64) + plan.prefill_counts
        prefilled = plan.prefill_rows[ends == self._length[plan.prefill_rows]]
        rows = np.sort(np.concatenate([plan.decode_rows, prefilled])).astype(np.int64)
        self._length[rows] += 1
        return _Step(self, plan, rows, received_ns)

    def next_end_ns(self) -> int:
        """When the step that is waited for now is over: a step's time after the one before, or after now."""
        self._end_ns = max(self._end_ns, time.monotonic_ns() - self._step_ns) + self._step_ns
        return self._end_ns

    def close(self) -> None:
        pass
