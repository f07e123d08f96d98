"""What a step computes, from its plan: tokens, keys, pairs of a query and a key. bench/step_work.py makes bytes and
operations of it. Loads no torch."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.messages import StepPlan

I64 = NDArray[np.int64]
NO_WINDOW: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """decode_lengths: of each row that decodes, tokens up to the one that is computed, itself included. starts, counts:
    of each piece of a prompt. num_sampling: rows that get a token."""

    decode_lengths: I64
    starts: I64
    counts: I64
    num_sampling: int

    @property
    def num_tokens(self) -> int:
        """That are computed."""
        return len(self.decode_lengths) + int(self.counts.sum())

    @property
    def context_tokens(self) -> int:
        """Whose keys are read, as in scheduler_svc.simulate.step_model.Cost."""
        return keys_read(self, NO_WINDOW)


class Lengths:
    """Follows the rows of an executor through its plans, as its device does; a plan admits a row before it uses it."""

    def __init__(self, num_rows: int) -> None:
        self._length: I64 = np.zeros(num_rows, dtype=np.int64)

    def batch(self, plan: StepPlan) -> Batch:
        """Of the next plan, in order."""
        length = self._length
        for admit in plan.admit:
            length[admit.row] = admit.length
        decode_lengths = length[plan.decode_rows]
        length[plan.decode_rows] += 1
        starts, counts = plan.prefill_starts.astype(np.int64), plan.prefill_counts.astype(np.int64)
        ending = plan.prefill_rows[starts + counts == length[plan.prefill_rows]]
        length[ending] += 1
        return Batch(decode_lengths, starts, counts, len(decode_lengths) + len(ending))


def keys_read(batch: Batch, window: int) -> int:
    """In one layer, and as many values: the whole row for each that decodes, everything up to its end for each piece of
    a prompt. `window`: positions a token attends to, its own included; 0: all."""
    decoding, pieces = batch.decode_lengths, batch.starts + batch.counts
    if window:
        decoding, pieces = np.minimum(decoding, window), np.minimum(pieces, batch.counts + window - 1)
    return int(decoding.sum() + pieces.sum())


def causal_pairs(start: int, count: int, window: int = NO_WINDOW) -> int:
    """Of a query and a key it attends to, for the tokens from position `start` on: the one at p has p + 1, or
    `window`."""
    near = count if not window else min(max(window - start, 0), count)
    return near * start + near * (near + 1) // 2 + (count - near) * window


def pairs(batch: Batch, window: int) -> int:
    """In one layer, and for one head."""
    own = np.minimum(batch.decode_lengths, window) if window else batch.decode_lengths
    pieces = zip(batch.starts.tolist(), batch.counts.tolist(), strict=True)
    return int(own.sum()) + sum(causal_pairs(start, count, window) for start, count in pieces)


def attention_flops(num_heads: int, head_dim: int, num_pairs: int) -> int:
    """A product and a sum for each number of the key, and of the value, of each pair, in each query head."""
    return 4 * num_heads * head_dim * num_pairs
