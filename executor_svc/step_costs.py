"""What steps cost on this device, measured with real ones before anybody is served.

The scheduler weighs prompts against running sequences by it (scheduler_svc/core/prefill_share.py). Only ratios count
there, so a machine that is busy meanwhile, and all of it slower, changes little.
"""

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from common.messages import Admit, ExecutorInfo, Hello, Sampling, StepPlan, u32
from executor_svc.step_executor import StepExecutor

log = logging.getLogger(__name__)

# Tokens behind which sequences decode here, tokens of the prompt beside them, rows that decode beside it and at most.
CONTEXT = 128
CHUNK = 120
FEW_ROWS = 8
MANY_ROWS = 32
# The least of so many counts: others on the machine only ever add.
REPEATS = 3


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step of D rows that decode and P prompt tokens takes about step_ns + D * row_ns + P * token_ns."""

    step_ns: int
    row_ns: int
    token_ns: int


def measure_costs(executor: StepExecutor) -> StepCosts | None:
    """Runs a few steps in an epoch of its own. None: the executor is too small for them, or they told nothing.

    Called before any scheduler is served, by a thread that may call `execute` and `wait`.
    """
    info = executor.info
    rows = min(MANY_ROWS, info.max_num_seqs - 1)
    own = -(-(CONTEXT + 3 * REPEATS + 3) // info.block_size)  # blocks of a row
    few = min(FEW_ROWS, rows)
    is_small = rows < 2 or info.max_context < CONTEXT + 3 * REPEATS + 3 or few + CHUNK > info.max_tokens_per_step
    if is_small or rows > info.max_tokens_per_step or (rows + 1) * own > info.num_blocks:
        return None
    trial = _Trial(executor, info, own)
    trial.admit(rows)
    trial.decode(1)
    one = min(trial.decode(1) for _ in range(REPEATS))
    many = min(trial.decode(rows) for _ in range(REPEATS))
    mixed = min(trial.mixed(few, rows) for _ in range(REPEATS))
    trial.leave(rows)
    row_ns = max(0, many - one) // (rows - 1)
    token_ns = (mixed - one - (few - 1) * row_ns) // CHUNK
    log.info(
        "a step takes %.2f ms, %.3f more for each row beside the first and %.3f for each prompt token",
        one / 1e6, row_ns / 1e6, token_ns / 1e6,
    )  # fmt: skip
    return StepCosts(max(1, one - row_ns), row_ns, token_ns) if token_ns > 0 else None


class _Trial:
    """An epoch of its own, one step at a time. Row r has the blocks [r * own, (r + 1) * own)."""

    def __init__(self, executor: StepExecutor, info: ExecutorInfo, own: int) -> None:
        self._executor = executor
        self._info = info
        self._own = own
        self._step = 0
        self._admissions = 0
        executor.begin_epoch(Hello(secrets.token_bytes(16), 1, 1, time.monotonic_ns(), time.time_ns()))

    def admit(self, rows: int) -> None:
        """Rows whose context is taken to be computed but for its last token: what lies in their blocks is no matter."""
        self._run(rows=range(rows), length=CONTEXT, computed=CONTEXT - 1)

    def decode(self, rows: int) -> int:
        return self._run(decoding=rows)

    def mixed(self, decoding: int, row: int) -> int:
        """A whole prompt in `row`, which is free again afterwards, beside rows that decode."""
        spent = self._run(rows=(row,), length=CHUNK, decoding=decoding)
        self._run(release=(row,))
        return spent

    def leave(self, rows: int) -> None:
        self._run(release=range(rows))

    def _admission(self, row: int, length: int, computed: int) -> Admit:
        self._admissions += 1
        tokens = u32(np.arange(row, row + length) % self._info.vocab_size)
        blocks = u32(range(row * self._own, (row + 1) * self._own))
        sampling = Sampling(seed=1, temperature=0.0, ignore_eos=True, max_tokens=self._info.max_context - length)
        return Admit(row, self._admissions, tokens, length, length, computed, blocks, sampling)

    def _run(
        self,
        *,
        rows: Sequence[int] = (),
        length: int = 0,
        computed: int = 0,
        decoding: int = 0,
        release: Sequence[int] = (),
    ) -> int:
        """A step that admits and computes `rows` and decodes the first `decoding` ones; ns from plan to result."""
        self._step += 1
        plan = StepPlan(
            epoch=1,
            step_id=self._step,
            sent_ns=0,
            num_tokens=decoding + len(rows) * (length - computed),
            release=u32(release),
            admit=tuple(self._admission(row, length, computed) for row in rows),
            prefill_rows=u32(rows),
            prefill_starts=u32([computed] * len(rows)),
            prefill_counts=u32([length - computed] * len(rows)),
            decode_rows=u32(range(decoding)),
        )
        begin = perf_counter_ns()
        self._executor.execute(plan, time.monotonic_ns()).wait()
        return perf_counter_ns() - begin
