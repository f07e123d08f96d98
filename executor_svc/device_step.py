"""What a step does on the device. Everything here runs on the COMPUTE stream, in the plans' order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from executor_svc.attention.base import Attend
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
from executor_svc.models.config import ModelConfig
from executor_svc.rows import RowNeeds
from executor_svc.sampler import GREEDY, SamplePlan, commit, sample, top_logprobs
from executor_svc.step_kernels import StepKernels

# What OutputSlot's second line says of a row.
FAILED, FINE, PADDING = 0, 1, 2

# Sampling that takes more than the most likely token.
_BEYOND_GREEDY = RowNeeds.RANDOM | RowNeeds.FILTER | RowNeeds.PENALTIES | RowNeeds.BIAS | RowNeeds.MIN_TOKENS
_FULL = SamplePlan(_BEYOND_GREEDY)

# Prompt positions whose logits are made at once.
_PROMPT_PIECE = 64


class Model(Protocol):
    """What the runner needs of a model; executor_svc.models.decoder.Decoder is one."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class GreedyModel(Model, Protocol):
    """A model that finds the most likely tokens without making logits."""

    def greedy(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [N, hidden]. Returns the tokens int64 [N], of equal ones the least, and whether every logit of the
        row is finite, bool [N]."""
        ...


@runtime_checkable
class NarrowModel(Model, Protocol):
    """A model whose logits can be had as its last product makes them."""

    def narrow_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [N, hidden]. Returns [N, vocab] in the model's dtype."""
        ...


@runtime_checkable
class WholeStepModel(Model, Protocol):
    """A model that does a whole step by itself where every sampling row takes its most likely token."""

    def run_greedy(self, inputs: "StepInputs", state: RowState, cache: KvCache, slot: torch.Tensor) -> None:
        """From the row state before the step to that after it. Writes `slot`, int64 [2, >= B]: tokens (0 where a row
        does not sample) and status, as DeviceStep.run does."""
        ...


@dataclass(slots=True, eq=False)
class RowChanges:
    """Staged changes of row state, applied in the order of the fields. None: nothing of the kind. All on the device.

    Rows whose tables are emptied; then places, int64 [m], in RowState.words with what goes there, int32 [m]. Places by
    row and token are row * vocab + token, int64. Penalties: rows to clear, places of prompt tokens, of output tokens
    with their counts, int32. Masks: rows to clear, rows confined to the allowed places, places with a bias, float32;
    rows to clear of stops, places of stops.
    """

    admit_rows: torch.Tensor | None = None
    places: torch.Tensor | None = None
    words: torch.Tensor | None = None
    penalty_rows: torch.Tensor | None = None
    prompt_places: torch.Tensor | None = None
    output_places: torch.Tensor | None = None
    output_counts: torch.Tensor | None = None
    bias_rows: torch.Tensor | None = None
    confined_rows: torch.Tensor | None = None
    allowed_places: torch.Tensor | None = None
    bias_places: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    stop_rows: torch.Tensor | None = None
    stop_places: torch.Tensor | None = None
    clean_blocks: torch.Tensor | None = None
    clean_slots: torch.Tensor | None = None
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill row: its place in the batch, its tokens in the step, its first position."""

    at: int
    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptWish:
    """Prompt logprobs of one chunk: hidden states [first, first + count) of the step, the tokens they predict."""

    at: int
    first: int
    targets: torch.Tensor
    num_top: int


@dataclass(slots=True, eq=False)
class StepInputs:
    """One step's batch on the device. B rows, T tokens; int64.

    rows: [B]. Where every row decodes, the rest is None: one token per row. token_at: [T], batch place of each token;
    token_ids, positions: [T], -1: the row's last token. last_at: [B], each row's last token of the step.
    sampling: [S], batch places that sample; None: all. decode_tokens [D], decode_at [D]: places of decoding rows.
    chunk_columns: [4, C], the chunks' fields in their order. raw_tokens: [R], tokens whose logits are wanted. context
    bounds what a decoding row attends to.
    logprobs_at: [L], places among the sampling rows, each with num_top most likely tokens.
    """

    rows: torch.Tensor
    context: int
    sample_plan: SamplePlan = GREEDY
    token_at: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    last_at: torch.Tensor | None = None
    sampling: torch.Tensor | None = None
    samples_any: bool = True
    decode_tokens: torch.Tensor | None = None
    decode_at: torch.Tensor | None = None
    chunks: tuple[Chunk, ...] = ()
    chunk_columns: torch.Tensor | None = None
    raw_tokens: torch.Tensor | None = None
    logprobs_at: torch.Tensor | None = None
    num_top: int = 0
    prompts: tuple[PromptWish, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing is wanted but each sampling row's most likely token."""
        wants_more = self.sample_plan.needs or self.raw_tokens is not None or self.prompts
        return not wants_more and self.logprobs_at is None


@dataclass(slots=True, eq=False)
class StepOutputs:
    """Results that are no part of the output slot, each in memory of its own, alive until the host has its copy."""

    raw_logits: torch.Tensor | None = None
    logprobs: tuple[torch.Tensor, ...] = ()
    prompts: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        raw = [] if self.raw_logits is None else [self.raw_logits]
        return [*raw, *self.logprobs, *(tensor for prompt in self.prompts for tensor in prompt)]


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
        self._greedy_model = model if isinstance(model, GreedyModel) else None
        # For the step's own use: kernels read logits in the model's dtype.
        self._make_logits: Callable[[torch.Tensor], torch.Tensor] = model.logits
        if kernels is not None and isinstance(model, NarrowModel):
            self._make_logits = model.narrow_logits
        # Logits of the last graph that goes no further, [rows of the largest bucket, vocab]; see `prepare_graphs`.
        self._logits: torch.Tensor | None = None
        self._first_slot = torch.zeros(1, dtype=torch.int64, device=state.length.device)
        self._whole = model if isinstance(model, WholeStepModel) else None
        self._block_size = cache.shape.block_size
        self._tables = RowTables(state.block_tables, state.length, cache.shape.block_size)

    @property
    def has_kernels(self) -> bool:
        return self._kernels is not None

    # ---------------------------------------------------------------------------------------------------- changes

    def apply(self, changes: RowChanges) -> None:
        """The scatter at the head of the step."""
        state = self._state
        if changes.admit_rows is not None:
            state.block_tables.index_fill_(0, changes.admit_rows, self._cache.null_block)
        if changes.places is not None and changes.words is not None:
            state.words.index_copy_(0, changes.places, changes.words)
        self._apply_penalties(changes)
        self._apply_masks(changes)
        if changes.clean_blocks is not None:
            self._cache.data.index_fill_(2, changes.clean_blocks, 0.0)
        for sources, targets in changes.copies:
            self._cache.copy_blocks(sources, targets)
        if changes.clean_slots is not None:
            self._cache.clean_slots(changes.clean_slots)

    def _apply_penalties(self, changes: RowChanges) -> None:
        if changes.penalty_rows is None and changes.prompt_places is None and changes.output_places is None:
            return
        counts, in_prompt = self._state.ensure_penalties()
        if changes.penalty_rows is not None:
            counts.index_fill_(0, changes.penalty_rows, 0)
            in_prompt.index_fill_(0, changes.penalty_rows, False)
        if changes.prompt_places is not None:
            in_prompt.view(-1).index_fill_(0, changes.prompt_places, True)
        if changes.output_places is not None and changes.output_counts is not None:
            counts.view(-1).index_add_(0, changes.output_places, changes.output_counts)

    def _apply_masks(self, changes: RowChanges) -> None:
        if changes.bias_rows is None and changes.stop_rows is None:
            return
        bias, stops = self._state.ensure_masks()
        if changes.bias_rows is not None:
            bias.index_fill_(0, changes.bias_rows, 0.0)
        if changes.confined_rows is not None and changes.allowed_places is not None:
            bias.index_fill_(0, changes.confined_rows, float("-inf"))
            bias.view(-1).index_fill_(0, changes.allowed_places, 0.0)
        if changes.bias_places is not None and changes.bias_values is not None:
            bias.view(-1).index_add_(0, changes.bias_places, changes.bias_values)
        if changes.stop_rows is not None:
            stops.index_fill_(0, changes.stop_rows, False)
        if changes.stop_places is not None:
            stops.view(-1).index_fill_(0, changes.stop_places, True)

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

    def run_padding(self, num_rows: int, num_tokens: int = 0, *, full: bool = False) -> None:
        """A step of padding alone, so that what is made at its first use is made: num_rows that decode; with
        num_tokens > 0 the first has a chunk of so many. `full`: as if rows used every way to sample."""
        device = self._state.length.device
        rows = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        inputs = StepInputs(rows, 1, _FULL if full and self._kernels is not None else GREEDY)
        if num_tokens:
            others = torch.arange(1, num_rows, device=device)
            chunk = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            inputs.token_at = torch.cat((chunk, others))
            inputs.token_ids = inputs.positions = torch.zeros_like(inputs.token_at)
            inputs.last_at = torch.arange(num_tokens - 1, num_tokens + num_rows - 1, device=device)
            inputs.chunks = (Chunk(0, 0, num_tokens, 0),)
            inputs.chunk_columns = torch.tensor([[0], [0], [num_tokens], [0]], device=device)
            if num_rows > 1:
                inputs.decode_tokens, inputs.decode_at = others + (num_tokens - 1), others
        self.run(inputs, 0, None)

    # ----------------------------------------------------------------------------------------------------- graphs

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What is worth a graph: torch's operators must be told by the host which rows filter and mask."""
        return (Variant.GREEDY, Variant.FORWARD) if self._kernels is None else tuple(Variant)

    def variant_for(self, inputs: StepInputs) -> Variant:
        if inputs.logprobs_at is not None or inputs.raw_tokens is not None:
            return Variant.FORWARD
        if not inputs.sample_plan.needs & _BEYOND_GREEDY:
            return Variant.GREEDY
        return Variant.FORWARD if self._kernels is None else Variant.FULL

    def prepare_graphs(self, max_rows: int) -> None:
        """Makes what graphs share: where a row's choice may look, so that no graph holds an address from before."""
        if self._kernels is not None:
            self._state.ensure_penalties()
            self._state.ensure_masks()
        one = self._make_logits(torch.zeros(1, self._model.config.hidden_size, dtype=self._model.dtype,
                                            device=self._state.length.device))  # fmt: skip
        self._logits = torch.empty(max_rows, one.shape[1], dtype=one.dtype, device=one.device)

    def body(self, shape: GraphShape) -> tuple[torch.Tensor, ...]:
        """What a graph holds. With Variant.FORWARD returns effective rows and status."""
        rows, hidden, status, place = self._forward_ring(shape)
        logits = self._make_logits(hidden)
        if shape.variant is Variant.FORWARD:
            assert self._logits is not None
            self._logits[: shape.rows].copy_(logits)
            return rows, status
        plan = GREEDY if shape.variant is Variant.GREEDY else _FULL
        self._choose(logits, rows, status, plan, place)
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
        tokens, _ = self._choose_into(number, logits, rows, status, inputs.sample_plan)
        if inputs.raw_tokens is not None:
            outputs.raw_logits = logits.index_select(0, inputs.raw_tokens).float()
        self._add_logprobs(outputs, inputs, logits, tokens)
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
        bad.index_add_(0, inputs.token_at, (~_is_finite(hidden)).float())
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
            self._mark_dead(rows, status)
            slot[0, :count].fill_(0)
            slot[1, :count].copy_(status)
        elif sampling is None:
            self._pick(inputs, outputs, last, rows, status, number)
        else:
            self._mark_dead(rows, status)
            own_last, own_rows, own_status = (t.index_select(0, sampling) for t in (last, rows, status))
            tokens, chosen_status = self._pick(inputs, outputs, own_last, own_rows, own_status, None)
            slot[0].index_copy_(0, sampling, tokens)
            slot[1, :count].copy_(status.index_copy(0, sampling, chosen_status))
        if inputs.raw_tokens is not None:
            outputs.raw_logits = self._model.logits(hidden.index_select(0, inputs.raw_tokens))
        for wish in inputs.prompts:
            outputs.prompts.append(self._prompt_logprobs(wish, hidden))
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
        return torch.where(rows == self._state.pad_row, PADDING, torch.where(_is_finite(hidden), FINE, FAILED))

    def _mark_dead(self, rows: torch.Tensor, status: torch.Tensor) -> None:
        self._state.dead.index_copy_(0, rows, (status == FAILED).to(torch.int32))

    def _pick(
        self,
        inputs: StepInputs,
        outputs: StepOutputs,
        last: torch.Tensor,
        rows: torch.Tensor,
        status: torch.Tensor,
        number: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and final status of the sampling rows, all of whose tensors these are; adds their logprobs.

        `number`: the output slot where they are all of the step's; None: the caller puts them there."""
        plan = inputs.sample_plan
        if self._greedy_model is not None and not plan.needs and inputs.logprobs_at is None:
            tokens, is_finite = self._greedy_model.greedy(last)
            status = self._settle(tokens, rows, status, is_finite, plan)
            if number is not None:
                self._put_out(self._rings.output.values[number], tokens, status)
            return tokens, status
        logits = self._make_logits(last)
        tokens, status = self._choose_into(number, logits, rows, status, plan)
        self._add_logprobs(outputs, inputs, logits, tokens)
        return tokens, status

    def _choose_into(
        self, number: int | None, logits: torch.Tensor, rows: torch.Tensor, status: torch.Tensor, plan: SamplePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples and makes the tokens the rows' next inputs. Returns tokens and the final status."""
        if number is None:
            return self._choose(logits, rows, status, plan)
        values = self._rings.output.values[number : number + 1]
        return self._choose(logits, rows, status, plan, self._first_slot, values)

    def _choose(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        status: torch.Tensor,
        plan: SamplePlan,
        place: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As _choose_into. With `place`, int64 [1], also writes them there in `values`; None: in the output ring."""
        values = self._rings.output.values if values is None else values
        if self._kernels is not None:
            # Every way to sample, or none: two kernels to make ready, and rows look at what is theirs alone.
            is_full = bool(plan.needs & _BEYOND_GREEDY)
            return self._kernels.sample_step(
                logits, rows, status, self._state,
                is_random=is_full, has_penalties=is_full, out=None if place is None else (values, place),
            )  # fmt: skip
        tokens = sample(logits, rows, self._state, plan)
        status = self._settle(tokens, rows, status, _is_finite(logits), plan)
        if place is not None:
            chosen = torch.stack((tokens, status))[None]
            values[:, :, : rows.shape[0]].index_copy_(0, place, chosen)
        return tokens, status

    def _put_out(self, slot: torch.Tensor, tokens: torch.Tensor, status: torch.Tensor) -> None:
        count = tokens.shape[0]
        slot[0, :count].copy_(tokens)
        slot[1, :count].copy_(status)

    def _settle(
        self, tokens: torch.Tensor, rows: torch.Tensor, status: torch.Tensor, is_finite: torch.Tensor, plan: SamplePlan
    ) -> torch.Tensor:
        """Makes the tokens the rows' next inputs; returns the final status."""
        status = torch.where((status == FINE) & ~is_finite, FAILED, status)
        self._mark_dead(rows, status)
        commit(tokens, rows, self._state, plan)
        return status

    def _add_logprobs(
        self, outputs: StepOutputs, inputs: StepInputs, logits: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        if inputs.logprobs_at is not None:
            at = inputs.logprobs_at
            outputs.logprobs = top_logprobs(logits.index_select(0, at), tokens.index_select(0, at), inputs.num_top)

    def _prompt_logprobs(self, wish: PromptWish, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pieces = []
        for begin in range(0, wish.targets.shape[0], _PROMPT_PIECE):
            targets = wish.targets[begin : begin + _PROMPT_PIECE]
            first = wish.first + begin
            logits = self._model.logits(hidden[first : first + targets.shape[0]])
            pieces.append(top_logprobs(logits, targets, wish.num_top))
        return tuple(torch.cat(columns) for columns in zip(*pieces, strict=True))


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """bool [N] for [N, M]: one pass; a sum is finite when its terms are, short of overflow, which is no good either."""
    return values.sum(-1, dtype=torch.float32).isfinite()
