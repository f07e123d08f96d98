"""What a step needs of a model, and what a model may do beyond it."""

from typing import Protocol, runtime_checkable

import torch

from executor_svc.attention.base import Attend
from executor_svc.buffers import RowState
from executor_svc.kv_cache import KvCache
from executor_svc.models.config import ModelConfig
from executor_svc.step_inputs import StepInputs


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

    def run_greedy(self, inputs: StepInputs, state: RowState, cache: KvCache, slot: torch.Tensor) -> None:
        """From the row state before the step to that after it. Writes `slot`, int64 [2, >= B]: tokens (0 where a row
        does not sample) and status, as DeviceStep.run does."""
        ...
