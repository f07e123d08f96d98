"""From a checked plan to staged columns: what a step brings to the device. Host work of the runner thread."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from common.messages import StepPlan
from executor_svc.buffers import (
    FREQUENCY,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    StagingSlot,
)
from executor_svc.device_step import Chunk, PromptWish, RowChanges, StepInputs
from executor_svc.input_batch import Batch
from executor_svc.rows import HostRow, RowBook, RowNeeds
from executor_svc.sampler import GREEDY, SamplePlan, SampleRow, seed_to_int64

I64 = NDArray[np.int64]


class Stager:
    """Applies plans to the book of rows and stages what the device must learn of them."""

    def __init__(
        self,
        book: RowBook,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        released: Callable[[HostRow, NDArray[np.int32]], None],
        take_dirty: Callable[[], set[int]],
    ) -> None:
        """`released`: told of each released row and the blocks its table named. `take_dirty`: blocks found dirty since
        it was last asked."""
        self._book = book
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._released = released
        self._take_dirty = take_dirty
        # Blocks that may hold numbers that are not finite; zeroed before a row gets them as new.
        self.dirty_blocks: set[int] = set()

    # ---------------------------------------------------------------------------------------------------- changes

    def apply(self, plan: StepPlan, slot: StagingSlot) -> RowChanges | None:
        """Takes release, admit, extend, grants and copies into the book. None: the device's rows stay as they are."""
        book = self._book
        for row in plan.release.tolist():
            self._released(book.release(row), book.blocks_of(row))
        # Only now: what this plan releases it may give away again.
        self.dirty_blocks |= self._take_dirty()
        if not (plan.admit or plan.extend or len(plan.grant_rows) or len(plan.copy_sources)):
            return None
        changes = RowChanges()
        admitted = [book.admit(admit) for admit in plan.admit]
        for extend in plan.extend:
            book.extend(extend)
        if admitted:
            self._stage_admitted(admitted, slot, changes)
        if plan.extend:
            self._stage_extended(plan, slot, changes)
        self._stage_penalties(plan, admitted, slot, changes)
        self._stage_tables(plan, slot, changes)
        self._stage_copies(plan, slot, changes)
        return changes

    def _stage_admitted(self, admitted: list[HostRow], slot: StagingSlot, changes: RowChanges) -> None:
        count = len(admitted)
        ints = np.zeros((count, 2), np.int64)
        floats = np.zeros((count, 6), np.float32)
        last = np.zeros(count, np.int64)
        for index, state in enumerate(admitted):
            sampling = state.sampling
            ints[index, SEED] = seed_to_int64(sampling.seed)
            ints[index, TOP_K] = sampling.top_k
            floats[index, TEMPERATURE] = sampling.temperature
            floats[index, TOP_P] = sampling.top_p
            floats[index, MIN_P] = sampling.min_p
            floats[index, REPETITION] = sampling.repetition_penalty
            floats[index, PRESENCE] = sampling.presence_penalty
            floats[index, FREQUENCY] = sampling.frequency_penalty
            last[index] = state.tokens[-1]
            self._stage_lists(state, slot)
        rows = np.array([state.row for state in admitted], np.int64)
        changes.admit_rows = slot.put(rows)
        changes.admit_length = slot.put(self._book.length[rows])
        changes.admit_last = slot.put(last)
        changes.admit_ints = slot.put(ints)
        changes.admit_floats = slot.put(floats)

    def _stage_lists(self, state: HostRow, slot: StagingSlot) -> None:
        """What only few rows have lives as long as the row, in memory of its own."""
        sampling = state.sampling
        if sampling.bias:
            state.bias_ids = slot.put_lasting(np.array([i for i, _ in sampling.bias], np.int64))
            state.bias_values = slot.put_lasting(np.array([v for _, v in sampling.bias], np.float32))
        if sampling.allowed_ids:
            state.allowed_ids = slot.put_lasting(np.array(sorted(set(sampling.allowed_ids)), np.int64))
        if sampling.min_tokens:
            masked = set(sampling.stop_ids) | (set() if sampling.ignore_eos else set(self._eos_ids))
            if masked:
                state.masked_ids = slot.put_lasting(np.array(sorted(masked), np.int64))

    def _stage_extended(self, plan: StepPlan, slot: StagingSlot, changes: RowChanges) -> None:
        done = {extend.row for extend in plan.extend if self._book.complete[extend.row]}
        if done:
            rows = sorted(done)
            changes.last_rows = slot.put(np.array(rows, np.int64))
            changes.last_tokens = slot.put(np.array([self._book.row(r).tokens[-1] for r in rows], np.int64))

    def _stage_penalties(self, plan: StepPlan, admitted: list[HostRow], slot: StagingSlot, changes: RowChanges) -> None:
        """Counts are rebuilt from the tokens after prompt_len, so that a re-admission is like any admission."""
        wanted = [state for state in admitted if state.needs & RowNeeds.PENALTIES]
        pieces = [(state, 0, len(admit.tokens)) for state, admit in zip(admitted, plan.admit, strict=True)]
        pieces += [(self._book.row(e.row), e.offset, e.offset + len(e.tokens)) for e in plan.extend]
        prompt: list[I64] = []
        output: list[I64] = []
        for state, begin, end in pieces:
            if state.needs & RowNeeds.PENALTIES:
                border = min(max(state.prompt_len, begin), end)
                base = state.row * self._vocab_size
                prompt.append(base + state.tokens[begin:border])
                output.append(base + state.tokens[border:end])
        if wanted:
            changes.penalty_rows = slot.put(np.array([state.row for state in wanted], np.int64))
        if prompt and sum(map(len, prompt)):
            changes.prompt_places = slot.put(np.concatenate(prompt))
        if output and sum(map(len, output)):
            changes.output_places = slot.put(np.concatenate(output))

    def _stage_tables(self, plan: StepPlan, slot: StagingSlot, changes: RowChanges) -> None:
        book = self._book
        width = book.max_blocks
        places: list[I64] = []
        for admit in plan.admit:
            places.append(admit.row * width + np.arange(len(admit.blocks)))
            # Blocks behind computed_len are new to the row; those before hold what the scheduler vouches for.
            first_new = admit.computed_len // book.block_size
            self.dirty_blocks.difference_update(admit.blocks[:first_new].tolist())
        if len(plan.grant_rows):
            rows, at = plan.grant_rows.astype(np.int64), plan.grant_indices.astype(np.int64)
            # One after the other: a later grant of the same entry counts.
            for row, index, block in zip(rows.tolist(), at.tolist(), plan.grant_blocks.tolist(), strict=True):
                book.tables[row, index] = block
            places.append(rows * width + at)
        flat = np.unique(np.concatenate(places)) if places else np.zeros(0, np.int64)
        if len(flat):
            changes.table_places = slot.put(flat)
            changes.table_blocks = slot.put(book.tables.reshape(-1)[flat])
        if self.dirty_blocks:
            self._stage_cleaning(plan, slot, changes)

    def _stage_cleaning(self, plan: StepPlan, slot: StagingSlot, changes: RowChanges) -> None:
        named: set[int] = set(plan.grant_blocks.tolist())
        for admit in plan.admit:
            named.update(admit.blocks.tolist())
        clean = named & self.dirty_blocks
        if clean:
            self.dirty_blocks -= clean
            changes.clean_blocks = slot.put(np.array(sorted(clean), np.int64))

    def _stage_copies(self, plan: StepPlan, slot: StagingSlot, changes: RowChanges) -> None:
        if not len(plan.copy_sources):
            return
        sources, targets = plan.copy_sources.astype(np.int64), plan.copy_targets.astype(np.int64)
        self.dirty_blocks.difference_update(targets.tolist())
        once = len(np.unique(targets)) == len(targets) and not np.isin(sources, targets).any()
        groups = [slice(None)] if once else [slice(i, i + 1) for i in range(len(sources))]
        changes.copies = tuple((slot.put(sources[g]), slot.put(targets[g])) for g in groups)
        copied, size = set(targets.tolist()), self._book.block_size
        # A fork's block is copied whole, but behind computed_len lies what the source's row has written since, perhaps
        # numbers that are not finite, which the fork's masked attention would still multiply with 0.
        tails = [
            np.arange(block * size + first, (block + 1) * size)
            for admit in plan.admit
            if (first := admit.computed_len % size)
            and (block := int(admit.blocks[admit.computed_len // size])) in copied
        ]
        if tails:
            changes.clean_slots = slot.put(np.concatenate(tails))

    # ------------------------------------------------------------------------------------------------------ batch

    def inputs(self, plan: StepPlan, batch: Batch, slot: StagingSlot) -> StepInputs:
        """Stages the batch. Called after `apply`, before `advance`."""
        sampling = np.flatnonzero(batch.samples)
        wishes = RowNeeds(int(np.bitwise_or.reduce(self._book.needs[batch.rows], initial=0)))
        pure = batch.is_pure_decode
        contexts = batch.lengths[~batch.is_prefill]
        inputs = StepInputs(slot.put(batch.rows), int(contexts.max()) if len(contexts) else 0)
        inputs.samples_any = len(sampling) > 0
        if not pure:
            self._stage_mixed(batch, sampling, slot, inputs)
        if wishes & ~RowNeeds.PROMPT_LOGPROBS:
            inputs.sample_plan = self._sample_plan(batch, sampling, slot)
            if wishes & RowNeeds.LOGPROBS:
                self._stage_logprobs(batch, sampling, slot, inputs)
        if wishes & RowNeeds.PROMPT_LOGPROBS and not pure:
            inputs.prompts = tuple(self._prompt_wishes(batch, slot))
        if len(plan.raw_logits_rows):
            at = np.searchsorted(batch.rows, plan.raw_logits_rows)
            raw = batch.offsets[at] + plan.raw_logits_positions.astype(np.int64) - 1 - batch.starts[at]
            inputs.raw_tokens = slot.put(raw)
        return inputs

    def _stage_mixed(self, batch: Batch, sampling: I64, slot: StagingSlot, inputs: StepInputs) -> None:
        total = batch.num_tokens
        ids = np.full(total, -1, np.int64)
        positions = np.full(total, -1, np.int64)
        chunks = []
        for at in np.flatnonzero(batch.is_prefill).tolist():
            first, start, count = int(batch.offsets[at]), int(batch.starts[at]), int(batch.counts[at])
            known = self._book.row(int(batch.rows[at])).tokens[start : start + count]
            ids[first : first + len(known)] = known
            positions[first : first + count] = np.arange(start, start + count)
            chunks.append(Chunk(at, first, count, start))
        inputs.chunks = tuple(chunks)
        columns = [[c.at, c.first, c.count, c.start] for c in chunks]
        inputs.chunk_columns = slot.put(np.array(columns, np.int64).T.copy())
        inputs.token_at = slot.put(np.repeat(np.arange(batch.num_rows), batch.counts))
        inputs.token_ids = slot.put(ids)
        inputs.positions = slot.put(positions)
        inputs.last_at = slot.put(batch.offsets[1:] - 1)
        if len(sampling) < batch.num_rows:
            inputs.sampling = slot.put(sampling)
        decoding = np.flatnonzero(~batch.is_prefill)
        if len(decoding):
            inputs.decode_at = slot.put(decoding)
            inputs.decode_tokens = slot.put(batch.offsets[decoding])

    def _sample_plan(self, batch: Batch, sampling: I64, slot: StagingSlot) -> SamplePlan:
        needs = RowNeeds.NONE
        special: list[SampleRow] = []
        filtered: list[int] = []
        for place, at in enumerate(sampling.tolist()):
            row = int(batch.rows[at])
            own = RowNeeds(int(self._book.needs[row]))
            if not own:
                continue
            state = self._book.row(row)
            generated = int(batch.lengths[at]) - state.prompt_len
            masks = bool(own & RowNeeds.MIN_TOKENS) and generated < state.sampling.min_tokens
            if not masks:
                own &= ~RowNeeds.MIN_TOKENS
            needs |= own
            if own & RowNeeds.FILTER:
                filtered.append(place)
            if own & (RowNeeds.BIAS | RowNeeds.MIN_TOKENS):
                special.append(SampleRow(place, state, masks))
        if not needs:
            return GREEDY
        places = slot.put(np.array(filtered, np.int64)) if filtered else None
        return SamplePlan(needs, places, tuple(special))

    def logprob_places(self, batch: Batch) -> I64:
        """Batch places of the sampling rows that want logprobs."""
        wants = (self._book.needs[batch.rows] & int(RowNeeds.LOGPROBS)) > 0
        return np.flatnonzero(batch.samples & wants)

    def _stage_logprobs(self, batch: Batch, sampling: I64, slot: StagingSlot, inputs: StepInputs) -> None:
        places = self.logprob_places(batch)
        if len(places):
            inputs.logprobs_at = slot.put(np.searchsorted(sampling, places))
            rows: Iterable[int] = batch.rows[places].tolist()
            inputs.num_top = max(self._book.row(row).sampling.num_logprobs for row in rows) - 1

    def _prompt_wishes(self, batch: Batch, slot: StagingSlot) -> Iterable[PromptWish]:
        """Hidden state at p tells of the token at p + 1; wanted are prompt positions from prompt_logprobs_from."""
        for at in np.flatnonzero(batch.is_prefill).tolist():
            state = self._book.row(int(batch.rows[at]))
            num = state.sampling.num_prompt_logprobs
            start, end = int(batch.starts[at]), int(batch.starts[at] + batch.counts[at])
            first = max(state.sampling.prompt_logprobs_from, start + 1)
            last = min(end, state.prompt_len - 1)
            if num and first <= last:
                targets = slot.put(state.tokens[first : last + 1])
                yield PromptWish(at, int(batch.offsets[at]) + first - 1 - start, targets, num - 1)

    def advance(self, batch: Batch) -> None:
        """The book after the step: what its rows have computed and sampled."""
        self._book.computed[batch.rows] = batch.starts + batch.counts
        self._book.length[batch.rows[batch.samples]] += 1
