"""What a step does on the device. Everything here runs on the COMPUTE stream, in the plans' order."""

from collections.abc import Sequence

import torch

from executor_svc.attention.layout import (
    AttentionBackend,
    DecodePart,
    PrefillColumns,
    PrefillPart,
    RowTables,
    StepLayout,
)
from executor_svc.buffers import RowState, StepRings
from executor_svc.graph_cache import GraphCache, GraphShape, Variant
from executor_svc.kv_cache import KvCache
from executor_svc.row_changes import RowChanges, apply_changes
from executor_svc.sampler import GREEDY, SamplePlan
from executor_svc.step_choice import BEYOND_GREEDY, FULL, TokenChoice, is_finite
from executor_svc.step_inputs import FAILED, FINE, PADDING, Chunk, StepInputs, StepOutputs
from executor_svc.step_kernels import StepKernels
from executor_svc.step_model import Model, WholeStepModel


class DeviceStep:
    """Owner of what a step works with; stateless beside row state and cache."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        cache: KvCache,
        state: RowState,
        graphs: GraphCache,
        rings: StepRings,
        *,
        kernels: StepKernels | None = None,
    ) -> None:
        """`kernels`: None: torch's operators do it all."""
        self._model = model
        self._attention = attention
        self._cache = cache
        self._state = state
        self._graphs = graphs
        self._rings = rings
        self._kernels = kernels
        self._choice = TokenChoice(model, state, rings, kernels)
        # Logits of the last graph that goes no further, [rows of the largest bucket, vocab]; see `prepare_graphs`.
        self._logits: torch.Tensor | None = None
        self._whole = model if isinstance(model, WholeStepModel) else None
        self._block_size = cache.shape.block_size
        self._tables = RowTables(state.block_tables, state.length, cache.shape.block_size)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def has_kernels(self) -> bool:
        return self._kernels is not None

    def apply(self, changes: RowChanges) -> None:
        """The scatter at the head of the step."""
        apply_changes(changes, self._state, self._cache)

    # -------------------------------------------------------------------------------------------------------- run

    def run(self, inputs: StepInputs, number: int, shape: GraphShape | None) -> StepOutputs:
        """Computes the step into output slot `number`. `shape`: of the graph to replay; None: eager."""
        if shape is not None:
            return self._run_graph(inputs, number, shape)
        if self._whole is not None and inputs.is_plain:
            self._whole.run_greedy(inputs, self._state, self._cache, self._rings.output.values[number])
            return StepOutputs()
        if inputs.token_at is None:
            rows, hidden, status = self._forward_decode(inputs.rows, inputs.context)
            return self._finish(inputs, number, rows, hidden, hidden, status)
        rows = self._state.effective(inputs.rows)
        hidden, status = self._forward_mixed(inputs, rows)
        assert inputs.last_at is not None
        return self._finish(inputs, number, rows, hidden, hidden.index_select(0, inputs.last_at), status)

    def run_padding(self, num_rows: int, chunks: Sequence[int] = (), *, full: bool = False) -> None:
        """A step of padding alone, so that what is made at its first use is made. The first rows have chunks of these
        lengths and sample nothing, the others decode; where all have chunks, all sample. `full`: as if every row used
        every way to sample, so that what rows keep by token is made too. No row attends to more than its own tokens."""
        device = self._state.length.device
        rows = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        inputs = StepInputs(rows, 1)
        if chunks:
            firsts = [sum(chunks[:at]) for at in range(len(chunks))]
            counts = torch.tensor([*chunks, *[1] * (num_rows - len(chunks))], device=device)
            inputs.token_at = torch.arange(num_rows, device=device).repeat_interleave(counts)
            inputs.token_ids = inputs.positions = torch.zeros_like(inputs.token_at)
            inputs.last_at = counts.cumsum(0) - 1
            inputs.chunks = tuple(Chunk(at, first, chunks[at], 0) for at, first in enumerate(firsts))
            columns = [list(range(len(chunks))), firsts, list(chunks), [0] * len(chunks)]
            inputs.chunk_columns = torch.tensor(columns, device=device)
            if len(chunks) < num_rows:
                others = torch.arange(len(chunks), num_rows, device=device)
                # In memory of its own: a kernel is compiled anew for addresses that are no multiple of 16.
                inputs.decode_tokens, inputs.decode_at = inputs.last_at[len(chunks) :].clone(), others
                inputs.sampling = others
        if full:
            sampling = torch.arange(num_rows - len(chunks) or num_rows, device=device)
            inputs.sample_plan = SamplePlan(BEYOND_GREEDY, filtered=sampling, masked=sampling)
        self.run(inputs, 0, None)

    # ----------------------------------------------------------------------------------------------------- graphs

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is worth a graph: torch's operators must be told by the host which rows filter and mask."""
        return (Variant.GREEDY, Variant.FORWARD) if self._kernels is None else tuple(Variant)

    def variant_for(self, inputs: StepInputs) -> Variant:
        if inputs.logprobs_at is not None or inputs.raw_tokens is not None:
            return Variant.FORWARD
        if not inputs.sample_plan.needs & BEYOND_GREEDY:
            return Variant.GREEDY
        return Variant.FORWARD if self._kernels is None else Variant.FULL

    def prepare_graphs(self, max_rows: int) -> None:
        """Makes what graphs share: where a row's choice may look, so that no graph holds an address from before."""
        if self._kernels is not None:
            self._state.ensure_penalties()
            self._state.ensure_masks()
        hidden = torch.zeros(
            1, self._model.config.hidden_size, dtype=self._model.dtype, device=self._state.length.device
        )
        one = self._choice.make_logits(hidden)
        self._logits = torch.empty(max_rows, one.shape[1], dtype=one.dtype, device=one.device)

    def body(self, shape: GraphShape) -> tuple[torch.Tensor, ...]:
        """What a graph holds. With Variant.FORWARD returns effective rows and status."""
        rows, hidden, status, place = self._forward_ring(shape)
        logits = self._choice.make_logits(hidden)
        if shape.variant is Variant.FORWARD:
            assert self._logits is not None
            self._logits[: shape.rows].copy_(logits)
            return rows, status
        plan = GREEDY if shape.variant is Variant.GREEDY else FULL
        self._choice.choose(logits, rows, status, plan, place)
        return ()

    def _run_graph(self, inputs: StepInputs, number: int, shape: GraphShape) -> StepOutputs:
        found = self._graphs.find(shape.rows, shape.context, shape.variant)
        assert found is not None
        rings = self._rings
        if rings.at != number:
            rings.cursor.fill_(number)
        rings.at = None  # if this fails
        outputs = StepOutputs()
        made = found[1].replay()
        rings.at = (number + 1) % rings.num_slots
        if shape.variant is not Variant.FORWARD:
            return outputs
        assert self._logits is not None
        count = inputs.rows.shape[0]
        rows, status = (t[:count] for t in made)
        logits = self._logits[:count]
        tokens, _ = self._choice.choose_into(number, logits, rows, status, inputs.sample_plan)
        if inputs.raw_tokens is not None:
            outputs.raw_logits = logits.index_select(0, inputs.raw_tokens).float()
        self._choice.add_logprobs(outputs, inputs, logits, tokens)
        return outputs

    def _forward_ring(self, shape: GraphShape) -> tuple[torch.Tensor, ...]:
        """A decode step of the batch the cursor names. Returns rows, hidden, status and the slot, int64 [1]."""
        rings, kernels = self._rings, self._kernels
        if kernels is not None:
            made = kernels.decode_inputs(rings.staging.batches[:, : shape.rows], self._state, self._cache, rings.cursor)
            rows, positions, tokens, slots, status, place = made
            return rows, self._forward(rows, positions, tokens, slots, shape.context), status, place
        place = rings.cursor.clone()
        rings.cursor.copy_((place + 1) % rings.num_slots)
        idx = rings.staging.batches.index_select(0, place)[0, : shape.rows]
        return *self._forward_decode(idx, shape.context), place

    def _forward_decode(self, idx: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns effective rows [B], hidden [B, H] and status [B].

        With kernels the status says nothing of the hidden states: what is not finite there is not finite in the logits.
        """
        state, kernels = self._state, self._kernels
        if kernels is not None:
            rows, positions, tokens, slots, status = kernels.decode_inputs(idx, state, self._cache)
            return rows, self._forward(rows, positions, tokens, slots, context), status
        rows = state.effective(idx)
        positions = state.length.index_select(0, rows) - 1
        tokens, slots = state.last_token.index_select(0, rows), self._slots(rows, positions)
        hidden = self._forward(rows, positions, tokens, slots, context)
        return rows, hidden, self._status(hidden, rows)

    def _forward(
        self, rows: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, context: int
    ) -> torch.Tensor:
        layout = StepLayout(slots, self._tables, DecodePart(None, rows, context), (), None)
        return self._model.forward(tokens, positions, self._attention.begin(self._cache, layout))

    def _forward_mixed(self, inputs: StepInputs, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self._state
        assert inputs.token_at is not None and inputs.token_ids is not None and inputs.positions is not None
        token_rows = rows.index_select(0, inputs.token_at)
        length = state.length.index_select(0, token_rows)
        tokens = torch.where(inputs.token_ids < 0, state.last_token.index_select(0, token_rows), inputs.token_ids)
        positions = torch.where(inputs.positions < 0, length - 1, inputs.positions)
        decode = None
        if inputs.decode_at is not None:
            decode = DecodePart(inputs.decode_tokens, rows.index_select(0, inputs.decode_at), inputs.context)
        prefills = tuple(PrefillPart(c.first, c.count, c.start, rows[c.at : c.at + 1]) for c in inputs.chunks)
        columns = None if inputs.chunk_columns is None else PrefillColumns(rows, inputs.chunk_columns)
        layout = StepLayout(self._slots(token_rows, positions), self._tables, decode, prefills, columns)
        hidden = self._model.forward(tokens, positions, self._attention.begin(self._cache, layout))
        bad = torch.zeros(rows.shape[0], dtype=torch.float32, device=rows.device)
        bad.index_add_(0, inputs.token_at, (~is_finite(hidden)).float())
        return hidden, torch.where(rows == state.pad_row, PADDING, torch.where(bad > 0, FAILED, FINE))

    def _finish(
        self,
        inputs: StepInputs,
        number: int,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        last: torch.Tensor,
        status: torch.Tensor,
    ) -> StepOutputs:
        """last: [B, H], each row's last hidden state; hidden: [T, H]."""
        count = rows.shape[0]
        slot = self._rings.output.values[number]
        outputs = StepOutputs()
        sampling = inputs.sampling
        if not inputs.samples_any:
            self._choice.mark_dead(rows, status)
            slot[0, :count].fill_(0)
            slot[1, :count].copy_(status)
        elif sampling is None:
            self._choice.pick(inputs, outputs, last, rows, status, number)
        else:
            self._choice.mark_dead(rows, status)
            own_last, own_rows, own_status = (t.index_select(0, sampling) for t in (last, rows, status))
            tokens, chosen_status = self._choice.pick(inputs, outputs, own_last, own_rows, own_status, None)
            slot[0].index_copy_(0, sampling, tokens)
            slot[1, :count].copy_(status.index_copy(0, sampling, chosen_status))
        if inputs.raw_tokens is not None:
            outputs.raw_logits = self._model.logits(hidden.index_select(0, inputs.raw_tokens))
        for wish in inputs.prompts:
            outputs.prompts.append(self._choice.prompt_logprobs(wish, hidden))
        return outputs

    # ------------------------------------------------------------------------------------------------------ parts

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where each token's keys and values go; the sink for padding."""
        state, size = self._state, self._block_size
        places = rows * state.block_tables.shape[1] + positions // size
        blocks = state.flat_tables.index_select(0, places).to(torch.int64)
        blocks = torch.where(rows == state.pad_row, self._cache.sink_block, blocks)
        return blocks * size + positions % size

    def _status(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows == self._state.pad_row, PADDING, torch.where(is_finite(hidden), FINE, FAILED))
