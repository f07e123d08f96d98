"""The host's book of rows: what the device state of each row is, without asking the device. Owner: runner thread."""

from dataclasses import dataclass, field
from enum import IntFlag
from typing import Final

import numpy as np
from numpy.typing import NDArray

from common.messages import Admit, Extend, Sampling

NO_BLOCK: Final = -1


class RowNeeds(IntFlag):
    """What sampling a row takes beyond the most likely token."""

    NONE = 0
    RANDOM = 1
    FILTER = 2  # top-k, top-p or min-p
    PENALTIES = 4
    BIAS = 8  # bias or allowed ids
    MIN_TOKENS = 16
    LOGPROBS = 32
    PROMPT_LOGPROBS = 64


def needs_of(sampling: Sampling) -> RowNeeds:
    needs = RowNeeds.NONE
    if sampling.temperature > 0:
        needs |= RowNeeds.RANDOM
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
            needs |= RowNeeds.FILTER
    if sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty:
        needs |= RowNeeds.PENALTIES
    if sampling.bias or sampling.allowed_ids:
        needs |= RowNeeds.BIAS
    if sampling.min_tokens:
        needs |= RowNeeds.MIN_TOKENS
    if sampling.num_logprobs:
        needs |= RowNeeds.LOGPROBS
    if sampling.num_prompt_logprobs:
        needs |= RowNeeds.PROMPT_LOGPROBS
    return needs


@dataclass(slots=True, eq=False)
class HostRow:
    """One admission. `tokens`: int64, as many as were announced; the first `filled` are here.

    `failed` and `freed_blocks` are shared with the waiter, under the runner's lock.
    """

    row: int
    admission_id: int
    prompt_len: int
    sampling: Sampling
    tokens: NDArray[np.int64]
    filled: int
    needs: RowNeeds
    failed: bool = False
    freed_blocks: NDArray[np.int32] | None = None


@dataclass(slots=True, eq=False)
class RowBook:
    """Arrays by row, for work over many rows at once; `rows[r]`: HostRow, None where no sequence is; `admissions`: of
    those in rows.

    length: tokens known or sampled, exact, as the device has it. computed: tokens whose KV is written, or will be by
    steps already launched. max_length: tokens a row may reach. min_length: tokens below which it does not stop.
    complete: every announced token is here. tables: the device's block tables, NO_BLOCK where it has none.
    """

    num_rows: int
    max_blocks: int
    block_size: int
    max_context: int
    rows: NDArray[np.object_] = field(init=False)
    admissions: set[int] = field(init=False)
    occupied: NDArray[np.bool_] = field(init=False)
    length: NDArray[np.int64] = field(init=False)
    computed: NDArray[np.int64] = field(init=False)
    max_length: NDArray[np.int64] = field(init=False)
    min_length: NDArray[np.int64] = field(init=False)
    complete: NDArray[np.bool_] = field(init=False)
    needs: NDArray[np.uint8] = field(init=False)
    tables: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Releases every row."""
        self.rows = np.full(self.num_rows, None, np.object_)
        self.admissions = set()
        self.occupied = np.zeros(self.num_rows, np.bool_)
        self.length = np.ones(self.num_rows, np.int64)
        self.computed = np.zeros(self.num_rows, np.int64)
        self.max_length = np.ones(self.num_rows, np.int64)
        self.min_length = np.zeros(self.num_rows, np.int64)
        self.complete = np.zeros(self.num_rows, np.bool_)
        self.needs = np.zeros(self.num_rows, np.uint8)
        self.tables = np.full((self.num_rows, self.max_blocks), NO_BLOCK, np.int32)

    def row(self, row: int) -> HostRow:
        state: HostRow | None = self.rows[row]
        assert state is not None, f"row {row} is empty"
        return state

    def release(self, row: int) -> HostRow:
        state = self.row(row)
        self.rows[row] = None
        self.admissions.discard(state.admission_id)
        self.occupied[row] = False
        self.needs[row] = 0
        return state

    def blocks_of(self, row: int) -> NDArray[np.int32]:
        table = self.tables[row]
        blocks: NDArray[np.int32] = table[table != NO_BLOCK].copy()
        return blocks

    def admit(self, admit: Admit) -> HostRow:
        tokens = np.zeros(admit.length, np.int64)
        tokens[: len(admit.tokens)] = admit.tokens
        state = HostRow(
            admit.row,
            admit.admission_id,
            admit.prompt_len,
            admit.sampling,
            tokens,
            len(admit.tokens),
            needs_of(admit.sampling),
        )
        self.rows[admit.row] = state
        self.admissions.add(admit.admission_id)
        self.occupied[admit.row] = True
        self.length[admit.row] = admit.length
        self.computed[admit.row] = admit.computed_len
        self.max_length[admit.row] = min(admit.prompt_len + admit.sampling.max_tokens, self.max_context)
        self.min_length[admit.row] = admit.prompt_len + admit.sampling.min_tokens
        self.complete[admit.row] = len(admit.tokens) == admit.length
        self.needs[admit.row] = int(state.needs)
        self.tables[admit.row] = NO_BLOCK
        self.tables[admit.row, : len(admit.blocks)] = admit.blocks
        return state

    def extend(self, extend: Extend) -> None:
        state = self.row(extend.row)
        end = extend.offset + len(extend.tokens)
        state.tokens[extend.offset : end] = extend.tokens
        state.filled = end
        self.complete[extend.row] = end == len(state.tokens)
