"""An executor that only answers: it knows each row's length, so it knows which rows sample, and makes up their tokens.

Plan bytes in, result bytes out, as they travel on the stream. For measuring the scheduler alone.
"""

import numpy as np

from common import wire
from common.messages import ExecutorInfo, StepMode, StepPlan, StepResult, Timings, Welcome, u32
from stepwire.executor.v1 import executor_pb2 as pb

VOCAB = 128_256
EOS = (128_001, 128_008, 128_009)
_TOKENS = 1 << 16


def modelled_info(num_seqs: int, block_size: int, num_blocks: int, max_context: int, max_tokens: int) -> ExecutorInfo:
    return ExecutorInfo(
        model_id="modelled",
        model_hash="",
        vocab_size=VOCAB,
        eos_ids=EOS,
        num_rows=num_seqs + 64,
        max_num_seqs=num_seqs,
        max_blocks_per_row=max_context // block_size,
        block_size=block_size,
        num_blocks=num_blocks,
        max_tokens_per_step=max_tokens,
        max_context=max_context,
    )


class ModelledExecutor:
    """`answer` plans in order. Sampled tokens are random, EOS with a chance of `eos_chance` each."""

    def __init__(self, info: ExecutorInfo, pipeline_depth: int, seed: int, eos_chance: float = 0.0) -> None:
        self.welcome = Welcome(1, info, pipeline_depth, kv_kept=False, monotonic_ns=0, wall_ns=0)
        self._known = np.zeros(info.num_rows, dtype=np.int64)  # tokens each row was admitted with
        rng = np.random.default_rng(seed)
        self._tokens = rng.integers(1000, EOS[0], size=_TOKENS, dtype=np.uint32)
        self._tokens[rng.random(_TOKENS) < eos_chance] = EOS[0]

    def answer(self, data: bytes, num_seqs: int) -> bytes:
        """Result bytes for one plan's bytes. `num_seqs`: the bucket that is said to have run."""
        plan = wire.decode_to_executor(pb.ToExecutor.FromString(data))
        assert isinstance(plan, StepPlan)
        for admit in plan.admit:
            self._known[admit.row] = admit.length
        ended = self._known[plan.prefill_rows] == plan.prefill_starts.astype(np.int64) + plan.prefill_counts
        rows = np.sort(np.concatenate([plan.decode_rows, plan.prefill_rows[ended]]))
        first = plan.step_id * 37 % (_TOKENS - len(rows))
        at = 10**15 + plan.step_id * 10**6  # as large as real clock readings: they travel as varints
        timings = Timings(at, at + 10, at + 20, at + 30, at + 40, at + 50, at + 60, at + 900, at + 950, at + 990, 5)
        result = StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            emitted_rows=u32(rows),
            tokens=u32(self._tokens[first : first + len(rows)].copy()),
            timings=timings,
            mode=StepMode.EAGER if len(plan.prefill_rows) else StepMode.GRAPH,
            bucket=num_seqs,
        )
        return wire.encode_from_executor(result).SerializeToString()
