"""What a step does on the device. Everything here runs on the COMPUTE stream, in the plans' order."""

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
from executor_svc.buffers import RowState
from executor_svc.graph_cache import GraphCache, GraphShape
from executor_svc.kv_cache import KvCache
from executor_svc.models.config import ModelConfig
from executor_svc.rows import RowNeeds
from executor_svc.sampler import GREEDY, SamplePlan, commit, sample, top_logprobs
from executor_svc.step_kernels import StepKernels

# What OutputSlot's second line says of a row.
FAILED, FINE, PADDING = 0, 1, 2

# Sampling a captured graph does not contain.
_BEYOND_GRAPH = RowNeeds.RANDOM | RowNeeds.FILTER | RowNeeds.PENALTIES | RowNeeds.BIAS | RowNeeds.MIN_TOKENS

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


@dataclass(slots=True, eq=False)
class RowChanges:
    """Staged changes of row state, applied in the order of the fields. None: nothing of the kind. All on the device.

    Admitted rows: rows, length, last_token int64 [n]; ints int64 [n, 2]; floats float32 [n, 6]. Tables: flat places
    int64 [m] with blocks int32 [m]. Penalties: rows, then places (row * vocab + token) of prompt and output.
    """

    admit_rows: torch.Tensor | None = None
    admit_length: torch.Tensor | None = None
    admit_last: torch.Tensor | None = None
    admit_ints: torch.Tensor | None = None
    admit_floats: torch.Tensor | None = None
    last_rows: torch.Tensor | None = None
    last_tokens: torch.Tensor | None = None
    table_places: torch.Tensor | None = None
    table_blocks: torch.Tensor | None = None
    penalty_rows: torch.Tensor | None = None
    prompt_places: torch.Tensor | None = None
    output_places: torch.Tensor | None = None
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
        *,
        kernels: StepKernels | None = None,
    ) -> None:
        """`kernels`: None: torch's operators do it all."""
        self._model = model
        self._attention = attention
        self._cache = cache
        self._state = state
        self._graphs = graphs
        self._kernels = kernels
        self._block_size = cache.shape.block_size
        self._tables = RowTables(state.block_tables, state.length, cache.shape.block_size)

    # ---------------------------------------------------------------------------------------------------- changes

    def apply(self, changes: RowChanges) -> None:
        """The scatter at the head of the step."""
        state = self._state
        rows = changes.admit_rows
        if rows is not None:
            assert changes.admit_length is not None and changes.admit_last is not None
            assert changes.admit_ints is not None and changes.admit_floats is not None
            state.length.index_copy_(0, rows, changes.admit_length)
            state.last_token.index_copy_(0, rows, changes.admit_last)
            state.ints.index_copy_(0, rows, changes.admit_ints)
            state.floats.index_copy_(0, rows, changes.admit_floats)
            state.dead.index_fill_(0, rows, False)
            state.block_tables.index_fill_(0, rows, self._cache.null_block)
        if changes.last_rows is not None and changes.last_tokens is not None:
            state.last_token.index_copy_(0, changes.last_rows, changes.last_tokens)
        if changes.table_places is not None and changes.table_blocks is not None:
            state.flat_tables.index_copy_(0, changes.table_places, changes.table_blocks)
        self._apply_penalties(changes)
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
        if changes.output_places is not None:
            ones = torch.ones_like(changes.output_places, dtype=torch.int32)
            counts.view(-1).index_put_((changes.output_places,), ones, accumulate=True)

    # -------------------------------------------------------------------------------------------------------- run

    def run(self, inputs: StepInputs, slot: torch.Tensor, shape: GraphShape | None) -> StepOutputs:
        """Computes the step; writes `slot`, int64 [2, >= B]. `shape`: of the graph to replay; None: eager."""
        if shape is not None:
            return self._run_graph(inputs, slot, shape)
        if inputs.token_at is None:
            rows, hidden, status = self._forward_decode(inputs.rows, inputs.context)
            return self._finish(inputs, slot, rows, hidden, hidden, status)
        rows = self._state.effective(inputs.rows)
        hidden, status = self._forward_mixed(inputs, rows)
        assert inputs.last_at is not None
        return self._finish(inputs, slot, rows, hidden, hidden.index_select(0, inputs.last_at), status)

    def run_padding(self, num_rows: int, *, mixed: bool) -> None:
        """A decode step of padding alone, or a mixed one that samples: whatever is made at its first use is made."""
        device = self._state.length.device
        rows = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        if not mixed:
            self.body(rows, GraphShape(num_rows, 1, True))
            return
        at = torch.arange(num_rows, device=device)
        inputs = StepInputs(
            rows, 1, SamplePlan(RowNeeds.RANDOM), token_at=at, token_ids=at.new_zeros(num_rows),
            positions=at.new_zeros(num_rows), last_at=at, chunks=(Chunk(0, 0, 1, 0),),
            chunk_columns=at.new_tensor([[0], [0], [1], [0]]),
        )  # fmt: skip
        if num_rows > 1:
            inputs.decode_tokens = inputs.decode_at = at[1:].clone()
        self.run(inputs, at.new_zeros(2, num_rows), None)

    def needs_beyond_graph(self, plan: SamplePlan) -> bool:
        return bool(plan.needs & _BEYOND_GRAPH)

    def body(self, idx: torch.Tensor, shape: GraphShape) -> tuple[torch.Tensor, ...]:
        """What a graph holds. Returns tokens, status, logits, effective rows (tokens are 0 without sampling)."""
        rows, hidden, status = self._forward_decode(idx, shape.context)
        logits = self._model.logits(hidden)
        if not shape.with_sampling:
            return status, status, logits, rows
        tokens, status = self._choose(logits, rows, status, GREEDY)
        return tokens, status, logits, rows

    def _run_graph(self, inputs: StepInputs, slot: torch.Tensor, shape: GraphShape) -> StepOutputs:
        found = self._graphs.find(shape.rows, shape.context, with_sampling=shape.with_sampling)
        assert found is not None
        count = inputs.rows.shape[0]
        tokens, status, logits, rows = (t[:count] for t in found[1].replay(inputs.rows))
        if not shape.with_sampling:
            tokens, status = self._choose(logits, rows, status, inputs.sample_plan)
        slot[0, :count].copy_(tokens)
        slot[1, :count].copy_(status)
        outputs = StepOutputs()
        if inputs.raw_tokens is not None:
            outputs.raw_logits = logits.index_select(0, inputs.raw_tokens)
        self._add_logprobs(outputs, inputs, logits, tokens)
        return outputs

    def _forward_decode(self, idx: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns effective rows [B], hidden [B, H] and status [B].

        With kernels the status says nothing of the hidden states: what is not finite there is not finite in the logits.
        """
        state, kernels = self._state, self._kernels
        if kernels is not None:
            rows, positions, tokens, slots, status = kernels.decode_inputs(idx, state, self._cache)
        else:
            rows = state.effective(idx)
            positions = state.length.index_select(0, rows) - 1
            tokens, slots = state.last_token.index_select(0, rows), self._slots(rows, positions)
        layout = StepLayout(slots, self._tables, DecodePart(None, rows, context), (), None)
        hidden = self._model.forward(tokens, positions, self._attention.begin(self._cache, layout))
        return rows, hidden, self._status(hidden, rows) if kernels is None else status

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
        slot: torch.Tensor,
        rows: torch.Tensor,
        hidden: torch.Tensor,
        last: torch.Tensor,
        status: torch.Tensor,
    ) -> StepOutputs:
        """last: [B, H], each row's last hidden state; hidden: [T, H]."""
        count = rows.shape[0]
        outputs = StepOutputs()
        sampling = inputs.sampling
        if not inputs.samples_any:
            self._mark_dead(rows, status)
            slot[0, :count].fill_(0)
            slot[1, :count].copy_(status)
        elif sampling is None:
            tokens, status = self._pick(inputs, outputs, last, rows, status)
            slot[0, :count].copy_(tokens)
            slot[1, :count].copy_(status)
        else:
            self._mark_dead(rows, status)
            own = (t.index_select(0, sampling) for t in (last, rows, status))
            tokens, chosen_status = self._pick(inputs, outputs, *own)
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
        self._state.dead.index_copy_(0, rows, status == FAILED)

    def _pick(
        self, inputs: StepInputs, outputs: StepOutputs, last: torch.Tensor, rows: torch.Tensor, status: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and final status of the sampling rows, all of whose tensors these are; adds their logprobs."""
        plan = inputs.sample_plan
        if isinstance(self._model, GreedyModel) and not plan.needs and inputs.logprobs_at is None:
            tokens, is_finite = self._model.greedy(last)
            return tokens, self._settle(tokens, rows, status, is_finite, plan)
        logits = self._model.logits(last)
        tokens, status = self._choose(logits, rows, status, plan)
        self._add_logprobs(outputs, inputs, logits, tokens)
        return tokens, status

    def _choose(
        self, logits: torch.Tensor, rows: torch.Tensor, status: torch.Tensor, plan: SamplePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples and makes the tokens the rows' next inputs. Returns tokens and the final status."""
        if self._kernels is not None and not plan.special:
            return self._kernels.sample_step(
                logits,
                rows,
                status,
                self._state,
                is_random=bool(plan.needs & RowNeeds.RANDOM),
                has_penalties=bool(plan.needs & RowNeeds.PENALTIES),
            )
        tokens = sample(logits, rows, self._state, plan)
        return tokens, self._settle(tokens, rows, status, _is_finite(logits), plan)

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
