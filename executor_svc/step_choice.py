"""From hidden states to the tokens of a step, its status and logprobs. On the COMPUTE stream."""

from collections.abc import Callable
from typing import Final

import torch

from executor_svc.buffers import RowState, StepRings
from executor_svc.rows import RowNeeds
from executor_svc.sampler import GREEDY, SamplePlan, commit, sample, top_logprobs
from executor_svc.step_inputs import FAILED, FINE, PromptWish, StepInputs, StepOutputs
from executor_svc.step_kernels import StepKernels
from executor_svc.step_model import GreedyModel, Model, NarrowModel

# Sampling that takes more than the most likely token.
BEYOND_GREEDY: Final = RowNeeds.RANDOM | RowNeeds.FILTER | RowNeeds.PENALTIES | RowNeeds.BIAS | RowNeeds.MIN_TOKENS
FULL: Final = SamplePlan(BEYOND_GREEDY)

# Prompt positions whose logits are made at once.
_PROMPT_PIECE = 64


class TokenChoice:
    """Stateless beside row state and output ring, which are the step's. `kernels`: None: torch's operators do it."""

    def __init__(self, model: Model, state: RowState, rings: StepRings, kernels: StepKernels | None) -> None:
        self._model = model
        self._state = state
        self._rings = rings
        self._kernels = kernels
        self._greedy_model = model if isinstance(model, GreedyModel) else None
        # For the step's own use: kernels read logits in the model's dtype.
        self.make_logits: Callable[[torch.Tensor], torch.Tensor] = model.logits
        if kernels is not None and isinstance(model, NarrowModel):
            self.make_logits = model.narrow_logits
        self._first_slot = torch.zeros(1, dtype=torch.int64, device=state.length.device)

    def pick(
        self,
        inputs: StepInputs,
        outputs: StepOutputs,
        last: torch.Tensor,
        rows: torch.Tensor,
        status: torch.Tensor,
        number: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and final status of the sampling rows, all of whose tensors these are; adds their logprobs.

        last: [N, hidden]; rows, status: int64 [N]. `number`: the output slot where they are all of the step's; None:
        the caller puts them there."""
        plan = inputs.sample_plan
        if self._greedy_model is not None and not plan.needs and inputs.logprobs_at is None:
            tokens, is_finite = self._greedy_model.greedy(last)
            status = self._settle(tokens, rows, status, is_finite, plan)
            if number is not None:
                slot = self._rings.output.values[number]
                slot[0, : tokens.shape[0]].copy_(tokens)
                slot[1, : tokens.shape[0]].copy_(status)
            return tokens, status
        logits = self.make_logits(last)
        tokens, status = self.choose_into(number, logits, rows, status, plan)
        self.add_logprobs(outputs, inputs, logits, tokens)
        return tokens, status

    def choose_into(
        self, number: int | None, logits: torch.Tensor, rows: torch.Tensor, status: torch.Tensor, plan: SamplePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples and makes the tokens the rows' next inputs. Returns tokens and the final status."""
        if number is None:
            return self.choose(logits, rows, status, plan)
        values = self._rings.output.values[number : number + 1]
        return self.choose(logits, rows, status, plan, self._first_slot, values)

    def choose(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        status: torch.Tensor,
        plan: SamplePlan = GREEDY,
        place: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As choose_into. With `place`, int64 [1], also writes them there in `values`; None: in the output ring."""
        values = self._rings.output.values if values is None else values
        if self._kernels is not None:
            # Every way to sample, or none: two kernels to make ready, and rows look at what is theirs alone.
            is_full = bool(plan.needs & BEYOND_GREEDY)
            return self._kernels.sample_step(
                logits, rows, status, self._state,
                is_random=is_full, has_penalties=is_full, out=None if place is None else (values, place),
            )  # fmt: skip
        tokens = sample(logits, rows, self._state, plan)
        status = self._settle(tokens, rows, status, is_finite(logits), plan)
        if place is not None:
            chosen = torch.stack((tokens, status))[None]
            values[:, :, : rows.shape[0]].index_copy_(0, place, chosen)
        return tokens, status

    def _settle(
        self, tokens: torch.Tensor, rows: torch.Tensor, status: torch.Tensor, finite: torch.Tensor, plan: SamplePlan
    ) -> torch.Tensor:
        """Makes the tokens the rows' next inputs; returns the final status."""
        status = torch.where((status == FINE) & ~finite, FAILED, status)
        self.mark_dead(rows, status)
        commit(tokens, rows, self._state, plan)
        return status

    def mark_dead(self, rows: torch.Tensor, status: torch.Tensor) -> None:
        self._state.dead.index_copy_(0, rows, (status == FAILED).to(torch.int32))

    def add_logprobs(
        self, outputs: StepOutputs, inputs: StepInputs, logits: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        if inputs.logprobs_at is not None:
            at = inputs.logprobs_at
            outputs.logprobs = top_logprobs(logits.index_select(0, at), tokens.index_select(0, at), inputs.num_top)

    def prompt_logprobs(self, wish: PromptWish, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """hidden: [T, hidden], of the whole step."""
        pieces = []
        for begin in range(0, wish.targets.shape[0], _PROMPT_PIECE):
            targets = wish.targets[begin : begin + _PROMPT_PIECE]
            first = wish.first + begin
            logits = self._model.logits(hidden[first : first + targets.shape[0]])
            pieces.append(top_logprobs(logits, targets, wish.num_top))
        return tuple(torch.cat(columns) for columns in zip(*pieces, strict=True))


def is_finite(values: torch.Tensor) -> torch.Tensor:
    """bool [N] for [N, M]: one pass; a sum is finite when its terms are, short of overflow, which is no good either."""
    return values.sum(-1, dtype=torch.float32).isfinite()
