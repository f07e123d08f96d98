"""From a checked plan to staged columns: what a step brings to the device. Host work of the runner thread."""

from collections.abc import Callable, Collection, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from common.messages import StepPlan
from common.prompt_positions import prompt_positions
from executor_svc.buffers import FREQUENCY, MIN_P, PRESENCE, REPETITION, TEMPERATURE, TOP_P, StagingSlot
from executor_svc.input_batch import Batch
from executor_svc.row_changes import RowChanges
from executor_svc.row_layout import RowLayout, RowRecord
from executor_svc.rows import HostRow, RowBook, RowNeeds
from executor_svc.sampler import GREEDY, SamplePlan, seed_to_int64
from executor_svc.step_inputs import Chunk, PromptWish, StepInputs

# What a row's logits are changed by.
_CHANGES = RowNeeds.PENALTIES | RowNeeds.BIAS | RowNeeds.MIN_TOKENS
_HELD = np.uint8(RowNeeds.MIN_TOKENS)

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]


class Stager:
    """Applies plans to the book of rows and stages what the device must learn of them."""

    def __init__(
        self,
        book: RowBook,
        layout: RowLayout,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        released: Callable[[HostRow, NDArray[np.int32]], None],
        take_dirty: Callable[[], set[int]],
        *,
        with_places: bool,
    ) -> None:
        """`released`: told of each released row and the blocks its table named. `take_dirty`: blocks found dirty since
        it was last asked. `with_places`: sampling must be told which rows filter and mask; kernels see for themselves.
        """
        self._book = book
        self._layout = layout
        self._with_places = with_places
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
        if dirty := self._take_dirty():
            self.dirty_blocks |= dirty
        if not (plan.admit or plan.extend or len(plan.grant_rows) or len(plan.copy_sources)):
            return None
        changes = RowChanges()
        admitted = [book.admit(admit) for admit in plan.admit]
        for extend in plan.extend:
            book.extend(extend)
        places: list[I64] = []
        words: list[I32] = []
        if admitted:
            rows, record = self._record(admitted)
            changes.admit_rows = slot.put(rows)
            places.append(self._layout.record_places(rows).reshape(-1))
            words.append(record.words().reshape(-1))
            self._stage_masks(admitted, slot, changes)
        if extended := sorted({e.row for e in plan.extend if book.complete[e.row]}):
            tokens = np.array([book.row(row).tokens[-1] for row in extended], np.int64)
            places.append(self._layout.last_token_places(np.array(extended, np.int64)).reshape(-1))
            words.append(tokens.view(np.int32))
        if len(flat := self._table_entries(plan)):
            places.append(self._layout.table_places(flat))
            words.append(book.tables.reshape(-1)[flat])
        if places:
            changes.places = slot.put(np.concatenate(places))
            changes.words = slot.put(np.concatenate(words))
        self._stage_penalties(plan, admitted, slot, changes)
        if self.dirty_blocks:
            self._stage_cleaning(plan, slot, changes)
        self._stage_copies(plan, slot, changes)
        return changes

    def _record(self, admitted: list[HostRow]) -> tuple[I64, RowRecord]:
        rows = np.array([state.row for state in admitted], np.int64)
        floats = np.zeros((len(admitted), 6), np.float32)
        for at, state in enumerate(admitted):
            sampling = state.sampling
            floats[at, TEMPERATURE] = sampling.temperature
            floats[at, TOP_P] = sampling.top_p
            floats[at, MIN_P] = sampling.min_p
            floats[at, REPETITION] = sampling.repetition_penalty
            floats[at, PRESENCE] = sampling.presence_penalty
            floats[at, FREQUENCY] = sampling.frequency_penalty
        record = RowRecord(
            length=self._book.length[rows],
            last_token=np.array([state.tokens[-1] for state in admitted], np.int64),
            seeds=np.array([seed_to_int64(state.sampling.seed) for state in admitted], np.int64),
            top_k=np.array([state.sampling.top_k for state in admitted], np.int64),
            min_length=self._book.min_length[rows],
            floats=floats,
            changes=(self._book.needs[rows] & int(_CHANGES)).astype(np.int32),
        )
        return rows, record

    def _stage_masks(self, admitted: list[HostRow], slot: StagingSlot, changes: RowChanges) -> None:
        """Bias, allowed ids and tokens under min_tokens, of the few rows that have any."""
        biased = [state for state in admitted if state.needs & RowNeeds.BIAS]
        if biased:
            confined = [state for state in biased if state.sampling.allowed_ids]
            changes.bias_rows = slot.put(np.array([state.row for state in biased], np.int64))
            if confined:
                changes.confined_rows = slot.put(np.array([state.row for state in confined], np.int64))
                changes.allowed_places = slot.put(self._places((s.row, s.sampling.allowed_ids) for s in confined))
            values = [value for state in biased for _, value in state.sampling.bias]
            if values:
                ids = ((state.row, [i for i, _ in state.sampling.bias]) for state in biased)
                changes.bias_places = slot.put(self._places(ids))
                changes.bias_values = slot.put(np.array(values, np.float32))
        held = [state for state in admitted if state.needs & RowNeeds.MIN_TOKENS]
        if held:
            changes.stop_rows = slot.put(np.array([state.row for state in held], np.int64))
            places = self._places((state.row, self._stops(state)) for state in held)
            if len(places):
                changes.stop_places = slot.put(places)

    def _stops(self, state: HostRow) -> set[int]:
        sampling = state.sampling
        return set(sampling.stop_ids) | (set() if sampling.ignore_eos else set(self._eos_ids))

    def _places(self, ids: Iterable[tuple[int, Collection[int]]]) -> I64:
        """row * vocab + token."""
        pieces = [row * self._vocab_size + np.fromiter(own, np.int64, len(own)) for row, own in ids]
        return np.concatenate(pieces)

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
            places, counts = np.unique(np.concatenate(output), return_counts=True)
            changes.output_places = slot.put(places)
            changes.output_counts = slot.put(counts.astype(np.int32))

    def _table_entries(self, plan: StepPlan) -> I64:
        """Entries of block tables that change, row * max_blocks + index, each once; the book has their blocks."""
        book = self._book
        width = book.max_blocks
        places: list[I64] = []
        for admit in plan.admit:
            places.append(admit.row * width + np.arange(len(admit.blocks)))
            # Blocks behind computed_len are new to the row; those before hold what the scheduler vouches for.
            first_new = admit.computed_len // book.block_size
            self.dirty_blocks.difference_update(admit.blocks[:first_new].tolist())
        if len(plan.grant_rows):
            flat = plan.grant_rows.astype(np.int64) * width + plan.grant_indices
            tables = book.tables.reshape(-1)
            if len(np.unique(flat)) == len(flat):
                tables[flat] = plan.grant_blocks
            else:  # one after the other: a later grant of the same entry counts
                for place, block in zip(flat.tolist(), plan.grant_blocks.tolist(), strict=True):
                    tables[place] = block
            places.append(flat)
        return np.unique(np.concatenate(places)) if places else np.zeros(0, np.int64)

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
        inputs = StepInputs(slot.put_batch(batch.rows), int(contexts.max()) if len(contexts) else 0)
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
        rows = batch.rows[sampling]
        needs = self._book.needs[rows]
        held = (needs & int(RowNeeds.MIN_TOKENS)) > 0
        if held.any():
            needs = np.where(held & (batch.lengths[sampling] >= self._book.min_length[rows]), needs & ~_HELD, needs)
        union = RowNeeds(int(np.bitwise_or.reduce(needs, initial=0)))
        if not union:
            return GREEDY
        filtered = masked = None
        if self._with_places:
            filtered = self._having(needs, RowNeeds.FILTER, slot)
            masked = self._having(needs, RowNeeds.BIAS | RowNeeds.MIN_TOKENS, slot)
        return SamplePlan(union, filtered, masked)

    def _having(self, needs: NDArray[np.uint8], wanted: RowNeeds, slot: StagingSlot) -> torch.Tensor | None:
        """Places of rows with any of `wanted`; None: there is none."""
        places = np.flatnonzero(needs & int(wanted))
        return slot.put(places) if len(places) else None

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
        """Hidden state at p tells of the token at p + 1."""
        for at in np.flatnonzero(batch.is_prefill).tolist():
            state = self._book.row(int(batch.rows[at]))
            num = state.sampling.num_prompt_logprobs
            start, end = int(batch.starts[at]), int(batch.starts[at] + batch.counts[at])
            wanted = prompt_positions(state.sampling.prompt_logprobs_from, start, end, state.prompt_len)
            if num and wanted:
                targets = slot.put(state.tokens[wanted.start : wanted.stop])
                yield PromptWish(at, int(batch.offsets[at]) + wanted.start - 1 - start, targets, num - 1)

    def advance(self, batch: Batch) -> None:
        """The book after the step: what its rows have computed and sampled."""
        self._book.computed[batch.rows] = batch.starts + batch.counts
        self._book.length[batch.rows[batch.samples]] += 1
