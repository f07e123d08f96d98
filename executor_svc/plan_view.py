"""The rows as a plan would leave them, without touching them; and what every check of a plan has in common."""

import numpy as np

from common.messages import U32, Admit, ExecutorInfo, PlanErrorCode, Sampling, StepPlan
from executor_svc.rows import NO_BLOCK, RowBook
from executor_svc.step_executor import PlanRefused, refused


class PlanView:
    """One plan over the book of rows; a check fills in what it has let through. `_need` methods raise PlanRefused."""

    def __init__(self, info: ExecutorInfo, book: RowBook, plan: StepPlan) -> None:
        self._info = info
        self._book = book
        self._plan = plan
        self._released: set[int] = set()
        self._new_admissions: set[int] = set()
        self._admitted: dict[int, Admit] = {}
        self._filled: dict[int, int] = {}
        self._grants: dict[tuple[int, int], int] = {}

    def _refuse(
        self, code: PlanErrorCode, field: str, text: str, *, row: int | None = None, limit: int = 0
    ) -> PlanRefused:
        return refused(self._plan, code, text, field=field, row=row, admission_id=self._admission_of(row), limit=limit)

    def _admission_of(self, row: int | None) -> int:
        if row is None or row >= self._info.num_rows:
            return 0
        if row in self._admitted:
            return self._admitted[row].admission_id
        state = self._book.rows[row]
        return 0 if state is None else state.admission_id

    def _is_occupied(self, row: int) -> bool:
        if row in self._admitted:
            return True
        return row < self._info.num_rows and bool(self._book.occupied[row]) and row not in self._released

    def _need_row(self, row: int, field: str) -> None:
        if row >= self._info.num_rows:
            raise self._refuse(
                PlanErrorCode.UNKNOWN_ROW, field, f"there are rows 0 to {self._info.num_rows - 1}",
                row=row, limit=self._info.num_rows,
            )  # fmt: skip
        if not self._is_occupied(row):
            raise self._refuse(PlanErrorCode.UNKNOWN_ROW, field, f"no sequence is in row {row}", row=row)

    def _need_same_length(self, **columns: U32) -> None:
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            name = next(iter(sizes))
            raise self._refuse(PlanErrorCode.MALFORMED, name, f"columns differ in length: {sizes}")

    def _need_ascending(self, field: str, rows: U32) -> None:
        if len(rows) > 1 and not bool((rows[1:] > rows[:-1]).all()):
            raise self._refuse(PlanErrorCode.MALFORMED, field, "rows are not ascending")

    def _need_blocks(self, field: str, blocks: U32, row: int | None = None) -> None:
        if len(blocks) and int(blocks.max()) >= self._info.num_blocks:
            index = int(np.argmax(blocks >= self._info.num_blocks))
            raise self._refuse(
                PlanErrorCode.BLOCK_RANGE, f"{field}[{index}]", f"there is no block {int(blocks[index])}",
                row=row, limit=self._info.num_blocks,
            )  # fmt: skip

    def _need_tokens(self, field: str, tokens: U32, row: int) -> None:
        if len(tokens) and int(tokens.max()) >= self._info.vocab_size:
            index = int(np.argmax(tokens >= self._info.vocab_size))
            raise self._refuse(
                PlanErrorCode.MALFORMED, f"{field}[{index}]", f"{int(tokens[index])} is not in the vocabulary",
                row=row, limit=self._info.vocab_size,
            )  # fmt: skip

    def _length(self, row: int) -> int:
        admit = self._admitted.get(row)
        return admit.length if admit is not None else int(self._book.length[row])

    def _computed(self, row: int) -> int:
        admit = self._admitted.get(row)
        return admit.computed_len if admit is not None else int(self._book.computed[row])

    def _known(self, row: int) -> int:
        """Tokens of the row the host has."""
        if row in self._filled:
            return self._filled[row]
        admit = self._admitted.get(row)
        return len(admit.tokens) if admit is not None else self._book.row(row).filled

    def _announced(self, row: int) -> int:
        """Tokens the host has or is to get; those after it were sampled and are on the device."""
        admit = self._admitted.get(row)
        return admit.length if admit is not None else len(self._book.row(row).tokens)

    def _sampling(self, row: int) -> tuple[Sampling, int]:
        admit = self._admitted.get(row)
        if admit is not None:
            return admit.sampling, admit.prompt_len
        state = self._book.row(row)
        return state.sampling, state.prompt_len

    def _need_room(self, field: str, row: int) -> None:
        """The row may have one token more."""
        sampling, prompt_len = self._sampling(row)
        limit, length = min(prompt_len + sampling.max_tokens, self._info.max_context), self._length(row)
        if length >= limit:
            text = f"row {row} has {length} tokens: its max_tokens or the context is used up"
            raise self._refuse(PlanErrorCode.BUDGET, field, text, row=row, limit=limit)

    def _need_block_for(self, field: str, row: int, first: int, last: int) -> None:
        """The row's table must have a block for each position first..last."""
        size = self._info.block_size
        admit = self._admitted.get(row)
        for index in range(first // size, last // size + 1):
            if (row, index) in self._grants:
                continue
            if admit is not None:
                if index < len(admit.blocks):
                    continue
            elif index < self._info.max_blocks_per_row and self._book.tables[row, index] != NO_BLOCK:
                continue
            raise self._refuse(
                PlanErrorCode.BLOCK_RANGE, field, f"row {row} has no block for positions from {index * size}",
                row=row, limit=index,
            )  # fmt: skip
