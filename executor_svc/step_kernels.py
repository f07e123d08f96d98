"""The kernels around the model that a device step may use in place of torch's operators."""

from dataclasses import dataclass
from typing import Protocol

import torch

from executor_svc.buffers import RowState
from executor_svc.kv_cache import KvCache
from executor_svc.numerics import ExactOps, FastOps


class SampleStep(Protocol):
    """Sampling and commit in one: executor_svc.kernels.sampling.sample_step."""

    def __call__(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        status: torch.Tensor,
        state: RowState,
        *,
        is_random: bool,
        has_penalties: bool,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class DecodeInputs(Protocol):
    """Effective rows, positions, tokens, slots and status: executor_svc.kernels.decode_inputs.decode_inputs."""

    def __call__(
        self, idx: torch.Tensor, state: RowState, cache: KvCache, cursor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class StepKernels:
    """What stands in for torch's operators around the model."""

    decode_inputs: DecodeInputs
    sample_step: SampleStep


def step_kernels(ops: FastOps | ExactOps) -> StepKernels | None:
    """What goes with the kernels' operations."""
    if not ops.has_kernels:
        return None
    from executor_svc.kernels.decode_inputs import decode_inputs  # only now: a CPU's installation has no triton
    from executor_svc.kernels.sampling import sample_step

    return StepKernels(decode_inputs, sample_step)
